"""Exponents of scales: tensors with a power of two for each element, and with one element where these are equal."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Final

import torch
from torch import Tensor

LARGEST: Final = 1 << 26  # elements whose exponents are worked out one by one


def compressed(x: Tensor) -> Tensor:
    """``x`` with one element along each dim along which it is constant."""
    for d in range(x.ndim):
        if x.shape[d] > 1 and bool((x == x.narrow(d, 0, 1)).all()):
            x = x.narrow(d, 0, 1)
    return x


def expanded(x: Tensor, shape: Sequence[Any]) -> Tensor | None:
    if not all(isinstance(size, int) for size in shape) or math.prod(shape) > LARGEST:
        return None
    try:
        return x.expand(tuple(shape)).contiguous()
    except RuntimeError:
        return None


def with_dims(x: Tensor, ndim: int) -> Tensor:
    return x.reshape([1] * (ndim - x.ndim) + list(x.shape))


def spread(x: Tensor, shape: Sequence[int]) -> Tensor | None:
    """Exponents of a scale, for the tensor of ``shape`` that it scales: of all, rows, columns or blocks of it."""
    if x.numel() == 1:
        return x.reshape([1] * len(shape))
    if x.ndim == 1 and len(shape) >= 2:
        if x.shape[0] == shape[-2]:
            return x.reshape([*[1] * (len(shape) - 2), -1, 1])
        return x if x.shape[0] == shape[-1] else None
    if x.ndim != len(shape):
        return None
    for d, size in enumerate(shape):
        if x.shape[d] not in (1, size):
            tile = -(-size // x.shape[d])
            for usual in (16, 32, 64, 128):  # the last one may be partial
                if -(-size // usual) == x.shape[d]:
                    tile = usual
            x = x.repeat_interleave(tile, d).narrow(d, 0, size)
    return x


def spread_operand(x: Tensor, shape: Sequence[int], operand: int, block: int = 0) -> Tensor | None:
    """Exponents of ``scale_a`` or ``scale_b`` of a scaled product, for its operand [m, k] or [k, n].

    Args:
        block: of elements along k that have one scale, if the scales lie in tiles of 128x4; 0 otherwise.
    """
    if x.numel() == 1:
        return x.reshape([1] * len(shape))
    if block:
        rows, k = shape if operand == 0 else shape[::-1]
        wide = _in_rows(x, rows, -(-k // block))
        wide = None if wide is None else wide.repeat_interleave(block, 1)[:, :k]
        return wide if wide is None or operand == 0 else wide.t()
    if x.ndim == 1:
        rows = shape[0] if operand == 0 else shape[1]
        if x.shape[0] == rows:
            return x[:, None] if operand == 0 else x[None]
        return None
    return spread(x, shape)


def _in_rows(x: Tensor, rows: int, columns: int) -> Tensor | None:
    """[rows, columns] of a tensor in which tiles of 128x4 follow each other, row 32 * i + j of a tile at [j, i].

    As cuBLAS reads the scales of blocks ("Block scaling factors layout"), rows and columns padded to whole tiles.
    """
    down, along = -(-rows // 128), -(-columns // 4)
    if x.numel() != down * along * 512:
        return None
    tiles = x.reshape(down, along, 32, 4, 4).transpose(2, 3).reshape(down, along, 128, 4)
    return tiles.transpose(1, 2).reshape(down * 128, along * 4)[:rows, :columns]


def contracted(a: Tensor | None, b: Tensor | None) -> Tensor | None:
    """Return the exponents of a product of [..., m, k] and [..., k, n]; None if those along k do not cancel."""
    a = torch.zeros(1, 1) if a is None else with_dims(a, max(a.ndim, 2))
    b = torch.zeros(1, 1) if b is None else with_dims(b, max(b.ndim, 2))
    along = a[..., :1, :]  # [..., 1, k]: of the first row
    rows = a - along  # must not vary along k
    columns = b + along.transpose(-2, -1)
    if bool((rows != rows[..., :1]).any()) or bool((columns != columns[..., :1, :]).any()):
        return None
    return compressed(rows[..., :1] + columns[..., :1, :])
