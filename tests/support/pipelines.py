"""Blocks trained as a pipeline (1F1B): what the ranks run, and the same blocks in one process."""

from __future__ import annotations

import logging
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleInterleaved1F1B
from torch.nn.parallel import DistributedDataParallel

import fp8graph
from parallelism import Block

HIDDEN, INNER, ROWS, PARTS, STEPS, RATE = 32, 64, 16, 4, 3, 0.25  # parts: micro-batches of a step, each of 16 rows


class Blocks(nn.Module):
    """Some of the blocks of a model, under their names in the whole model."""

    def __init__(self, first: int, last: int) -> None:
        super().__init__()
        self.layers = nn.ModuleDict({str(place): Block(HIDDEN, INNER) for place in range(first, last)})

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers.values():
            x = layer(x)
        return x


def whole(blocks: int) -> tuple[Blocks, Tensor, Tensor]:
    """The model, and inputs and targets of all steps, [steps, parts * rows, hidden]."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = Blocks(0, blocks)
    data = torch.randn(2, STEPS, PARTS * ROWS, HIDDEN, generator=torch.Generator().manual_seed(1))
    return model, data[0], data[1]


def loss_of(y: Tensor, target: Tensor) -> Tensor:
    return (y - target).square().mean()


def alone(recipe: str, blocks: int) -> tuple[list[float], dict[str, Tensor]]:
    """In one process: the loss of each step, and the scaling state."""
    model, inputs, targets = whole(blocks)
    backend = fp8graph.Backend(recipe=recipe, compiler="eager")
    optimizer = torch.optim.SGD(model.parameters(), RATE)
    compiled = torch.compile(model, backend=backend)
    losses: list[float] = []
    for x, target in zip(inputs, targets, strict=True):
        parts = []
        for part, wanted in zip(x.chunk(PARTS), target.chunk(PARTS), strict=True):
            loss = loss_of(compiled(part), wanted)
            loss.backward()
            parts.append(loss.item())
        for parameter in model.parameters():
            assert parameter.grad is not None
            parameter.grad /= PARTS  # as the schedule does
        optimizer.step()
        optimizer.zero_grad()
        losses.append(sum(parts) / PARTS)
    return losses, dict(backend.state_dict())


def staged(rank: int, recipe: str, interleaved: bool = False, replicas: int = 1, shards: str = "") -> dict[str, Any]:
    """A stage per rank (two, if interleaved), compiled by name of nothing else than its own blocks.

    Args:
        replicas: ranks per stage, which train on the same data.
        shards: "ddp" or "fsdp" joins the replicas; "" leaves each alone.
    """
    ranks = dist.get_world_size() // replicas
    mesh = init_device_mesh("cpu", (ranks, replicas), mesh_dim_names=("pipeline", "data"))
    said = _Warnings()
    logging.getLogger("fp8graph").addHandler(said)
    group, place = mesh["pipeline"].get_group(), mesh["pipeline"].get_local_rank()
    per_rank = 2 if interleaved else 1
    model, inputs, targets = whole(2 * ranks)
    backend = fp8graph.Backend(recipe=recipe, compiler="eager")
    stages, parts = [], []
    for stage in range(place, per_rank * ranks, ranks):
        size = 2 // per_rank
        part: nn.Module = Blocks(0, 0)
        part.layers = nn.ModuleDict({str(i): model.layers[str(i)] for i in range(stage * size, stage * size + size)})
        backend.bind(part)
        part.compile(backend=backend)
        if shards == "ddp":
            part = DistributedDataParallel(part, process_group=mesh["data"].get_group())
        elif shards == "fsdp":
            fully_shard(part, mesh=mesh["data"])
        parts.append(part)
        stages.append(PipelineStage(part, stage, per_rank * ranks, torch.device("cpu"), group=group))
    if interleaved:
        schedule: Any = ScheduleInterleaved1F1B(stages, PARTS, loss_fn=loss_of)
    else:
        schedule = Schedule1F1B(stages[0], PARTS, loss_fn=loss_of)
    parameters = [x for part in parts for x in part.parameters()]
    optimizer = torch.optim.SGD(parameters, RATE)
    losses: list[float] = []
    for x, target in zip(inputs, targets, strict=True):
        found: list[Tensor] = []
        taken = {"target": target, "losses": found} if place == ranks - 1 else {}
        schedule.step(*([x] if place == 0 else []), **taken)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(sum(loss.item() for loss in found) / PARTS)
    refused, loaded = _saved(backend, place, recipe)
    return {
        "losses": losses,
        "state": dict(backend.state_dict()),
        "refused": refused,
        "loaded": loaded,
        "reductions": [each.ranks for each in backend.report.collectives if each.direction == "step"],
        "stage": place,
        "warnings": said.texts,
    }


class _Warnings(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


def _saved(backend: fp8graph.Backend, stage: int, recipe: str) -> tuple[str, dict[str, Tensor]]:
    """DCP's error when all stages save under one name, and the values that it loads of those saved under several."""
    folder: list[Any] = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(folder)
    refused = ""
    try:
        dcp.save({"fp8graph": backend}, checkpoint_id=Path(folder[0]) / "one")
    except CheckpointException as error:
        refused = str(error)
    if backend.state_dict().not_shared:
        return refused, {}
    dcp.save({f"fp8graph-stage{stage}": backend}, checkpoint_id=Path(folder[0]) / "several")
    other = fp8graph.Backend(recipe=recipe)
    dcp.load({f"fp8graph-stage{stage}": other}, checkpoint_id=Path(folder[0]) / "several")
    return refused, dict(other.state_dict())
