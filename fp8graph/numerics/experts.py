"""Numerics of grouped matmuls: the rows of one operand fall into groups, one per expert.

``offs`` [experts], int32: where each group of rows ends; groups are contiguous, may be empty, and rows after the last
one belong to none. Each group is quantized as if it were a tensor of its own, as Transformer Engine's GroupedLinear
does, except under delayed scaling, where one scale and one history stand for all groups.

Two forms (fprop and dgrad; wgrad), operands contiguous along k as everywhere:

    a [t, k] in groups of rows,    b [experts, n, k]                ->  [t, n]
    a [m, t] in groups of columns, b [n, t] in groups of columns    ->  [experts, m, n]

Where scales or a GEMM want groups that are multiples of something along t, the groups of the columnwise copies are
padded with zero columns: to t + experts * (multiple - 1) columns at most, which is static.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from fp8graph.numerics.formats import amax_of, inverse, nvfp4_global_scale, saturating_cast
from fp8graph.numerics.hints import stored
from fp8graph.numerics.tiles import (
    pad_to_multiple,
    quantize_rows,
    quantize_tiles,
    scales_from_amaxes,
    with_overflow,
    with_padding,
)
from fp8graph.recipes import FLT_MAX


def padded_rows(rows: int, groups: int, multiple: int) -> int:
    """How many rows ``groups`` groups of ``rows`` rows can be at most when each is padded to ``multiple``."""
    most = rows + groups * (multiple - 1)
    return most + -most % multiple


def padded_offsets(offs: Tensor, multiple: int) -> Tensor:
    """Where each group ends after padding to ``multiple``."""
    if multiple == 1:
        return offs
    counts = offs - torch.cat([offs.new_zeros(1), offs[:-1]])
    return torch.cumsum((counts + (multiple - 1)) // multiple * multiple, 0, dtype=offs.dtype)


def group_of_rows(offs: Tensor, rows: int) -> Tensor:
    """[rows]: the group of each row; the number of groups for rows after the last one."""
    return (torch.arange(rows, device=offs.device).unsqueeze(1) >= offs.unsqueeze(0)).sum(1)  # [rows, experts]


def pad_groups(x: Tensor, offs: Tensor, multiple: int) -> tuple[Tensor, Tensor]:
    """``(x, group of each row)``, every group padded to ``multiple`` rows; padding and rows of no group are zero."""
    rows, groups = x.shape[0], offs.shape[0]
    ends = padded_offsets(offs, multiple)
    size = padded_rows(rows, groups, multiple)
    group = group_of_rows(ends, size)
    known = group.clamp_max(groups - 1)
    # row p of the result is row p - (start of its padded group) + (start of its group) of x
    shift = torch.cat([ends.new_zeros(1), ends[:-1] - offs[:-1]])
    source = torch.arange(size, device=x.device) - shift[known]
    valid = (group < groups) & (source < offs[known])
    return torch.where(valid.unsqueeze(1), x[source.clamp(0, rows - 1)], x.new_zeros(())), known


def quantize_groups(
    x: Tensor,
    dtype: torch.dtype,
    power_2_scale: bool,
    amax_epsilon: float,
    rowwise: Sequence[int],
    columnwise: Sequence[int],
    *,
    scaling: str,
    block: Sequence[int],
    carry_overflow: bool,
    scales: Tensor | None,
    row: int,
    offs: Tensor | None,
) -> list[Tensor]:
    """:func:`quantization.quantize_layouts` of one operand of a grouped matmul; outputs as there, but:

    * ``x`` [experts, n, k] and no ``offs``: scales of tensors, ``scale_inv`` [experts].
    * ``x`` [t, c] and ``offs``: ``scale_inv`` [experts] for scales of tensors; columnwise scales [experts, c] for
      "row". Columnwise data are [c, padded t], groups padded to ``columnwise[1]``.
    """
    settings = (power_2_scale, amax_epsilon, carry_overflow, None, x.dtype)
    if offs is None:
        scale, scale_inv = scales_from_amaxes(amax_of(x, (-2, -1)), dtype, "tensor", *settings)
        scaled = x.to(torch.float32) * scale.unsqueeze(-1).unsqueeze(-1)
        layouts = [(rowwise, scaled), (columnwise, scaled.transpose(-2, -1))]
        made = [with_padding(_cast(values, dtype), multiples) for multiples, values in layouts if multiples]
        return [*made, scale_inv]
    groups = offs.shape[0]
    group = group_of_rows(offs, x.shape[0])
    data: list[Tensor] = []
    scale_invs: list[Tensor] = []
    last: list[Tensor] = []
    scale = global_scale = None
    if scaling in ("tensor", "nvfp4", "delayed"):
        row_amaxes = amax_of(x, -1)
        row_amaxes = torch.where(group < groups, row_amaxes, 0.0)
        if scaling == "tensor":
            amaxes = _amaxes_of_groups(row_amaxes, group, groups)
            scale, scale_inv = scales_from_amaxes(amaxes, dtype, "tensor", *settings)
            last = [scale_inv]
        elif scaling == "nvfp4":
            amax = row_amaxes.amax()
            global_scale = nvfp4_global_scale(amax)
            last = [with_overflow(inverse(global_scale), amax) if carry_overflow else inverse(global_scale)]
        else:
            if scales is None:
                scales = torch.ones((1, 2), dtype=torch.float32, device=x.device)
            scale = scales[row, 0].expand(groups)
            last = [scales[row, 1:2].clone(), row_amaxes]
    for multiples, transposed in ((rowwise, False), (columnwise, True)):
        if not multiples:
            continue
        rows, which = pad_groups(x, offs, multiples[1]) if transposed else (x, group.clamp_max(groups - 1))
        if scale is None and not (transposed and scaling == "row"):
            source = rows.t() if transposed else rows
            if scaling == "row":
                layout, layout_scale_inv = quantize_rows([source], -1, multiples, dtype, *settings[:3])
            else:
                source = pad_to_multiple(source, multiples[0], multiples[1])
                tiles = (dtype, scaling, block, *settings[:3], global_scale)
                layout, layout_scale_inv = quantize_tiles([source], -1, *tiles)
            data.append(layout)
            scale_invs.append(layout_scale_inv)
            continue
        if scale is None:  # one for each column of each group
            amaxes = _amaxes_of_columns(rows, which, groups, multiples[1])
            amaxes = torch.cat([amaxes, amaxes.new_zeros((groups, -x.shape[1] % multiples[0]))], 1)
            column_scales, layout_scale_inv = scales_from_amaxes(amaxes, dtype, "row", *settings)
            scale_invs.append(layout_scale_inv)
            row_scales = column_scales[which][:, : x.shape[1]]
        else:
            row_scales = scale[which].unsqueeze(1)
        exact = rows.to(torch.float32)
        scaled = exact * row_scales
        if carry_overflow and scaling == "delayed":
            scaled = torch.where(exact.abs() > FLT_MAX, torch.nan, scaled)
        padding = (multiples[0], 1) if transposed else multiples
        data.append(with_padding(_cast(scaled.t() if transposed else scaled, dtype), padding))
    return [*data, *scale_invs, *last]


def _amaxes_of_groups(row_amaxes: Tensor, group: Tensor, groups: int) -> Tensor:
    """[experts]: the largest of each group's ``row_amaxes`` [t]; 0 where it has no rows."""
    mine = group.unsqueeze(0) == torch.arange(groups, device=group.device).unsqueeze(1)  # [experts, t]
    return torch.where(mine, row_amaxes.unsqueeze(0), 0.0).amax(1)


