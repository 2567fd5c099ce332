"""Ranks with different policies are told so when they start, all of them; a rank that does not compile stops nobody."""

from __future__ import annotations

import datetime
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import fp8graph
import parallelism
from fp8graph.agreement import agree
from fp8graph.autocast import amax_group
from ranks import run_ranks

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not dist.is_available(), reason="torch without torch.distributed"),
]


def compile_with(rank: int, recipes: list[str], own_groups: bool) -> str:
    """What the rank is told when it compiles with its recipe."""
    groups = [dist.new_group([i]) for i in range(dist.get_world_size())]
    model, data = parallelism.model_and_data(1)
    rules = [fp8graph.Rule("*.down", recipes[rank])]
    backend = fp8graph.Backend(fp8graph.Policy(rules=rules, default="tensorwise"), compiler="eager")
    compiled = torch.compile(model, backend=backend)
    try:
        for batch in data[:2]:
            with fp8graph.autocast(amax_reduction_group=groups[rank] if own_groups else None):
                compiled(batch).sum().backward()
    except fp8graph.PolicyError as error:
        return str(error)
    return ""


def test_all_ranks_see_the_difference(tmp_path: Path) -> None:
    for told in run_ranks(compile_with, 2, tmp_path, ["rowwise", "delayed"], False, seconds=120):
        assert told.startswith("the ranks do not agree on how to quantize:\n--- rank 0\n+++ rank 1\n")
        changed = [line for line in told.splitlines() if line.startswith(("+rule", "-rule"))]
        assert len(changed) == 2
        assert changed[0].startswith("-rule 0 ")
        assert "'rowwise'" in changed[0]
        assert "'delayed'" in changed[1]


def test_four_ranks_of_one_policy_go_on(tmp_path: Path) -> None:
    assert run_ranks(compile_with, 4, tmp_path, ["rowwise"] * 4, False, seconds=120) == [""] * 4


def test_models_of_their_own_have_groups_of_their_own(tmp_path: Path) -> None:
    assert run_ranks(compile_with, 2, tmp_path, ["rowwise", "delayed"], True, seconds=120) == ["", ""]


def largest(history: torch.Tensor) -> torch.Tensor:
    return history.amax(0)


def compile_again(rank: int) -> list[str]:
    """What ranks are told that have one schedule, of which only the first one infers, and that compile at other steps.

    A function of the recipe has another address on each.
    """
    agree.__defaults__ = ("training", datetime.timedelta(seconds=2))
    model, data = parallelism.model_and_data(1)
    if rank == 0:
        with torch.no_grad():
            torch.compile(model, backend=fp8graph.Backend(recipe="rowwise", compiler="eager"))(data[0])
        torch._dynamo.reset()
    recipe = fp8graph.DelayedScaling(amax_history_len=4, amax_compute_algo=largest, reduce_amax=False)
    policies = [fp8graph.Policy([fp8graph.Rule("*.down", down)], default=recipe) for down in ("rowwise", None, recipe)]
    backend = fp8graph.Backend(policies[0], compiler="eager")
    compiled = torch.compile(model, backend=backend)
    for step, policy in enumerate(policies):
        backend.set_policy(policy)
        x = data[0, :8] if step == rank + 1 else data[0]
        compiled(x).sum().backward()
    return backend.report.unused_rules


def test_one_schedule_is_one_policy(tmp_path: Path) -> None:
    assert run_ranks(compile_again, 2, tmp_path, seconds=120) == [[], []]


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


def test_nobody_waits_long_for_a_rank_that_does_not_compile(tmp_path: Path) -> None:
    results: list[Any] = run_ranks(be_late, 2, tmp_path, seconds=60)
    assert results[0] == [
        "not all of the ranks [0, 1] compiled a model within 0:00:01 of rank 0: their policies were not compared."
    ]
