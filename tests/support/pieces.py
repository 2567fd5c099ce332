"""Weights in pieces, spread over ranks in many ways, and quantized: what the ranks run, without compiling anything."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from fp8graph.backend.sharded import Piece, cut_out, quantize_pieces, whole
from fp8graph.compat.distributed import local
from fp8graph.errors import ConfigError
from fp8graph.ir import ops
from fp8graph.ir.quantize_node import call, names
from fp8graph.numerics.quantization import quantizer_args, quantizer_kwargs
from fp8graph.numerics.scalings import QuantizeArguments
from fp8graph.recipes import Recipe
from fp8graph.runtime.rank_groups import fail_together
from helpers import bits

PLACEMENTS: dict[str, Any] = {
    "rows": [Shard(0)],
    "columns": [Shard(1)],
    "on each": [Replicate()],
    "rows of rows": [Shard(0), Shard(0)],
    "rows and columns": [Shard(0), Shard(1)],
    "replicas": [Replicate(), Shard(0)],
}


def numbers(shape: Sequence[int], seed: int, special: float | None) -> Tensor:
    x = torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * (1 + seed)
    if special is not None:
        x.view(-1)[x.numel() // 2] = special
    return x.bfloat16()


def run(rank: int, cases: dict[str, tuple[Recipe, list[tuple[int, ...]], str, float | None]]) -> dict[str, list[str]]:
    """By case, what differs from quantizing the whole weight."""
    return {name: _differences(*case) for name, case in cases.items()}


def _differences(recipe: Recipe, shapes: list[tuple[int, ...]], where: str, special: float | None) -> list[str]:
    placements, ranks = PLACEMENTS[where], dist.get_world_size()
    mesh = init_device_mesh("cpu", (ranks,) if len(placements) == 1 else (2, ranks // 2))
    wholes = [numbers(shape, seed, special if seed == 0 else None) for seed, shape in enumerate(shapes)]
    quantizer = recipe.quantizer("weight")
    kwargs: dict[str, Any] = {**quantizer_kwargs(quantizer), "dim": -2, "per_matrix": wholes[0].ndim == 3}
    asked: QuantizeArguments[Any] = QuantizeArguments(wholes[0], *quantizer_args(quantizer), [1, 1], [], **kwargs)
    args, kwargs = call(asked)
    if len(wholes) > 1:
        kwargs["more"] = wholes[1:]
    made = dict(zip(names(asked), ops.quantize(*args, **kwargs), strict=True))
    pieces = [distribute_tensor(x, mesh, placements) for x in wholes]
    shards = [Piece(name=str(i), parameter=p, shard=local(p)) for i, p in enumerate(pieces)]
    found = quantize_pieces(asked, shards, [True] * len(shards))
    wrong: list[str] = []
    for number, (own, expected) in enumerate(zip(found, cut_out(made, asked, shapes), strict=True)):
        assert own is not None
        for name in ("data", "scale_inv", "global_scale_inv"):
            x, y = getattr(own, name), getattr(expected, name)
            if y is None:
                continue
            x = own.touched.whole(x) if own.touched is not None and name == "scale_inv" else whole(x)
            if (x.dtype, x.shape) != (y.dtype, y.shape) or not torch.equal(bits(x), bits(y)):
                wrong.append(f"{name} of part {number}: {tuple(x.shape)} and {tuple(y.shape)}")
    return wrong


def disagree(rank: int) -> list[str]:
    """Errors of this rank for a block that raises on the second rank, and for lines that differ there."""
    mesh, said = init_device_mesh("cpu", (dist.get_world_size(),)), list[str]()
    for error in (True, False):
        try:
            with fail_together(mesh) as lines:
                if error and rank == 1:
                    raise ConfigError("its model was not called.")
                lines += ["q: rowwise", f"k: {'rowwise' if rank == 0 else 'mxfp8'}"]
        except ConfigError as raised:
            said.append(str(raised))
    with fail_together(mesh) as lines:
        lines += ["q: rowwise"]
    return said