def _amaxes_of_columns(rows: Tensor, group: Tensor, groups: int, multiple: int) -> Tensor:
    """[experts, c]: the amax of each column of each group of ``rows`` [padded t, c], padded to ``multiple`` rows."""
    chunks = amax_of(rows.reshape(-1, multiple, rows.shape[1]), 1)  # each in one group
    index = group[::multiple].unsqueeze(1).expand(chunks.shape)
    return chunks.new_zeros((groups, rows.shape[1])).scatter_reduce(0, index, chunks, "amax")


def _cast(x: Tensor, dtype: torch.dtype) -> Tensor:
    return stored(saturating_cast(x, dtype).contiguous())


class Span(NamedTuple):
    """Where one group is: its rows, and its columns where groups are padded."""

    group: int
    rows: slice
    columns: slice


def spans(offs: Tensor, multiple: int = 1) -> Iterator[Span]:
    """The groups that have rows. Reads ``offs``: waits for the device."""
    rows = pairwise([0, *offs.tolist()])
    columns = pairwise([0, *padded_offsets(offs, multiple).tolist()])
    for group, (own, padded) in enumerate(zip(rows, columns, strict=True)):
        if own[1] > own[0]:
            yield Span(group, slice(*own), slice(*padded))


def grouped_mm(a: Tensor, b: Tensor, offs: Tensor) -> Tensor:
    """``aten._grouped_mm`` for every dtype and size: a [t, k] @ b [experts, k, n], or a [m, t] @ b [t, n]."""
    if b.ndim == 3:
        out = a.new_zeros((a.shape[0], b.shape[2]))
        for span in spans(offs):
            torch.mm(a[span.rows], b[span.group], out=out[span.rows])
        return out
    out = a.new_zeros((offs.shape[0], a.shape[0], b.shape[1]))
    for span in spans(offs):
        torch.mm(a[:, span.rows], b[span.rows], out=out[span.group])
    return out
