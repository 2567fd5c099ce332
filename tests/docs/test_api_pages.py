"""Every public name has a section in docs/api with an example, and each example prints what its page shows."""

from __future__ import annotations

import importlib
import re
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import fp8graph
from fp8graph import numerics
from fp8graph.extras import planning
from helpers import in_one_test
from samples import ROOT, anchors, name_of, run, samples, without_a_reason
from samples import apart as apart  # a fixture

FOLDER = ROOT / "docs" / "api"
DIRECTIVE = re.compile(r"^ *\.\. auto\w+:: ([\w.]+)", re.MULTILINE)
PAGES = sorted(page for page in FOLDER.glob("*.md") if page.stem != "index")
TEXTS = {page: page.read_text(encoding="utf-8") for page in PAGES}
SECTIONS = [(page, name) for page in PAGES for name in re.findall(r"(?m)^## (.+)$", TEXTS[page])]
SLOW = [(page, sample.section) for page in PAGES for sample in samples(page) if sample.mark.startswith("slow")]
MODULES = [
    "fp8graph",
    "fp8graph.numerics",
    "fp8graph.extras.planning",
    *(
        f"fp8graph.{room}.{file.stem}"
        for room in ("integrations", "extras")
        for file in (ROOT / "fp8graph" / room).glob("[!_]*.py")
    ),
]


def found(path: str) -> Any:
    """The object that ``path`` names: a module, or something in one."""
    module, _, name = path.rpartition(".")
    try:
        return importlib.import_module(path)
    except ModuleNotFoundError:
        return getattr(importlib.import_module(module), name)


@in_one_test("module", MODULES)
def test_every_public_name_is_on_a_page(module: str) -> None:
    documented = [found(path) for page in PAGES for path in paths(page)]
    public = {name: getattr(importlib.import_module(module), name) for name in found(module).__all__}
    without = [name for name, value in public.items() if not any(value is one for one in documented)]
    # the names of these modules have sections; a page is theirs
    assert [name for name in without if not is_group(public[name])] == []


def paths(page: Path) -> list[str]:
    """The names that ``page`` documents, without members of classes."""
    return [path for path in DIRECTIVE.findall(TEXTS[page]) if path.startswith("fp8graph.")]


def is_group(value: object) -> bool:
    return isinstance(value, ModuleType) and FOLDER / f"{value.__name__.rpartition('.')[2]}.md" in PAGES


def test_groups_and_pages_are_recognised() -> None:
    assert is_group(numerics)
    assert is_group(planning)
    assert not is_group(fp8graph.models)  # it has a section of its own
    assert "fp8graph.Policy" in paths(FOLDER / "policies.md")
    assert (FOLDER / "policies.md", "Policy") in SECTIONS
    assert {"fp8graph.extras.kv_cache", "fp8graph.extras.gradients"} <= set(MODULES)


@in_one_test("page", PAGES, ids=name_of)
def test_every_section_is_in_its_pages_table_and_has_an_example(page: Path) -> None:
    own = [slug for slug in [*anchors(page)][1:] if f"](#{slug})" in TEXTS[page]]
    names = [name for each, name in SECTIONS if each == page]
    assert len(own) == len(names)
    assert {sample.section for sample in samples(page)} - {""} == {*names}  # "": the set-up of all


@pytest.mark.slow
@pytest.mark.usefixtures("apart")
@pytest.mark.parametrize(("page", "section"), SECTIONS, ids=lambda part: part if isinstance(part, str) else part.stem)
def test_example(page: Path, section: str) -> None:
    run(page, section=section)


@pytest.mark.release
@pytest.mark.usefixtures("apart")
@pytest.mark.parametrize(("page", "section"), SLOW, ids=lambda part: part if isinstance(part, str) else part.stem)
def test_slow_example(page: Path, section: str) -> None:
    run(page, section=section, slow=True)


def test_an_example_that_is_not_run_says_why() -> None:
    assert without_a_reason(PAGES) == []
