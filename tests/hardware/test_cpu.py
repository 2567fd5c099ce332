"""CPUs: what they multiply, and how."""

from __future__ import annotations

import pytest
import torch

import oracle
from fp8graph import Float8BlockScaling, MXFP8BlockScaling, NVFP4BlockScaling, Recipe, hardware
from fp8graph.compat import torch_build
from fp8graph.numerics import bf16_product, dequantize, quantize


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


@pytest.mark.parametrize("scaling", sorted(torch_build.CPU_SCALINGS))
def test_bf16_results_are_rounded_once(scaling: str, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    a, b = torch.randn(24, 64).to(torch.float8_e4m3fn), torch.randn(24, 64).to(torch.float8_e4m3fn)
    shape = (24, 1) if scaling == "row" else ()
    scales = torch.rand(shape) + 0.5, torch.rand(shape) + 0.5
    exact = ((a.double() @ b.double().T) * scales[0].double() * scales[1].double().reshape(1, -1)).float()
    slack = 2.0**-17 * exact.abs().max()  # of the accumulation

    def product() -> torch.Tensor:
        return hardware.scaled_mm(a, b, *scales, None, torch.bfloat16, False, scaling=scaling)

    found = [product()]
    monkeypatch.setattr(torch_build, "multiplies_bf16_on_cpu", lambda: False)
    found.append(product())  # torch's own kernel
    for got in found:
        assert ((exact - slack).bfloat16() <= got).all()
        assert (got <= (exact + slack).bfloat16()).all()


def test_what_is_multiplied_by_fp8graphs_own_op(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu = hardware.of_device(torch.device("cpu"))
    monkeypatch.setattr(torch_build, "multiplies_bf16_on_cpu", lambda: True)
    assert cpu.own_product(torch.bfloat16) is bf16_product.product
    assert cpu.own_product(torch.float32) is cpu.own_product(torch.float16) is None
    monkeypatch.setattr(torch_build, "multiplies_bf16_on_cpu", lambda: False)
    assert cpu.own_product(torch.bfloat16) is None


@pytest.mark.parametrize(
    ("recipe", "fits"),
    [
        (MXFP8BlockScaling(), True),
        (NVFP4BlockScaling(), False),
        (Float8BlockScaling(), True),
        (Float8BlockScaling(power_2_scale=False), False),
        (Float8BlockScaling(scale_format="ue8m0"), True),
    ],
)
def test_what_is_emulated_in_bf16_is_exact(recipe: Recipe, fits: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    cpu = hardware.of_device(torch.device("cpu"))
    quantizers = [cpu.quantizer(recipe, operand) for operand in ("input", "weight")]
    monkeypatch.setattr(torch_build, "multiplies_bf16_on_cpu", lambda: True)
    assert cpu.emulation_dtype(quantizers, torch.bfloat16) == (torch.bfloat16 if fits else torch.float32)
    assert cpu.emulation_dtype(quantizers, torch.float32) == torch.float32
    x = torch.randn(128, 256) * torch.logspace(-6, 6, 256)
    decoded = dequantize(quantize(x, recipe, "input", "rowwise"))
    assert torch.equal(decoded.bfloat16().float(), decoded) == fits
    monkeypatch.setattr(torch_build, "multiplies_bf16_on_cpu", lambda: False)
    assert cpu.emulation_dtype(quantizers, torch.bfloat16) == torch.float32
