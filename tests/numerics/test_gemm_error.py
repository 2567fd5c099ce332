"""The error of a GEMM, against FP64 of quantized and decoded operands."""

from __future__ import annotations

import importlib

import pytest
import torch
from torch import Tensor

from fp8graph.numerics import cast_to_representable
from fp8graph.numerics.gemm_error import gemm_error
from fp8graph.recipes import Recipe, resolve_recipe
from helpers import in_one_test

RECIPES = ["tensorwise", "rowwise", "blockwise", "mxfp8", "nvfp4"]


def quantizers(recipe: Recipe) -> list[object]:
    found = [recipe.quantizer("input"), recipe.quantizer("weight")]
    lists = [[getattr(q, name) for q in found] for name in ("power_2_scale", "amax_epsilon", "scaling")]
    return [*(q.dtype for q in found), *lists, *(list(q.block) for q in found)]


@in_one_test("name", RECIPES)
@in_one_test("shape", [(), (3,)])
@in_one_test("dtype", [torch.float32, torch.bfloat16])
def test_against_fp64(name: str, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    recipe = resolve_recipe(name)
    assert recipe is not None
    a, b = torch.randn(*shape, 100, 128).to(dtype), torch.randn(*shape, 128, 64).to(dtype)
    reference = torch.randn(*shape, 100, 64).to(dtype)
    a[..., 3, :] *= 50
    got = gemm_error(a, b, reference, *quantizers(recipe)).double()  # pyright: ignore[reportArgumentType]

    def rounded(x: Tensor, operand: str) -> Tensor:
        return cast_to_representable(x, recipe, operand).double()  # pyright: ignore[reportArgumentType]

    if shape and name in ("tensorwise", "nvfp4"):  # one scale for the whole batch
        scale_shape = a.shape, b.shape
        qa = rounded(a.flatten(0, -2), "input").reshape(scale_shape[0])
        qb = rounded(b.transpose(-2, -1).flatten(0, -2), "weight").reshape(*shape, 64, 128).transpose(-2, -1)
    elif shape:
        qa = torch.stack([rounded(x, "input") for x in a])
        qb = torch.stack([rounded(x.t().contiguous(), "weight").t() for x in b])
    else:
        qa, qb = rounded(a, "input"), rounded(b.t().contiguous(), "weight").t()
    change = qa @ qb - a.double() @ b.double()
    exact = [(change * reference.double()).square().sum(), change.square().sum(), reference.double().square().sum()]
    # bf16: the operands' differences are rounded to 8 bits, and the products' results
    bound = 2e-6 if dtype == torch.float32 else 0.005  # found: 3e-7 and 0.0022
    torch.testing.assert_close(got, torch.stack(exact), rtol=bound, atol=0)


def test_rows_are_taken_some_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    a, b, reference = torch.randn(100, 64), torch.randn(64, 32), torch.randn(100, 32)
    recipe = resolve_recipe("rowwise")
    assert recipe is not None
    whole = gemm_error(a, b, reference, *quantizers(recipe))  # pyright: ignore[reportArgumentType]
    monkeypatch.setattr(importlib.import_module("fp8graph.numerics.gemm_error"), "_ROWS", 7)
    parts = gemm_error(a, b, reference, *quantizers(recipe))  # pyright: ignore[reportArgumentType]
    torch.testing.assert_close(whole, parts, rtol=1e-5, atol=0)


def test_exact_product_has_no_error() -> None:
    ones = torch.ones(32, 64)
    recipe = resolve_recipe("mxfp8")
    assert recipe is not None
    got = gemm_error(ones, ones.t(), torch.ones(32, 32), *quantizers(recipe))  # pyright: ignore[reportArgumentType]
    assert got.tolist() == [0.0, 0.0, 1024.0]
