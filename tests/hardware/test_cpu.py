"""CPUs: what they multiply, and how."""

from __future__ import annotations

import inspect
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import oracle
from fp8graph import Float8BlockScaling, MXFP8BlockScaling, NVFP4BlockScaling, Policy, Recipe, hardware, numerics
from fp8graph.compat import torch_build
from fp8graph.numerics import dequantize, quantize
from fp8graph.numerics.matmul import bf16_product
from fp8graph.recipes import resolve_recipe
from helpers import MLP, eager_backend, first_fast, in_one_test, step


def test_cpu_multiplies_one_scale_per_tensor_or_row() -> None:
    cpu = hardware.of_device(torch.device("cpu"))
    assert cpu == hardware.from_target("cpu")
    assert (cpu.scalings, cpu.grouped, cpu.speed, cpu.is_gpu) == ({"tensor", "row"}, frozenset(), None, False)
    assert cpu.multiplies("delayed")
    a, b = (cpu.quantizer(MXFP8BlockScaling(), operand) for operand in ("input", "weight"))
    assert cpu.obstacle(a, b, torch.bfloat16) == "cpu has no MXFP8 GEMM"


FP8 = (torch.float8_e4m3fn, torch.float8_e5m2, *oracle.FNUZ)
OUT = (torch.float32, torch.float16, torch.bfloat16)


