"""docs/support.md says what pyproject.toml, constraints.txt and fp8graph/compat/ say."""

from __future__ import annotations

import ast
import re
import tomllib
from typing import Any

import pytest

import hosts
from fp8graph.tools.doctor import HOSTS, RUNS, SUPPORTED_TORCH
from release_check import user_extras
from samples import ROOT
from test_layers import is_private, names_of_torch

PAGE = (ROOT / "docs" / "support.md").read_text(encoding="utf-8")
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
PINNED = dict(line.split("==") for line in (ROOT / "constraints.txt").read_text(encoding="utf-8").split())


def rows(heading: str) -> list[list[str]]:
    """The cells of a section's table, without its head."""
    section = PAGE.split(f"\n## {heading}\n")[1].split("\n## ")[0]
    table = [line for line in section.splitlines() if line.startswith("|")][2:]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in table]


def numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split(".")[:2])


def private(name: str) -> str:
    """Up to the first private part: "torch._inductor" of "torch._inductor.config.patch"."""
    parts = name.split(".")
    first = next(i for i, part in enumerate(parts) if part.startswith("_") and not part.startswith("__"))
    return ".".join(parts[: first + 1])


def test_the_bounds() -> None:
    (torch,) = [need for need in PROJECT["dependencies"] if need.startswith("torch")]
    assert f"allows `{torch}` and Python `{PROJECT['requires-python']}`" in PAGE
    low, high = re.findall(r"\d+\.\d+", torch)
    named = [numbers(version) for row in rows("Versions") for version in row[0].split(", ")]
    allowed = [(2, minor) for minor in range(numbers(low)[1], numbers(high)[1])]
    assert sorted(set(named)) == allowed
    assert [numbers(version) for version in SUPPORTED_TORCH] == [allowed[0], allowed[-1]]


def test_the_hosts() -> None:
    """Those that bring many packages have environments of their own, and the others are in that of the tests."""
    apart = {name: host.version for name, host in hosts.HOSTS.items()}
    assert {name: PINNED.get(name) for name in HOSTS if name not in apart} | apart == HOSTS
    page = (ROOT / "docs" / "trainers.md").read_text(encoding="utf-8").lower()
    assert [name for name, version in HOSTS.items() if f"{name} {version.removesuffix('.0')}" not in page] == []


def test_the_trainers_table_is_that_of_their_last_runs() -> None:
    rows = hosts.recorded()
    assert hosts.with_table(PAGE, rows) == PAGE
    for name, row in rows.items():
        assert row["version"] == hosts.HOSTS[name].version
        assert re.match(r"\d+ passed", row["result"])


def test_a_run_of_a_trainer_becomes_a_row_in_place_of_the_last() -> None:
    row = {"version": "0.3.0", "torch": "2.13.0", "python": "3.11.7", "result": "9 passed", "when": "May 1, 2026"}
    page = hosts.with_table(PAGE, {"torchtitan": row})
    assert "|---|\n| torchtitan 0.3.0 | 2.13.0 | 3.11.7 | 9 passed | May 1, 2026 |\n\n## " in page
    assert hosts.with_table(page, hosts.recorded()) == PAGE


def test_a_host_is_an_entry_whose_tests_exist() -> None:
    for host in hosts.HOSTS.values():
        assert all((ROOT / file).is_file() for file in host.tests)
        assert {*host.pins} <= PINNED.keys()  # others need no word
    with pytest.raises(ValueError, match="has no table of trainers"):
        hosts.with_table("", {})
    assert hosts.main(["torchtitan", "megatron"]) == 2  # before anything is installed


def test_the_runs() -> None:
    table = rows("Versions")
    assert [row[:3] for row in table if "CI" in row[3]] == [[PINNED["torch"], "3.11", PINNED["transformers"]]]
    ran = [row for row in table if not row[3].startswith(("nothing", "no tests"))]
    assert all(row[4] for row in ran)
    assert list(dict.fromkeys(tuple(row[:3]) for row in ran)) == [(r.torch, r.python, r.transformers) for r in RUNS]
    all_fast_tests = {tuple(row[:3]) for row in ran if row[3].startswith("all ")}
    assert all_fast_tests == {(run.torch, run.python, run.transformers) for run in RUNS if run.all_fast_tests}
    pythons = [c.split(" :: ")[-1] for c in PROJECT["classifiers"] if re.search(r"Python :: 3\.\d+$", c)]
    assert sorted({run.python for run in RUNS}) == sorted(pythons)
    assert f"`{PROJECT['optional-dependencies']['hf'][0]}`" in PAGE
    recorded = {file.stem.removeprefix("kernels-") for file in (ROOT / "tests" / "data").glob("kernels-*.json")}
    assert recorded <= {row[0] for row in table}


def test_every_file_that_depends_on_torchs_inside_is_listed() -> None:
    folder = ROOT / "fp8graph" / "compat"
    table = {row[0].strip("`"): row for row in rows("What depends on torch's private surface")}
    assert list(table) == sorted(file.name for file in folder.glob("*.py") if file.stem != "__init__")
    for name, row in table.items():
        tree = ast.parse((folder / name).read_text(encoding="utf-8"))
        taken = {private(text) for text, _ in names_of_torch(tree) if is_private(text)}
        assert set(re.findall(r"`(torch\.[\w.]*)`", row[1])) == taken, name
        assert row[2], name


def test_the_extras() -> None:
    table = {row[0].strip("`"): set(re.findall(r"`([\w-]+)`", row[1])) for row in rows("For packagers")}
    extras: dict[str, list[str]] = PROJECT["optional-dependencies"]
    assert table.keys() == user_extras()
    for name, packages in table.items():
        needs = [need for need in extras[name] if not need.startswith("fp8graph")]
        inner = [
            other
            for need in extras[name]
            if need.startswith("fp8graph")
            for other in re.findall(r"\w+", need.removeprefix("fp8graph"))
        ]
        needs += [need for other in inner for need in extras[other]]
        assert packages - {"torch"} == {re.split(r"[\[<>=; ]", need)[0] for need in needs}
    core = [re.split(r"[<>=]", need)[0] for need in PROJECT["dependencies"]]
    assert f"The core needs {' and '.join(f'`{package}`' for package in core)} only" in PAGE
