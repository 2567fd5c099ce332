"""Ranks that are out of step end with an error at their next reduction, all of them, and say where they are."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import fp8graph
from ranks import run_each, run_ranks

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not dist.is_available(), reason="torch without torch.distributed"),
]
STEPS = 3


class Training:
    """A model of which each rank trains its own copy, like the ranks of DDP."""

    def __init__(self, rank: int) -> None:
        torch._dynamo.reset()
        torch.manual_seed(0)
        self.rank = rank
        self.net = nn.Linear(16, 16, bias=False)
        self.backend = fp8graph.Backend(recipe=fp8graph.DelayedScaling(amax_history_len=4), compiler="eager")
        self.backend.bind(self.net)
        self.model = torch.compile(self.net, backend=self.backend)
        self.optimizer = torch.optim.SGD(self.net.parameters(), lr=0.01)

    def micro_batch(self, model: Callable[[Tensor], Tensor] | None = None) -> None:
        (model or self.model)(torch.ones(16, 16) * (1 + self.rank)).square().mean().backward()

    def step(self, micro_batches: int = 1, model: Callable[[Tensor], Tensor] | None = None) -> None:
        for _ in range(micro_batches):
            self.micro_batch(model)
        self.optimizer.step()
        self.optimizer.zero_grad()


def extra_before_the_step(run: Training) -> Iterator[None]:
    for step in range(STEPS):
        run.step(2 if run.rank == 1 and step == 1 else 1)
        yield


def extra_after_the_step(run: Training) -> Iterator[None]:
    for step in range(STEPS):
        run.step()
        if run.rank == 1 and step == 0:
            run.micro_batch()
        yield


def late(run: Training) -> Iterator[None]:
    """Rank 1 takes its first step in eager."""
    for step in range(STEPS):
        run.step(model=run.net if run.rank == 1 and step == 0 else None)
        yield


def accumulates(run: Training) -> Iterator[None]:
    for _ in range(STEPS):
        run.step(3)
        yield


def evaluates(run: Training) -> Iterator[None]:
    """Rank 0 alone evaluates, and trains something else."""
    probe = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(probe.parameters(), lr=0.1)
    for _ in range(STEPS):
        run.step()
        if run.rank == 0:
            with torch.no_grad():
                run.model(torch.ones(16, 16))
            probe(torch.ones(2, 2)).sum().backward()
            optimizer.step()
        yield


def resumes(run: Training) -> Iterator[None]:
    """From a state that was saved after other steps of this process."""
    for _ in range(STEPS):
        run.step()
    saved = run.backend.state_dict()
    other = Training(run.rank)
    other.backend.load_state_dict(saved)
    for _ in range(STEPS):
        other.step()
        yield


OUT_OF_STEP: dict[str, Any] = {
    "an extra micro-batch": extra_before_the_step,
    "an extra forward and backward": extra_after_the_step,
    "late": late,
}
IN_STEP: dict[str, Any] = {"accumulates": accumulates, "evaluates": evaluates, "resumes": resumes}


def train(rank: int, how: str) -> dict[str, Any]:
    """The number of steps that were made, and the warnings."""
    done, said, run = 0, "", Training(rank)
    try:
        for _ in {**OUT_OF_STEP, **IN_STEP}[how](run):
            done += 1
    except fp8graph.StateError as error:
        said = str(error)
    dist.barrier()
    return {"steps": done, "said": said}


@pytest.fixture(scope="module")
def of_ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    calls = {how: (train, (how,)) for how in (*OUT_OF_STEP, *IN_STEP)}
    return run_ranks(run_each, 2, tmp_path_factory.mktemp("ranks"), calls)


@pytest.mark.parametrize(
    ("how", "steps", "first", "last"),
    [
        ("an extra micro-batch", 1, "in the middle of step 2", "at the end of step 2"),
        ("an extra forward and backward", 1, "in the middle of step 2", "at the end of step 2"),
        ("late", 0, "at the end of step 1", "at the end of step 2"),
    ],
)
def test_all_ranks_raise_at_the_first_reduction(how: str, steps: int, first: str, last: str, of_ranks: Any) -> None:
    for rank, found in enumerate(result[how] for result in of_ranks):
        own = first if (rank == 1) == (how != "late") else last
        assert f"rank {rank} reduced the amaxes of delayed scaling {own}" in found["said"]
        assert f"the first of 2 ranks {first} and the last {last}. " in found["said"]
        assert found["steps"] <= steps + (how == "late" and rank == 1)


@pytest.mark.parametrize("how", IN_STEP)
def test_ranks_in_step_go_on(how: str, of_ranks: Any) -> None:
    assert [(result[how]["steps"], result[how]["said"]) for result in of_ranks] == [(STEPS, "")] * 2
