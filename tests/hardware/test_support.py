"""support: whether a device multiplies what a recipe quantizes, and why not."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch

import fp8graph
from fp8graph import ConfigError, Float8RowwiseScaling, supports
from fp8graph.hardware import Support, from_target, support_of
from fp8graph.recipes import resolve_recipe
from helpers import in_one_test
from samples import ROOT


@in_one_test(
    ("recipe", "target", "native"),
    [
        ("tensorwise", "sm_89", True),
        ("rowwise", "sm_89", True),
        ("rowwise", "sm_120", True),
        ("mxfp8", "sm_120", True),
        ("nvfp4", "sm_121", True),
        ("mxfp8", "sm_121", True),
        ("mxfp8", "sm_89", False),
        ("blockwise", "sm_90", True),
        ("mxfp8", "sm_90", False),
        (Float8RowwiseScaling(), "sm_90", True),
        ("high_precision", "sm_80", True),
    ],
)
def test_supports(recipe: Any, target: str, native: bool) -> None:
    found = supports(recipe, target)
    assert bool(found) == native
    assert str(found).startswith(f"{target} multiplies") if native else "fprop is emulated: " in str(found)


@in_one_test(
    ("recipe", "target", "evidence"),
    [
        ("mxfp8", "sm_120", "others' measurement and the sources, not by our run"),
        ("nvfp4", "sm_121", "others' measurement and the sources, not by our run"),
        ("rowwise", "sm_89", "torch's sources and libraries, not by our run"),
        ("rowwise", "sm_120a", "torch's sources and libraries, not by our run"),
        ("rowwise", "sm_90", ""),
        ("tensorwise", "sm_120", ""),
        ("mxfp8", "sm_89", ""),
    ],
)
def test_evidence_is_named_where_we_ran_nothing(recipe: str, target: str, evidence: str) -> None:
    support = supports(recipe, target)
    assert support.evidence == evidence
    assert str(support).endswith(f" natively, by {evidence}") == bool(evidence)


def test_supports_says_which_gemms() -> None:
    found = supports("blockwise", "sm_100")
    assert not found.native
    assert str(found).count("is emulated") == 3
    assert supports("tensorwise")  # this machine's CPU has a reference kernel
    with pytest.raises(ConfigError, match="target must be"):
        supports("tensorwise", "h100")
    with pytest.raises(ConfigError, match="unknown recipe"):
        supports("tensorwize")


def test_gemms_that_a_recipe_leaves_are_not_an_obstacle() -> None:
    found = supports("rowwise_with_gw_hp", "sm_90")
    assert found
    assert found.native == ("fprop", "dgrad")


def test_experts_are_asked_for_apart() -> None:
    recipe = resolve_recipe("tensorwise")
    assert recipe is not None
    device = from_target("sm_89")
    assert support_of(device, recipe)
    assert str(support_of(device, recipe, grouped=True)).startswith("fprop is emulated: sm_89 has no grouped")


def test_each_obstacle_is_said() -> None:
    found = Support(recipe="x", device="d", native=("fprop",), obstacles={"dgrad": "this", "wgrad": "that"})
    assert str(found) == "dgrad is emulated: this; wgrad is emulated: that"
    assert not found


def test_the_upper_bound_of_nvfp4_on_an_rtx_5090_is_that_of_the_page() -> None:
    page = (ROOT / "docs" / "recipes.md").read_text(encoding="utf-8")
    (bound,) = re.findall(r"predicts for `nvfp4` there, (\d)x of bf16 for a large GEMM", page)
    linear = torch.nn.Linear(8192, 8192, bias=False, device="meta", dtype=torch.bfloat16)
    x = torch.empty(8192, 8192, device="meta", dtype=torch.bfloat16)
    (gemm,) = fp8graph.explain(linear, x, policy={"default": "nvfp4"}, target="sm_120", training=False).gemms
    assert float(gemm.reason.rpartition("predicted ")[2].removesuffix("x")) == pytest.approx(float(bound), rel=0.1)
