"""Products of quantized operands that any device can compute: decoded first, or by a GEMM in bf16.

Decoded, every GEMM on any device computes the same. The files of the vendors (``hardware``) know how a device
multiplies without decoding. bf16 holds every FP8 number, so that only the accumulation (FP32) of its GEMM rounds:

    y = ((a @ b.T) * scale_inv_a * scale_inv_b + bias) rounded once to bf16

On a CPU with such a GEMM that takes half as long as one in FP32. Its op is fp8graph's, as scales must be applied before
the result is rounded, and ``alpha``, with which aten's GEMM does that, is a number and not a tensor. The op takes FP8
and converts it, so that no loop that only converts is generated and compiled: five of 18 C++ kernels in the backward of
a two-layer Llama.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Final

import torch
from torch import Tensor

from fp8graph.numerics import group_blocks
from fp8graph.numerics.experts import Span, padded_offsets, spans
from fp8graph.numerics.scalings import SCALINGS, Scaling
from fp8graph.numerics.tiles import rows_of_blocks

Product = Callable[[Tensor, Tensor], Tensor]  # of a [m, k] and b [n, k] in FP32: a @ b.T


def _in_one_gemm(a: Tensor, b: Tensor) -> Tensor:
    return a @ b.t()


def scaled_mm(
    a: Tensor,
    b: Tensor,
    scale_inv_a: Tensor,
    scale_inv_b: Tensor,
    bias: Tensor | None,
    out_dtype: torch.dtype,
    *,
    scaling: str = "tensor",
    block_a: Sequence[int] = (),
    block_b: Sequence[int] = (),
    global_scale_inv_a: Tensor | None = None,
    global_scale_inv_b: Tensor | None = None,
    order_a: str = "",
    order_b: str = "",
    product: Product = _in_one_gemm,
) -> Tensor:
    """``(a * scale_inv_a) @ (b * scale_inv_b).T + bias`` in FP32, rounded once to ``out_dtype``.

    a [m, k], b [n, k] and the rest as ``Hardware.scaled_mm`` has them. ``product``: multiplies the decoded operands.
    """
    kind = SCALINGS[scaling]
    sides = (
        (a, scale_inv_a, order_a, block_a, global_scale_inv_a),
        (b, scale_inv_b, order_b, block_b, global_scale_inv_b),
    )
    result = product(
        *(
            kind.decode(data, kind.in_rows(data, scale_inv, order, block), block, scalar)
            for data, scale_inv, order, block, scalar in sides
        )
    )
    return (result if bias is None else result + bias.to(torch.float32)).to(out_dtype)


def scaled_grouped_mm(
    a: Tensor,
    b: Tensor,
    scale_inv_a: Tensor,
    scale_inv_b: Tensor,
    offs: Tensor,
    out_dtype: torch.dtype,
    *,
    scaling: str = "tensor",
    block_a: Sequence[int] = (),
    block_b: Sequence[int] = (),
    global_scale_inv_a: Tensor | None = None,
    global_scale_inv_b: Tensor | None = None,
    multiple: int = 1,
    order_a: str = "",
    order_b: str = "",
    product: Product = _in_one_gemm,
) -> Tensor:
    """:func:`scaled_mm` for each group: a [t, k] and b [experts, n, k] -> [t, n], or a [m, t] and b [n, t] ->
    [experts, m, n]. Rows of no group are zero.

    ``multiple``: groups of columns are padded to it. ``order_a``, ``order_b``: of the scales (``group_blocks``).
    """
    kind, ragged_k = SCALINGS[scaling], b.ndim == 2
    scale_inv_a, scale_inv_b = (
        _in_rows(data, scale_inv, kind, block, offs, multiple if ragged_k else 0) if order else scale_inv
        for data, scale_inv, block, order in (
            (a, scale_inv_a, block_a, order_a),
            (b, scale_inv_b, block_b, order_b),
        )
    )
    sides = (a, scale_inv_a, block_a, global_scale_inv_a), (b, scale_inv_b, block_b, global_scale_inv_b)
    shape = (offs.shape[0], a.shape[0], b.shape[0]) if ragged_k else (a.shape[0], b.shape[1])
    out = a.new_zeros(shape, dtype=out_dtype)
    for span in spans(offs, multiple):
        values = [
            kind.decode(
                *_of_group(span, data, scale_inv, kind, block, ragged_k), block, _of_unit(span, data, scalar, ragged_k)
            )
            for data, scale_inv, block, scalar in sides
        ]
        out[span.group if ragged_k else span.rows] = product(values[0], values[1]).to(out_dtype)
    return out


def _in_rows(data: Tensor, blocks: Tensor, kind: Scaling, block: Sequence[int], offs: Tensor, multiple: int) -> Tensor:
    """Scales that are in blocks as they are without an order; ``multiple``: of groups of columns, 0: others."""
    *_, rows, columns = data.shape
    tiles = -(-columns * kind.packed // block[1])
    if data.ndim == 3:
        return rows_of_blocks(blocks, rows, tiles)[:, :: block[0]]
    ends = (padded_offsets(offs, multiple) // block[1] if multiple else offs).tolist()
    sizes = [end - start for start, end in pairwise([0, *ends])]
    parts = group_blocks.of_groups(blocks, sizes, rows if multiple else tiles, columns=bool(multiple))
    missing = blocks.new_zeros((rows, tiles - ends[-1]) if multiple else (rows - ends[-1], tiles))  # of no group
    return torch.cat([*parts, missing], 1 if multiple else 0)


def _of_unit(span: Span, data: Tensor, scalar: Tensor | None, ragged_k: bool) -> Tensor | None:
    """Return the global scales of one group: its own, or those of its rows where each row of [t, k] has one."""
    if scalar is None or not scalar.ndim:
        return scalar
    if scalar.ndim == 1:
        return scalar[span.group]
    return scalar[span.rows] if data.ndim == 2 and not ragged_k else scalar


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


_library: Final = torch.library.Library("fp8graph_bf16", "DEF")
_library.define(
    "product(Tensor a, Tensor b, Tensor scale_inv_a, Tensor scale_inv_b, Tensor? bias) -> Tensor",
    tags=(torch.Tag.pt2_compliant_tag,),
)


@functools.cache
def _numbers(dtype: torch.dtype) -> Tensor:
    """Return the 256 numbers of an FP8 type in bf16, by their bits."""
    return torch.arange(256, dtype=torch.uint8, device="cpu").view(dtype).to(torch.bfloat16)


def _in_bf16(x: Tensor) -> Tensor:
    """``x.to(bf16)`` by a table: torch converts a million E4M3 numbers in 6.5 ms of one core, this in 1.2."""
    bits = x.contiguous().view(torch.uint8).flatten().to(torch.int32)
    return _numbers(x.dtype).to(x.device).index_select(0, bits).view(x.shape)


def _product(a: Tensor, b: Tensor, scale_inv_a: Tensor, scale_inv_b: Tensor, bias: Tensor | None) -> Tensor:
    a, b = _in_bf16(a), _in_bf16(b)
    if scale_inv_a.numel() == scale_inv_b.numel() == 1:
        alpha = (scale_inv_a * scale_inv_b).item()
        added = a.new_empty(()) if bias is None else bias
        return torch.addmm(added.expand(a.shape[0], b.shape[0]), a, b.t(), beta=int(bias is not None), alpha=alpha)
    exact = bias is None and _powers_of_two(scale_inv_a) and _powers_of_two(scale_inv_b)
    product = (a @ b.t()).to(torch.float32) if exact else a.to(torch.float32) @ b.to(torch.float32).t()
    # [m, 1] * [1, n]; first, since the sums times one of them, as large as its operand may make it, would overflow
    result = product.mul_(scale_inv_a * scale_inv_b.reshape(1, -1))
    return (result if bias is None else result.add_(bias)).to(torch.bfloat16)


def _powers_of_two(scale_inv: Tensor) -> bool:
    """Return whether multiplying by these FP32 scales rounds nothing; inf counts as one of them."""
    return not bool(torch.bitwise_and(scale_inv.contiguous().view(torch.int32), 0x007FFFFF).any())


def _fake_product(a: Tensor, b: Tensor, _scale_inv_a: Tensor, _scale_inv_b: Tensor, _bias: Tensor | None) -> Tensor:
    return a.new_empty((a.shape[0], b.shape[0]), dtype=torch.bfloat16)


_library.impl("product", _product, "CompositeExplicitAutograd")
torch.library.register_fake("fp8graph_bf16::product", _fake_product, lib=_library)
BF16_PRODUCT: Final = torch.ops.fp8graph_bf16.product.default


def bf16_product(a: Tensor, b: Tensor, scale_inv_a: Tensor, scale_inv_b: Tensor, bias: Tensor | None) -> Tensor:
    """``((a @ b.T) * scale_inv_a * scale_inv_b + bias)`` in bf16, rounded once.

    Args:
        a: [m, k] FP8.  b: [n, k] FP8.
        scale_inv_a, scale_inv_b: FP32, one number each, or [m, 1] and [n, 1].
        bias: [n] bf16, or None.
    """
    return BF16_PRODUCT(a, b, scale_inv_a, scale_inv_b, bias)
