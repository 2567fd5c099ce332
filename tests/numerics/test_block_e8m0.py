"""Powers of two in E8M0 for 128-wide tiles: the numbers of DeepGEMM, a linear, and a Llama layer."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fp8graph
from fp8graph import Float8BlockScaling, Policy, numerics
from fp8graph.numerics.scalings import SCALINGS
from fp8graph.recipes import resolve_recipe
from helpers import compiled_step, eager_backend, in_one_test, step

RECIPE = Float8BlockScaling(scale_format="ue8m0", amax_epsilon=1e-4)


def deepgemm(x: Tensor, tile: tuple[int, int]) -> tuple[Tensor, Tensor]:
    """``per_token_cast_to_fp8`` and ``per_block_cast_to_fp8`` of DeepGEMM with ``use_ue8m0``, on whole tiles.

    The formula of deep_gemm/utils/math.py; the logarithm in FP64, where that of a power of two is exact.
    """
    rows, columns = x.shape
    view = x.reshape(rows // tile[0], tile[0], columns // tile[1], tile[1])
    amax = view.abs().float().amax((1, 3), keepdim=True).clamp(1e-4)
    scale_inv = torch.pow(2.0, torch.ceil(torch.log2((amax / 448.0).double()))).float()
    return (view * (1.0 / scale_inv)).to(torch.float8_e4m3fn).reshape(x.shape), scale_inv[:, 0, :, 0]


@in_one_test(("operand", "tile"), [("input", (1, 128)), ("weight", (128, 128)), ("grad_output", (1, 128))])
@in_one_test("dtype", [torch.bfloat16, torch.float32])
def test_bytes_and_scales_are_those_of_deepgemm(operand: Any, tile: tuple[int, int], dtype: torch.dtype) -> None:
    x = (torch.randn(256, 512) * torch.logspace(-9, 4, 256).unsqueeze(1)).to(dtype)
    x[:4] = torch.tensor([448.0, 449.0, 0.0, 1e-6]).to(dtype).unsqueeze(1)  # a power of two, above it, 0, little
    data, scale_inv = deepgemm(x, tile)
    q = numerics.quantize(x, RECIPE, operand, "rowwise")
    assert torch.equal(q.data.view(torch.uint8), data.view(torch.uint8))
    assert q.scale_inv.dtype == torch.uint8
    assert torch.equal(torch.exp2(q.scale_inv.float() - 127), scale_inv)
    assert torch.equal(numerics.dequantize(q).float(), (data.float() * _spread(scale_inv, tile)).to(dtype).float())


def _spread(scale_inv: Tensor, tile: tuple[int, int]) -> Tensor:
    return scale_inv.repeat_interleave(tile[0], 0).repeat_interleave(tile[1], 1)


def test_nothing_saturates_and_scales_are_those_of_powers_of_two_in_fp32() -> None:
    """The same numbers as with ``power_2_scale`` and FP32 scales, in a quarter of the bytes."""
    x = torch.randn(64, 384, dtype=torch.bfloat16)
    e8m0 = numerics.quantize(x, Float8BlockScaling(scale_format="ue8m0"), "input", "rowwise")
    fp32 = numerics.quantize(x, Float8BlockScaling(), "input", "rowwise")
    assert torch.equal(e8m0.data.view(torch.uint8), fp32.data.view(torch.uint8))
    assert torch.equal(SCALINGS["block_e8m0"].scale_values(e8m0.scale_inv), fp32.scale_inv)  # pyright: ignore
    assert (e8m0.scale_inv.nbytes, fp32.scale_inv.nbytes) == (192, 768)


def test_a_linear_trains() -> None:
    module = nn.Linear(256, 128).to(torch.bfloat16)
    x = torch.randn(64, 256, dtype=torch.bfloat16, requires_grad=True)
    results = compiled_step(module, x, backend := eager_backend(Policy(default=RECIPE)), fullgraph=True)
    exact = step(module, x, parameters=module.parameters())
    for name, got, expected in zip(("fprop", "dgrad", "wgrad"), results, exact, strict=False):
        assert numerics.sqnr_db(expected, got) > 26.0, name
    assert {gemm.recipe for gemm in backend.report.gemms} == {"blockwise"}


@pytest.mark.slow
def test_hopper_multiplies_it_and_blackwell_does_not() -> None:
    """On Hopper the bytes become FP32 scales in front of the GEMM."""
    linear = nn.Linear(512, 256, device="meta", dtype=torch.bfloat16)
    x = torch.empty(128, 512, device="meta", dtype=torch.bfloat16, requires_grad=True)
    policy = Policy(default=RECIPE, min_speedup=0)
    hopper, blackwell = (fp8graph.explain(linear, x, policy=policy, target=name) for name in ("sm_90", "sm_100"))
    assert {gemm.execution for gemm in hopper.gemms} == {"native"}
    assert "e4m3[512, 512], uint8[2, 4], uint8[4, 4])" in hopper.graphs[0].stages["share"]
    assert any("_scaled_mm" in kernel.name for kernel in hopper.kernels)
    assert {gemm.reason for gemm in blackwell.gemms} == {
        "default; emulated: sm_100 has no FP8 GEMM with one scale per tile"
    }


def test_a_policy_file_can_ask_for_it() -> None:
    assert resolve_recipe({"type": "Float8BlockScaling", "scale_format": "ue8m0"}) == Float8BlockScaling(
        scale_format="ue8m0"
    )
