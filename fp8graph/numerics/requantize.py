"""Quantize a changed weight as it was stored: its tiles, the dtype of its scales, and powers of two if they were."""

from __future__ import annotations

import torch
from torch import Tensor

from fp8graph.numerics.formats import biased_exponent, exp2_biased
from fp8graph.numerics.hints import divide
from fp8graph.numerics.quantization import quantize_by
from fp8graph.numerics.tiles import pad_to_multiple, tiles_of
from fp8graph.recipes import FLT_MAX, FP8_MAX

_MANTISSA = 0x7FFFFF


def requantize(x: Tensor, scale_inv: Tensor, block: tuple[int, int], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """``x`` in the form of the weight that has ``scale_inv``: ``(data, scale_inv)``.

    The scale of a tile is ``amax / 448``, in the dtype of ``scale_inv``. It is rounded up to a power of two if those of
    ``scale_inv`` all are powers of two, so that no number saturates. The numbers are divided by the scale as it is
    stored. A tile of zeros, or with a number that is not finite, keeps its scale.

    Args:
        x: FP32 [n, k].
        scale_inv: one per tile, [ceil(n / rows), ceil(k / columns)]: FP32, BF16, FP16, or E8M0 bytes in uint8.
        block: (rows, columns) of a tile.
        dtype: of the data.
    """
    tiles = tiles_of(pad_to_multiple(x, *block), block)
    amax = tiles.abs().amax((-3, -1))  # [ceil(n / rows), ceil(k / columns)]
    usable = (amax > 0.0) & (amax <= FLT_MAX)
    if scale_inv.dtype == torch.uint8:
        exponent = biased_exponent(amax, FP8_MAX[dtype])
        stored = torch.where(usable, exponent.to(torch.uint8), scale_inv)
        factors = exp2_biased(stored.to(torch.int32))
    else:
        limits = torch.finfo(scale_inv.dtype)
        factors = divide(amax, torch.full_like(amax, FP8_MAX[dtype]))
        if powers_of_two(scale_inv):
            factors = exp2_biased(biased_exponent(amax, FP8_MAX[dtype]))
        factors = factors.clamp(limits.tiny, limits.max).to(scale_inv.dtype)
        stored = torch.where(usable, factors, scale_inv)
        factors = stored.to(torch.float32)
    rows, columns = x.shape
    each = factors.repeat_interleave(block[0], 0)[:rows].repeat_interleave(block[1], 1)[:, :columns]
    return quantize_by(x, each, dtype), stored


def powers_of_two(scales: Tensor) -> bool:
    """Return whether all of ``scales``, FP32, BF16 or FP16, are powers of two."""
    return not torch.bitwise_and(scales.to(torch.float32).view(torch.int32), _MANTISSA).any()
