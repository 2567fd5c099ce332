"""Scales of grouped matmuls in the order in which Blackwell's tensor cores read them: blocks of 128 rows x 4 tiles.

A block is 512 scales: rows 0, 32, 64, 96 (4 tiles each), then 1, 33, 65, 97, ... (cuBLAS, "1D block scaling factors
layout"). The blocks of a matrix follow each other along its tiles, then along its rows. Every group begins with a
block of its own, and its last rows and tiles are filled up. Where a scale belongs depends on the offsets, which are on
the device: the kernel that quantizes computes it, and writes each scale to its place.

    rows in groups     [t, tiles]           ->  [rows, tiles], both padded
    columns in groups  [m, tiles]           ->  [m, tiles], both padded
    matrices           [experts, n, tiles]  ->  [experts, n * tiles], both padded

Source: ``set_grouped_gemm_args_kernel`` in include/mslk/gemm/cutlass/grouped_common.cuh of meta-pytorch/MSLK, which is
the kernel behind ``torch._scaled_grouped_mm``, and ``_check_scales_blocked`` in
aten/src/ATen/native/cuda/GroupedBlas.cpp (torch 2.11 to 2.15).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from fp8graph.numerics.experts import group_of_rows, padded_offsets, starts
from fp8graph.numerics.hints import materialize, placed
from fp8graph.numerics.tiles import ROWS, TILES, rows_of_blocks


def _up(size: int, multiple: int) -> int:
    return (size + multiple - 1) // multiple * multiple


def ordered(scales: Tensor, ends: Tensor | None, *, in_blocks: Tensor | None = None, rows: int = 1) -> Tensor:
    """Return the scales of a layout in blocks.

    Args:
        scales: [t, tiles] of rows in groups, [m, tiles] of columns in groups, or [experts, n, tiles] of matrices.
        ends: the end of each group, in rows or, of columns, in tiles; None: matrices.
        in_blocks: of columns, see :func:`ends_of_columns`.
        rows: the number of rows that share a scale: each gets it.
    """
    scales = scales.repeat_interleave(rows, -2) if rows > 1 else scales
    as_bytes = scales.view(torch.uint8)
    if ends is None:
        made = _of_matrices(as_bytes)
    else:
        made = _of_rows(as_bytes, ends) if in_blocks is None else _of_columns(as_bytes, ends, in_blocks)
    return made.view(scales.dtype)


def ends_of_columns(offs: Tensor, multiple: int, tile: int) -> tuple[Tensor, Tensor]:
    """Return the ends, in tiles, of groups that are padded to ``multiple`` columns, and those of groups of whole
    blocks.
    """
    # both from the offsets: computed from one another, they would be two scans in two kernels
    block = TILES * tile
    ends, in_blocks = (padded_offsets(offs, multiple, each=each) for each in (1, block // math.gcd(block, multiple)))
    return ends // tile, in_blocks // tile


def ordered_shape(shape: Sequence[int], groups: int, *, rows: int = 1, columns: bool) -> list[int]:
    """Return the shape of what ``ordered`` makes of scales of this shape; ``groups``: 0 for matrices."""
    *batch, height, tiles = shape
    height *= rows
    if batch:
        return [*batch, _up(height, ROWS) * _up(tiles, TILES)]
    if columns:
        return [_up(height, ROWS), _up(tiles + groups * (TILES - 1), TILES)]
    return [_up(height + groups * (ROWS - 1), ROWS), _up(tiles, TILES)]


def _in_block(row: Tensor, tile: Tensor) -> Tensor:
    """Return the place of a scale in its block."""
    # bits of numbers that are not negative: a division of whole numbers takes ten instructions
    return ((row & 31) << 4) + ((row >> 5 & 3) << 2) + (tile & 3)


def _of_rows(scales: Tensor, offs: Tensor) -> Tensor:
    """Of rows whose groups end at ``offs``. Rows of no group follow the last group."""
    rows, tiles = scales.shape
    shape = ordered_shape(scales.shape, offs.shape[0], columns=False)
    row = materialize(_moved(torch.arange(rows, device=scales.device), offs, padded_offsets(offs, ROWS, least=0)))
    row, tile = row.unsqueeze(1), torch.arange(tiles, device=scales.device)
    places = ((row >> 7) * (shape[1] // TILES) + (tile >> 2)) * (ROWS * TILES) + _in_block(row, tile)
    # scales of rows behind a group are not initialized: they scale results that are not stored
    return placed(scales, places, shape[0] * shape[1], filled=tiles % TILES == 0).view(shape)


def _of_columns(scales: Tensor, ends: Tensor, in_blocks: Tensor) -> Tensor:
    """Of columns whose groups end at ``ends``, in tiles. Tiles of no group follow the last group."""
    rows, tiles = scales.shape
    shape = ordered_shape(scales.shape, ends.shape[0], columns=True)
    group = group_of_rows(ends, tiles)  # the number of groups for tiles behind the last one
    first, last = starts(in_blocks, group), in_blocks[group.clamp_max(len(ends) - 1)]
    width = torch.where(group < len(ends), last, shape[1]) - first
    tile = _moved(torch.arange(tiles, device=scales.device), ends, in_blocks) - first
    first, width, tile = materialize(first), materialize(width), materialize(tile)
    row = torch.arange(rows, device=scales.device).unsqueeze(1)
    block = (row >> 7) * (width >> 2) + (tile >> 2)
    places = first * shape[0] + block * (ROWS * TILES) + _in_block(row, tile)
    # a group's last tiles scale zeros, and a NaN there would be a NaN in the result
    return placed(scales, places, shape[0] * shape[1], filled=False).view(shape)


def _of_matrices(scales: Tensor) -> Tensor:
    experts, rows, tiles = scales.shape
    shape = ordered_shape(scales.shape, 0, columns=False)
    expert = torch.arange(experts, device=scales.device).reshape(-1, 1, 1)
    row = torch.arange(rows, device=scales.device).unsqueeze(1)
    tile = torch.arange(tiles, device=scales.device)
    block = (row >> 7) * (_up(tiles, TILES) // TILES) + (tile >> 2)
    places = expert * shape[1] + block * (ROWS * TILES) + _in_block(row, tile)
    return placed(scales, places, experts * shape[1], filled=tiles % TILES == 0).view(shape)


def _moved(position: Tensor, ends: Tensor, padded: Tensor) -> Tensor:
    """``position``, of all, in groups that end at ``ends``, after each group was padded and ends at ``padded``."""
    group = group_of_rows(ends, position.shape[0])
    return position + starts(padded, group) - starts(ends, group)


def of_groups(blocks: Tensor, sizes: Sequence[int], other: int, *, columns: bool) -> list[Tensor]:
    """Return the scales [rows, tiles] of each group, of which ``ordered`` made ``blocks``.

    ``sizes``: of the groups, in rows, or in tiles if ``columns``; ``other``: the number of tiles, or of rows.
    """
    scales: list[Tensor] = []
    flat, first = blocks.reshape(-1), 0
    for size in sizes:
        rows, tiles = (other, size) if columns else (size, other)
        count = _up(rows, ROWS) * _up(tiles, TILES)
        scales.append(rows_of_blocks(flat[first : first + count], rows, tiles))
        first += count
    return scales
