"""Grouped matmuls: each group of rows is quantized as a tensor of its own, and multiplied by its own matrix."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fp8graph
from fp8graph import NVFP4BlockScaling, numerics
from fp8graph.ir import ops
from fp8graph.numerics import quantization
from fp8graph.numerics.experts import group_of_rows, grouped_mm, pad_groups, padded_rows
from fp8graph.numerics.scalings import SCALINGS
from fp8graph.recipes import Layout, OperandName, resolve_recipe
from helpers import bits, in_one_test

SIZES = ([5, 0, 1, 18], [24, 0, 0, 0], [0, 0, 0, 24], [6, 6, 6, 6], [0, 33, 2, 64])
# delayed has one scale for all groups
EACH_ITS_OWN = ("tensorwise", "rowwise", "blockwise", "mxfp8", "nvfp4", "nvfp4, 4 over 6")


def named(recipe: str) -> Any:
    if recipe == "nvfp4, a scale per row":
        return NVFP4BlockScaling(row_scaled_activation=True, disable_rht=True)
    if recipe == "nvfp4":  # random numbers are those of a place in the whole tensor
        return NVFP4BlockScaling(disable_stochastic_rounding=True)
    if recipe == "nvfp4, 4 over 6":
        return NVFP4BlockScaling(disable_stochastic_rounding=True, nvfp4_4over6="all")
    return resolve_recipe(recipe)


def offsets(sizes: Sequence[int]) -> Tensor:
    return torch.tensor(sizes).cumsum(0).to(torch.int32)


def spans(sizes: Sequence[int]) -> list[tuple[int, int]]:
    return list(pairwise([0, *offsets(sizes).tolist()]))


def quantized(x: Tensor, recipe: Any, operand: OperandName, layout: Layout, multiples: list[int], **kwargs: Any) -> Any:
    """The outputs of the dialect op by name."""
    quantizer = recipe.quantizer(operand)
    both: tuple[list[int], list[int]] = (multiples, []) if layout == "rowwise" else ([], multiples)
    settings = quantization.quantizer_kwargs(quantizer)
    results = ops.quantize(x, *quantization.quantizer_args(quantizer), *both, **settings, **kwargs)
    return dict(zip(quantization.output_names(quantizer.scaling, [layout]), results, strict=True))


def same(a: Tensor, b: Tensor | None) -> bool:
    return b is not None and torch.equal(bits(a.contiguous()), bits(b.contiguous()))


@in_one_test("sizes", SIZES, ids=str)
@in_one_test("name", EACH_ITS_OWN)
@in_one_test("operand", ["input", "grad_output"])
def test_each_group_of_rows_is_a_tensor_of_its_own(name: str, operand: OperandName, sizes: list[int]) -> None:
    recipe = named(name)
    x = torch.randn(sum(sizes), 48, dtype=torch.bfloat16) * torch.rand(sum(sizes), 1) * 100
    tile = recipe.quantizer(operand).block[1] or 1
    multiple = max(tile, 16)
    rowwise = quantized(x, recipe, operand, "rowwise", [1, 1], offs=offsets(sizes))
    columnwise = quantized(x, recipe, operand, "columnwise", [1, multiple], offs=offsets(sizes))
    packed = SCALINGS[recipe.quantizer(operand).scaling].packed
    assert columnwise["columnwise"].shape == (48, padded_rows(sum(sizes), len(sizes), multiple) // packed)
    first = 0  # column of the padded group
    for group, (start, end) in enumerate(spans(sizes)):
        rows = end - start
        if not rows:  # one multiple of zeros
            assert not columnwise["columnwise"][:, first // packed : (first + multiple) // packed].float().any()
            first += multiple
            continue
        one = numerics.quantize(x[start:end], recipe, operand, "rowwise")
        assert same(rowwise["rowwise"][start:end], one.data)
        scale_inv = rowwise["scale_inv"][group] if name == "tensorwise" else rowwise["rowwise_scale_inv"][start:end]
        assert same(scale_inv, one.scale_inv)
        other = numerics.quantize(x[start:end], recipe, operand, "columnwise")
        end, behind = first // packed + other.data.shape[1], first + rows + -rows % multiple
        assert same(columnwise["columnwise"][:, first // packed : end], other.data)
        assert not columnwise["columnwise"][:, end : behind // packed].float().any()
        if packed > 1:
            assert same(rowwise["rowwise_global_scale_inv"][group], one.global_scale_inv)
            assert same(columnwise["columnwise_global_scale_inv"][group], other.global_scale_inv)
        if name == "tensorwise":
            assert same(columnwise["scale_inv"][group], other.scale_inv)
        elif name == "rowwise":
            assert same(columnwise["columnwise_scale_inv"][group], other.scale_inv.reshape(-1))
        else:
            tiles = slice(first // tile, -(-(first + rows) // tile))
            assert same(columnwise["columnwise_scale_inv"][:, tiles], other.scale_inv)
        first = behind
    assert not columnwise["columnwise"][:, first // packed :].float().any()


@pytest.mark.parametrize("name", ["tensorwise", "nvfp4", "nvfp4, 4 over 6"])
def test_scales_of_an_expert_s_weight_are_its_own(name: str) -> None:
    w = torch.randn(3, 20, 48) * torch.tensor([1.0, 100.0, 0.0]).reshape(3, 1, 1)
    recipe, whole = named(name), "scale_inv" if name == "tensorwise" else "columnwise_global_scale_inv"
    together = quantized(w, recipe, "weight", "columnwise", [16, 32], per_matrix=True)
    for expert in range(3):
        alone = numerics.quantize(w[expert], recipe, "weight", "columnwise")
        assert same(together["columnwise"][expert, :48, : alone.data.shape[1]], alone.data)
        assert same(together[whole][expert], alone.scale_inv if name == "tensorwise" else alone.global_scale_inv)
    assert together["columnwise"].shape == (3, 48, 32 if name == "tensorwise" else 16)


@pytest.mark.parametrize("value", [float("inf"), float("nan")])
def test_an_overflow_stays_in_its_group(value: float) -> None:
    x = torch.randn(10, 16)
    x[7, 3] = value
    recipe = named("tensorwise")
    made = quantized(x, recipe, "grad_output", "rowwise", [1, 1], offs=offsets([4, 4, 2]))
    clean = quantized(x[:4], recipe, "grad_output", "rowwise", [1, 1], offs=offsets([4, 0, 0]))
    assert same(made["rowwise"][:4], clean["rowwise"])
    assert made["scale_inv"].isfinite().all()
    assert made["rowwise"].float().isnan().nonzero().tolist() == [[7, 3]]


def test_an_overflow_under_nvfp4_is_in_the_scale_of_its_tile() -> None:
    x = torch.randn(10, 32)
    x[7, 3] = float("inf")
    made = quantized(x, named("nvfp4"), "grad_output", "rowwise", [1, 1], offs=offsets([4, 4, 2]))
    assert made["rowwise_scale_inv"].float().isnan().nonzero().tolist() == [[7, 0]]
    assert made["rowwise_global_scale_inv"].isfinite().all()


def test_rows_after_the_last_group_belong_to_none() -> None:
    assert group_of_rows(offsets([2, 0, 1]), 5).tolist() == [0, 0, 2, 3, 3]
    x = torch.arange(1.0, 6.0).reshape(5, 1)
    padded, _ = pad_groups(x, offsets([2, 0, 1]), 2)
    assert padded.flatten().tolist() == [1, 2, 0, 0, 3, 0, 0, 0, 0, 0]
    x[4] = 1e30  # no group's amax
    recipe = named("delayed")
    assert quantized(x, recipe, "input", "rowwise", [1, 1], offs=offsets([2, 0, 1]))["amax"].amax() == 3


@in_one_test("sizes", SIZES, ids=str)
@in_one_test("name", [*EACH_ITS_OWN, "delayed", "nvfp4, a scale per row"])
def test_each_group_is_multiplied_by_its_own_matrix(name: str, sizes: list[int]) -> None:
    """fprop and wgrad forms against one GEMM per group, of the decoded numbers."""
    recipe = named(name)
    tokens, experts, n, k = sum(sizes), len(sizes), 20, 48
    offs = offsets(sizes)
    x, dy, w = torch.randn(tokens, k), torch.randn(tokens, n), torch.randn(experts, n, k)

    def gemm(
        a: Any, b: Any, layouts: tuple[str, str], operands: tuple[OperandName, OperandName], **more: Any
    ) -> Tensor:
        settings: dict[str, Any] = {"scaling": recipe.quantizer("input").scaling}
        for side, operand, layout, made in zip("ab", operands, layouts, (a, b), strict=True):
            if any(block := recipe.quantizer(operand).block):
                settings[f"block_{side}"] = list(block)
            if (whole := made.get(f"{layout}_global_scale_inv")) is not None:
                settings[f"global_scale_inv_{side}"] = whole
        data = [made[layout] for made, layout in zip((a, b), layouts, strict=True)]
        scales = [
            made.get("scale_inv", made.get(f"{layout}_scale_inv")) for made, layout in zip((a, b), layouts, strict=True)
        ]
        return ops.scaled_grouped_mm(*data, *scales, offs, torch.float32, False, False, **settings, **more)

    rowwise: tuple[str, str] = ("rowwise", "rowwise")
    qx = quantized(x, recipe, "input", "rowwise", [1, 1], offs=offs)
    qw = quantized(w, recipe, "weight", "rowwise", [1, 1], per_matrix=True)
    y = gemm(qx, qw, rowwise, ("input", "weight"))
    multiple = max(recipe.quantizer("input").block[1], 16)
    columnwise: list[tuple[Tensor, OperandName]] = [(dy, "grad_output"), (x, "input")]
    columns = [quantized(t, recipe, o, "columnwise", [1, multiple], offs=offs) for t, o in columnwise]
    dw = gemm(columns[0], columns[1], ("columnwise", "columnwise"), ("grad_output", "input"), multiple=multiple)
    assert y.shape == (tokens, n)
    assert dw.shape == (experts, n, k)
    bound = 15 if name.startswith("nvfp4") else 23.5  # dB, of what rounding to the format costs a random GEMM
    exact = torch.cat([x[start:end] @ w[expert].t() for expert, (start, end) in enumerate(spans(sizes))])
    assert fp8graph.numerics.sqnr_db(exact, y) > bound
    exact = torch.stack([dy[start:end].t() @ x[start:end] for start, end in spans(sizes)])
    assert fp8graph.numerics.sqnr_db(exact, dw) > bound
    for expert, (start, end) in enumerate(spans(sizes)):
        if start == end:
            assert not dw[expert].any()
        elif name in EACH_ITS_OWN:  # the very numbers of one GEMM on its own

            def values(t: Tensor, operand: OperandName, layout: Any) -> Tensor:
                return numerics.dequantize(numerics.quantize(t, recipe, operand, layout))

            alone = values(x[start:end], "input", "rowwise") @ values(w[expert], "weight", "rowwise").t()
            torch.testing.assert_close(y[start:end], alone, rtol=1e-5, atol=1e-5)
            rows = [nn.functional.pad(t[start:end], (0, 0, 0, (start - end) % 16)) for t in (dy, x)]  # transformed
            alone = values(rows[0], "grad_output", "columnwise").t() @ values(rows[1], "input", "columnwise")
            torch.testing.assert_close(dw[expert], alone, rtol=1e-5, atol=1e-5)


@in_one_test("sizes", SIZES, ids=str)
def test_in_high_precision_it_is_one_matmul_a_group(sizes: list[int]) -> None:
    x, dy, w = torch.randn(sum(sizes), 7), torch.randn(sum(sizes), 5), torch.randn(len(sizes), 7, 5)
    y, dw = grouped_mm(x, w, offsets(sizes)), grouped_mm(x.t(), dy, offsets(sizes))
    for expert, (start, end) in enumerate(spans(sizes)):
        assert torch.equal(y[start:end], x[start:end] @ w[expert])
        torch.testing.assert_close(dw[expert], x[start:end].t() @ dy[start:end])
