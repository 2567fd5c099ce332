"""The scaling state beside model and optimizer in torch.distributed.checkpoint, resumed on any number of ranks."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

import checkpointing
from fp8graph import Backend, StateError
from fp8graph.runtime.state_dict import BackendState
from helpers import first_fast, first_slow
from ranks import run_each, run_ranks

KINDS = [*checkpointing.KINDS, checkpointing.WITHOUT_STATE]

pytestmark = [
    pytest.mark.skipif(not dist.is_available(), reason="torch without torch.distributed"),
    # what DCP says where there is no process group
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled, unavailable or uninitialized:UserWarning"),
]


def equal(a: Any, b: Any) -> bool:
    """Of two states: the same names and bits."""
    return a.keys() == b.keys() and len(a) > 1 and all(torch.equal(a[name], b[name]) for name in a)


@pytest.fixture(scope="module")
def trained() -> checkpointing.Run:
    torch.manual_seed(0)
    run = checkpointing.Run("alone")
    run.steps(range(3))
    return run


@first_fast("compiled_before", [False, True])
def test_a_backend_goes_into_a_checkpoint_as_it_is(
    trained: checkpointing.Run, compiled_before: bool, tmp_path: Path
) -> None:
    trained.save(str(tmp_path))
    expected = trained.backend.state_dict()
    run = checkpointing.Run("alone")
    if compiled_before:
        run.steps(range(7, 8))
        assert not equal(run.backend.state_dict(), expected)
    found = checkpointing.resumed(run, str(tmp_path))
    assert equal(found["waiting"], expected)
    assert equal(found["placed"], expected)
    assert found["unused"] == []


def test_a_state_dict_taken_out_of_the_backend_can_be_saved_too(trained: checkpointing.Run, tmp_path: Path) -> None:
    dcp.save({"scales": trained.backend.state_dict()}, checkpoint_id=tmp_path)
    fresh = Backend()
    parts: dict[str, Any] = {"scales": fresh.state_dict()}
    dcp.load(parts, checkpoint_id=tmp_path)
    fresh.load_state_dict(parts["scales"])
    assert equal(fresh.state_dict(), trained.backend.state_dict())


def test_a_checkpoint_of_other_layers_is_refused(trained: checkpointing.Run, tmp_path: Path) -> None:
    """DCP would load what fits and say nothing."""
    dcp.save({"fp8graph": Backend()}, checkpoint_id=tmp_path)
    before = trained.backend.state_dict()
    with pytest.raises(StateError, match="12 of 12 tensors are missing"):
        dcp.load({"fp8graph": trained.backend}, checkpoint_id=tmp_path)
    assert equal(before, trained.backend.state_dict())


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind",
    [AsyncCheckpointerType.THREAD, pytest.param(AsyncCheckpointerType.PROCESS, marks=pytest.mark.slow)],
)
def test_saving_in_the_background(trained: checkpointing.Run, kind: Any, tmp_path: Path) -> None:
    """DCP copies the state, or sends it to another process: it stays one value, and later steps do not reach it."""
    store = dist.TCPStore("127.0.0.1", 0, world_size=1, is_master=True)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        expected = trained.backend.state_dict()
        future = dcp.async_save(
            {"fp8graph": trained.backend}, checkpoint_id=tmp_path / "saved", async_checkpointer_type=kind
        )
        trained.steps(range(20, 21))
        future.result()  # pyright: ignore[reportAttributeAccessIssue]
        fresh = Backend()
        dcp.load({"fp8graph": fresh}, checkpoint_id=tmp_path / "saved")
    finally:
        dist.destroy_process_group()
    assert equal(fresh.state_dict(), expected)
    assert not equal(fresh.state_dict(), trained.backend.state_dict())


Found = tuple[Path, list[dict[str, Any]]]


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Found:
    """Where two ranks saved, and what each found."""
    folder = tmp_path_factory.mktemp("of2")
    return folder, run_ranks(run_each, 2, folder, {
        "saved": (checkpointing.save, (str(folder), KINDS)),
        "refused": (checkpointing.refused, (str(folder),)),
    }, seconds=500)  # fmt: skip


@pytest.fixture(scope="module")
def resumed(two: Found, tmp_path_factory: pytest.TempPathFactory) -> Callable[[int, int], tuple[Any, Any]]:
    """Of so many ranks before and after: what each of those that saved found, and each of those that resumed."""

    @cache
    def four() -> Found:
        """Where four ranks saved, and what each found there and in what two ranks had saved."""
        folder = tmp_path_factory.mktemp("of4")
        return folder, run_ranks(run_each, 4, folder, {
            "saved": (checkpointing.save, (str(folder), KINDS)),
            "of 2": (checkpointing.load, (str(two[0]), KINDS)),
        }, seconds=500)  # fmt: skip

    @cache
    def two_again(folder: Path) -> list[dict[str, Any]]:
        calls = {"again": (checkpointing.load, (str(folder), KINDS))}
        return run_ranks(run_each, 2, tmp_path_factory.mktemp("again"), calls, seconds=500)

    def found(before: int, after: int) -> tuple[Any, Any]:
        folder, saved = two if before == 2 else four()
        loaded = [of["of 2"] for of in four()[1]] if after == 4 else [of["again"] for of in two_again(folder)]
        return [of["saved"] for of in saved], loaded

    return found


@first_slow(("before", "after"), [(2, 2), (2, 4), (4, 2)])
def test_resuming_on_other_numbers_of_ranks(resumed: Any, before: int, after: int) -> None:
    """The same scales; on as many ranks as before also the same losses, and what comes of them, bit for bit."""
    of_ranks, results = resumed(before, after)
    for rank, found in enumerate(results):
        for how in checkpointing.KINDS:
            expected = of_ranks[0][how]["saved"]
            assert all(equal(other[how]["saved"], expected) for other in of_ranks)
            assert equal(found[how]["waiting"], expected)
            assert equal(found[how]["placed"], expected)
            assert found[how]["unused"] == []
            if before == after:
                assert found[how]["losses"] == of_ranks[rank][how]["losses"]
                assert equal(found[how]["after"], of_ranks[rank][how]["after"])


@first_slow(("before", "after"), [(2, 2), (2, 4), (4, 2)])
def test_resuming_with_gathers_in_fp8(resumed: Any, before: int, after: int) -> None:
    """FP8 shards are no state: they are made from the loaded weights. Other ranks quantize other rows of a batch."""
    of_ranks, results = ([found[checkpointing.WITHOUT_STATE] for found in each] for each in resumed(before, after))
    assert all(found["sent"] > 0 for found in of_ranks)
    expected, got = (
        [statistics.mean(x) for x in zip(*(r["losses"] for r in each), strict=True)] for each in (of_ranks, results)
    )
    assert got == pytest.approx(expected, rel=1e-2)
    if before == after:
        assert [found["losses"] for found in results] == [found["losses"] for found in of_ranks]


@pytest.mark.slow
@pytest.mark.parametrize("how", checkpointing.KINDS)
def test_resuming_in_one_process(two: Any, how: str) -> None:
    folder, of_ranks = two
    found = checkpointing.resumed(checkpointing.Run("alone"), str(folder / how))
    saved = of_ranks[0]["saved"][how]["saved"]
    assert equal(found["waiting"], saved)
    assert equal(found["placed"], saved)
    assert found["unused"] == []


@pytest.mark.slow
def test_scales_that_differ_from_rank_to_rank_are_not_saved_as_one(two: Any) -> None:
    folder, of_ranks = two
    for by_recipe, by_group in (found["refused"] for found in of_ranks):
        assert "StateError: torch.distributed.checkpoint would keep the scaling state of one rank" in by_recipe
        assert "DelayedScaling(reduce_amax=False) lets each rank have its own scales" in by_recipe
        assert "its amaxes were reduced over 1 of 2 ranks" in by_group
    assert not (folder / "refused" / ".metadata").exists()


def test_a_state_reads_as_a_dict_does() -> None:
    """The state is no Mapping, whose entries DCP would store one by one."""
    state = BackendState({"a": torch.ones(1)})
    assert (state.get("a"), state.get("b"), state.get("b", 3)) == (state["a"], None, 3)
    assert {**state} == dict(state)
    assert not isinstance(state, Mapping)
