"""benchmarks/recipe_evidence.py: the arithmetic of intervals, and that documents say what the committed runs say."""

from __future__ import annotations

import math
import statistics
from pathlib import Path

import pytest

from benchmarks import recipe_evidence
from benchmarks.recipe_evidence import (
    BF16,
    BF16_AGAIN,
    at,
    differences,
    early,
    interval,
    intervals,
    lines,
    plot,
    read,
    recipes,
    rows,
    styles,
    text,
)
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


def test_a_recipe_and_what_is_changed_of_it_share_a_color_and_differ_in_the_line() -> None:
    found = styles([BF16_AGAIN, "tensorwise", "nvfp4", "nvfp4, plain", "tensorwise, 2^n"])
    assert found[BF16_AGAIN] == ("black", "-")
    assert found["nvfp4"][0] == found["nvfp4, plain"][0] != found["tensorwise"][0] == found["tensorwise, 2^n"][0]
    assert [found[name][1] for name in ("tensorwise", "nvfp4", "nvfp4, plain", "tensorwise, 2^n")] == [
        "-",
        "-",
        "--",
        "--",
    ]


def test_the_pictures(tmp_path: Path) -> None:
    """README's has a row for each recipe, and none for what is changed of one."""
    runs = read(RESULTS / "train_recipes_cpu")
    pictures = ("train_recipes_cpu.png", "train_recipes_confidence.png")
    plot(runs, *(tmp_path / name for name in pictures))
    for name in pictures:
        assert (tmp_path / name).read_bytes().startswith(b"\x89PNG")
        assert (RESULTS / name).exists()

    from matplotlib import pyplot

    figure, axes = pyplot.subplots()
    intervals(axes, runs, recipes(runs))
    assert [label.get_text() for label in axes.get_yticklabels()] == recipes(runs)
    pyplot.close(figure)
    fp8 = {"tensorwise", "delayed", "blockwise", "rowwise", "rowwise_with_gw_hp", "mxfp8"}
    assert set(recipes(runs)) == {BF16_AGAIN, "nvfp4", *fp8}


def test_the_sentence_of_readme_about_its_picture() -> None:
    """No interval of an FP8 recipe excludes zero, and that of nvfp4 does."""
    readme = " ".join((RESULTS.parents[1] / "README.md").read_text(encoding="utf-8").split())
    assert "(benchmarks/results/train_recipes_confidence.png)" in readme
    assert (
        "After 1,000 steps, no FP8 recipe can be distinguished from bf16; `nvfp4`, which has four bits, can" in readme
    )
    runs = read(RESULTS / "train_recipes_cpu")
    shown = {name: interval(differences(runs, name, at(1000))) for name in recipes(runs)}
    assert [name for name, (mean, half) in shown.items() if abs(mean) > half] == ["nvfp4"]
    assert all(len(runs[name]) == 5 for name in shown)  # five seeds


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
