"""CPUs, and devices that nobody has a file for."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import oracle
from fp8graph import Float8CurrentScaling, Float8RowwiseScaling, MXFP8BlockScaling, hardware, numerics
from fp8graph.compat import torch_build
from fp8graph.errors import ConfigError
from fp8graph.hardware.device import Hardware
from fp8graph.recipes import Recipe


def test_what_a_cpu_multiplies() -> None:
    cpu = hardware.of_device(torch.device("cpu"))
    assert cpu == hardware.from_target("cpu")
    assert (cpu.scalings, cpu.grouped, cpu.speed, cpu.is_gpu) == (torch_build.CPU_SCALINGS, frozenset(), None, False)
    assert cpu.multiplies("delayed")
    a, b = (cpu.quantizer(MXFP8BlockScaling(), operand) for operand in ("input", "weight"))
    assert cpu.obstacle(a, b, torch.bfloat16) == "cpu has no MXFP8 GEMM"


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, *oracle.FNUZ])
def test_its_kernel_is_the_product_of_the_decoded_operands(dtype: torch.dtype) -> None:
    a, b = (
        torch.randn(24, 64).to(dtype),
        torch.randn(32, 64).to(torch.float8_e4m3fnuz if dtype in oracle.FNUZ else dtype),
    )
    one = torch.tensor(0.5)
    got = hardware.scaled_mm(a, b, one, one, None, torch.float32, False)
    exact = (a.double() * 0.5) @ (b.double() * 0.5).T
    assert (got.double() - exact).abs().max() <= 64 * 2.0**-24 * exact.abs().max()


@pytest.mark.parametrize("recipe", [Float8CurrentScaling(), Float8RowwiseScaling()])
def test_a_device_without_a_vendor_multiplies_nothing_and_decodes(recipe: Recipe) -> None:
    unknown = hardware.of_device(torch.device("xpu"))
    a, b = (unknown.quantizer(recipe, operand) for operand in ("input", "weight"))
    assert str(unknown.obstacle(a, b, torch.bfloat16)).startswith("device 'xpu' has no FP8 GEMM")
    assert (unknown.alignment(a, b), unknown.default_recipe, unknown.speed) == ((1, 1, 1), "tensorwise", None)
    left, right = (
        numerics.quantize(torch.randn(16, 48), recipe, operand, "rowwise") for operand in ("input", "weight")
    )
    args = left.data, right.data, left.scale_inv, right.scale_inv, None, torch.float32, False
    got = Hardware.scaled_mm(*args, scaling=a.scaling)
    assert torch.equal(got, numerics.dequantize(left) @ numerics.dequantize(right).t())


@pytest.mark.parametrize("target", ["", "gpu", "sm_9", "sm90", "gfx", "GFX942", "cuda", 90])
def test_what_is_no_target(target: Any) -> None:
    with pytest.raises(ConfigError, match="like 'sm_90' or 'gfx942'"):
        hardware.from_target(target)
