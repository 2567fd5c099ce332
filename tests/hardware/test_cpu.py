"""CPUs: what they multiply, and how."""

from __future__ import annotations

import pytest
import torch

import oracle
from fp8graph import MXFP8BlockScaling, hardware
from fp8graph.compat import torch_build


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


@pytest.mark.parametrize("scale_shape", [(), (1,), (24, 1)])
def test_bf16_results_are_those_of_its_kernel_but_for_the_order_of_additions(
    scale_shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    a, b = torch.randn(24, 64).to(torch.float8_e4m3fn), torch.randn(24, 64).to(torch.float8_e4m3fn)
    scales = torch.rand(scale_shape) + 0.5, torch.rand(scale_shape) + 0.5
    scaling = "row" if scale_shape == (24, 1) else "tensor"
    if scaling not in torch_build.CPU_SCALINGS:
        pytest.skip("this torch has no such kernel")
    got = hardware.scaled_mm(a, b, *scales, None, torch.bfloat16, False, scaling=scaling)
    exact = (a.double() * scales[0]) @ (b.double() * scales[1]).T
    monkeypatch.setattr(torch_build, "multiplies_bf16_on_cpu", lambda: False)
    kernel = hardware.scaled_mm(a, b, *scales, None, torch.bfloat16, False, scaling=scaling)
    for result in (got, kernel):
        assert (result.double() - exact).abs().max() <= 2.0**-8 * exact.abs().max()
    assert (got != kernel).float().mean() < 0.01
