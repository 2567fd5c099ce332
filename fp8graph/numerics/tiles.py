"""Quantizing by tiles and by rows: one layout of a tensor, its data and the scale of each tile or row.

A tensor may come in parts that are joined: each part is read where it is and written where it belongs.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
from torch import Tensor

from fp8graph.numerics.formats import (
    amax_of,
    biased_exponent,
    cast_to_e2m1,
    exp2_biased,
    inverse,
    pack_e2m1,
    saturating_cast,
    scale_from_amax,
    widened_columns,
)
from fp8graph.numerics.hints import stored
from fp8graph.recipes import FLT_MAX, FP8_MAX


def pad_to_multiple(x: Tensor, rows: int, columns: int) -> Tensor:
    """Zero rows and columns at the end so that both sizes are multiples. Zeros change no amax."""
    pad_rows, pad_columns = missing(x.shape[-2], rows), missing(x.shape[-1], columns)
    if pad_rows is None and pad_columns is None:
        return x
    return torch.constant_pad_nd(x, [0, pad_columns or 0, 0, pad_rows or 0], 0.0)


def missing(size: int, multiple: int) -> int | None:
    """How much ``size`` lacks to a multiple; None if it surely lacks nothing (a dynamic size may)."""
    lacks = -size % multiple
    return None if isinstance(lacks, int) and lacks == 0 else lacks


def tiles_of(x: Tensor, block: Sequence[int]) -> Tensor:
    """[..., R, C] -> [..., R / rows, rows, C / columns, columns]; both sizes are multiples of the block's."""
    *batch, rows, columns = x.shape
    return x.reshape(*batch, rows // block[0], block[0], columns // block[1], block[1])


def untile(tiles: Tensor) -> Tensor:
    *batch, row_tiles, rows, column_tiles, columns = tiles.shape
    return tiles.reshape(*batch, row_tiles * rows, column_tiles * columns)


def largest_of(amaxes: Sequence[Tensor]) -> Tensor:
    """Elementwise; NaN wins."""
    return functools.reduce(torch.maximum, amaxes)


def join(parts: Sequence[Tensor], axis: int) -> Tensor:
    """The parts along ``axis``. Stored parts are written where they belong: no copy."""
    return torch.cat(list(parts), axis) if len(parts) > 1 else parts[0]


def quantize_tiles(
    parts: Sequence[Tensor],
    axis: int,
    dtype: torch.dtype,
    scaling: str,
    block: Sequence[int],
    power_2_scale: bool,
    amax_epsilon: float,
    carry_overflow: bool,
    global_scale: Tensor | None,
    multiple: int = 1,
) -> tuple[Tensor, Tensor]:
    """``(data, scale_inv)`` of one layout with one scale per tile of ``block``; parts are joined.

    ``multiple``: of how many tiles there are along the contraction dim ("block" only); what lacks are tiles of zeros.
    """
    *batch, rows, columns = parts[0].shape
    exact = [widened_columns(x, -1) for x in parts]
    padded = [pad_to_multiple(x, *block) for x in exact]
    tiled = [tiles_of(x, block) for x in padded]
    amaxes = [amax_of(x, (-3, -1)) for x in tiled]  # [..., R / rows, C / columns]
    settings = (dtype, scaling, power_2_scale, amax_epsilon, carry_overflow, global_scale, parts[0].dtype)
    made = [scales_from_amaxes(amax, *settings) for amax in amaxes]
    scale_inv = join([inverse for _, inverse in made], axis)
    lacks = missing(scale_inv.shape[-1], multiple) if multiple > 1 else None
    if lacks is not None:
        zeros = scale_inv.new_zeros([*scale_inv.shape[:-1], lacks])
        scale_inv = torch.cat([scale_inv, scales_from_amaxes(zeros, *settings)[1]], -1)
    scaled = [x.to(torch.float32) * s.unsqueeze(-2).unsqueeze(-1) for x, (s, _) in zip(tiled, made, strict=True)]
    if scaling == "nvfp4":
        packed = [pack_e2m1(cast_to_e2m1(untile(x)))[..., :rows, :].contiguous() for x in scaled]
        return join(packed, axis), scale_inv
    data = [saturating_cast(x, dtype) for x in scaled]
    if not all(x is part for x, part in zip(padded, exact, strict=True)):
        joined = join([stored(untile(x)[..., :rows, :columns].contiguous()) for x in data], axis)
        return joined if lacks is None else with_padding(joined, (1, multiple * block[1])), scale_inv
    # [..., R / rows, rows, C / columns, columns]; more tiles are written beside these, before any view: no copy
    joined = join([stored(x.contiguous()) for x in data], -4 if axis == -2 else -2)
    if lacks is not None:
        joined = torch.cat([joined, joined.new_zeros([*joined.shape[:-2], lacks, block[1]])], -2)
    return joined.reshape(*batch, joined.shape[-4] * block[0], joined.shape[-2] * block[1]), scale_inv


def quantize_rows(
    parts: Sequence[Tensor],
    axis: int,
    multiples: Sequence[int],
    dtype: torch.dtype,
    power_2_scale: bool,
    amax_epsilon: float,
    carry_overflow: bool,
) -> tuple[Tensor, Tensor]:
    """``(data, scale_inv)`` of one layout with one scale per row of the joined parts, padded to ``multiples``."""
    amaxes = [amax_of(x, -1, keepdim=True) for x in parts]  # [..., rows, 1]
    if axis == -1:
        amaxes = [largest_of(amaxes)]

    def scales_of(amax: Tensor) -> tuple[Tensor, Tensor]:
        settings = (power_2_scale, amax_epsilon, carry_overflow, None, parts[0].dtype)
        return scales_from_amaxes(amax, dtype, "row", *settings)

    made = [scales_of(amax) for amax in amaxes]
    data = [
        stored(saturating_cast(x.to(torch.float32) * made[i % len(made)][0], dtype).contiguous())
        for i, x in enumerate(parts)
    ]
    scale_inv = join([inverse for _, inverse in made], -2)
    if (rows := missing(scale_inv.shape[-2], multiples[0])) is not None:  # of zeros
        zeros = scale_inv.new_zeros([*scale_inv.shape[:-2], rows, 1])
        scale_inv = torch.cat([scale_inv, scales_of(zeros)[1]], -2)
    return with_padding(join(data, axis), multiples), scale_inv


def with_padding(x: Tensor, multiples: Sequence[int]) -> Tensor:
    """``x`` with zeros at the end so that its last sizes are ``multiples``.

    Written beside ``x``, not with it: the loop that makes ``x`` keeps its size and goes on to fuse with what feeds it.
    """
    for axis, multiple in ((-1, multiples[1]), (-2, multiples[0])):
        if (lacks := missing(x.shape[axis], multiple)) is not None:
            shape = [*x.shape]
            shape[axis] = lacks
            x = torch.cat([x, x.new_zeros(shape)], axis)
    return x


def columnwise_copy(data: Tensor, multiples: Sequence[int]) -> Tensor:
    """FP8 [rows, columns] -> the transposed copy, padded to ``multiples``: columnwise data of one scale."""
    return with_padding(data.t().contiguous(), multiples)


def scales_from_amaxes(
    amax: Tensor,
    dtype: torch.dtype,
    scaling: str,
    power_2_scale: bool,
    amax_epsilon: float,
    carry_overflow: bool,
    global_scale: Tensor | None,
    source_dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    """``(scale, scale_inv)`` of tiles, rows or tensors from their amaxes."""
    if scaling == "mxfp8":
        exponent = biased_exponent(amax, FP8_MAX[dtype])
        scale = exp2_biased(torch.where(exponent == 255, exponent, 254 - exponent))  # 2 ** (127 - e)
        scale_inv = exponent.to(torch.uint8)
    elif global_scale is not None:  # nvfp4
        scale_inv = saturating_cast(amax * (global_scale / 6.0), torch.float8_e4m3fn)
        scale = inverse(scale_inv.to(torch.float32) * inverse(global_scale)).clamp_max(FLT_MAX)
    else:
        largest = torch.finfo(source_dtype).max if scaling == "block" else FLT_MAX
        scale = scale_from_amax(
            amax, FP8_MAX[dtype], power_2_scale=power_2_scale, amax_epsilon=amax_epsilon, largest=largest
        )
        scale = stored(scale)  # else every thread that casts with it divides for itself
        scale_inv = with_overflow(inverse(scale), amax) if carry_overflow else inverse(scale)
    return scale, scale_inv


def with_overflow(scale_inv: Tensor, amax: Tensor) -> Tensor:
    """``scale_inv``, and inf where the amax is inf."""
    return torch.where(amax > FLT_MAX, amax, scale_inv)
