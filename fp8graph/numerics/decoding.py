"""Decode quantized numbers."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fp8graph.numerics.scalings import SCALINGS


def dequantize_data(
    data: Tensor,
    scale_inv: Tensor,
    dtype: torch.dtype,
    *,
    scaling: str = "tensor",
    block: Sequence[int] = (),
    global_scale_inv: Tensor | None = None,
) -> Tensor:
    """``data * scale_inv``, rounded once to ``dtype``."""
    return SCALINGS[scaling].decode(data, scale_inv, block, global_scale_inv).to(dtype)
