"""Padding, tiling and joining: how one layout of a tensor is read and written.

A tensor may consist of parts that are joined: each part is read from its own place and written to its place in the
result.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Final

import torch
from torch import Tensor
from torch.fx.experimental.symbolic_shapes import statically_known_true

from fp8graph.numerics.experts import pad_groups
from fp8graph.numerics.hints import arrange, materialize


def pad_to_multiple(x: Tensor, rows: int, columns: int) -> Tensor:
    """Zero rows and columns at the end so that both sizes are multiples. Zeros change no amax."""
    pad_rows, pad_columns = padding_needed(x.shape[-2], rows), padding_needed(x.shape[-1], columns)
    if pad_rows is None and pad_columns is None:
        return x
    return torch.constant_pad_nd(x, [0, pad_columns or 0, 0, pad_rows or 0], 0.0)


def padding_needed(size: int, multiple: int) -> int | None:
    """Return the padding of ``size`` to a multiple; None if it is known to be 0 (a dynamic size may need some)."""
    padding = -size % multiple
    return None if statically_known_true(padding == 0) else padding


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
    """Join the parts along ``axis``. Stored parts are written to their place in the result: no copy."""
    return torch.cat(list(parts), axis) if len(parts) > 1 else parts[0]


def with_padding(x: Tensor, multiples: Sequence[int]) -> Tensor:
    """``x`` with zeros at the end so that its last sizes are ``multiples``.

    The zeros are written by a separate loop: the loop that makes ``x`` keeps its size, and still fuses with its
    producer.
    """
    for axis, multiple in ((-1, multiples[1]), (-2, multiples[0])):
        if (padding := padding_needed(x.shape[axis], multiple)) is not None:
            shape = [*x.shape]
            shape[axis] = padding
            x = torch.cat([x, x.new_zeros(shape)], axis)
    return x


def columnwise_copy(data: Tensor, multiples: Sequence[int], *, offs: Tensor | None = None) -> Tensor:
    """FP8 [rows, columns] -> the transposed copy, padded to ``multiples``: columnwise data of one scale.

    ``offs``: the rows fall into groups that end there, each padded to ``multiples[1]``.
    """
    if offs is not None:
        rows, _ = pad_groups(data.view(torch.uint8), offs, multiples[1])
        data, multiples = rows.view(data.dtype), (multiples[0], 1)
    # not .contiguous(): for a single column it would return its argument, which an op must not do
    return with_padding(data.t().clone(memory_format=torch.contiguous_format), multiples)


def joined_rows(parts: Sequence[Tensor]) -> Tensor:
    """Return the rows of tensors in low precision, or of their scales, below each other."""
    first = parts[0]
    if first.element_size() > 1:
        return torch.cat([*parts])
    return torch.cat([part.view(torch.uint8) for part in parts]).view(first.dtype)  # no FP8 type has a kernel anywhere


def repeated_scales(scale_inv: Tensor, rows: int) -> Tensor:
    """Return the scales [ceil(rows / 128), C] of tiles of 128 rows as those of each row, TRANSPOSED: [C, rows]."""
    return scale_inv.repeat_interleave(ROWS, 0)[:rows].t().clone(memory_format=torch.contiguous_format)


# How the scales [R, C] of the tiles of one tensor lie in memory: "" is that, contiguous.
TRANSPOSED: Final = "transposed"  # [C, R], contiguous
BLOCKS: Final = "128x4"  # [R / 128, C * 128], in blocks of 128 rows and 4 tiles, as Blackwell's tensor cores read them
ROWS: Final = 128
TILES: Final = 4


def ordered(parts: Sequence[Tensor], order: str, axis: int = -2, rows: int = 1) -> Tensor:
    """Return the scales of ``parts``, joined along ``axis``, in an order. Parts are written to their place: no copy.

    BLOCKS knows one scale per row: those of tiles of several ``rows`` are repeated. They are padded with zeros to
    blocks of 512 scales: rows 0, 32, 64, 96 (4 tiles each), then 1, 33, 65, 97, ... Source: cuBLAS "1D block scaling
    factors layout".
    """
    if order == TRANSPOSED:
        return arrange([part.t() for part in parts], -3 - axis)
    if order != BLOCKS:
        return join([materialize(part) for part in parts], axis)
    multiple, each = (ROWS, rows) if axis == -2 else (TILES, 1)
    if any(padding_needed(part.shape[axis] * each, multiple) is not None for part in parts):
        parts = [join([materialize(part) for part in parts], axis)]
    blocks = arrange([_blocks(part, rows) for part in parts], axis + 2)
    return blocks.reshape(blocks.shape[0], -1)


def _blocks(scales: Tensor, rows: int) -> Tensor:
    """[R, C] -> [ceil(R * rows / 128), ceil(C / 4), 32, 4, 4]."""
    padded = pad_to_multiple(scales.repeat_interleave(rows, 0) if rows > 1 else scales, ROWS, TILES)
    r, c = padded.shape
    return padded.reshape(r // ROWS, 4, 32, c // TILES, TILES).permute(0, 3, 2, 1, 4)


def in_rows(scales: Tensor, order: str, shape: Sequence[int], rows: int = 1) -> Tensor:
    """Return the scales [R, C] (``shape``) of which ``ordered`` made ``scales``."""
    if order == TRANSPOSED:
        return scales.t()
    if order != BLOCKS:
        return scales
    return rows_of_blocks(scales.reshape(-1), shape[0] * rows, shape[1])[::rows]


def rows_of_blocks(blocks: Tensor, rows: int, tiles: int) -> Tensor:
    """Return the scales [..., rows, tiles] of which the BLOCKS [..., n] were made, one scale per row."""
    split = blocks.reshape(*blocks.shape[:-1], -(-rows // ROWS), -(-tiles // TILES), 32, ROWS // 32, TILES)
    swapped = split.transpose(-4, -2)  # [..., row block, 32-row group, row in it, tile block, tile]
    return swapped.flatten(-2).flatten(-4, -2)[..., :rows, :tiles]


def ordered_shape(shape: Sequence[int], order: str, rows: int = 1) -> list[int]:
    """Return the shape of the scales [R, C] (``shape``) in an order."""
    if order == BLOCKS:
        return [-(-shape[0] * rows // ROWS), -(-shape[1] // TILES) * TILES * ROWS]
    return [*shape[::-1]] if order == TRANSPOSED else [*shape]
