"""The parts of a weight that ranks have, by the names and shapes of checkpoints: together they are the whole."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Generator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

import fp8graph
from fp8graph.backend.multiplied import Multiplied
from fp8graph.backend.sharded import Touched
from fp8graph.checkpoints import FORMATS
from fp8graph.numerics import api
from fp8graph.recipes import resolve_recipe
from fp8graph.tools.forms import MatrixRows, as_stored, cut, kind_of
from fp8graph.tools.shards import TensorShard, shards_of_rows, shards_of_weight, why_scattered
from gathers import two_ranks
from handed_over import differences
from helpers import in_one_test

pytestmark = pytest.mark.skipif(not dist.is_available(), reason="this torch has no torch.distributed")
ROWS = torch.arange(256)
PARTS: dict[str, list[MatrixRows]] = {
    "itself": [MatrixRows(layer="a", rows=ROWS, expert=None)],
    "rows": [MatrixRows(layer=name, rows=ROWS[i * 64 : i * 64 + 128], expert=None) for i, name in enumerate("ab")],
    "tiles": [MatrixRows(layer=name, rows=ROWS[i * 128 : i * 128 + 128], expert=None) for i, name in enumerate("ab")],
    "experts": [
        MatrixRows(layer=f"{e}.{half}", rows=ROWS[half * 128 : half * 128 + 128], expert=e)
        for e in range(4)
        for half in range(2)
    ],
}


@contextlib.contextmanager
def mesh_of(rank: int) -> Generator[Any]:
    """A mesh of two ranks, as one of them sees it."""
    with two_ranks(rank):
        yield init_device_mesh("cpu", (2,))


def spread(x: Tensor, mesh: Any, rank: int, dim: int = 0) -> Any:
    own = x.tensor_split(mesh.size(), dim)[rank].contiguous()
    return DTensor.from_local(own, mesh, [Shard(dim)], shape=x.shape, stride=x.stride(), run_check=False)


def assembled(shards: list[TensorShard]) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    for shard in shards:
        whole = found.setdefault(shard.name, torch.zeros(shard.shape, dtype=shard.tensor.dtype))
        whole[shard.index] = shard.tensor
    return found


def made(recipe: str, experts: bool) -> Multiplied:
    resolved: Any = resolve_recipe(recipe)
    ones = [api.quantize(torch.randn(256, 128) * (e + 1), resolved, "weight", "rowwise") for e in range(4)]
    one = ones[0]
    data, scales, whole = one.data, one.scale_inv, one.global_scale_inv
    if experts:
        data, scales = (torch.stack([getattr(x, name) for x in ones]) for name in ("data", "scale_inv"))
        scalars: list[Any] = [x.global_scale_inv for x in ones]
        whole = None if whole is None else torch.stack(scalars)
    return Multiplied(
        parameter="a.weight",
        data=data,
        scale_inv=scales,
        quantizer=one.quantizer,
        global_scale_inv=whole,
    )


@in_one_test(
    ("recipe", "form", "parts"),
    [
        ("blockwise", "fp8", "itself"),
        ("blockwise", "compressed-tensors", "tiles"),
        ("blockwise", "fp8", "experts"),
        ("rowwise", "modelopt", "rows"),
        ("rowwise", "compressed-tensors", "experts"),
        ("tensorwise", "fp8", "experts"),
        ("mxfp8", "compressed-tensors", "itself"),
        ("nvfp4", "modelopt", "rows"),
        ("nvfp4", "modelopt", "experts"),
    ],
)
def test_shards_are_the_tensors_of_the_checkpoint(recipe: str, form: str, parts: str) -> None:
    weight, amax = made(recipe, parts == "experts"), torch.tensor(3.0)
    stored = FORMATS[form].forms()[kind_of(weight)]
    expected: dict[str, Tensor] = {}
    for layer, own in cut(weight, PARTS[parts]):
        expected |= stored.write(layer, as_stored(own, stored, amax))
    found: list[TensorShard] = []
    for rank in range(2):
        with mesh_of(rank) as mesh:
            scales = weight.scale_inv
            one = dataclasses.replace(
                weight,
                data=spread(weight.data, mesh, rank),
                scale_inv=spread(scales, mesh, rank) if scales.ndim else scales,
            )
            for part in PARTS[parts]:
                found += shards_of_weight(one, part, stored, amax)
    assert differences(assembled(found), expected) == []
    assert any(shard.dtensor is not None for shard in found) == (parts == "itself")


def test_scales_of_cut_tiles_come_to_both_ranks() -> None:
    weight, rows = made("blockwise", False), 192
    weight = dataclasses.replace(weight, data=weight.data[:rows])
    stored, part = FORMATS["fp8"].forms()[kind_of(weight)], MatrixRows(layer="a", rows=ROWS[:rows], expert=None)
    expected = dict(stored.write("a", as_stored(weight, stored, None)))
    found: list[TensorShard] = []
    for rank, (first, last) in enumerate([(0, 1), (0, 2)]):  # of 96 rows each
        with mesh_of(rank) as mesh:
            data = spread(weight.data, mesh, rank)
            touched = Touched(parameter=data, offset=(first, 0), shape=(2, 1))
            one = dataclasses.replace(weight, data=data, scale_inv=weight.scale_inv[first:last], touched=touched)
            shards = [*shards_of_weight(one, part, stored, None)]
        assert [shard.dtensor is None for shard in shards] == [False, True]
        assert shards[1].index == (slice(first, last), slice(0, 1))
        found += shards
    assert differences(assembled(found), expected) == []


def test_rows_in_another_order_are_refused_where_a_rank_would_have_them_scattered() -> None:
    """As rotary embeddings are stored with their halves interleaved."""
    rows = ROWS.view(2, 2, 64)
    within, across = rows.transpose(1, 2).reshape(-1), rows.transpose(0, 1).reshape(-1)
    weight, parts = torch.randn(256, 8), [MatrixRows(layer="q", rows=order, expert=None) for order in (within, across)]
    found: list[TensorShard] = []
    for rank in range(2):
        with mesh_of(rank) as mesh:
            one = spread(weight, mesh, rank)
            assert why_scattered(one, parts[:1]) is None
            found += shards_of_rows("q.weight", one, parts[0])
            assert (why_scattered(one, parts) or "").startswith("q has its rows in another order")
    assert differences(assembled(found), {"q.weight": weight[within]}) == []


def test_a_rank_without_numbers_gets_an_empty_shard_of_a_dtensor_alone() -> None:
    with mesh_of(1) as mesh:
        (shard,) = shards_of_rows("norm.weight", spread(torch.randn(1, 8), mesh, 1), None)
        assert (shard.tensor.shape, shard.shape) == ((0, 8), (1, 8))
        first = MatrixRows(layer="gate", rows=torch.arange(2), expert=None)
        assert [*shards_of_rows("gate.weight", spread(torch.randn(4, 8), mesh, 1), first)] == []


def test_the_place_is_that_of_a_chunk_in_distributed_checkpoints() -> None:
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

    with mesh_of(1) as mesh:
        (shard,) = shards_of_rows("a", spread(torch.randn(5, 8), mesh, 1), None)
        assert isinstance(shard.dtensor, DTensor)
        (chunk,) = shard.dtensor.__create_chunk_list__()  # pyright: ignore
    assert chunk == ChunkStorageMetadata(offsets=shard.offsets, sizes=shard.tensor.shape)


def test_one_process_has_whole_tensors() -> None:
    model = torch.nn.Sequential(torch.nn.LayerNorm(128), torch.nn.Linear(128, 128)).bfloat16()
    fp8graph.compile(model, recipe="blockwise", compiler="eager")(torch.randn(2, 128, dtype=torch.bfloat16))
    shards = [*fp8graph.quantized_shards(model)]
    assert differences({shard.name: shard.tensor for shard in shards}, dict(fp8graph.quantized_state(model))) == []
    assert all(shard.shape == shard.tensor.shape and not any(shard.offsets) for shard in shards)
