"""What quantized numbers stand for."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fp8graph.numerics.formats import (
    exp2_biased,
    unpack_e2m1,
)
from fp8graph.numerics.tiles import (
    pad_to_multiple,
    tiles_of,
    untile,
)


def decode(
    data: Tensor,
    scale_inv: Tensor,
    scaling: str = "tensor",
    block: Sequence[int] = (),
    global_scale_inv: Tensor | None = None,
) -> Tensor:
    """``data * scale_inv`` in FP32: what quantized numbers stand for."""
    if scaling in ("tensor", "delayed", "row"):
        return data.to(torch.float32) * scale_inv
    values = unpack_e2m1(data) if scaling == "nvfp4" else data.to(torch.float32)
    *_, rows, columns = values.shape
    if scaling == "mxfp8":
        scale_inv = exp2_biased(scale_inv.to(torch.int32))
    tiles = tiles_of(pad_to_multiple(values, *block), block)
    tiles = tiles * scale_inv.to(torch.float32).unsqueeze(-2).unsqueeze(-1)
    values = untile(tiles)[..., :rows, :columns]
    return values if global_scale_inv is None else values * global_scale_inv


def dequantize_data(
    data: Tensor,
    scale_inv: Tensor,
    dtype: torch.dtype,
    *,
    scaling: str = "tensor",
    block: Sequence[int] = (),
    global_scale_inv: Tensor | None = None,
) -> Tensor:
    """:func:`decode`, rounded once to ``dtype``."""
    return decode(data, scale_inv, scaling, block, global_scale_inv).to(dtype)
