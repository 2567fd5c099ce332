"""Rowwise scaling, and scales that are given, for code that Dynamo traces.

It does not follow the requests of ``quantize_layouts``.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fp8graph.numerics.formats import amax_of, inverse, overflow_as_nan, saturating_cast, scale_from_amax
from fp8graph.numerics.hints import divide, stored
from fp8graph.recipes import FP8_MAX


def quantize_rows(x: Tensor, dtype: torch.dtype, *, power_2_scale: bool) -> tuple[Tensor, Tensor]:
    """The bits of ``Float8RowwiseScaling``, epsilon 0: ``(data, scale_inv)``, both contiguous.

    Args:
        x: [..., rows, columns], bf16, fp16 or FP32, any strides.
        dtype: of the data [..., rows, columns], E4M3 or E5M2; ``scale_inv`` is FP32 [..., rows, 1].
        power_2_scale: see :class:`fp8graph.Float8RowwiseScaling`.
    """
    amax = amax_of(x, -1, keepdim=True)
    scale = stored(scale_from_amax(amax, FP8_MAX[dtype], power_2_scale=power_2_scale))
    data = saturating_cast(overflow_as_nan(x) * scale, dtype)
    return data.contiguous(), inverse(scale)


def quantize_by(x: Tensor, scale_inv: Tensor, dtype: torch.dtype) -> Tensor:
    """``x / scale_inv`` in FP8, contiguous; larger numbers saturate, and inf becomes NaN.

    ``scale_inv``: FP32, broadcast with ``x``.
    """
    scaled = divide(overflow_as_nan(x), scale_inv.expand(x.shape))
    return saturating_cast(scaled, dtype).contiguous()


def clipped_by(x: Tensor, scale_inv: Tensor) -> Tensor:
    """[]: how many elements are too large for E4M3: beyond 464, up to which numbers are rounded to 448, its largest."""
    return (x.to(torch.float32).abs() > 464.0 * scale_inv).sum()


def dequantize_rows(data: Tensor, scale_inv: Tensor, dtype: torch.dtype) -> Tensor:
    """``data * scale_inv``, rounded once to ``dtype``."""
    return (data.to(torch.float32) * scale_inv).to(dtype)
