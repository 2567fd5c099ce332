"""What a GPU is given: torch's own rules for ``_scaled_mm`` on CUDA, checked on meta tensors. No GPU is needed.

torch's meta kernel takes meta tensors for CUDA ones and knows the layouts, alignments, scale shapes and types that the
CUDA kernel takes; it refuses the others, as the last test shows. (Whether cuBLAS multiplies them right is for a GPU
to say.)
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from fp8graph import Float8BlockScaling, hardware, numerics
from fp8graph.recipes import OperandName, Recipe, resolve_recipe

# gemm: operand and whether its columnwise layout is multiplied, for a [m, k] and b [n, k]
GEMMS: dict[str, tuple[tuple[OperandName, bool], tuple[OperandName, bool]]] = {
    "fprop": (("input", False), ("weight", False)),
    "dgrad": (("grad_output", False), ("weight", True)),
    "wgrad": (("grad_output", True), ("input", True)),
}
M, N, K = 200, 96, 300  # ragged for every tile
SHAPES = {"input": (M, K), "weight": (N, K), "grad_output": (M, N)}


def multiply(recipe: Recipe, gemm: str, calls: list[Any], out_dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """One GEMM, from high-precision tensors, as pass ``quantize`` pads and names it."""
    sides, settings = [], dict[str, Any]()
    scaling = recipe.quantizer("input").scaling
    m, n, k = hardware.ALIGNMENT[scaling]
    for side, (operand, columnwise), multiples in zip("ab", GEMMS[gemm], ([m, k], [n, k]), strict=True):
        quantizer = recipe.quantizer(operand)
        layouts: Any = ([], multiples) if columnwise else (multiples, [])
        x = torch.empty(SHAPES[operand], dtype=torch.bfloat16, device="meta")
        outputs = numerics.quantize_layouts(
            x, *numerics.quantizer_args(quantizer), *layouts, **numerics.quantizer_kwargs(quantizer)
        )
        named = dict(zip(numerics.output_names(scaling, *layouts), outputs, strict=True))
        layout = "columnwise" if columnwise else "rowwise"
        sides.append((named[layout], named.get("scale_inv", named.get(f"{layout}_scale_inv"))))
        if any(quantizer.block):
            settings[f"block_{side}"] = quantizer.block
        if "global_scale_inv" in named:
            settings[f"global_scale_inv_{side}"] = named["global_scale_inv"]
    (a, scale_a), (b, scale_b) = sides
    calls.append((a, b, scale_a, scale_b))
    return numerics.scaled_mm(a, b, scale_a, scale_b, None, out_dtype, False, scaling=scaling, **settings)


@pytest.mark.parametrize("gemm", GEMMS)
@pytest.mark.parametrize("recipe", ["tensorwise", "delayed", "rowwise", "blockwise", "mxfp8", "nvfp4"])
def test_the_cuda_rules_are_kept(recipe: str, gemm: str) -> None:
    found = resolve_recipe(recipe)
    assert found is not None
    out = multiply(found, gemm, calls := [])
    ((a, b, *_),) = calls
    assert out.dtype == torch.bfloat16
    assert out.shape == (a.shape[0], b.shape[0])
    _, n, k = hardware.ALIGNMENT[found.quantizer("input").scaling]
    assert b.shape[0] % n == 0
    assert (a.shape[1] * (2 if recipe == "nvfp4" else 1)) % k == 0


def record(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What reaches torch._scaled_mm."""
    seen: list[Any] = []
    original = torch._scaled_mm

    def scaled_mm(*args: Any, **kwargs: Any) -> Tensor:
        seen.append(args)
        return original(*args, **kwargs)

    monkeypatch.setattr(torch, "_scaled_mm", scaled_mm)
    return seen


def test_block_scales_are_stored_as_cublas_reads_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """1x128: outer-dim-major. 128x128: rows 16 bytes apart."""
    seen = record(monkeypatch)
    for gemm in GEMMS:
        multiply(Float8BlockScaling(), gemm, [])
    described = [[(tuple(s.shape), s.stride()) for s in args[2:4]] for args in seen]
    assert described == [
        [((200, 3), (1, 200)), ((3, 1), (1, 4))],  # x [m, k / 128] and w [k / 128, n / 128] transposed
        [((200, 1), (1, 1)), ((1, 3), (1, 4))],  # one tile along k: any stride between tiles
        [((96, 2), (1, 96)), ((2, 304), (304, 1))],
    ]


def test_mxfp8_and_nvfp4_scales_are_swizzled(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = record(monkeypatch)
    for name in ("mxfp8", "nvfp4"):
        recipe = resolve_recipe(name)
        assert recipe is not None
        multiply(recipe, "fprop", [])
    (mx, fp4) = seen
    assert [(s.dtype, tuple(s.shape)) for s in mx[2:4]] == [
        (torch.float8_e8m0fnu, (256 * 12,)),  # 200 rows, 10 tiles of 32
        (torch.float8_e8m0fnu, (128 * 12,)),
    ]
    assert fp4[0].dtype == fp4[1].dtype == torch.float4_e2m1fn_x2
    assert [(s.dtype, tuple(s.shape)) for s in fp4[2:4]] == [
        (torch.float8_e4m3fn, (256 * 20,)),  # 20 tiles of 16 after padding
        (torch.float8_e4m3fn, (128 * 20,)),
    ]


def test_torchs_meta_kernel_refuses_what_cuda_refuses() -> None:
    a, b = (torch.empty(32, 64, dtype=torch.float8_e4m3fn, device="meta") for _ in range(2))
    one, rows = torch.ones((), device="meta"), torch.ones(31, 1, device="meta")
    with pytest.raises(RuntimeError, match="col_major"):
        torch._scaled_mm(a, b.t().contiguous(), one, one, out_dtype=torch.bfloat16)
    with pytest.raises(RuntimeError, match="Invalid scaling configuration"):
        torch._scaled_mm(a, b.t(), rows, rows.t(), out_dtype=torch.bfloat16)
