"""Ranks that do not call equally often end with a StateError in time, or are refused: none dies in a collective."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import fp8graph
from ranks import run_each, run_ranks

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not dist.is_available(), reason="torch without torch.distributed"),
]
STEPS = 4
PATIENCE = 30  # seconds that a collective waits
OWN = 0.9 * PATIENCE  # and the reduction of amaxes
REDUCED = fp8graph.DelayedScaling(amax_history_len=4)
APART = fp8graph.DelayedScaling(amax_history_len=4, reduce_amax=False)


class Net(nn.Module):
    def __init__(self, layers: int = 2) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x).relu()
        return x


class Training:
    """A model whose gradients are averaged by DDP, as the trainer's own collectives."""

    def __init__(self, rank: int, recipe: Any = REDUCED, layers: int = 2) -> None:
        torch.manual_seed(0)
        self.rank = rank
        self.net = Net(layers)
        self.backend = fp8graph.Backend(recipe=recipe, compiler="eager")
        self.backend.bind(self.net)
        self.net.compile(backend=self.backend)
        self.ddp = DistributedDataParallel(self.net)
        self.optimizer = torch.optim.SGD(self.net.parameters(), lr=0.01)

    def loss(self, model: Callable[[Tensor], Tensor]) -> Tensor:
        return model(torch.ones(16, 32) * (1 + self.rank)).square().mean()

    def step(self) -> None:
        self.optimizer.zero_grad()
        self.loss(self.ddp).backward()
        self.optimizer.step()

    def weights(self) -> float:
        return sum(float(x.detach().double().sum()) for x in self.net.parameters())


def extra(run: Training, step: int) -> None:
    """One more forward and backward of the bare module."""
    run.step()
    if run.rank == 0 and step == 1:
        run.loss(run.net).backward()


def first_extra(run: Training, step: int) -> None:
    """The same before the first reduction, which makes the process group."""
    if run.rank == 0 and step == 0:
        run.loss(run.net).backward()
    run.step()


def policy_one_step_late(run: Training, step: int) -> None:
    if step == 1 + run.rank:
        run.backend.set_policy(None, recipe=REDUCED)
    run.step()


def loads_alone(run: Training, step: int) -> None:
    if run.rank == 1 and step == 2:
        run.backend.load_state_dict(run.backend.state_dict())
    run.step()


def loads_all(run: Training, step: int) -> None:
    if step == 2:
        run.backend.load_state_dict(run.backend.state_dict())
    run.step()


def train(rank: int, how: Callable[[Training, int], None], recipe: Any = REDUCED) -> dict[str, Any]:
    """The number of steps that were made, what ended them and after how many seconds in the last one."""
    torch._dynamo.reset()
    run, done, said, start = Training(rank, recipe), 0, "", time.monotonic()
    try:
        for step in range(STEPS):
            start = time.monotonic()
            how(run, step)
            done += 1
    except RuntimeError as error:
        said = f"{type(error).__name__}: {error}"
    return {"steps": done, "said": said, "seconds": time.monotonic() - start, "weights": run.weights()}


def join(rank: int, recipe: Any, throws: bool = False) -> dict[str, Any]:
    """3 batches on rank 0, and 5 on rank 1."""
    torch._dynamo.reset()
    run, done, said = Training(rank, recipe), 0, ""
    try:
        with run.ddp.join(throw_on_early_termination=throws):
            for _ in range(3 + 2 * rank):
                run.step()
                done += 1
    except RuntimeError as error:
        said = f"{type(error).__name__}: {error}"
    return {"steps": done, "said": said, "weights": run.weights()}


def two_backends(rank: int) -> dict[str, Any]:
    """Rank 1 skips the first of two models, of other sizes, in one step."""
    torch._dynamo.reset()
    first, second, done, said = Training(rank), Training(rank, layers=3), 0, ""
    for step in range(STEPS):
        try:
            for run in (second,) if rank == 1 and step == 2 else (first, second):
                run.loss(run.net).backward()
                run.optimizer.step()
        except fp8graph.StateError as error:
            said = str(error)
            break
        done += 1
    return {"steps": done, "said": said}


ENDED: dict[str, Any] = {  # by the timeout; on one rank, as the other waits in DDP's collective
    "extra": (extra, REDUCED),
    "first extra": (first_extra, REDUCED),
    "policy": (policy_one_step_late, "tensorwise"),
}


@pytest.mark.timeout(240)
@pytest.mark.parametrize("how", ENDED)
def test_ranks_that_miss_each_other_end_in_time(how: str, tmp_path: Path) -> None:
    """The rank that waits for amaxes says so, before the other's collective gives up; the other one follows."""
    results = run_ranks(train, 2, tmp_path, *ENDED[how], seconds=180, collective_seconds=PATIENCE)
    assert all(found["steps"] < STEPS for found in results)
    (waited,) = [found for found in results if found["said"].startswith("StateError")]
    assert "waited in the middle of step" in waited["said"] or "waited at the end of step" in waited["said"]
    assert "All ranks have to call forward, backward and optimizer.step() equally often" in waited["said"]
    assert waited["seconds"] < OWN + 40  # a machine under load compiles for a while


@pytest.fixture(scope="module")
def quick(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    calls: dict[str, Any] = {
        "join, delayed": (join, (REDUCED,)),
        "join, delayed, throws": (join, (REDUCED, True)),
        "join, delayed apart": (join, (APART,)),
        "join, tensorwise": (join, ("tensorwise",)),
        "loads all": (train, (loads_all,)),
        "loads alone": (train, (loads_alone,)),
        "two backends": (two_backends, ()),  # the last: the ranks end at different places
    }
    return run_ranks(run_each, 2, tmp_path_factory.mktemp("ranks"), calls, seconds=240)


def test_join_refuses_amaxes_that_are_reduced(quick: list[dict[str, Any]]) -> None:
    for found in (rank["join, delayed"] for rank in quick):
        assert found["steps"] == 0
        assert found["said"].startswith("StateError: DistributedDataParallel.join(), torch's Join: ")
        assert "DelayedScaling(reduce_amax=False)" in found["said"]


@pytest.mark.parametrize("how", ["join, delayed apart", "join, tensorwise"])
def test_join_trains_where_nothing_is_reduced(how: str, quick: list[dict[str, Any]]) -> None:
    assert [(rank[how]["steps"], rank[how]["said"]) for rank in quick] == [(3, ""), (5, "")]
    assert quick[0][how]["weights"] == quick[1][how]["weights"]


def test_join_that_throws_ends_both_ranks_by_itself(quick: list[dict[str, Any]]) -> None:
    for found in (rank["join, delayed, throws"] for rank in quick):
        assert found["steps"] == 3
        assert found["said"].startswith("RuntimeError: ")
        assert "exhausted" in found["said"]


def test_a_state_that_one_rank_loads_is_refused_by_all(quick: list[dict[str, Any]]) -> None:
    for rank, found in enumerate(result["loads alone"] for result in quick):
        assert found["steps"] == 2
        assert f"rank {rank} has loaded {rank}, but among 2 ranks some have loaded 0 and some 1." in found["said"]


def test_a_state_that_all_ranks_load_goes_on(quick: list[dict[str, Any]]) -> None:
    assert [(rank["loads all"]["steps"], rank["loads all"]["said"]) for rank in quick] == [(STEPS, "")] * 2


def test_backends_in_another_order_are_noticed(quick: list[dict[str, Any]]) -> None:
    for found in (rank["two backends"] for rank in quick):
        assert found["steps"] == 2
        assert re.search(r"of its \d+\. backend", found["said"])
        assert "All ranks have to train the models of several backends in the same order." in found["said"]
