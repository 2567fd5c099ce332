"""The hand-written pages name files, modules and floors that exist."""

from __future__ import annotations

import importlib
import re
from collections.abc import Iterator
from pathlib import Path

from test_layers import FLOORS

ROOT = Path(__file__).parent.parent
PAGES = (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md")))
FOLDERS = "benchmarks docs examples fp8graph models notebooks passes tests tools".split()
PATH = re.compile(
    rf"(?<![\w/.])(?:{'|'.join(FOLDERS)})/[\w.*/-]*"  # below a folder of the repository
    r"|(?<=\]\()[^)#:]+(?=[)#])"  # the target of a link
    r"|(?<![\w/.*])\w+\.(?:py|md)\b"  # the bare name of a Python file or a page
)
MODULE = re.compile(r"(?<![\w/.-])fp8graph(?:\.[A-Za-z_]\w*)+")

WRITTEN = "passes/clip_outliers.py"  # docs/write_a_feature.md writes it, and its test builds it
WRITTEN_MODULE = "fp8graph.passes.clip_outliers"


def text_of(page: Path) -> str:
    """The page without what samples print, with ``*`` for what the reader is to fill in: ``passes/<name>.py``."""
    written = re.sub(r"(?ms)^```output$.*?^```$", "", page.read_text(encoding="utf-8"))
    return re.sub(r"<[^>\n]+>", "*", written)


def paths(page: Path) -> Iterator[str]:
    """The paths that a page names, each once. ``.`` at the end is the sentence's."""
    yield from dict.fromkeys(match[0].rstrip(".") for match in PATH.finditer(text_of(page)))


def exists(path: str, page: Path) -> bool:
    if "/" not in path:  # a file that the text around it places
        return (ROOT / path).exists() or any(any((ROOT / folder).rglob(path)) for folder in FOLDERS)
    if "*" in path:
        return any(ROOT.glob(path))
    return path == WRITTEN or (ROOT / path).exists() or (page.parent / path).exists()


def test_named_files_exist() -> None:
    assert [(page.name, path) for page in PAGES for path in paths(page) if not exists(path, page)] == []


def resolves(name: str) -> bool:
    """Whether ``name`` is a module, or an attribute of one."""
    parts = name.split(".")
    for end in range(len(parts), 0, -1):
        try:
            found = importlib.import_module(".".join(parts[:end]))
        except ModuleNotFoundError:
            continue
        for part in parts[end:]:
            if not hasattr(found, part):
                return False
            found = getattr(found, part)
        return True
    return False


def test_named_modules_exist() -> None:
    named = {
        (page.name, name) for page in PAGES for name in MODULE.findall(text_of(page)) if WRITTEN_MODULE not in name
    }
    assert [(page, name) for page, name in sorted(named) if not resolves(name)] == []


def test_paths_and_names_are_recognised() -> None:
    page = ROOT / "docs" / "architecture.md"
    assert {"fp8graph/ir/ops.py", "passes/match.py", "fp8graph/compat/"} <= set(paths(page))
    assert not exists("fp8graph/graph.py", page)
    assert not exists("graph.py", page)
    assert resolves("fp8graph.numerics.quantize")
    assert not resolves("fp8graph.spec")


def test_samples_import_what_they_use() -> None:
    """Of the standard library: a sample that is copied must not stop at the first name."""
    for page in PAGES:
        for sample in page.read_text(encoding="utf-8").split("```python\n")[1:]:
            code = sample.split("```")[0]
            for name in ("re", "json", "os"):
                assert f"import {name}" in code or not re.search(rf"(?<![\w.]){name}\.\w", code), (page, name)


def test_the_floors_of_the_page_are_those_of_the_test() -> None:
    """Top down, ``a | b   what they are``; ``__init__`` is the face of the package."""
    page = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    picture = page.split("```text\n")[1].split("```")[0].splitlines()
    floors = [re.split(r" {2,}", line)[0].split(" | ") for line in picture]
    assert [set(floor) for floor in reversed(floors)] == [{room or "__init__" for room in floor} for floor in FLOORS]
