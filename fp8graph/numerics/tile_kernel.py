"""A Triton kernel that computes tiles of 128 x 128 once, and casts them to both layouts.

Each program has one tile in registers: the amaxes of its rows and of its columns (or of all of it), the scales, which
are from these amaxes or given, and both casts. Inductor's loops have one direction each: they would compute the tile in
every one of them, or store the other layout in short pieces. What is computed is that of ``quantization`` for FP32
scales, bit for bit; see ``tile_casts`` for the functions. Needs triton.
"""

# Triton gives types to the parameters.
# pyright: reportMissingParameterType=false, reportAssignmentType=false, reportMissingImports=false

from __future__ import annotations

import triton
import triton.language as tl

FLT_MAX = tl.constexpr(3.4028234663852886e38)
BF16_MAX = tl.constexpr(3.3895313892515355e38)


@triton.jit
def larger(a, b):
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def scale_of(amax, fp8_max: tl.constexpr, power_2: tl.constexpr, epsilon: tl.constexpr):
    """``formats.scale_from_amax`` of tensors in bf16."""
    if epsilon > 0.0:
        amax = larger(amax, epsilon)
    if power_2:
        # 448 and 57344 are 1.75 * 2**e: the exponent of fp8_max / amax, without a division
        bits = amax.to(tl.int32, bitcast=True)
        top: tl.constexpr = 262 if fp8_max == 448.0 else 269  # 127 + e + 127
        exponent = top - (bits >> 23) - ((bits & 0x7FFFFF) > 0x600000).to(tl.int32)
        scale = (tl.minimum(exponent, 254) << 23).to(tl.float32, bitcast=True)
    else:
        scale = tl.div_rn(tl.full(amax.shape, fp8_max, tl.float32), amax)
        scale = tl.where(scale > FLT_MAX, BF16_MAX, scale)
    return tl.where((amax > 0.0) & (amax <= FLT_MAX), scale, 1.0)


@triton.autotune(configs=[triton.Config({}, num_warps=8, num_stages=1)], key=[])
@triton.jit
def cast_tiles(
    a, b, c,  # [rows, columns] of this launch, in memory; those that a function does not read are a
    table,  # of scales that are given; else a
    rowwise, columnwise, rowwise_scale_inv, columnwise_scale_inv,  # of the whole tensor
    of_tiles,  # [row tiles, column tiles]: their scales, kept; with a given scale [1]: the amax, 0 before
    stride_a, stride_b, stride_c,
    first_row, first_column,  # where this launch begins in the result, in tiles
    whole_rows, whole_columns,
    row_stride, row_tile_stride, column_stride, column_tile_stride,  # of the scales
    at_scale, at_scale_inv,  # places in the table
    function: tl.constexpr,
    fp8_max: tl.constexpr, power_2: tl.constexpr, epsilon: tl.constexpr,
    scales: tl.constexpr,  # of "rows" of tiles and of columns, of "squares", or "given" for the tensor
    both: tl.constexpr, keeps: tl.constexpr,
):  # fmt: skip
    size: tl.constexpr = 128
    i = tl.arange(0, size)
    row, column = tl.program_id(1), tl.program_id(0)
    part = 0
    if function == "swiglu_backward":  # a tile of both gradients in turn: they read the same, while it is in the cache
        part = column % 2
        column = column // 2
        first_column += part * (tl.num_programs(0) // 2)
    rows, columns = row.to(tl.int64) * size, column.to(tl.int64) * size
    x = tl.load(a + rows * stride_a + columns + i[:, None] * stride_a + i[None, :]).to(tl.float32)
    if function == "swiglu":
        y = tl.load(b + rows * stride_b + columns + i[:, None] * stride_b + i[None, :]).to(tl.float32)
        x = x * tl.sigmoid(x) * y
    elif function == "swiglu_backward":
        y = tl.load(b + rows * stride_b + columns + i[:, None] * stride_b + i[None, :]).to(tl.float32)
        up = tl.load(c + rows * stride_c + columns + i[:, None] * stride_c + i[None, :], mask=part == 0, other=0.0)
        sigmoid = tl.sigmoid(x)
        of_gate = y * up.to(tl.float32) * sigmoid * (x * (1.0 - sigmoid) + 1.0)
        x = tl.where(part == 0, of_gate, y * (x * sigmoid))  # a branch would need twice as many registers
    finite = x + x * 0.0  # NaN where x is infinite
    row, column = row + first_row, column + first_column
    rows, columns = row.to(tl.int64) * size, column.to(tl.int64) * size
    in_row = rowwise + rows * whole_columns + columns + i[:, None] * whole_columns + i[None, :]
    in_column = columnwise + columns * whole_rows + rows + i[None, :] * whole_rows + i[:, None]
    of_rows = tl.reduce(tl.abs(x), 1, larger)
    if scales == "given":
        cast = (finite * tl.load(table + at_scale)).to(rowwise.dtype.element_ty)
        tl.store(in_row, cast)
        tl.store(in_column, cast)
        # as numbers that are not negative, bits have the order of their values; NaN's are the largest
        amax = tl.reduce(of_rows, 0, larger).to(tl.int32, bitcast=True)
        tl.atomic_max(of_tiles.to(tl.pointer_type(tl.int32), bitcast=True), amax, sem="relaxed")
        tl.store(rowwise_scale_inv, tl.load(table + at_scale_inv), mask=(row == 0) & (column == 0))
    elif scales == "squares":
        scale = scale_of(tl.reduce(of_rows, 0, larger), fp8_max, power_2, epsilon)
        scale_inv = tl.div_rn(1.0, scale)
        cast = (finite * scale).to(rowwise.dtype.element_ty)
        tl.store(in_row, cast)
        tl.store(rowwise_scale_inv + row * row_stride + column * row_tile_stride, scale_inv)
        if both:
            tl.store(in_column, cast)
            tl.store(columnwise_scale_inv + column * column_stride + row * column_tile_stride, scale_inv)
        if keeps:
            tl.store(of_tiles + row * (whole_columns // size) + column, scale)
    else:
        of_rows = scale_of(of_rows, fp8_max, power_2, epsilon)
        of_columns = scale_of(tl.reduce(tl.abs(x), 0, larger), fp8_max, power_2, epsilon)
        tl.store(in_row, (finite * of_rows[:, None]).to(rowwise.dtype.element_ty))
        tl.store(rowwise_scale_inv + (rows + i) * row_stride + column * row_tile_stride, tl.div_rn(1.0, of_rows))
        tl.store(in_column, (finite * of_columns[None, :]).to(rowwise.dtype.element_ty))
        tl.store(
            columnwise_scale_inv + (columns + i) * column_stride + row * column_tile_stride, tl.div_rn(1.0, of_columns)
        )
