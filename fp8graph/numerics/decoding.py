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


def stored_weight(
    data: Tensor,
    scale_inv: Tensor,
    dtype: torch.dtype,
    *,
    scaling: str = "tensor",
    block: Sequence[int] = (),
    global_scale_inv: Tensor | None = None,
    activations: str = "dynamic",
    input_scale_inv: Tensor | None = None,
) -> Tensor:
    """A weight that arrives quantized, in high precision: what a GEMM multiplies that cannot take its bytes.

    Args:
        data, scale_inv, scaling, block, global_scale_inv: a rowwise copy [N, K], see :class:`QuantizeArguments`.
        dtype: of the activations.
        activations: how its checkpoint quantizes what is multiplied by it: "dynamic", "static" or "none".
        input_scale_inv: for "static": [] or [1], FP32; it multiplies.
    """
    del activations, input_scale_inv  # ``assign`` and ``quantize`` read them
    return dequantize_data(data, scale_inv, dtype, scaling=scaling, block=block, global_scale_inv=global_scale_inv)