@pytest.fixture(autouse=True)
def _amx(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's own kernel refuses, as with fnuz types on a CPU with AMX. (With others it takes minutes there.)"""

    def refuse(*_: Any, **__: Any) -> Tensor:
        raise RuntimeError("could not create a primitive descriptor for the matmul primitive")

    monkeypatch.setattr(torch, "_scaled_mm", refuse)


@pytest.mark.parametrize("scaling", ["tensor", "delayed", "row"])
@pytest.mark.parametrize("dtype", FP8)
@pytest.mark.parametrize("out_dtype", OUT)
@pytest.mark.parametrize("bf16", [True, False])
def test_the_product_of_the_decoded_operands_is_rounded_once(
    scaling: str, dtype: torch.dtype, out_dtype: torch.dtype, bf16: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not bf16:
        monkeypatch.setattr(torch_build, "multiplies_bf16_on_cpu", lambda: False)
    torch.manual_seed(0)
    a = torch.randn(24, 64).to(dtype)
    b = torch.randn(32, 64).to(torch.float8_e4m3fnuz if dtype in oracle.FNUZ else torch.float8_e4m3fn)
    shapes = ((24, 1), (32, 1)) if scaling == "row" else ((), (1,))
    scales = [torch.rand(shape) + 0.5 for shape in shapes]
    bias = torch.randn(32).to(out_dtype)
    scale = scales[0].double() * scales[1].double().reshape(1, -1)
    exact = (a.double() @ b.double().T) * scale + bias.double()
    slack = (64 + 3) * 2.0**-24 * ((a.double().abs() @ b.double().abs().T) * scale + bias.double().abs())
    low, high = ((exact + error).float().to(out_dtype) for error in (-slack, slack))
    for custom_ops in (True, False):
        got = hardware.scaled_mm(a, b, *scales, bias, out_dtype, False, scaling=scaling, custom_ops=custom_ops)
        assert got.dtype == out_dtype
        assert (low <= got).all()
        assert (got <= high).all()


@first_fast("recipe", ["tensorwise", "rowwise"])
@first_fast("dtype", OUT)
def test_no_layer_runs_torchs_reference(recipe: str, dtype: torch.dtype) -> None:
    module = MLP().to(dtype)
    backend = eager_backend(Policy(default=recipe))
    out, *grads = step(torch.compile(module, backend=backend), torch.randn(16, 32).to(dtype).requires_grad_())
    assert all(x.isfinite().all() for x in (out, *grads))
    assert {(gemm.recipe, gemm.execution) for gemm in backend.report.gemms} == {(recipe, "native")}


@in_one_test("scaling", ["tensor", "row"])
@in_one_test("out_dtype", [torch.float32, torch.bfloat16])
def test_large_numbers_do_not_overflow_on_the_way(scaling: str, out_dtype: torch.dtype) -> None:
    """The sums times one scale are infinite, times both they are not: 448 * 448 * 64 * 1e33 = 1e40."""
    a, b = (torch.full((16, 64), 448.0).to(torch.float8_e4m3fn) for _ in range(2))
    scales = (torch.full((16, 1) if scaling == "row" else (), x) for x in (1e33, 1e-9))
    got = hardware.scaled_mm(a, b, *scales, None, out_dtype, False, scaling=scaling)
    torch.testing.assert_close(got.double(), torch.full((16, 16), 448.0**2 * 64 * 1e24).double(), rtol=2.0**-8, atol=0)


def numbers(x: Tensor, w: Tensor) -> dict[str, list[Tensor]]:
    """Codes and scales of both operands under each kind of scaling, and the products that a CPU multiplies itself."""
    found: dict[str, list[Tensor]] = {}
    for name in ("tensorwise", "rowwise", "blockwise", "mxfp8", "nvfp4"):
        recipe: Any = resolve_recipe(name)
        a, b = numerics.quantize(x, recipe, "input", "rowwise"), numerics.quantize(w, recipe, "weight", "rowwise")
        found[name] = [part for q in (a, b) for part in (q.data.view(torch.uint8), q.scale_inv)]
        if name in ("tensorwise", "rowwise"):
            args = a.data, b.data, a.scale_inv, b.scale_inv, None
            types = torch.float32, torch.float16, torch.bfloat16
            scaling = a.quantizer.scaling
            found[f"products of {name}"] = [hardware.scaled_mm(*args, out, False, scaling=scaling) for out in types]
    return found


UNDER_AVX2 = f"""
from __future__ import annotations
import sys
from typing import Any
import torch
from torch import Tensor
from fp8graph import hardware, numerics
from fp8graph.recipes import resolve_recipe

{inspect.getsource(numbers)}

torch.save((torch.backends.cpu.get_cpu_capability(), numbers(*torch.load(sys.argv[1]))), sys.argv[2])
"""


@pytest.mark.slow
def test_another_instruction_set_computes_the_same(tmp_path: Path) -> None:
    """Codes and scales bit for bit, products but for the order of additions."""
    torch.manual_seed(0)
    x, w = torch.randn(48, 256) * torch.logspace(-3, 3, 48).unsqueeze(1), torch.randn(32, 256)
    torch.save((x, w), tmp_path / "operands.pt")
    command = [sys.executable, "-c", UNDER_AVX2, tmp_path / "operands.pt", tmp_path / "found.pt"]
    limits = {"ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2"}
    subprocess.run(command, env=os.environ | limits, check=True, timeout=120)
    capability, limited = torch.load(tmp_path / "found.pt")
    here = torch.backends.cpu.get_cpu_capability()
    assert capability == ("AVX2" if here == "AVX512" else here)
    for name, expected in numbers(x, w).items():
        if not name.startswith("products"):
            assert all(map(torch.equal, limited[name], expected))
            continue
        for got, other in zip(limited[name], expected, strict=True):
            slack = 256 * 2.0**-24 * x.double().abs() @ w.double().abs().t() * 1.3  # FP8 numbers are this much larger
            slack += 2 * torch.finfo(got.dtype).eps * other.double().abs()
            assert ((got.double() - other.double()).abs() <= slack).all()


def test_own_product_needs_bf16_results(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu = hardware.of_device(torch.device("cpu"))

    monkeypatch.setattr(torch_build, "multiplies_bf16_on_cpu", lambda: True)
    assert cpu.custom_gemm("tensor", torch.bfloat16) is bf16_product
    assert cpu.custom_gemm("mxfp8", torch.bfloat16) is None
    assert cpu.custom_gemm("tensor", torch.float32) is cpu.custom_gemm("tensor", torch.float16) is None
    monkeypatch.setattr(torch_build, "multiplies_bf16_on_cpu", lambda: False)
    assert cpu.custom_gemm("tensor", torch.bfloat16) is None


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
def test_emulation_in_bf16_is_exact(recipe: Recipe, fits: bool, monkeypatch: pytest.MonkeyPatch) -> None:
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
