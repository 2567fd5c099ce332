"""The stage of a pipeline, found on the call stack."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

from fp8graph.compat import distributed
from ranks import run_ranks


class Looks(nn.Module):
    """Notes at each call which stage runs it, and whether on data."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.seen: list[tuple[int | None, bool]] = []

    def forward(self, x: Tensor) -> Tensor:
        stage = distributed.running_stage()
        self.seen.append((None if stage is None else stage.stage_index, distributed.is_dry_run()))
        return self.linear(x)


def _looks(rank: int) -> list[Any]:
    model = Looks()
    stage = PipelineStage(model, rank, dist.get_world_size(), torch.device("cpu"))
    schedule: Any = Schedule1F1B(stage, 2, loss_fn=lambda y, target: (y - target).square().mean())
    schedule.step(*([torch.ones(4, 4)] if rank == 0 else []), **({"target": torch.ones(4, 4)} if rank == 1 else {}))
    return model.seen


@pytest.mark.slow
def test_the_stage_and_its_rehearsal_are_seen(tmp_path: Path) -> None:
    for rank, seen in enumerate(run_ranks(_looks, 2, tmp_path)):
        assert seen[-2:] == [(rank, False)] * 2  # two micro-batches
        assert set(seen[:-2]) <= {(rank, True)}


def test_outside_of_a_pipeline_there_is_no_stage() -> None:
    model = Looks()
    model(torch.ones(1, 4))
    assert model.seen == [(None, False)]
