"""A small model trained under each kind of parallelism: what the ranks run."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel

import fp8graph
from fp8graph.compat.distributed import local

STEPS = 5
LEARNING_RATE = 0.5
HIDDEN, INNER, ROWS = 32, 64, 16  # rows: of each rank's batch


class Block(nn.Module):
    def __init__(self, hidden: int, inner: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(hidden)
        self.up = nn.Linear(hidden, inner)
        self.down = nn.Linear(inner, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(nn.functional.silu(self.up(self.norm(x))))


class Net(nn.Module):
    """Two blocks and a head that stays in high precision."""

    def __init__(self, hidden: int = HIDDEN, inner: int = INNER) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block(hidden, inner) for _ in range(2))
        self.lm_head = nn.Linear(hidden, 16, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.lm_head(x)


def model_and_data(ranks: int) -> tuple[Net, Tensor]:
    """The same everywhere: the model, and [steps, ranks * rows, hidden]."""
    torch._dynamo.reset()
    generator = torch.Generator().manual_seed(1)
    torch.manual_seed(0)
    return Net(), torch.randn(STEPS, ranks * ROWS, HIDDEN, generator=generator)


def backend_for(recipe: Any, *, compiler: Any = "eager", **kwargs: Any) -> fp8graph.Backend:
    settings: dict[str, Any] = {"cache_weights": "update", **kwargs}
    return fp8graph.Backend(recipe=recipe, compiler=compiler, **settings)


def train(compiled: Any, model: nn.Module, batches: Tensor, *, shares: int = 1, moves: bool = False) -> dict[str, Any]:
    """Losses and last gradients of SGD steps on ``batches``, one of ``shares`` of a batch.

    ``moves``: the model is moved between steps, which swaps its DTensors.
    """
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
    losses: list[float] = []
    gradients: dict[str, Tensor] = {}
    for batch in batches:
        if moves:
            model.to("cpu")
        optimizer.zero_grad()
        loss = compiled(batch).square().mean() / shares
        loss.backward()
        for parameter in model.parameters():
            if shares > 1 and not isinstance(parameter, DTensor):
                dist.all_reduce(parameter.grad)  # the head, which saw this rank's rows
        gradients = {name.removeprefix("module."): whole(p.grad) for name, p in model.named_parameters()}
        optimizer.step()
        losses.append(loss.item())
    return {"losses": losses, "gradients": gradients}


def whole(tensor: Any) -> Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


def parallelize(how: str, model: Net, backend: Any) -> tuple[Any, nn.Module]:
    """``(what to call, the module with the parameters)``."""
    ranks = dist.get_world_size()
    if how == "ddp":
        wrapped = DistributedDataParallel(model)
        return torch.compile(wrapped, backend=backend), wrapped
    if how == "ddp of compiled":
        model.compile(backend=backend)
        wrapped = DistributedDataParallel(model)
        return wrapped, wrapped
    if how == "fsdp":
        return _fully_shard(model, backend, init_device_mesh("cpu", (ranks,)))
    if how in ("tp", "tp and sp"):
        _tensor_parallel(model, init_device_mesh("cpu", (ranks,)), sequence=how == "tp and sp")
        return torch.compile(model, backend=backend), model
    mesh = init_device_mesh("cpu", (2, ranks // 2), mesh_dim_names=("dp", "tp"))
    _tensor_parallel(model, mesh["tp"], sequence=False)
    return _fully_shard(model, backend, mesh["dp"])


def _fully_shard(model: Net, backend: Any, mesh: Any) -> tuple[Any, nn.Module]:
    backend.bind(model)  # blocks are compiled one by one: their full names
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    for layer in model.layers:
        layer.compile(backend=backend)
    return model, model


def _tensor_parallel(model: Net, mesh: Any, *, sequence: bool) -> None:
    for layer in model.layers:
        plan: dict[str, Any] = {"up": ColwiseParallel(), "down": RowwiseParallel()}
        if sequence:  # between the blocks each rank has its rows
            plan["norm"] = SequenceParallel(sequence_dim=0)
            plan["up"] = ColwiseParallel(input_layouts=Shard(0))
            plan["down"] = RowwiseParallel(output_layouts=Shard(0))
        parallelize_module(layer, mesh, plan)


def data_of(how: str, rank: int, ranks: int, data: Tensor) -> Tensor:
    """This rank's share of the global batch."""
    if how == "tp":
        return data
    shares = 2 if how == "fsdp and tp" else ranks
    share = rank // (ranks // shares)
    rows = data.shape[1] // shares
    return data[:, share * rows : (share + 1) * rows].contiguous()


