"""The numbers of one quantized layer that ``fp8graph lint`` judges, read in one pass over its bytes.

The largest code of each tile, and NaN, come from all bytes, which are in the order of the numbers. Sizes come from some
of the numbers of each tile: a wrong scale changes all of them by one factor. Where tiles are small and many, some rows
of tiles are left out, and stand in with the sizes of the others and their own scales.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor
from torch.nn import functional

from fp8graph.checkpoints import LayerFormat
from fp8graph.checkpoints.layer_format import QuantizedWeight

_MOST: Final = 1 << 22  # bytes of a matrix of small tiles that sizes come from
_NAN: Final = 127  # the byte of E4M3's NaN, without its sign


@dataclass(frozen=True, kw_only=True)
class Layer:
    """The numbers of one quantized layer.

    ``rms``: of the decoded weight; ``code_rms``: of its codes. ``tops``: the largest code of each tile that has another
    number than zero. ``saturated``: the share of codes that are the largest of their type. ``kinds``: how many absolute
    codes there are, without zero. ``fractions``: how many of its ``scales``, if they are FP32, are no powers of two.
    ``least``, ``most``: of its scales, with that of the whole tensor. ``input_scale``: multiplies.
    """

    name: str
    stored: LayerFormat
    shape: tuple[int, ...]
    packed: bool
    rms: float
    code_rms: float
    tops: Tensor
    saturated: float
    kinds: int
    nan: int
    fractions: int
    scales: int
    least: float
    most: float
    input_scale: float | None

    @property
    def scale(self) -> float:
        """The scale that all of its numbers share, about."""
        return self.rms / self.code_rms if self.code_rms else 0.0

    @property
    def gain(self) -> float:
        return self.rms * math.sqrt(self.shape[-1])

    @property
    def top(self) -> float:
        """The largest number of its type."""
        return 6.0 if self.packed else 448.0


def read_layer(name: str, stored: LayerFormat, weight: QuantizedWeight) -> Layer:
    """Read a layer, one matrix at a time."""
    rows, columns = weight.block
    scales = weight.scales()
    in_matrices = scales.reshape(-1, *scales.shape[-2:])
    square, seen = _values(weight.packed).square().mean(1), torch.zeros(256, dtype=torch.int64)
    tops, squares, codes, nan = list[Tensor](), 0.0, 0.0, 0
    matrices = weight.data.view(torch.uint8).reshape(-1, *weight.data.shape[-2:])
    for matrix, of_matrix in zip(matrices, in_matrices, strict=True):
        most, bad = _tops(matrix, rows, columns, weight.packed)
        tops.append(most.flatten())
        nan += bad
        step, some = _some(matrix, rows, columns // (1 + weight.packed))
        seen += torch.bincount(some.flatten(), minlength=256)
        of_tiles = square.index_select(0, some.flatten().int()).view(some.shape).mean((1, 3)).to(torch.float64)
        weights = of_matrix.to(torch.float64).square()
        codes += float(of_tiles.mean())
        squares += float((of_tiles * weights[::step]).sum() / weights.numel())
        if step > 1:
            rest = weights.sum() - weights[::step].sum()
            squares += float(of_tiles.mean() * rest / weights.numel())
    values, every = _values(weight.packed), torch.cat(tops)
    top, scale_inv = float(values.max()), weight.scale_inv
    there = values[seen > 0].flatten()
    numbers = max(1, int(seen.sum()) * values.shape[1])
    fractions = int((scale_inv.view(torch.int32) & 0x7FFFFF).count_nonzero()) if scale_inv.dtype == torch.float32 else 0
    given, divisor = weight.input_scale_inv, weight.input_scale
    return Layer(
        name=name,
        stored=stored,
        shape=weight.shape,
        packed=weight.packed,
        rms=math.sqrt(squares / max(1, len(matrices))),
        code_rms=math.sqrt(codes / max(1, len(matrices))),
        tops=every[every > 0],
        saturated=int(((values == top).sum(1) * seen).sum()) / numbers,
        kinds=int(there[there > 0].unique().numel()),
        nan=nan,
        fractions=fractions,
        scales=scale_inv.numel(),
        least=float(scales.min()),
        most=float(scales.max()),
        input_scale=_number(given) if divisor is None else _number(divisor.to(torch.float32).reciprocal()),
    )


def _number(scale: Tensor | None) -> float | None:
    return None if scale is None else float(scale.to(torch.float32).max())


@functools.cache
def _values(packed: bool) -> Tensor:
    """FP32 [256, numbers in a byte]: the absolute numbers that each byte holds. NaN is zero here."""
    every = torch.arange(256, dtype=torch.uint8)
    if not packed:
        return every.view(torch.float8_e4m3fn).to(torch.float32).abs().nan_to_num(0.0)[:, None]
    codes = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
    return torch.stack([codes[(every & 7).int()], codes[((every >> 4) & 7).int()]], 1)


def _tiled(matrix: Tensor, rows: int, columns: int) -> Tensor:
    """[row tiles, rows, column tiles, columns], filled up with zeros."""
    n, k = matrix.shape
    matrix = functional.pad(matrix, (0, -k % columns, 0, -n % rows)) if n % rows or k % columns else matrix
    return matrix.reshape(matrix.shape[0] // rows, rows, matrix.shape[1] // columns, columns)


def _tops(matrix: Tensor, rows: int, columns: int, packed: bool) -> tuple[Tensor, int]:
    """Return the largest absolute code of each tile, and how many codes are NaN."""
    if packed:
        largest = torch.maximum(matrix & 7, (matrix >> 4) & 7)
        return _values(True)[:, 0][_tiled(largest, rows, columns // 2).amax((1, 3)).int()], 0
    codes = matrix & _NAN
    top = _tiled(codes, rows, columns).amax(3).amax(1)  # one dim after the other: several times as fast as both
    nan = int((codes == _NAN).sum()) if (top == _NAN).any() else 0
    return _values(False)[:, 0][top.clamp(max=_NAN - 1).int()], nan


def _some(matrix: Tensor, rows: int, columns: int) -> tuple[int, Tensor]:
    """Return the step from one row of tiles that is read to the next, and bytes of each of their tiles."""
    wide, high = (256 if rows == 1 else 128), (4 if rows <= 128 else 128)
    step = 1 if rows * columns >= 1024 else max(1, matrix.numel() // _MOST)
    return step, _tiled(matrix, rows, columns)[::step, :: max(1, rows // high), :, :: max(1, columns // wide)]
