"""The product of two quantized operands, decoded first: every GEMM on any device computes the same.

The files of the vendors (``hardware``) know how a device multiplies them without decoding.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fp8graph.numerics.experts import Span, spans
from fp8graph.numerics.scalings import SCALINGS, Scaling

Blocks = tuple[Sequence[int], Sequence[int]]  # tiles of a and of b
Scalars = tuple[Tensor | None, Tensor | None]  # global scales of a and of b: [], or [rows, 1]


def scaled_mm(
    a: Tensor,
    b: Tensor,
    scale_inv_a: Tensor,
    scale_inv_b: Tensor,
    bias: Tensor | None,
    out_dtype: torch.dtype,
    scaling: str,
    blocks: Blocks,
    scalars: Scalars,
) -> Tensor:
    """``(a * scale_inv_a) @ (b * scale_inv_b).T + bias`` in FP32, rounded once to ``out_dtype``.

    a [m, k], b [n, k] and their scales as ``quantize_layouts`` returns them.
    """
    values_a = SCALINGS[scaling].decode(a, scale_inv_a, blocks[0], scalars[0])
    values_b = SCALINGS[scaling].decode(b, scale_inv_b, blocks[1], scalars[1])
    result = values_a @ values_b.t()
    return (result if bias is None else result + bias.to(torch.float32)).to(out_dtype)


def scaled_grouped_mm(
    a: Tensor,
    b: Tensor,
    scale_inv_a: Tensor,
    scale_inv_b: Tensor,
    offs: Tensor,
    out_dtype: torch.dtype,
    scaling: str,
    blocks: Blocks,
    scalars: Scalars,
    multiple: int,
) -> Tensor:
    """:func:`scaled_mm` for each group: a [t, k] and b [experts, n, k] -> [t, n], or a [m, t] and b [n, t] ->
    [experts, m, n]. Rows of no group are zero.

    ``multiple``: groups of columns are padded to it.
    """
    kind, ragged_k = SCALINGS[scaling], b.ndim == 2
    sides = ((a, scale_inv_a, blocks[0], scalars[0]), (b, scale_inv_b, blocks[1], scalars[1]))
    shape = (offs.shape[0], a.shape[0], b.shape[0]) if ragged_k else (a.shape[0], b.shape[1])
    out = a.new_zeros(shape, dtype=out_dtype)
    for span in spans(offs, multiple):
        values = [
            kind.decode(
                *_of_group(span, data, scale_inv, kind, block, ragged_k), block, _of_rows(span, data, scalar, ragged_k)
            )
            for data, scale_inv, block, scalar in sides
        ]
        out[span.group if ragged_k else span.rows] = (values[0] @ values[1].t()).to(out_dtype)
    return out


def _of_rows(span: Span, data: Tensor, scalar: Tensor | None, ragged_k: bool) -> Tensor | None:
    """The global scales of one group: its rows' where each row of [t, k] has one."""
    return scalar[span.rows] if scalar is not None and scalar.ndim and data.ndim == 2 and not ragged_k else scalar


def _of_group(
    span: Span, data: Tensor, scale_inv: Tensor, kind: Scaling, block: Sequence[int], ragged_k: bool
) -> tuple[Tensor, Tensor]:
    """Data and scales of one group of an operand of ``scaled_grouped_mm``."""
    if data.ndim == 3:  # [experts, n, k]
        return data[span.group], kind.scale_of_group(scale_inv, span, span.group)
    if not ragged_k:  # [t, k]
        return data[span.rows], kind.scale_of_group(scale_inv, span, span.rows)
    columns = slice(span.columns.start // kind.packed, span.columns.stop // kind.packed)  # of [m, padded t]
    return data[:, columns], kind.scale_of_columns(scale_inv, span, block)
