"""A quantized weight as all formats have it: numbers, scales, and who shares a scale."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from fp8graph.numerics.decoding import dequantize_data
from fp8graph.numerics.formats import exp2_biased
from fp8graph.recipes import FP8_MAX


@dataclass(frozen=True, kw_only=True)
class QuantizedWeight:
    """The bytes and scales of one weight [..., n, k], as they are in a file.

    ``data``: FP8 [..., n, k], or two E2M1 codes per byte [..., n, k / 2], the first in the low half (uint8 or int8).
    ``scale_inv``: multiplies; one per tile, [..., ceil(n / rows), ceil(k / columns)]; FP32, BF16, FP16, E4M3, or E8M0
    (float8_e8m0fnu or its bytes in uint8). ``block``: (rows, columns) of a tile.

    What the whole tensor shares, and what quantizes the layer's input, is stored by one library as a factor and by
    another as a divisor. One of both is given: the one that is in the file.
    """

    data: Tensor
    scale_inv: Tensor
    block: tuple[int, int]
    global_scale_inv: Tensor | None = None  # FP32 []: multiplies
    global_scale: Tensor | None = None  # FP32 []: divides
    input_scale_inv: Tensor | None = None  # [] (or one per expert): x = q * input_scale_inv
    input_scale: Tensor | None = None  # []: x = q / input_scale

    @property
    def packed(self) -> bool:
        return is_packed(self.data.dtype)

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the weight."""
        *leading, columns = self.data.shape
        return (*leading, columns * (1 + self.packed))

    def scales(self) -> Tensor:
        """FP32: what each tile is multiplied by. A factor or divisor of the whole tensor is applied to the scales.

        In this order, as in compressed-tensors (``_dequantize``), ModelOpt (``NVFP4QTensor.dequantize``) and the GEMMs
        of engines; the other order would round other numbers.
        """
        scales = decoded_scales(self.scale_inv)
        if self.global_scale_inv is not None:
            scales = scales * self.global_scale_inv.to(torch.float32)
        if self.global_scale is not None:
            scales = scales / self.global_scale.to(torch.float32)
        return scales


def dequantize(weight: QuantizedWeight) -> Tensor:
    """FP32 [..., n, k]: each number times the scale of its tile, rounded once to FP32."""
    data, scaling = weight.data, "block"
    if weight.packed:
        data, scaling = data.view(torch.uint8), "nvfp4"
    return dequantize_data(data, weight.scales(), torch.float32, scaling=scaling, block=weight.block)


def is_packed(dtype: torch.dtype | None) -> bool:
    """Whether a weight of this dtype holds two E2M1 codes per byte."""
    return dtype in (torch.uint8, torch.int8)


def decoded_scales(scales: Tensor) -> Tensor:
    """Stored scales in FP32. E8M0: 2 ** (byte - 127), and byte 255 is NaN."""
    if scales.dtype == torch.float8_e8m0fnu:
        scales = scales.view(torch.uint8)
    return exp2_biased(scales.to(torch.int32)) if scales.dtype == torch.uint8 else scales.to(torch.float32)


@dataclass(frozen=True, kw_only=True)
class Counts:
    """How the numbers of a weight are distributed. ``saturated``: at the largest value of their type."""

    numbers: int
    saturated: int
    zero: int
    nan: int


def counts_of(data: Tensor) -> Counts:
    """Count the numbers of FP8 or packed E2M1 data without decoding them, from how often each byte is there."""
    per_byte = torch.zeros(256, dtype=torch.int64)
    for part in data.contiguous().view(torch.uint8).flatten().split(1 << 24):
        per_byte += torch.bincount(part, minlength=256)
    every_byte = torch.arange(256, dtype=torch.uint8)
    if is_packed(data.dtype):
        halves = torch.stack([every_byte & 7, (every_byte >> 4) & 7])  # without their signs
        saturated, zero = (int((per_byte * (halves == code).sum(0)).sum()) for code in (7, 0))
        return Counts(numbers=2 * data.numel(), saturated=saturated, zero=zero, nan=0)
    numbers = every_byte.view(data.dtype).to(torch.float32).abs()
    saturated = int(per_byte[numbers >= FP8_MAX[data.dtype]].sum())  # E5M2's inf too
    zero, nan = int(per_byte[numbers == 0].sum()), int(per_byte[numbers.isnan()].sum())
    return Counts(numbers=data.numel(), saturated=saturated, zero=zero, nan=nan)


def scale_ratio(scales: Tensor) -> float:
    """The largest scale over the smallest that is not zero; inf if one is inf, NaN if one is NaN."""
    if scales.isnan().any():
        return math.nan
    positive = scales.abs()
    positive = positive[positive > 0]
    return float(positive.max() / positive.min()) if positive.numel() else 1.0
