"""Numerics of grouped matmuls: the rows of one operand fall into groups, one per expert.

``offs`` [experts], int32, is the end of each group of rows. Groups are contiguous and may be empty; rows after the last
group belong to none. Each group is quantized as if it were a separate tensor, as Transformer Engine's GroupedLinear
does, except with delayed scaling, where all groups share one scale and one history, and in wgrad's copies of NVFP4 with
a scale per row, where a row has one for all groups.

Two forms (fprop and dgrad; wgrad), operands contiguous along k as everywhere:

    a [t, k] in groups of rows,    b [experts, n, k]                ->  [t, n]
    a [m, t] in groups of columns, b [n, t] in groups of columns    ->  [experts, m, n]

If scales or a GEMM need groups whose sizes along t are multiples of a number, the groups of the columnwise copies are
padded with zero columns: to t + experts * multiple columns at most, which is static. An empty group has one multiple of
zeros: kernels for Blackwell write no result for a group that contracts nothing, and the gradient of an expert without
tokens would be what the memory held before (pytorch#172439).
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor
from torch.fx.experimental.symbolic_shapes import statically_known_true

from fp8graph.numerics.formats import amax_of
from fp8graph.numerics.hints import materialize


def padded_rows(rows: int, groups: int, multiple: int) -> int:
    """Return the largest number of rows of ``groups`` groups that have ``rows`` rows, padded as ``padded_offsets``
    does.
    """
    if multiple == 1:
        return rows
    return (rows // multiple + groups) * multiple  # torch sees that this is a multiple, whatever the data decide


def not_empty(x: Tensor) -> Tensor:
    """``x``, with a zero row at the end if it may have no rows: a maximum over no rows does not exist."""
    return x if statically_known_true(x.shape[0] > 0) else torch.constant_pad_nd(x, [0, 0] * (x.ndim - 1) + [0, 1])


def padded_offsets(offs: Tensor, multiple: int, *, least: int = 1, each: int = 1) -> Tensor:
    """Return the end of each group after padding to ``multiple``, an empty one to ``least``, and all to ``each``
    multiples.
    """
    if multiple == 1:
        return offs
    counts = offs - starts(offs, torch.arange(offs.shape[0], device=offs.device))
    multiples = ((counts + (multiple - 1)) // multiple).clamp_min(least)
    if each > 1:
        multiples = (multiples + (each - 1)) // each * each
    return torch.cumsum(multiples * multiple, 0, dtype=offs.dtype)


def starts(ends: Tensor, group: Tensor) -> Tensor:
    """Where each ``group`` starts, of those that end at ``ends``; its number may be theirs: behind the last one."""
    return torch.where(group > 0, ends[(group - 1).clamp(0, ends.shape[0] - 1)], ends.new_zeros(()))


def group_of_rows(offs: Tensor, rows: int) -> Tensor:
    """[rows]: the group of each row; the number of groups for rows after the last one."""
    row = torch.arange(rows, dtype=offs.dtype, device=offs.device)
    return torch.searchsorted(offs, row, right=True)  # not a sum over groups: a reduction would be a kernel of its own


def pad_groups(x: Tensor, offs: Tensor, multiple: int) -> tuple[Tensor, Tensor]:
    """``(x, group of each row)``, every group padded to ``multiple`` rows; padding and rows of no group are zero."""
    rows, groups = x.shape[0], offs.shape[0]
    ends = padded_offsets(offs, multiple)
    size = padded_rows(rows, groups, multiple)
    group = group_of_rows(ends, size)
    valid_group = group.clamp_max(groups - 1)
    # row p of the result is row p - (start of its padded group) + (start of its group) of x
    source = torch.arange(size, device=x.device) - starts(ends, valid_group) + starts(offs, valid_group)
    # in memory: one kernel computes it for all operands, whose loops read one number for each row
    source = materialize(torch.where((group < groups) & (source < offs[valid_group]), source, -1))
    x = not_empty(x)
    return torch.where((source >= 0).unsqueeze(1), x[source.clamp(0, x.shape[0] - 1)], x.new_zeros(())), valid_group


def amaxes_of_groups(row_amaxes: Tensor, group: Tensor, groups: int) -> Tensor:
    """[experts]: the largest of each group's ``row_amaxes`` [t]; 0 for a group without rows."""
    row_amaxes, group = not_empty(row_amaxes), not_empty(group)  # zero changes no largest number
    mine = group.unsqueeze(0) == torch.arange(groups, device=group.device).unsqueeze(1)  # [experts, t]
    return torch.where(mine, row_amaxes.unsqueeze(0), 0.0).amax(1)


def amaxes_of_columns(rows: Tensor, group: Tensor, groups: int, multiple: int) -> Tensor:
    """[experts, c]: the amax of each column of each group of ``rows`` [padded t, c], padded to ``multiple`` rows."""
    chunks = amax_of(rows.reshape(-1, multiple, rows.shape[1]), 1)  # each in one group
    index = group[::multiple].unsqueeze(1).expand(chunks.shape)
    return chunks.new_zeros((groups, rows.shape[1])).scatter_reduce(0, index, chunks, "amax")


class Span(NamedTuple):
    """The place of one group: its rows, and its columns if groups are padded."""

    group: int
    rows: slice
    columns: slice


def spans(offs: Tensor, multiple: int = 1) -> Iterator[Span]:
    """Yield the groups that have rows. Reads ``offs``: waits for the device."""
    rows = pairwise([0, *offs.tolist()])
    columns = pairwise([0, *padded_offsets(offs, multiple).tolist()])
    for group, (exact, padded) in enumerate(zip(rows, columns, strict=True)):
        if exact[1] > exact[0]:
            yield Span(group, slice(*exact), slice(*padded))


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
