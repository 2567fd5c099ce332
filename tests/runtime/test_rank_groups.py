"""The ranks over which amaxes are reduced: in a pipeline those of the stage, else all."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import fp8graph
import pipelines
from fp8graph.runtime import rank_groups
from fp8graph.runtime.rank_groups import Comparison, RankGroups
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
    groups.detect_stage()
    assert groups.in_stage is None
    assert groups.now() is None  # without torch.distributed there is one rank
    assert not groups.is_dry_run()
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


@pytest.mark.parametrize(
    ("enable", "throws", "ranks", "refused"),
    [
        (True, False, {0, 1}, True),
        (True, False, {0, 2}, False),
        (True, True, {0, 1}, False),
        (False, False, {0, 1}, False),
    ],
)
def test_a_join_is_refused_that_lets_ranks_take_unequal_steps(
    monkeypatch: pytest.MonkeyPatch, enable: bool, throws: bool, ranks: set[int], refused: bool
) -> None:
    """Of ranks that reduce amaxes together, here 0 and 1."""
    config = SimpleNamespace(enable=enable, throw_on_early_termination=throws)
    ddp = SimpleNamespace(_join_config=config, process_group="of ddp")
    monkeypatch.setattr(nn.parallel.DistributedDataParallel, "_active_ddp_module", ddp)
    monkeypatch.setattr(rank_groups.collectives, "ranks_of", {"of ddp": frozenset(ranks), "all": frozenset({0, 1})}.get)
    if refused:
        with pytest.raises(fp8graph.StateError, match="DistributedDataParallel.join"):
            RankGroups().expect_equal_steps("all")
    else:
        RankGroups().expect_equal_steps("all")


@pytest.fixture
def comparisons(monkeypatch: pytest.MonkeyPatch) -> Callable[[str, str], list[Comparison]]:
    """Begun by ranks 0 and 1 with a text each; they look whenever they are asked to."""

    def begin(*texts: str) -> list[Comparison]:
        store = dist.HashStore()
        begun: list[Comparison] = []
        for rank, text in enumerate(texts):
            monkeypatch.setattr(dist, "get_rank", lambda rank=rank: rank)
            begun.append(Comparison(text, [0, 1], "here", store))
        return begun

    monkeypatch.setattr(rank_groups.time, "monotonic", iter(range(0, 1000, 10)).__next__)
    return begin


def test_a_comparison_of_equal_texts_ends_without_waiting(comparisons: Callable[..., list[Comparison]]) -> None:
    first, second = comparisons("one", "one")
    assert [first.is_over(), first.is_over()] == [False, False]
    assert [second.is_over(), first.is_over()] == [True, True]


def test_a_comparison_of_other_texts_raises_on_both_ranks(comparisons: Callable[..., list[Comparison]]) -> None:
    first, second = comparisons("one", "two")
    assert not first.is_over()
    for each in (second, first):
        with pytest.raises(
            fp8graph.PolicyError, match=r"(?s)--- rank 0\n\+\+\+ rank 1\n.*-one\n\+two\nGive all of them"
        ):
            each.is_over()


@pytest.mark.parametrize(
    ("recipe", "gradients", "compared"),
    [
        ("delayed", True, [True]),
        (fp8graph.DelayedScaling(reduce_amax=False), True, [False]),
        ("tensorwise", True, [False]),
        ("tensorwise", False, []),
        ("delayed", False, []),
    ],
)
def test_ranks_wait_for_each_other_where_they_must_agree(
    monkeypatch: pytest.MonkeyPatch, recipe: Any, gradients: bool, compared: list[bool]
) -> None:
    """One that evaluates is not compared, one that reduces nothing does not wait."""
    waited: list[bool] = []
    monkeypatch.setattr(RankGroups, "compare", lambda self, text, kind, *, waits: waited.append(waits))
    torch._dynamo.reset()
    model = torch.compile(nn.Linear(16, 16), backend=fp8graph.Backend(recipe=recipe, compiler="eager"))
    with torch.set_grad_enabled(gradients):
        model(torch.ones(16, 16))
    assert waited == compared
