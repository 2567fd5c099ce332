"""The cost of NVFP4's ingredients on a GPU: kernels and bytes of sm_100 code, counted without a GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from fp8graph import NVFP4BlockScaling, Policy, explain
from fp8graph.ir import ops
from fp8graph.numerics import quantization
from fp8graph.numerics.scalings import SCALINGS
from fp8graph.recipes import OperandName, resolve_recipe
from generated import OF_ONE_INDUCTOR, generate
from helpers import first_slow

X = torch.empty(2048, 1024, dtype=torch.bfloat16)
MATRIX, SEED = torch.empty(16, 16, dtype=torch.bfloat16), torch.empty(1, dtype=torch.int64)
NEAREST: dict[str, Any] = {"disable_stochastic_rounding": True}


@OF_ONE_INDUCTOR
@first_slow(
    ("fields", "operand", "kernels", "reads"),
    [
        ({**NEAREST, "disable_rht": True}, "input", 6, 5.7),
        (NEAREST, "input", 9, 6.7),  # a GEMM transforms, whose bytes are not counted; the copy has an amax of its own
        ({"disable_rht": True}, "grad_output", 9, 10.7),  # random bits: two bytes per number, written and read
        ({}, "grad_output", 12, 11.7),
        ({}, "weight", 5, 4.6),
        # the amaxes of rows and of columns are two passes, where that of the tensor is one
        ({"disable_rht": True, "row_scaled_activation": True}, "input", 7, 6.7),
    ],
    ids=["plain", "transform", "stochastic", "both", "weight", "row scaled"],
)
def test_both_layouts(fields: dict[str, Any], operand: OperandName, kernels: int, reads: float) -> None:
    """Of one tensor. It also ends: Inductor once followed random numbers to their start for each of their uses."""
    quantizer = NVFP4BlockScaling(**fields).quantizer(operand)
    args, kwargs = quantization.quantizer_args(quantizer), quantization.quantizer_kwargs(quantizer)

    def quantize(x: torch.Tensor, matrix: torch.Tensor, seed: torch.Tensor) -> list[torch.Tensor]:
        made = {"matrix": matrix} if quantizer.rotation is not None else {}
        drawn = {"seed": seed} if quantizer.stochastic else {}
        return ops.quantize(x, *args, [1, 32], [16, 32], **kwargs, **made, **drawn)

    found = generate(quantize, [X, MATRIX, SEED], "sm_100").kernels
    assert len(found) <= kernels
    assert sum(kernel.bytes for kernel in found) <= reads * X.nbytes


@OF_ONE_INDUCTOR
@first_slow(
    ("recipe", "target"), [("nvfp4", "sm_100"), ("mxfp8", "sm_100"), ("blockwise", "sm_90"), ("rowwise", "sm_90")]
)
def test_kernels_of_a_gemm_are_those_of_the_speed_model(recipe: str, target: str) -> None:
    """No kernel puts scales in order between quantize and GEMM; NVFP4's result is multiplied by two scales."""
    x = torch.empty(256, 512, dtype=torch.bfloat16, device="meta", requires_grad=True)
    linear = nn.Linear(512, 1024, bias=False, device="meta", dtype=torch.bfloat16)
    policy = Policy(default=recipe, min_speedup=0)
    kernels = explain(linear, x, policy=policy, target=target, cache_weights="update").kernels
    resolved = resolve_recipe(recipe)
    assert resolved is not None
    for gemm in ("fprop", "dgrad", "wgrad"):
        launches = [kernel for kernel in kernels if gemm in kernel.nodes]
        assert len(launches) == SCALINGS[resolved.quantizer("input").scaling].gemm_launches, gemm


def test_triton_rounds_to_nearest_or_to_zero_only() -> None:
    """With a third way, sm_100a's instruction for stochastic rounding could take the place of the bits."""
    triton = pytest.importorskip("triton")
    if not triton.__version__.startswith("3.7"):
        pytest.skip("docs/nvfp4.md speaks of Triton 3.7")
    from triton._C.libtriton import ir as triton_ir

    assert {mode for mode in dir(triton_ir.ROUNDING_MODE) if mode.isupper()} == {"RTNE", "RTZ"}
