"""Scales of grouped matmuls in blocks: each is where the kernel reads it, and the way back leads to the scales."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from fp8graph import hardware
from fp8graph.ir import ops
from fp8graph.numerics import quantization
from fp8graph.numerics.tiles import BLOCKS, rows_of_blocks
from fp8graph.recipes import resolve_recipe
from helpers import first_fast, in_one_test, same_bits

SIZES = ([5, 0, 130, 18], [0, 0, 0, 24], [0, 33, 2, 64])
RECIPE = resolve_recipe("mxfp8")
assert RECIPE is not None
QUANTIZER = RECIPE.quantizer("input")


def quantized(x: Tensor, order: str, **settings: Any) -> list[Tensor]:
    """Data and scales of both layouts."""
    settings |= quantization.quantizer_kwargs(QUANTIZER)
    args = (x, *quantization.quantizer_args(QUANTIZER), [1, 32], [16, 32])
    return ops.quantize(*args, rowwise_order=order, columnwise_order=order, **settings)


def read(flat: Tensor, first: int, rows: int, tiles: int) -> Tensor:
    """[rows, tiles]: the scales of a matrix whose blocks begin at ``first``, as cuBLAS' documentation counts them."""
    blocks_per_row = (tiles + 3) // 4
    found = [
        [
            int(flat[first + 512 * (r // 128 * blocks_per_row + t // 4) + 16 * (r % 32) + 4 * (r % 128 // 32) + t % 4])
            for t in range(tiles)
        ]
        for r in range(rows)
    ]
    return torch.tensor(found, dtype=torch.uint8).reshape(rows, tiles)


def rounded(size: int, multiple: int) -> int:
    return (size + multiple - 1) // multiple * multiple


@pytest.mark.parametrize("behind", [0, 7], ids=["all rows", "rows of no group"])
@first_fast("sizes", SIZES, ids=str)
def test_scales_are_where_the_kernel_reads_them(sizes: list[int], behind: int) -> None:
    """MSLK's ``set_grouped_gemm_args_kernel``: the blocks of groups follow each other, an empty one has no rows."""
    offs = torch.tensor(sizes).cumsum(0).to(torch.int32)
    x = torch.randn(sum(sizes) + behind, 96) * torch.logspace(-20, 20, 96)
    x *= torch.logspace(-10, 10, len(x)).unsqueeze(1)
    data, columns, plain, plain_columns = quantized(x, "", offs=offs)
    *same, scales, scales_of_columns = quantized(x, BLOCKS, offs=offs)
    assert same_bits([data, columns], same)
    first = 0
    for start, end in pairwise([0, *offs.tolist()]):
        assert torch.equal(read(scales.flatten(), first, end - start, 3), plain[start:end])
        first += rounded(end - start, 128) * 4
    first = tile = 0
    for size in sizes:
        tiles = max(rounded(size, 32) // 32, 1)
        assert torch.equal(read(scales_of_columns.flatten(), first, 96, tiles), plain_columns[:, tile : tile + tiles])
        first, tile = first + 128 * rounded(tiles, 4), tile + tiles


def test_scales_of_matrices_are_blocks_of_each() -> None:
    w = torch.randn(3, 144, 160) * torch.logspace(-9, 9, 160)
    *_, plain, plain_columns = quantized(w, "", per_matrix=True)
    *_, scales, scales_of_columns = quantized(w, BLOCKS, per_matrix=True)
    for expert in range(3):
        assert torch.equal(read(scales[expert], 0, 144, 5), plain[expert])
        assert torch.equal(read(scales_of_columns[expert], 0, 160, 5), plain_columns[expert])
    assert torch.equal(rows_of_blocks(scales, 144, 5), plain)


@first_fast("sizes", [*SIZES, [0, 0, 0, 0]], ids=str)
def test_the_last_tiles_of_a_group_have_no_nan(sizes: list[int]) -> None:
    """They scale zeros that are not there: of what the memory held before, 255 would be NaN."""
    offs = torch.tensor(sizes).cumsum(0).to(torch.int32)
    *_, rows, columns = quantized(torch.ones(sum(sizes), 96), BLOCKS, offs=offs)
    assert int(rows.max()) < 255 and int(columns.max()) < 255  # noqa: PT018


@first_fast("sizes", SIZES, ids=str)
@first_fast("form", ["fprop", "wgrad"])
def test_a_product_of_scales_in_blocks_is_that_of_the_scales(form: str, sizes: list[int]) -> None:
    offs = torch.tensor(sizes).cumsum(0).to(torch.int32)
    x, dy, w = torch.randn(sum(sizes) + 3, 96), torch.randn(sum(sizes) + 3, 64), torch.randn(4, 64, 96)
    results: list[Tensor] = []
    for order in ("", BLOCKS):
        settings: dict[str, Any] = {"scaling": "mxfp8", "block_a": [1, 32], "block_b": [1, 32]}
        settings |= {"order_a": order, "order_b": order}
        if form == "fprop":
            (a, _, scale_a, _), (b, _, scale_b, _) = (
                quantized(x, order, offs=offs),
                quantized(w, order, per_matrix=True),
            )
        else:
            (_, a, _, scale_a), (_, b, _, scale_b) = quantized(dy, order, offs=offs), quantized(x, order, offs=offs)
            settings["multiple"] = 32
        results.append(ops.scaled_grouped_mm(a, b, scale_a, scale_b, offs, torch.bfloat16, False, True, **settings))
    assert same_bits(*([x] for x in results))
    assert results[0].isfinite().all()


SHAPES = [(100, 160, 96, 4), (64, 256, 144, 3), (8, 32, 16, 32), (4096, 2880, 5760, 32)]  # tokens, k, n, experts


@in_one_test("ordered", [True, False], ids=["by quantize", "at the GEMM"])
@in_one_test("shape", SHAPES, ids=str)
def test_torch_accepts_operands_of_all_three_gemms(shape: tuple[int, ...], ordered: bool) -> None:
    """On meta tensors torch checks types, layouts, and the shapes of scales. gpt-oss is the last shape."""
    tokens, k, n, experts = shape
    order = BLOCKS if ordered else ""
    with torch.device("meta"):
        x, dy = torch.empty(tokens, k, dtype=torch.bfloat16), torch.empty(tokens, n, dtype=torch.bfloat16)
        w, offs = torch.empty(experts, n, k, dtype=torch.bfloat16), torch.empty(experts, dtype=torch.int32)
    of_x, of_dy = (quantized(rows, order, offs=offs) for rows in (x, dy))
    of_w = quantized(w, order, per_matrix=True)
    settings: dict[str, Any] = {"scaling": "mxfp8", "block_a": [1, 32], "block_b": [1, 32]}
    settings |= {"order_a": order, "order_b": order}
    rest = (offs, torch.bfloat16, False, True)
    y = hardware.scaled_grouped_mm(of_x[0], of_w[0], of_x[2], of_w[2], *rest, **settings)
    dx = hardware.scaled_grouped_mm(of_dy[0], of_w[1], of_dy[2], of_w[3], *rest, **settings)
    dw = hardware.scaled_grouped_mm(of_dy[1], of_x[1], of_dy[3], of_x[3], *rest, **settings, multiple=32)
    assert [tuple(x.shape) for x in (y, dx, dw)] == [(tokens, n), (tokens, k), (experts, n, k)]
    flat, settings = of_w[2].flatten(), settings | {"order_b": BLOCKS}
    with pytest.raises((RuntimeError, ValueError), match="scale"):
        hardware.scaled_grouped_mm(of_x[0], of_w[0], of_x[2], flat, *rest, **settings)
