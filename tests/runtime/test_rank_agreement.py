"""Ranks with different policies are told so when they start, all of them; a rank that does not compile stops nobody."""

from __future__ import annotations

import datetime
import logging
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist

import fp8graph
import parallelism
from fp8graph.recipes.autocast import amax_group
from fp8graph.runtime.rank_groups import agree
from ranks import run_ranks

PATIENT = agree.__defaults__

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not dist.is_available(), reason="torch without torch.distributed"),
]


def compile_with(rank: int, recipes: list[str], group: Any = None) -> str:
    """The error, or "", of the rank when it compiles with its recipe."""
    model, data = parallelism.model_and_data(1)
    rules = [fp8graph.Rule("*.down", recipes[rank])]
    backend = fp8graph.Backend(fp8graph.Policy(rules=rules, default="tensorwise"), compiler="eager")
    compiled = torch.compile(model, backend=backend)
    said = ""
    for batch in data[:2]:
        try:
            with fp8graph.autocast(amax_reduction_group=group):
                compiled(batch).sum().backward()
        except fp8graph.PolicyError as error:
            said = said or str(error)
        dist.barrier()  # as the gradients of a training would
        time.sleep(1.1)  # a rank that does not wait looks once per second
    return said


def largest(history: torch.Tensor) -> torch.Tensor:
    return history.amax(0)


def compile_again(rank: int) -> list[str]:
    """The errors of ranks with one schedule, of which only the first one infers, and that compile at other steps.

    A function of the recipe has another address on each.
    """
    model, data = parallelism.model_and_data(1)
    if rank == 0:
        agree.__defaults__ = ("training", datetime.timedelta(seconds=2))
        with torch.no_grad():
            torch.compile(model, backend=fp8graph.Backend(recipe="rowwise", compiler="eager"))(data[0])
        torch._dynamo.reset()
        agree.__defaults__ = PATIENT
    recipe = fp8graph.DelayedScaling(amax_history_len=4, amax_compute_algo=largest, reduce_amax=False)
    policies = [fp8graph.Policy([fp8graph.Rule("*.down", down)], default=recipe) for down in ("rowwise", None, recipe)]
    backend = fp8graph.Backend(policies[0], compiler="eager")
    compiled = torch.compile(model, backend=backend)
    for step, policy in enumerate(policies):
        backend.set_policy(policy)
        x = data[0, :8] if step == rank + 1 else data[0]
        compiled(x).sum().backward()
    return backend.report.unused_rules


def be_late(rank: int) -> list[str]:
    """The first rank's warnings, while the second one never asks."""
    messages: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())
    logging.getLogger("fp8graph").addHandler(handler)
    if rank == 0:
        agree("a policy", amax_group(), patience=datetime.timedelta(seconds=1))
    dist.barrier()
    return messages


def run(rank: int) -> dict[str, Any]:
    own = [dist.new_group([i]) for i in range(dist.get_world_size())][rank]
    return {
        "two policies": compile_with(rank, ["rowwise", "delayed"]),
        "one policy": compile_with(rank, ["rowwise", "rowwise"]),
        "models of their own": compile_with(rank, ["rowwise", "delayed"], own),
        "one schedule": compile_again(rank),
        "late": be_late(rank),  # the last: one rank has asked more often than the other
    }


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """The message that each of two ranks got."""
    return run_ranks(run, 2, tmp_path_factory.mktemp("ranks"), seconds=240)


def test_all_ranks_see_the_difference(told: list[dict[str, Any]]) -> None:
    for of_rank in told:
        error = of_rank["two policies"]
        assert error.startswith("the ranks do not agree on how to quantize:\n--- rank 0\n+++ rank 1\n")
        changed = [line for line in error.splitlines() if line.startswith(("+rule", "-rule"))]
        assert len(changed) == 2
        assert changed[0].startswith("-rule 0 ")
        assert "'rowwise'" in changed[0]
        assert "'delayed'" in changed[1]


def test_ranks_of_one_policy_go_on(told: list[dict[str, Any]]) -> None:
    assert [of_rank["one policy"] for of_rank in told] == ["", ""]


def test_models_of_their_own_have_groups_of_their_own(told: list[dict[str, Any]]) -> None:
    assert [of_rank["models of their own"] for of_rank in told] == ["", ""]


def test_one_schedule_is_one_policy(told: list[dict[str, Any]]) -> None:
    assert [of_rank["one schedule"] for of_rank in told] == [[], []]


def test_nobody_waits_long_for_a_rank_that_does_not_compile(told: list[dict[str, Any]]) -> None:
    assert told[0]["late"] == [
        "not all of the ranks [0, 1] compiled a model within 0:00:01 of rank 0: their policies were not compared."
    ]
