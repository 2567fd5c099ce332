"""benchmarks/change_of_precision.py: its arithmetic, and that the page says what the committed runs say."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.change_of_precision import BEFORE, CHANGE, CHANGED, NVFP4, POLICIES, differences, lines, read, rises
from benchmarks.train_recipes import BF16

PAGE = Path(__file__).parents[2] / "docs" / "nvfp4.md"


def test_losses_are_compared_with_the_median_before_and_with_the_other_run() -> None:
    before = [1.0, 9.0, *[2.0] * (BEFORE - 2)]
    runs = {
        CHANGED: {"apart": [*before, 2.2, 2.4, 1.8]},
        NVFP4: {"apart": [*before, 2.0, 2.0, 2.0]},
        BF16: {"apart": [*before, 1.0, 1.0, 1.0]},
    }
    assert rises(runs[CHANGED]) == pytest.approx([0.1, 0.2, -0.1])
    assert differences(runs) == pytest.approx([0.1, 0.2, -0.1])
    assert lines({"0": runs, "1": {name: {"apart": [*before, 2.0, 2.0, 2.0]} for name in POLICIES}})[0] == (
        "| NVFP4, then fprop in bf16 | +0.00 % to +10.00 % | +0.00 % to +20.00 % | -10.00 % to +0.00 % |"
    )


def test_only_fprop_changes_and_the_head_stays() -> None:
    policy = POLICIES[CHANGED]
    recipes = {
        (step, layer, gemm): policy.at_step(step).resolve(layer, "linear").recipes[gemm]
        for step in (CHANGE - 1, CHANGE)
        for layer in ("model.layers.0.mlp.up_proj", "lm_head")
        for gemm in ("fprop", "dgrad")
    }
    assert {key for key, recipe in recipes.items() if recipe is None} == {
        (CHANGE, "model.layers.0.mlp.up_proj", "fprop"),
        *((step, "lm_head", gemm) for step in (CHANGE - 1, CHANGE) for gemm in ("fprop", "dgrad")),
    }


def test_the_loss_does_not_jump_and_the_page_says_so() -> None:
    found = read()
    runs = found["seeds"]
    assert (found["change"], {*runs}) == (CHANGE, {"0", "1", "2"})
    for seed in runs.values():
        assert seed[CHANGED]["losses"][:CHANGE] == seed[NVFP4]["losses"][:CHANGE]  # the same run until then
        assert abs(differences(seed)[0]) < 0.001
        assert max(map(abs, differences(seed))) < 0.01
    for name in (CHANGED, NVFP4):  # at step 128 of one seed
        assert max(max(rises(seed[name])) for seed in runs.values()) == rises(runs["0"][name])[8]
    page = PAGE.read_text(encoding="utf-8")
    assert [line for line in lines(runs) if line not in page] == []
