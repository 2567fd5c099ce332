"""benchmarks/recipe_evidence.py: the arithmetic of intervals, and that documents say what the committed runs say."""

from __future__ import annotations

import math
import statistics

import pytest

from benchmarks import recipe_evidence
from benchmarks.recipe_evidence import BF16, at, differences, early, interval, lines, read, rows, text
from benchmarks.records import RESULTS


def test_the_interval_is_students() -> None:
    values = [1.0, 2.0, 4.0, 7.0, 6.0]
    mean, half = interval(values)
    assert mean == 4.0
    assert half == pytest.approx(2.776445105 * statistics.stdev(values) / 5**0.5, rel=1e-3)
    assert math.isnan(interval([1.0])[1])
    assert text(0.0123, 0.004) == "+1.23 % ± 0.40 %"
    assert text(-0.0123, math.nan) == "-1.23 %"


def test_runs_are_compared_with_bf16_of_their_seed() -> None:
    def run(loss: float) -> recipe_evidence.Run:
        return {"losses": [loss] * 60, "evaluations": {"100": loss, "200": loss}, "own_precision": loss}

    runs = {BF16: {0: run(1.0), 1: run(2.0)}, "tensorwise": {0: run(1.1), 1: run(2.0)}}
    ((name, row),) = rows(runs).items()
    assert (name, row["seeds"]) == ("tensorwise", 2)
    assert row["held out, step 100"][0] == pytest.approx(0.05)
    runs["rowwise"] = {0: run(1.1)}
    assert [line.split(" | ")[0] for line in lines(rows(runs))] == ["| tensorwise", "| rowwise (1 of 2 seeds)"]


def test_page_names_the_only_significant_ingredient_of_nvfp4() -> None:
    """Of what is left out, beside nvfp4 itself: one difference excludes zero, and the page names it."""
    runs = read(RESULTS / "train_recipes_cpu")
    less = [name for name in runs if name.startswith("nvfp4, ")]
    found = {
        (name, number): interval(differences(runs, name, number, beside="nvfp4"))
        for name in less
        for number in (at(1000), early)
    }
    assert len(found) == 8
    (((name, number), shown),) = [item for item in found.items() if abs(item[1][0]) > item[1][1]]
    assert (name, number) == ("nvfp4, no transform", early)
    page = " ".join((RESULTS / "README.md").read_text(encoding="utf-8").split())  # wherever its lines end
    assert f"the early losses are lower ({text(*shown)})" in page


def test_the_results_are_in_the_documents() -> None:
    found = rows(read(RESULTS / "train_recipes_cpu"))
    page = (RESULTS / "README.md").read_text(encoding="utf-8")
    assert [line for line in lines(found) if line not in page] == []
    page = (RESULTS.parents[1] / "docs" / "recipes.md").read_text(encoding="utf-8")
    named = {
        name: line for name in found for line in page.splitlines() if line.startswith(f"| `{name}` | ") and "±" in line
    }
    assert named.keys() >= {"tensorwise", "delayed", "blockwise", "rowwise", "rowwise_with_gw_hp", "mxfp8", "nvfp4"}
    for name, line in named.items():
        assert line == f"| `{name}` | {text(*found[name]['held out, weights in FP32'])} |"
