"""The product of two quantized operands: on torch's kernels, or decoded first."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor

from fp8graph.compat import ops, torch_build
from fp8graph.numerics.experts import Span, padded_offsets, spans
from fp8graph.numerics.scalings import SCALINGS, Scaling
from fp8graph.numerics.tiles import pad_to_multiple


def swizzle_scales(scale_inv: Tensor) -> Tensor:
    """Scales [rows, k tiles] -> flat, in the order in which Blackwell's tensor cores read them.

    Padded with zeros to 128 rows x 4 tiles; each such block is 512 scales: rows 0, 32, 64, 96 (4 tiles each), then
    1, 33, 65, 97, ... Source: cuBLAS "1D block scaling factors layout".
    """
    padded = pad_to_multiple(scale_inv.view(torch.uint8), 128, 4)
    rows, tiles = padded.shape
    blocks = padded.reshape(rows // 128, 4, 32, tiles // 4, 4)  # [row block, 32-row group, row in it, tile block, tile]
    return blocks.permute(0, 3, 2, 1, 4).reshape(-1).view(scale_inv.dtype)


def scaled_mm(
    a: Tensor,
    b: Tensor,
    scale_inv_a: Tensor,
    scale_inv_b: Tensor,
    bias: Tensor | None,
    out_dtype: torch.dtype,
    use_fast_accum: bool,
    *,
    scaling: str = "tensor",
    block_a: Sequence[int] = (),
    block_b: Sequence[int] = (),
    global_scale_inv_a: Tensor | None = None,
    global_scale_inv_b: Tensor | None = None,
) -> Tensor:
    """``(a * scale_inv_a) @ (b * scale_inv_b).T + bias``, FP32 accumulation, rounded once to ``out_dtype``.

    What the device's tensor cores cannot multiply (anything but per-tensor scales on a CPU, where torch 2.12 and
    later also do rows) is decoded to FP32 first; ``assign`` emits this op only where that does not happen, except
    to look at a GPU's graph on a CPU.

    Args:
        a: [m, k] FP8, row-major.  b: [n, k] FP8, row-major: both contiguous along k ("TN", all that Hopper has).
        scale_inv_a, scale_inv_b: as ``quantize_layouts`` returns them.
        bias: [n] in ``out_dtype`` (bf16 or fp16), or None.
        scaling, block_a, block_b: see :class:`fp8graph.recipes.Quantizer`.
        global_scale_inv_a, global_scale_inv_b: nvfp4's FP32 scalars.
    """
    if a.device.type == "cpu" and scaling not in torch_build.CPU_SCALINGS:
        values_a = SCALINGS[scaling].decode(a, scale_inv_a, block_a, global_scale_inv_a)
        values_b = SCALINGS[scaling].decode(b, scale_inv_b, block_b, global_scale_inv_b)
        result = values_a @ values_b.t()
        return (result if bias is None else result + bias.to(torch.float32)).to(out_dtype)
    operands = [(a, scale_inv_a, block_a), (b, scale_inv_b, block_b)]
    (data_a, scales_a), (data_b, scales_b) = (_for_tensor_cores(*operand, scaling) for operand in operands)
    scales_b = scales_b.t() if scales_b.ndim == 2 else scales_b
    if scales_a.ndim != scales_b.ndim:  # [] of an own amax and [1] of a table: Inductor's templates want one shape
        scales_a, scales_b = scales_a.reshape(1), scales_b.reshape(1)
    fp4 = global_scale_inv_a is not None and global_scale_inv_b is not None
    result = ops.scaled_mm(
        data_a,  # [m, k] row-major
        data_b.t(),  # [k, n] column-major: no copy
        scales_a,
        scales_b,
        bias=None if fp4 else bias,
        out_dtype=torch.float32 if fp4 else out_dtype,
        use_fast_accum=use_fast_accum,
    )
    if fp4:  # v1 of torch's op has no place for the global scales
        result = result * (cast(Tensor, global_scale_inv_a) * cast(Tensor, global_scale_inv_b))
        result = (result if bias is None else result + bias).to(out_dtype)
    return result


def scaled_grouped_mm(
    a: Tensor,
    b: Tensor,
    scale_inv_a: Tensor,
    scale_inv_b: Tensor,
    offs: Tensor,
    out_dtype: torch.dtype,
    use_fast_accum: bool,
    native: bool,
    *,
    scaling: str = "tensor",
    block_a: Sequence[int] = (),
    block_b: Sequence[int] = (),
    global_scale_inv_a: Tensor | None = None,
    global_scale_inv_b: Tensor | None = None,
    multiple: int = 1,
) -> Tensor:
    """:func:`scaled_mm` for each group: a [t, k] and b [experts, n, k] -> [t, n], or a [m, t] and b [n, t] ->
    [experts, m, n]. FP32 accumulation, rounded once to ``out_dtype``; rows of no group are zero where emulated.

    ``scale_inv_a``, ``scale_inv_b``: as ``quantize_layouts`` returns them for ``offs`` and ``per_matrix``.
    ``multiple``: what the groups of columns are padded to. ``native``: the device multiplies, with one scale per row.
    """
    kind, ragged_k = SCALINGS[scaling], b.ndim == 2
    if native and a.device.type != "cpu":
        ends = padded_offsets(offs, multiple) if ragged_k else offs
        return ops.scaled_grouped_mm(
            a,  # [t, k] or [m, t], row-major
            b.transpose(-2, -1),  # column-major: no copy
            kind.scale_per_row(a, scale_inv_a, offs, ragged_k),
            kind.scale_per_row(b, scale_inv_b, offs, ragged_k),
            ends,
            out_dtype=out_dtype,
            use_fast_accum=use_fast_accum,
        )
    sides = ((a, scale_inv_a, block_a, global_scale_inv_a), (b, scale_inv_b, block_b, global_scale_inv_b))
    shape = (offs.shape[0], a.shape[0], b.shape[0]) if ragged_k else (a.shape[0], b.shape[1])
    out = a.new_zeros(shape, dtype=out_dtype)
    for span in spans(offs, multiple):
        values = [
            kind.decode(*_of_group(span, data, scale_inv, kind, block, ragged_k), block, scalar)
            for data, scale_inv, block, scalar in sides
        ]
        out[span.group if ragged_k else span.rows] = (values[0] @ values[1].t()).to(out_dtype)
    return out


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


def _for_tensor_cores(data: Tensor, scale_inv: Tensor, block: Sequence[int], scaling: str) -> tuple[Tensor, Tensor]:
    """Data and scales of one operand in the types and layouts that torch._scaled_mm takes on a GPU."""
    if scaling == "mxfp8":
        return data, swizzle_scales(scale_inv).view(torch.float8_e8m0fnu)
    if scaling == "nvfp4":
        rows = scale_inv.repeat_interleave(block[0], 0)[: data.shape[0]]  # 16x16 tiles: one scale per row
        return data.view(torch.float4_e2m1fn_x2), swizzle_scales(rows)
    if scaling == "block" and block[0] == 1:
        return data, scale_inv.t().contiguous().t()  # [rows, k / 128], outer-dim-major
    return data, scale_inv  # 128x128 tiles: [rows / 128, k / 128], rows 16 bytes apart by ``hardware.alignment``
