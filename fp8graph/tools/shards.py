"""The part of each tensor of a checkpoint that one rank has: its numbers, and their place in the whole."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fp8graph.backend.multiplied import Multiplied
from fp8graph.checkpoints import LayerFormat
from fp8graph.compat.distributed import local, mesh_of, offset_of, spread_as
from fp8graph.tools.forms import MatrixRows, as_stored, cut, scale_rows_of, selected


@dataclass(frozen=True, kw_only=True)
class TensorShard:
    """The numbers that this rank has of one tensor of an FP8 checkpoint; see :func:`quantized_shards`.

    Attributes:
        name: the tensor's, as :func:`quantized_state` gives it.
        tensor: this rank's numbers, a plain tensor.
        offsets: where they begin in the whole tensor, in each of its dims. With ``tensor.shape`` they are the two
            fields of ``torch.distributed.checkpoint.metadata.ChunkStorageMetadata``.
        shape: of the whole tensor.
        dtensor: the same numbers as a DTensor, on the mesh and with the placements of the model's parameter. None, if
            no placement says where the numbers of all ranks are, or each rank has all.
    """

    name: str
    tensor: Tensor
    offsets: torch.Size
    shape: torch.Size
    dtensor: Tensor | None = None

    @property
    def index(self) -> tuple[slice, ...]:
        """The place of the numbers: ``whole[shard.index] = shard.tensor``."""
        return tuple(slice(at, at + size) for at, size in zip(self.offsets, self.tensor.shape, strict=True))


class _ShardRegion(NamedTuple):
    numbers: Tensor
    offset: tuple[int, ...]


def whole_shard(name: str, tensor: Tensor) -> TensorShard:
    """Return a tensor that each rank has."""
    return TensorShard(name=name, tensor=tensor, offsets=torch.Size((0,) * tensor.ndim), shape=tensor.shape)


def shards_of_weight(
    weight: Multiplied, part: MatrixRows, stored: LayerFormat, amax: Tensor | None
) -> Iterator[TensorShard]:
    """Yield the tensors of one layer, of which this rank has the numbers that ``weight`` has.

    Args:
        amax: see :func:`fp8graph.tools.forms.as_stored`.
    """
    names, spread = stored.names(part.layer), weight.touched is not None or mesh_of(weight.scale_inv) is not None
    of_all = dataclasses.replace(weight, data=_on_meta(weight.data, weight.data.shape))
    if spread:
        shape = weight.scale_inv.shape if weight.touched is None else weight.touched.shape
        of_all = dataclasses.replace(of_all, scale_inv=_on_meta(weight.scale_inv, shape))
    ((_, of_part),) = cut(of_all, [part])  # its names and shapes
    for name, tensor in stored.write(part.layer, as_stored(of_part, stored, amax)):
        if name == names["weight"]:
            yield from shards_of_rows(name, weight.data, part)
        elif name == names["scale"] and spread:
            yield from _scales(name, tensor.shape, weight, part, stored)
        else:
            yield whole_shard(name, tensor)


def shards_of_rows(name: str, tensor: Tensor, part: MatrixRows | None) -> Iterator[TensorShard]:
    """Yield the numbers of a DTensor that this rank has, or of the part that a checkpoint stores as ``name``."""
    region: _ShardRegion | None = _ShardRegion(local(tensor), offset_of(tensor))
    shape, same = tensor.shape, part is None or _is_all(part, tensor)
    if part is not None:
        region, shape = _selected(region, part.rows, part.expert), torch.Size((len(part.rows), tensor.shape[-1]))
    yield from _placed(name, region, shape, tensor if same else None)


def why_scattered(tensor: Tensor, parts: Sequence[MatrixRows]) -> str | None:
    """Return the reason why this rank's rows of a DTensor do not lie together in ``parts``; None if they do."""
    first, rows = offset_of(tensor)[-2], local(tensor).shape[-2]
    for part in parts:
        places = _places(part.rows, first, rows)
        if len(places) and int(places[-1] - places[0]) >= len(places):
            return f"{part.layer} has its rows in another order, in which those of a rank do not lie together"
    return None


