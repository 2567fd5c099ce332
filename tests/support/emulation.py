"""The results of the ranks of ``parallelism.run``, in one process: each shard and each share of the batch by itself."""

from __future__ import annotations

import functools
import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

import fp8graph
import parallelism

DIMS = {"up": 0, "down": 1}  # along which tensor parallelism splits a weight

Field = tuple[str, str]  # of a state: the tensor ("layers.0.up.weight"), and "scale" or "amax_history"


class Shards(nn.ModuleList):
    """A linear as ``shards`` ranks hold it: each shard is a layer of its own, and so has scales of its own."""

    def __init__(self, linear: nn.Linear, dim: int, shards: int) -> None:
        super().__init__()
        biases = [None] * shards if linear.bias is None else linear.bias.detach().chunk(shards)
        for weight, bias in zip(linear.weight.detach().chunk(shards, dim), biases, strict=True):
            rows, columns = weight.shape
            shard = nn.Linear(columns, rows, bias=bias is not None)
            shard.weight = nn.Parameter(weight.clone(memory_format=torch.contiguous_format))
            if bias is not None:
                shard.bias = nn.Parameter(bias.clone())
            self.append(shard)


class SplitBlock(nn.Module):
    """``parallelism.Block`` as ``shards`` ranks run it."""

    def __init__(self, block: parallelism.Block, shards: int) -> None:
        super().__init__()
        self.norm = block.norm
        self.up = Shards(block.up, DIMS["up"], shards)
        self.down = Shards(block.down, DIMS["down"], shards)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        parts = [
            down(nn.functional.silu(up(y))) for up, down in zip(self.up.children(), self.down.children(), strict=True)
        ]
        return x + functools.reduce(operator.add, parts)


def train(recipe: Any, ranks: int, *, shards: int = 1, shares: int = 1, parts: int = 1) -> dict[str, Any]:
    """SGD on the batches of ``ranks`` ranks: losses [steps, shares * parts], last gradients, scaling state.

    Args:
        shards: of each weight, with scales of their own.
        shares: of each batch, quantized each by itself; gradients are averaged, amaxes are those of all shares.
        parts: of a share's rows, quantized together, with losses of their own that add up.
    """
    net, data = parallelism.model_and_data(ranks)
    model: nn.Module = net
    if shards > 1:
        blocks = [layer for layer in net.layers if isinstance(layer, parallelism.Block)]
        net.layers = nn.ModuleList(SplitBlock(block, shards) for block in blocks)
    backends = [parallelism.backend_for(recipe, fuse_linears=False) for _ in range(shares if has_state(recipe) else 1)]
    compiled = [torch.compile(model, backend=backend) for backend in backends]
    optimizer = torch.optim.SGD(model.parameters(), lr=parallelism.LEARNING_RATE)
    losses: list[list[float]] = []
    gradients: dict[str, Tensor] = {}
    state: dict[Field, Tensor] = {}
    for batch in data:
        optimizer.zero_grad()
        losses.append([])
        for share, rows in enumerate(batch.chunk(shares)):
            outputs = compiled[share % len(compiled)](rows).chunk(parts)
            each = [output.square().mean() / parts for output in outputs]
            functools.reduce(operator.add, each).backward()
            losses[-1] += [loss.item() for loss in each]
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter.grad.div_(shares)
        gradients = joined_gradients(model)
        optimizer.step()
        if has_state(recipe):
            state = reduce_amaxes(backends, recipe.amax_history_len)
    return {"losses": torch.tensor(losses), "gradients": gradients, "state": state}


def has_state(recipe: Any) -> bool:
    return isinstance(recipe, fp8graph.DelayedScaling)


def joined_gradients(model: nn.Module) -> dict[str, Tensor]:
    """By the names of the model before it was split."""
    pieces: dict[tuple[str, int], list[Tensor]] = {}
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            pieces.setdefault((without_shard(name), dim_of(name)), []).append(parameter.grad.clone())
    return {name: torch.cat(several, dim) for (name, dim), several in pieces.items()}


def dim_of(name: str) -> int:
    return next((dim for linear, dim in DIMS.items() if f".{linear}." in name), 0)


def without_shard(name: str) -> str:
    """``layers.0.up.1.weight`` -> ``layers.0.up.weight``."""
    for linear in DIMS:
        before, found, after = name.partition(f".{linear}.")
        if found and after[0].isdigit():
            return f"{before}.{linear}{after.lstrip('0123456789')}"
    return name


def by_tensor(state: Any) -> dict[Field, Tensor]:
    """A state dict by tensor and field, whatever the recipe is called."""
    return {(name.partition("|")[0], name.rpartition("|")[2]): value for name, value in state.items()}


def reduce_amaxes(backends: Sequence[fp8graph.Backend], length: int) -> dict[Field, Tensor]:
    """Give all shards of a tensor, in all backends, the largest amaxes, as the all-reduce of the ranks does."""
    states = [dict(backend.state_dict()) for backend in backends]
    reduced: dict[str, Tensor] = {}
    for state in states:
        for name, value in state.items():
            if name.endswith("|amax_history"):
                assert len(value) == length > parallelism.STEPS  # nothing has left it
                whole = without_shard(name)
                reduced[whole] = torch.maximum(reduced[whole], value) if whole in reduced else value.clone()
    for state in states:
        for name in [name for name in state if name.endswith("|amax_history")]:
            state[name] = reduced[without_shard(name)]
            top = 57344.0 if "grad_output" in name else 448.0
            state[name.removesuffix("amax_history") + "scale"] = torch.tensor([top]) / state[name].max()
    for backend, state in zip(backends, states, strict=True):
        backend.load_state_dict(state)
    return by_tensor({without_shard(name): value for name, value in states[0].items()})
