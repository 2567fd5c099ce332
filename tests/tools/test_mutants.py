"""The list of small faults fits the product and the tests, so that `make mutants` can make each of them."""

from __future__ import annotations

from pathlib import Path

import pytest

import mutants
from small_faults import FAULTS, SURVIVORS, Fault

ROOT = Path(__file__).parents[2]


def test_each_fault_can_be_made() -> None:
    texts = {file: (ROOT / file).read_text(encoding="utf-8") for file in {fault.file for fault in FAULTS}}
    assert [fault.name for fault in FAULTS if mutants.with_fault(texts[fault.file], fault) == texts[fault.file]] == []


def test_a_fault_that_fits_nowhere_is_refused() -> None:
    fault = Fault("", "a.py", "x", "y", ())
    assert mutants.with_fault("1 + x", fault) == "1 + y"
    for text in ("1", "x + x"):
        with pytest.raises(ValueError, match="a.py: 'x' stands there [02] times, not once"):
            mutants.with_fault(text, fault)


def test_there_are_many_in_every_room() -> None:
    assert len({fault.name for fault in FAULTS}) == len(FAULTS) >= 80
    packages = {file.parent for file in ROOT.glob("fp8graph/**/__init__.py")} - {ROOT / "fp8graph"}
    rooms = {folder.resolve().relative_to(ROOT).as_posix() for folder in packages}  # passes and models are links
    assert rooms - {fault.room for fault in FAULTS} == set()


def test_the_tests_that_are_named_exist() -> None:
    missing: list[str] = []
    for name in {name for fault in FAULTS for name in fault.tests}:
        path, _, test = name.partition("::")
        there = (ROOT / path).exists() and (not test or f"def {test}(" in (ROOT / path).read_text(encoding="utf-8"))
        missing += [] if there else [name]
    assert missing == []
    assert all(fault.tests for fault in FAULTS)


def test_recorded_mutants_are_the_current_faults() -> None:
    rows = mutants.recorded()
    assert {name: row["file"] for name, row in rows.items()} == {fault.name: fault.file for fault in FAULTS}
    assert {name for name, row in rows.items() if row["killed_by"] is None} == {*SURVIVORS}
    killers = {row["killed_by"].partition("[")[0].partition("::")[::2] for row in rows.values() if row["killed_by"]}
    texts = {path: (ROOT / path).read_text(encoding="utf-8") for path, _ in killers}
    assert [name for path, name in sorted(killers) if f"def {name.rpartition('::')[2]}(" not in texts[path]] == []