def _scales(
    name: str, shape: torch.Size, weight: Multiplied, part: MatrixRows, stored: LayerFormat
) -> Iterator[TensorShard]:
    """Yield the scales, in a tensor of ``shape``."""
    given = weight.scale_inv
    at = offset_of(given) if weight.touched is None else weight.touched.offset
    region: _ShardRegion | None = _ShardRegion(local(given), at)
    same = _is_all(part, weight.data) and weight.touched is None
    if given.ndim == 1:  # one scale for each expert
        place = (part.expert or 0) - at[0]
        scale = local(given)[place : place + 1] if 0 <= place < len(local(given)) else None
        region, same = None if scale is None else _ShardRegion(scale.reshape(shape), (0,) * len(shape)), False
    else:
        region = _selected(region, scale_rows_of(weight, part), part.expert)
        if region is not None:
            rows, repeats = len(part.rows), weight.quantizer.block[0] // stored.tile(weight.data.shape[-2:])[0]
            if repeats > 1:  # as in as_stored
                first = region.offset[0] * repeats
                region = _ShardRegion(
                    region.numbers.repeat_interleave(repeats, 0)[: rows - first], (first, region.offset[1])
                )
            region = _in_dims(region, len(shape))
    like = given if same and len(shape) == 2 else None
    yield from _placed(name, region, shape, like)


def _placed(name: str, region: _ShardRegion | None, shape: torch.Size, like: Tensor | None) -> Iterator[TensorShard]:
    """Yield the shard of a tensor of ``shape``; nothing, if this rank has no numbers of it and other ranks have no
    DTensor.

    Args:
        like: a DTensor that is spread over ranks as this one is.
    """
    if region is None or (like is None and not region.numbers.numel() and shape.numel()):
        return
    numbers = region.numbers.detach().contiguous()
    dtensor = None if like is None else spread_as(numbers, like, shape)
    yield TensorShard(name=name, tensor=numbers, offsets=torch.Size(region.offset), shape=shape, dtensor=dtensor)


def _selected(region: _ShardRegion, rows: Tensor, expert: int | None) -> _ShardRegion | None:
    """Return the numbers of ``region`` that are in ``rows`` of a matrix, and their place among these rows."""
    numbers, offset = region
    if expert is not None:
        if not 0 <= expert - offset[0] < len(numbers):
            return None
        numbers, offset = numbers[expert - offset[0]], offset[1:]
    places = _places(rows, offset[0], len(numbers))
    first = int(places[0]) if len(places) else 0
    return _ShardRegion(selected(numbers, rows[places] - offset[0]), (first, *offset[1:]))


def _places(rows: Tensor, first: int, count: int) -> Tensor:
    """Return the places of those of ``rows`` that are among ``count`` rows from ``first`` on."""
    return ((rows >= first) & (rows < first + count)).nonzero().flatten()


def _in_dims(region: _ShardRegion, dims: int) -> _ShardRegion:
    """Scales [rows, columns] of tiles as a checkpoint has them: [rows], [rows, columns] or [rows, 1, columns, 1]."""
    shape, offset = [1] * dims, [0] * dims
    for source, target in enumerate(range(0, dims, max(1, dims // 2))):
        shape[target], offset[target] = region.numbers.shape[source], region.offset[source]
    return _ShardRegion(region.numbers.reshape(shape), tuple(offset))


def _is_all(part: MatrixRows, tensor: Tensor) -> bool:
    """Return whether ``part`` is the matrix as it is."""
    rows = tensor.shape[-2]
    return part.expert is None and len(part.rows) == rows and torch.equal(part.rows, torch.arange(rows))


def _on_meta(like: Tensor, shape: Any) -> Tensor:
    return torch.empty(shape, dtype=like.dtype, device="meta")
