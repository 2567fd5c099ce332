"""What a chain of views makes of a stored tensor: which of its elements is where.

Every dim of a tensor is a list of factors ``(size, stride)``: its index is split into digits, the last one fastest,
and each digit moves ``stride`` elements in the stored tensor. An expanded dim has stride 0. Views split and regroup
factors, transposes permute dims; a chain that cannot be written so is not understood (None).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch

from fp8graph.ir.nodes import aten

Factor = tuple[int, int]  # size, stride
Dims = list[list[Factor]]
CASTS: Final = (torch.ops.prims.convert_element_type.default, aten._to_copy.default)
_VIEWS: Final = (
    *(aten.view.default, aten._unsafe_view.default, aten.reshape.default),
    *(aten.unsqueeze.default, aten.squeeze.dim, aten.squeeze.dims),
)
_SAME: Final = (aten.alias.default, aten.detach.default, aten.clone.default)


def stored(shape: Sequence[int]) -> Dims:
    """A contiguous tensor as it is stored."""
    dims: Dims = []
    stride = 1
    for size in reversed(shape):
        dims.append([(size, stride)])
        stride *= size
    return dims[::-1]


def sizes(dims: Dims) -> list[int]:
    return [_size(factors) for factors in dims]


def viewed(dims: Dims, shape: Sequence[int]) -> Dims | None:
    """``dims`` as a view of ``shape``; None if a digit would have to be split unevenly."""
    digits_of_all = _merged([factor for factors in dims for factor in factors])
    left = [factor for factor in digits_of_all if factor[0] != 1]
    result: Dims = []
    for size in shape:
        taken: list[Factor] = []
        wanted = size
        while wanted > 1:
            if not left:
                return None
            digits, stride = left.pop(0)
            if wanted % digits == 0:
                taken.append((digits, stride))
                wanted //= digits
            elif digits % wanted == 0:  # its slow part belongs here
                taken.append((wanted, stride * (digits // wanted)))
                left.insert(0, (digits // wanted, stride))
                wanted = 1
            else:
                return None
        result.append(taken or [(1, 0)])
    return result if not left else None


def permuted(dims: Dims, order: Sequence[int]) -> Dims:
    return [dims[position] for position in order]


def expanded(dims: Dims, shape: Sequence[int]) -> Dims:
    """``dims`` broadcast to ``shape``, with new dims before the old ones."""
    padded: Dims = [[(1, 0)]] * (len(shape) - len(dims)) + dims
    pairs = zip(padded, shape, strict=True)
    return [[(size, 0)] if _size(own) == 1 and size != 1 else own for own, size in pairs]


def moved(target: Any, dims: Dims, shape: Sequence[int], args: tuple[Any, ...]) -> Dims | None:
    """``dims`` after one operation with a result of ``shape`` and more ``args``; None if it is not understood."""
    rank = len(dims)
    if target in (*CASTS, *_SAME):
        return dims
    if target in _VIEWS:
        return viewed(dims, shape)
    if target is aten.expand.default:
        return expanded(dims, shape)
    if target is aten.t.default:
        return dims[::-1]
    if target is aten.permute.default:
        return permuted(dims, [d % rank for d in args[0]])
    if target is aten.transpose.int:
        order = list(range(rank))
        a, b = args[0] % rank, args[1] % rank
        order[a], order[b] = b, a
        return permuted(dims, order)
    return None


@dataclass(frozen=True)
class Tile:
    """The elements that share a scale: (rows, columns), and the number of tiles along both."""

    block: tuple[int, int]
    grid: tuple[int, int]


def tile_of(scale: Dims) -> Tile | None:
    """The tiles of a weight [N, K] whose element (i, j) has the scale at ``scale`` in a contiguous tensor of scales.

    None if they are no grid of equal tiles, stored row by row.
    """
    found = [along for factors in scale if (along := _constant_below(factors)) is not None]
    if len(found) != 2 or len(scale) != 2:
        return None
    (rows, down), (columns, across) = found
    grid = (_size(scale[0]) // rows, _size(scale[1]) // columns)
    wanted = (grid[1], 1)
    for tiles, own, stride in zip(grid, (down, across), wanted, strict=True):
        if tiles > 1 and own != stride:
            return None
    return Tile((rows, columns), grid)


def is_row_major(data: Dims) -> bool:
    """Whether a tensor is the stored one, element by element."""
    merged = [_merged(factors) for factors in data]
    stride = 1
    for factors in reversed(merged):
        if len(factors) != 1 or (factors[0][0] > 1 and factors[0][1] != stride):
            return False
        stride *= factors[0][0]
    return True


def _constant_below(factors: Sequence[Factor]) -> tuple[int, int] | None:
    """(elements that share a scale, stride from one tile to the next), along one dim; None for anything else."""
    merged = _merged(factors)
    block = 1
    if merged and merged[-1][1] == 0:
        block = merged.pop()[0]
    if len(merged) > 1 or (merged and merged[0][1] == 0):
        return None
    return block, merged[0][1] if merged else 0


def _merged(factors: Sequence[Factor]) -> list[Factor]:
    """Neighbouring digits that count on as one."""
    result: list[Factor] = []
    for size, stride in factors:
        if size == 1:
            continue
        if result and (result[-1][1] == size * stride):
            result[-1] = (result[-1][0] * size, stride)
        else:
            result.append((size, stride))
    return result or [(1, 0)]


def _size(factors: Sequence[Factor]) -> int:
    total = 1
    for size, _ in factors:
        total *= size
    return total