def run(rank: int, how: str, recipes: list[Any], compiler: str = "eager") -> dict[str, Any]:
    ranks = dist.get_world_size()
    found: dict[str, Any] = {}
    for recipe in recipes:
        model, data = model_and_data(ranks)
        counters.clear()
        backend = backend_for(recipe, compiler=compiler)
        compiled, owner = parallelize(how, model, backend)
        # DDP and FSDP average gradients; those of a row's loss under sequence parallel add up
        result = train(compiled, owner, data_of(how, rank, ranks, data), shares=ranks if how == "tp and sp" else 1)
        report = backend.report
        result["fp8"] = sorted({g.name for g in report.gemms if g.recipe})
        result["gemms"] = len([g for g in report.gemms if g.recipe])
        result["left"] = sorted({g.name for g in report.gemms if not g.recipe})
        result["quantized"] = backend.weights.quantized
        result["skipped"] = report.skipped_frames
        result["state"] = backend.state_dict()
        result["collectives"] = [(c.kind, c.direction, c.dtype, c.shape) for c in report.collectives]
        result["by_inductor"] = sum(n for name, n in counters["inductor"].items() if name.startswith("fxgraph_cache_"))
        found[str(recipe)] = result
    return found


def moved(rank: int, how: str, recipe: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """Trained as ``run`` does, and with moves between the steps; ``freed``: whether a dead model's shards are gone."""
    both: list[dict[str, Any]] = []
    for moves in (False, True):
        model, data = model_and_data(dist.get_world_size())
        backend = backend_for(recipe)
        compiled, owner = parallelize(how, model, backend)
        found = train(compiled, owner, data_of(how, rank, 2, data), moves=moves)
        found |= {"state": dict(backend.state_dict()), "weights": dict(fp8graph.quantized_state(owner))}
        shards = [weakref.ref(local(parameter)) for parameter in model.parameters()]
        del model, compiled, owner
        torch._dynamo.reset()
        gc.collect()
        both.append({**found, "freed": [reference() is None for reference in shards]})
    return both[0], both[1]


SKIPS = ((), (0,), (1,), (0, 1), (), (1,))  # by step: the layers that the second rank skips


class SkippingNet(Net):
    """Layers may be left out, as stochastic depth does."""

    skipped: tuple[int, ...] = ()

    def __init__(self) -> None:
        super().__init__()
        for layer in self.layers:
            layer.norm = nn.Identity()  # small inputs stay small

    def forward(self, x: Tensor) -> Tensor:
        for number, layer in enumerate(self.layers):
            if number not in self.skipped:
                x = layer(x)
        return self.lm_head(x)


def run_skipping(rank: int, recipe: Any, first: int) -> list[dict[str, Tensor]]:
    """Scaling state after each step, of which the second rank skips layers. Its numbers are smaller, weights stay."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = SkippingNet()
    generator = torch.Generator().manual_seed(1)
    backend = backend_for(recipe)
    compiled = torch.compile(model, backend=backend)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    states: list[dict[str, Tensor]] = []
    for skipped in SKIPS[first:] + SKIPS[:first]:
        model.skipped = skipped if rank else ()
        x = torch.randn(ROWS, HIDDEN, generator=generator) * 1e-3**rank
        compiled(x).square().mean().backward()
        optimizer.step()
        states.append(dict(backend.state_dict()))
    return states


def run_in_pairs(rank: int, recipe: Any) -> dict[str, Tensor]:
    """Scaling state after DDP steps in which two ranks each reduce their amaxes."""
    ranks = dist.get_world_size()
    pairs = [dist.new_group([first, first + 1]) for first in range(0, ranks, 2)]
    model, data = model_and_data(ranks)
    backend = backend_for(recipe)
    compiled, owner = parallelize("ddp", model, backend)
    with fp8graph.autocast(amax_reduction_group=pairs[rank // 2]):
        train(compiled, owner, data_of("ddp", rank, ranks, data))
    return dict(backend.state_dict())


def compiled_block(model: nn.Sequential) -> Any:
    """``model`` of one block, which is compiled alone, as one of many is."""
    torch._dynamo.reset()  # its limit of recompilations counts those of every model
    return fp8graph.compile(model, compiler="eager", regions=[type(model[0]).__name__])  # fully_shard makes a subclass


def sharded_block(block: nn.Module, **settings: Any) -> Any:
    """A model of this block alone, sharded by FSDP2, as are both."""
    fully_shard(block, **settings)
    return fully_shard(nn.Sequential(block), **settings)
