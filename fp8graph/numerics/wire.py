"""Numbers as bytes to send: FP8 with one FP32 scale for 128 numbers, decoded in FP32."""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from fp8graph.numerics.decoding import dequantize_data
from fp8graph.numerics.quantization import quantize_layouts

BLOCK: Final = 128  # numbers that share a scale
_SCALE: Final = 4  # bytes


def bytes_of(numbers: int) -> int:
    """The bytes that ``numbers`` numbers become: blocks of 128, the last one filled with zeros."""
    return -(-numbers // BLOCK) * (BLOCK + _SCALE)


def to_bytes(x: Tensor, dtype: torch.dtype) -> Tensor:
    """``x`` [messages, numbers], bf16, fp16 or FP32, as ``dtype`` (E4M3 or E5M2): uint8 [messages, bytes].

    A block is scaled to the largest number of ``dtype``. Inf and NaN become NaN.
    """
    messages, numbers = x.shape
    blocks = torch.nn.functional.pad(x, (0, -numbers % BLOCK)).view(-1, BLOCK)
    made = quantize_layouts(blocks, dtype, False, 0.0, [1, 1], [], scaling="row")  # [blocks, 128], [blocks, 1]
    parts = [part.reshape(messages, -1).view(torch.uint8) for part in made]
    return torch.cat(parts, 1)


def from_bytes(message: Tensor, numbers: int, dtype: torch.dtype) -> Tensor:
    """The inverse of :func:`to_bytes`: FP32 [messages, numbers]."""
    blocks = -(-numbers // BLOCK)
    data, scale_inv = message.split([blocks * BLOCK, blocks * _SCALE], 1)
    values = data.contiguous().view(dtype).view(-1, BLOCK)
    scales = scale_inv.contiguous().view(torch.float32).view(-1, 1)
    decoded = dequantize_data(values, scales, torch.float32, scaling="row")
    return decoded.view(len(message), -1)[:, :numbers]
