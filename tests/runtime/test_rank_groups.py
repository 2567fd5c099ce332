"""The ranks over which amaxes are reduced: in a pipeline those of the stage, else all."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import pipelines
from fp8graph.runtime import rank_groups
from fp8graph.runtime.rank_groups import RankGroups
from ranks import run_each, run_ranks

RUNS: dict[int, dict[str, tuple[Any, ...]]] = {  # on so many ranks, the arguments of ``pipelines.staged``
    2: {
        "tensorwise": ("tensorwise",),
        "delayed": ("delayed",),
        "delayed, two stages per rank": ("delayed", True),
        "blockwise": ("blockwise",),
    },
    4: {
        "four stages": ("delayed",),
        "ddp": ("delayed", False, 2, "ddp"),
        "fsdp": ("delayed", False, 2, "fsdp"),
        "fsdp, weights gathered in FP8": ("tensorwise", False, 2, "fsdp"),
        "apart": ("delayed", False, 2),
    },
}
SLOW = {"tensorwise", "delayed", "ddp"}  # the others wait for a release


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], list[dict[str, Any]]]:
    """The findings of each rank, by the name of the run. The slow runs with one number of ranks share one launch."""

    @cache
    def launched(ranks: int, slow: bool) -> list[dict[str, Any]]:
        calls = {name: (pipelines.staged, x) for name, x in RUNS[ranks].items() if (name in SLOW) == slow}
        return run_ranks(run_each, ranks, tmp_path_factory.mktemp(f"ranks{ranks}"), calls)

    return lambda name: [rank[name] for rank in launched(2 if name in RUNS[2] else 4, name in SLOW)]


def runs(*names: str) -> pytest.MarkDecorator:
    """Some of ``RUNS``, by name, each when it runs."""
    cases = [pytest.param(name, marks=pytest.mark.slow if name in SLOW else pytest.mark.release) for name in names]
    return pytest.mark.parametrize("name", cases)


@runs(*RUNS[2], "four stages", "fsdp, weights gathered in FP8", "apart")
def test_a_pipeline_trains_as_one_process(name: str, found: Callable[[str], list[dict[str, Any]]]) -> None:
    """Losses and scales are equal, bit for bit, though stages run forward and backward in different orders.

    On torch 2.13 a stage first runs on uninitialized memory, forward and backward; nothing of that is recorded.
    """
    recipe, _, replicas, *_ = *{**RUNS[2], **RUNS[4]}[name], False, 1
    if name in RUNS[2] or name == "four stages":
        replicas = 1
    ranks = found(name)
    losses, state = pipelines.alone(recipe, 2 * len(ranks) // replicas)
    last = max(rank["stage"] for rank in ranks)
    assert [rank["losses"] for rank in ranks if rank["stage"] == last] == [losses] * replicas
    merged = {key: value for rank in ranks for key, value in rank["state"].items()}
    assert merged.keys() == state.keys()
    assert all(torch.equal(merged[key], state[key]) for key in state)


@runs("ddp", "fsdp")
def test_the_replicas_of_a_stage_share_their_scales(name: str, found: Callable[[str], list[dict[str, Any]]]) -> None:
    """They record amaxes together, when a step is over: one process alone, which records at once, is near."""
    losses, _ = pipelines.alone("delayed", 4)
    ranks = found(name)
    assert [rank["losses"] for rank in ranks[2:]] == [pytest.approx(losses, rel=2e-3)] * 2
    for one, other in (ranks[:2], ranks[2:]):
        assert one["stage"] == other["stage"]
        assert all(torch.equal(other["state"][key], value) for key, value in one["state"].items())


@runs("delayed", "ddp", "fsdp")
def test_a_stage_reduces_over_its_own_ranks(name: str, found: Callable[[str], list[dict[str, Any]]]) -> None:
    """A rank alone records in the graph."""
    assert [rank["reductions"] for rank in found(name)] == ([[], []] if name == "delayed" else [[2]] * 4)


@runs("delayed", "delayed, two stages per rank", "four stages", "ddp", "fsdp")
def test_checkpoints_keep_the_state_of_each_stage(name: str, found: Callable[[str], list[dict[str, Any]]]) -> None:
    """DCP keeps one value under one name: one name for all stages is refused, a name per stage is saved and loaded."""
    for rank in found(name):
        assert f'"fp8graph-stage{rank["stage"]}": backend' in rank["refused"]
        assert rank["loaded"].keys() == rank["state"].keys()
        assert all(torch.equal(rank["loaded"][key], value) for key, value in rank["state"].items())


@pytest.mark.slow
def test_a_recipe_without_state_has_nothing_to_lose(found: Callable[[str], list[dict[str, Any]]]) -> None:
    assert [rank["refused"] for rank in found("tensorwise")] == ["", ""]


@pytest.mark.release
def test_ungrouped_replicas_of_a_stage_are_warned_of(found: Callable[[str], list[dict[str, Any]]]) -> None:
    for rank in found("apart"):
        (warning,) = [text for text in rank["warnings"] if "stage" in text]
        assert "2 ranks seem to run stage" in warning
        assert "fp8graph.autocast(amax_reduction_group=...)" in warning
        assert "1 of 4 ranks" in rank["refused"]  # their scales may differ: DCP would keep one of them


def test_outside_of_a_pipeline_nothing_is_restricted() -> None:
    groups = RankGroups()
    groups.look()
    assert groups.in_stage is None
    assert groups.now() is None  # without torch.distributed there is one rank
    assert not groups.rehearses()
    assert not groups.same_in_stage(None)


def test_a_stage_reduces_over_its_own_ranks_unless_a_group_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    groups = RankGroups()
    monkeypatch.setattr(rank_groups.autocast, "amax_group", lambda: "all")
    assert groups.now() == "all"
    stage: Any = SimpleNamespace(name="stage", complete=True)
    groups.in_stage = stage
    assert groups.now() == "stage"
    assert (groups.same_in_stage("stage"), groups.same_in_stage("all")) == (True, False)
    stage.name = None  # this rank alone runs the stage
    assert groups.now() is None
    monkeypatch.setattr(rank_groups.autocast, "names_a_group", lambda: True)
    assert groups.now() == "all"
