"""Weights that are spread over ranks, quantized as whole ones are, before they are sent: FP8 travels, and scales.

Each rank quantizes its shard. Numbers that share a scale may lie on several ranks: all of a tensor, a row whose columns
are sharded, a tile that two shards cut. The ranks then exchange amaxes, and each puts the common one beside its own
numbers, as padding that is cut off again. So all arithmetic is that of :func:`fp8graph.numerics.quantize`, whatever the
recipe makes of an amax. Weights for which this is not possible are gathered in high precision, and quantized whole.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional

from fp8graph.compat.distributed import local, mesh_of, offset_of, sharded_over, spread_as
from fp8graph.ir import ops
from fp8graph.ir.quantize_node import call, names
from fp8graph.numerics.formats import amax_of
from fp8graph.numerics.scalings import SCALINGS, QuantizeArguments
from fp8graph.numerics.tiles import largest_of, rows_of_blocks, tiles_of

_SCALES: Final = "rowwise_scale_inv"


@dataclass(frozen=True, kw_only=True)
class Piece:
    """One of the matrices that a weight joins.

    ``name``: of its parameter. ``parameter``: a DTensor, or a tensor that each rank has. ``shard``: this rank's numbers
    of it, as they are quantized.
    """

    name: str
    parameter: Tensor
    shard: Tensor

    @property
    def shape(self) -> torch.Size:
        return self.parameter.shape

    @property
    def offset(self) -> tuple[int, ...]:
        """Where the shard begins."""
        return offset_of(self.parameter) if sharded_over(self.parameter) else (0,) * self.parameter.ndim

    def cut(self, dim: int, multiple: int) -> bool:
        """Return whether shards may begin at other places in ``dim`` than multiples of ``multiple``. The same on all
        ranks.
        """
        ranks = [group.size() for sharded, group in sharded_over(self.parameter) if sharded % len(self.shape) == dim]
        size, count = self.shape[dim], math.prod(ranks)
        if count == 1 or multiple == 1 or size % (count * multiple) == 0:
            return False
        return len(ranks) > 1 or -(-size // count) % multiple != 0

    def largest(self, x: Tensor) -> Tensor:
        """FP32 ``x``, none negative: the largest of all ranks, elementwise; NaN wins."""
        bits = torch.where(x.isnan(), torch.nan, x).view(torch.int32)  # in the order of the numbers
        for _, group in sharded_over(self.parameter):
            dist.all_reduce(bits, dist.ReduceOp.MAX, group=group)
        return bits.view(torch.float32)

    def spread(self, shard: Tensor, shape: Sequence[int]) -> Tensor:
        """Return a tensor of ``shape``, sharded as the parameter is."""
        shard = shard.contiguous()
        return shard if mesh_of(self.parameter) is None else spread_as(shard, self.parameter, shape)


@dataclass(frozen=True, kw_only=True)
class Touched:
    """The place of a rank's scales where shards cut tiles: it has those of all tiles that its shard touches.

    Neighbours have the scales of the tiles between them both, which no placement of a DTensor says.

    ``parameter``: the DTensor whose shards cut. ``offset`` [2], ``shape`` [2]: in tiles.
    """

    parameter: Tensor
    offset: tuple[int, int]
    shape: tuple[int, int]

    def whole(self, scales: Tensor) -> Tensor:
        """Return all scales, of the ``scales`` that each rank has. All ranks call it."""
        placed = _placed(scales, self.offset, self.shape)
        for _, group in sharded_over(self.parameter):
            dist.all_reduce(placed.view(torch.uint8), dist.ReduceOp.MAX, group=group)
        return placed


@dataclass(frozen=True, kw_only=True)
class QuantizedPiece:
    """One piece, quantized; where it is sharded, ``data`` and ``scale_inv`` are DTensors, else whole.

    ``touched``: given, if ``scale_inv`` has the scales of this rank alone.
    """

    data: Tensor
    scale_inv: Tensor
    global_scale_inv: Tensor | None
    touched: Touched | None = None


def whole(x: Tensor) -> Tensor:
    """Return all of a tensor, on each rank. FP8 travels as bytes, which every backend of torch.distributed can send."""
    if mesh_of(x) is None:
        return x
    shard, dtype = local(x), x.dtype
    in_bytes: Any = spread_as(shard.view(torch.uint8) if dtype.itemsize == 1 else shard, x, x.shape)
    return in_bytes.full_tensor().view(dtype)


def quantize_pieces(
    arguments: QuantizeArguments[Any], pieces: Sequence[Piece], wanted: Sequence[bool]
) -> Iterator[QuantizedPiece | None]:
    """Yield the pieces of a weight, rowwise, as they are when all of it is quantized; None for pieces not wanted.

    All ranks iterate.

    Args:
        arguments: its scales are those of earlier steps, and the same on all ranks.
    """
    arguments = dataclasses.replace(arguments, rowwise=[1, 1], columnwise=[], more=None, rowwise_order="")
    if why_gathered(arguments, pieces) is not None:
        parts = [whole(piece.spread(piece.shard, piece.shape)) for piece in pieces]
        made = _quantized(dataclasses.replace(arguments, x=parts[0], more=parts[1:] or None))
        del parts
        yield from cut_out(made, arguments, [piece.shape for piece in pieces])
        return
    kind = SCALINGS[arguments.scaling]
    amax = None
    if (kind.own_scale or kind.scale_of_layout) and not arguments.per_matrix:
        amax = largest_of([piece.largest(_amax(piece.shard)) for piece in pieces])
    for piece, want in zip(pieces, wanted, strict=True):
        yield _piece(arguments, piece, amax) if want else None


def cut_out(
    made: Mapping[str, Tensor], arguments: QuantizeArguments[Any], shapes: Iterable[Sequence[int]]
) -> Iterator[QuantizedPiece]:
    """Yield the parts of these shapes, without padding, of the weight that they form together."""
    kind, first = SCALINGS[arguments.scaling], 0
    scales = made["scale_inv"] if "scale_inv" in made else made[_SCALES]
    if arguments.rowwise_order:
        if arguments.per_matrix:
            *_, rows, columns = made["rowwise"].shape
            scales = rows_of_blocks(scales, rows, -(-columns * kind.packed // arguments.block[1]))
            scales = scales[..., :: arguments.block[0], :]
        else:
            scales = kind.in_rows(made["rowwise"], scales, arguments.rowwise_order, arguments.block)
    for shape in shapes:
        rows, columns = shape[-2:]
        scale_inv = scales
        if (grid := kind.scale_shape(rows, columns, arguments.block)) is not None:
            start = first * grid[0] // rows
            scale_inv = scales[..., start : start + grid[0], : grid[1]]
        yield QuantizedPiece(
            data=made["rowwise"][..., first : first + rows, : columns // kind.packed].contiguous(),
            scale_inv=scale_inv.contiguous(),
            global_scale_inv=made.get("rowwise_global_scale_inv"),
        )
        first += rows


def _amax(x: Tensor) -> Tensor:
    return amax_of(x) if x.numel() else x.new_zeros((), dtype=torch.float32)


def _quantized(arguments: QuantizeArguments[Any]) -> dict[str, Tensor]:
    args, kwargs = call(arguments)
    return dict(zip(names(arguments), ops.quantize(*args, **kwargs), strict=True))


def _placed(part: Tensor, start: Sequence[int], shape: Sequence[int]) -> Tensor:
    """``part`` at ``start`` in a tensor of zeros."""
    placed = part.new_zeros(shape)
    if part.numel():
        placed[start[0] : start[0] + part.shape[0], start[1] : start[1] + part.shape[1]] = part
    return placed


def why_gathered(arguments: QuantizeArguments[Any], pieces: Sequence[Piece]) -> str | None:
    """Return the reason why the weight is gathered in high precision and quantized in one piece; None if it is not.

    Args:
        pieces: of their shards only the number of dims is read.
    """
    kind = SCALINGS[arguments.scaling]
    if arguments.stochastic:
        return "it is rounded stochastically"
    if arguments.row_scaled:
        return "its rows have scales below that of the tensor"
    if arguments.dim == -1 and len(pieces) > 1:
        return "it is joined with others along its columns"
    if pieces[0].shard.ndim == 3:  # experts: whole ones, on whose scale no other has a say
        if any(dim != 0 for piece in pieces for dim, _ in sharded_over(piece.parameter)):
            return "its experts are sharded, and not only their number"
        if (kind.own_scale or kind.scale_of_layout) and not arguments.per_matrix:
            return "all experts share a scale"
        if any(piece.shape[0] % _ranks(piece) for piece in pieces):
            return f"the ranks have different numbers of its {pieces[0].shape[0]} experts"
        return None
    if pieces[0].shard.ndim != 2:
        return f"it has {pieces[0].shard.ndim} dims"
    if any(True in _cut(arguments, piece) for piece in pieces):
        if kind.packed > 1:
            return f"shards cut tiles that share a scale, or bytes of two numbers ({arguments.scaling})"
        if arguments.four_over_six:
            return "shards cut tiles, and the maximum of each is chosen by all of its numbers"
    return None


def _ranks(piece: Piece) -> int:
    return math.prod(group.size() for _, group in sharded_over(piece.parameter))


def _cut(arguments: QuantizeArguments[Any], piece: Piece) -> tuple[bool, bool]:
    """Return whether shards cut what shares a scale, other than the whole: along rows, along columns."""
    kind, (rows, columns) = SCALINGS[arguments.scaling], piece.shape[-2:]
    if kind.scale_shape(rows, columns, arguments.block) is None:
        return False, False
    height, width = arguments.block if kind.tiled else (1, columns)
    return piece.cut(0, height), piece.cut(1, width)


def _piece(arguments: QuantizeArguments[Any], piece: Piece, amax: Tensor | None) -> QuantizedPiece:
    """Return one piece, which is quantized shard by shard.

    Args:
        amax: FP32 [], of all of the weight, if it matters.
    """
    x, kind = piece.shard, SCALINGS[arguments.scaling]
    rows, columns = x.shape[-2:]
    height, width = arguments.block if kind.tiled else (1, 1)
    cut = _cut(arguments, piece) if x.ndim == 2 else (False, False)
    top = left = bottom = right = 0
    if any(cut) and kind.tiled:  # to whole tiles
        top, left = piece.offset[-2] % height, piece.offset[-1] % width
        bottom, right = -(top + rows) % height, -(left + columns) % width
    elif any(cut):  # a row is one tile, however long: it takes one number more
        right = 1
    if not x.numel():  # quantized all the same, as zeros that are cut off
        bottom, right = bottom + height * (not rows), right + width * (not columns)
    grid = kind.scale_shape(piece.shape[-2], piece.shape[-1], arguments.block)
    start = (piece.offset[-2] // height, piece.offset[-1] // width if kind.tiled else 0) if any(cut) else (0, 0)
    x = functional.pad(x, (left, right, top, bottom))
    if any(cut):
        assert grid is not None
        tile = (height, width) if kind.tiled else (1, x.shape[-1])
        own = amax_of(tiles_of(x, tile), (-3, -1)) if piece.shard.numel() else x.new_zeros((0, 0), dtype=torch.float32)
        everywhere = piece.largest(_placed(own, start, grid))
        if piece.shard.numel():
            own = everywhere[start[0] : start[0] + own.shape[0], start[1] : start[1] + own.shape[1]]
            filled = own.repeat_interleave(tile[0], 0).repeat_interleave(tile[1], 1).to(x.dtype)
            filled[top : top + rows, left : left + columns] = piece.shard
            x = filled
    if amax is not None:
        x = functional.pad(x, (0, 0, 0, -x.shape[0] % height))
        x = torch.cat([x, amax.to(x.dtype).expand(height, x.shape[1])])
    made = _quantized(dataclasses.replace(arguments, x=x))
    global_scale_inv = made.get("rowwise_global_scale_inv")
    if arguments.per_matrix and global_scale_inv is not None:
        global_scale_inv = whole(piece.spread(global_scale_inv, piece.shape[:1]))  # a number of each expert
    data = made["rowwise"][..., top : top + rows, left // kind.packed : (left + columns) // kind.packed]
    shape = (*piece.shape[:-1], piece.shape[-1] // kind.packed)
    touched = None
    if grid is None:
        scale_inv = made["scale_inv"]
        if (
            arguments.per_matrix
            and scale_inv.numel() == len(piece.shard)
            and piece.shard.ndim == 3
            and not kind.has_state
        ):
            scale_inv = piece.spread(scale_inv, piece.shape[:1])
    elif any(cut):
        size = [-(-(top + rows) // height), -(-(left + columns) // width) if kind.tiled else 1]
        scale_inv = made[_SCALES][: size[0] * bool(rows), : size[1] * bool(columns)].contiguous()
        touched = Touched(parameter=piece.parameter, offset=start, shape=(grid[0], grid[1]))
    else:
        own = made[_SCALES][..., : -(-rows // height), : (-(-columns // width) if kind.tiled else 1)]
        scale_inv = piece.spread(own, (*piece.shape[:-2], *grid))
    return QuantizedPiece(
        data=piece.spread(data, shape),
        scale_inv=scale_inv,
        global_scale_inv=global_scale_inv,
        touched=touched,
    )
