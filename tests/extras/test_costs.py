"""The predicted times of the GEMMs that tune chooses among."""

from __future__ import annotations

import dataclasses

import torch

from fp8graph import hardware
from fp8graph.extras.planning.scoring import GemmScore, seconds
from fp8graph.recipes import resolve_recipe
from helpers import in_one_test

FOUND = GemmScore(
    site="up", op="linear", group="up", gemm="fprop", candidate=0, m=8192, n=4096, k=4096, dtype=torch.bfloat16,
    weighted_error=4.0, square_error=1.0, square_reference=100.0,
)  # fmt: skip


def test_the_error_of_each_gemm() -> None:
    assert FOUND.error == 4.0
    assert dataclasses.replace(FOUND, gemm="dgrad").error == 1.0
    assert dataclasses.replace(FOUND, gemm="dgrad", upstream=6).error == 7.0  # the gradients that it goes into
    assert dataclasses.replace(FOUND, gemm="wgrad").error == 0.01
    assert dataclasses.replace(FOUND, gemm="wgrad", square_reference=0.0).error == 0.0


@in_one_test("gemm", ["fprop", "dgrad", "wgrad"])
@in_one_test("name", ["tensorwise", "rowwise", "delayed"])
def test_a_large_gemm_is_faster_in_fp8(gemm: str, name: str) -> None:
    device, found = hardware.from_target("sm_90"), dataclasses.replace(FOUND, gemm=gemm)
    plain, fp8 = (seconds(found, recipe, device, 1) for recipe in (None, resolve_recipe(name)))
    assert plain is not None
    assert fp8 is not None
    assert 1.2 < plain / fp8 < 2


def test_linears_that_share_an_input_share_its_cost() -> None:
    device, recipe = hardware.from_target("sm_90"), resolve_recipe("tensorwise")
    alone, shared = (seconds(FOUND, recipe, device, sharing) for sharing in (1, 3))
    assert alone is not None
    assert shared is not None
    assert shared < alone
    gradient = dataclasses.replace(FOUND, gemm="dgrad")  # each linear has its own
    assert seconds(gradient, recipe, device, 1) == seconds(gradient, recipe, device, 3)


def test_unsupported_gemm_has_no_time() -> None:
    device = hardware.from_target("sm_90")
    assert seconds(FOUND, resolve_recipe("mxfp8"), device, 1) is None
    wgrad = dataclasses.replace(FOUND, gemm="wgrad")
    assert seconds(wgrad, resolve_recipe("rowwise_with_gw_hp"), device, 1) is None


def test_a_gemm_in_fp32_gains_more() -> None:
    device, recipe = hardware.from_target("sm_90"), resolve_recipe("tensorwise")
    found = dataclasses.replace(FOUND, dtype=torch.float32)
    plain, fp8 = seconds(found, None, device, 1), seconds(found, recipe, device, 1)
    assert plain is not None
    assert fp8 is not None
    assert plain / fp8 > 5
