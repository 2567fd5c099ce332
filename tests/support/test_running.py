"""The tier of a test, results that are kept between runs, and the row that a run writes."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest
import torch

import kept
import timed
from helpers import first_fast, first_slow, in_one_test


def tiers(mark: pytest.MarkDecorator) -> list[tuple[Any, list[str], Any]]:
    _, cases = mark.args
    parameters = [case if isinstance(case, type(pytest.param())) else pytest.param(case) for case in cases]
    return [(case.values, [one.name for one in case.marks], case.id) for case in parameters]


def test_the_first_of_several_cases_runs_earlier() -> None:
    skip = pytest.mark.skip
    cases = ["a", pytest.param("b", marks=skip, id="second"), "c"]
    assert tiers(first_fast("x", cases)) == [
        (("a",), [], None),
        (("b",), ["skip", "slow"], "second"),
        (("c",), ["slow"], None),
    ]
    assert tiers(first_slow(("x", "y"), [(1, 2), (3, 4)])) == [((1, 2), ["slow"], None), ((3, 4), ["release"], None)]


def test_further_cases_are_fast_that_are_named() -> None:
    cases = ["a", pytest.param("b", id="second"), "c", "d"]
    assert [marks for _, marks, _ in tiers(first_fast("x", cases, also=["second", "d"]))] == [[], [], ["slow"], []]
    assert [marks for _, marks, _ in tiers(first_fast("x", [1, 2, 3], list("abc"), also="c"))] == [[], ["slow"], []]


def test_cases_in_one_test_fail_one_by_one(subtests: pytest.Subtests, monkeypatch: pytest.MonkeyPatch) -> None:
    failed: list[tuple[str | None, dict[str, Any], str]] = []

    @contextlib.contextmanager
    def record(label: str | None, **values: Any) -> Generator[None]:
        try:
            yield
        except AssertionError as error:
            failed.append((label, values, str(error).partition("\n")[0]))

    @in_one_test("x, y", [(1, 2), pytest.param(3, 4, id="large")])
    @in_one_test("sign", [1, -1], ids={1: "plus", -1: "minus"}.get)
    @in_one_test(("z",), [(torch.rand,)])
    def adds(z: Any, x: int, y: int, sign: int, fixture: int) -> None:
        assert float(z(1)) == drawn
        assert sign * (x + y) > fixture, sign * (x + y)

    torch.manual_seed(0)
    drawn = float(torch.rand(1))  # by each case, as by a test of its own
    monkeypatch.setattr(subtests, "test", record)
    assert [*inspect.signature(adds).parameters] == ["subtests", "fixture"]
    adds(subtests=subtests, fixture=3)
    assert [(label, sorted(values), said) for label, values, said in failed] == [
        ("plus", ["x", "y", "z"], "3"),
        ("minus", ["x", "y", "z"], "-3"),
        ("large-minus", ["z"], "-7"),
    ]
    with pytest.raises(ValueError, match="A case with a mark is a test of its own"):
        in_one_test("x", [pytest.param(1, marks=pytest.mark.slow)])


def test_a_test_without_a_mark_is_fast(request: pytest.FixtureRequest) -> None:
    assert request.node.get_closest_marker("fast")


def test_kept_results_are_made_again_when_a_source_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept, "FOLDER", tmp_path)
    made: list[str] = []

    def make(name: str) -> str:
        made.append(name)
        return name + "!"

    for names, expected in (("aab", ["a", "b"]), ("ab", ["a", "b"])):
        assert [kept.kept(make)(name) for name in names] == [f"{name}!" for name in names]
        assert made == expected
    assert kept.ROOT / "tests" / "support" in kept.SOURCES  # the model of the kernels lies there
    (tmp_path / "helper.py").write_text("x = 1")
    monkeypatch.setattr(kept, "SOURCES", (*kept.SOURCES, tmp_path))
    kept.sources.cache_clear()
    assert kept.kept(make)("a") == "a!"
    assert made == ["a", "b", "a"]
    kept.sources.cache_clear()


def test_a_run_is_written_into_its_row() -> None:
    page = "| `make test` | fast | | |\n| `make test-slow` | slow | old | old |\n"
    assert timed.with_row(page, "test-slow", "now", "5 passed") == page.replace("old | old", "now | 5 passed")
    with pytest.raises(ValueError, match="no row, or several, for `make test-all`"):
        timed.with_row(page, "test-all", "now", "5 passed")
    contributing = timed.PAGE.read_text(encoding="utf-8")
    for target in ("test", "test-slow", "test-release"):
        assert timed.with_row(contributing, target, "now", "all") != contributing
