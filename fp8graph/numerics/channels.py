"""Scales of channels that make all of them about equally large, as powers of two.

Source: "Scaling FP8 training to trillion-token LLMs", arXiv 2409.12517 (Smooth-SwiGLU): the product of SwiGLU is scaled
channel by channel before it is quantized, and the weight that multiplies it by the inverse.
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from fp8graph.numerics.formats import amax_of

_MOST: Final = 14  # powers of two
_BIAS: Final = 127  # of FP32's exponents


def smoothing(x: Tensor) -> list[Tensor]:
    """``[scale, scale_inv]``, each [columns] in x's dtype: powers of two, exact.

    ``x`` [rows, columns] times ``scale`` has an amax from 1 to below 2 in each column, unless that takes a factor
    beyond 2^14 or 2^-14.
    """
    bits = amax_of(x, -2).view(torch.int32)
    exponent = torch.bitwise_and(torch.bitwise_right_shift(bits, 23), 255) - _BIAS  # floor(log2(amax))
    exponent = exponent.clamp_min(-_MOST).clamp_max(_MOST)
    found = [torch.bitwise_left_shift(_BIAS + sign * exponent, 23).view(torch.float32) for sign in (-1, 1)]
    return [scale.to(x.dtype) for scale in found]
