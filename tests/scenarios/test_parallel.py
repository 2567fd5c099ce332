"""DDP, FSDP2 and tensor parallel on real processes: the numbers of one process, and the names that users know."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import emulation
import fp8graph
import parallelism
from fp8graph.numerics import sqnr_db
from fp8graph.passes.connect_scales.amax_reduction import HEAD
from helpers import same_bits
from ranks import run_each, run_ranks

LINEARS = ["layers.0.down", "layers.0.up", "layers.1.down", "layers.1.up"]


def delayed(**kwargs: Any) -> fp8graph.DelayedScaling:
    # with "auto" each rank begins with the scales of its share
    return fp8graph.DelayedScaling(amax_history_len=8, initial_scale="one", **kwargs)


RECIPES: dict[str, Any] = {
    "tensorwise": "tensorwise",
    "delayed": delayed(),
    "rowwise": "rowwise",
    "blockwise": "blockwise",
    # powers of two only move exponents: which rows and columns share a scale is seen in other scales only
    "rowwise, any scale": fp8graph.Float8RowwiseScaling(power_2_scale=False),
    "blockwise, any scale": fp8graph.Float8BlockScaling(power_2_scale=False),
}

# measured 138.7 dB and more, in most cases no difference: sums of FP32 numbers in another order
LAST_BITS = 135.0
POWERS_OF_TWO = {"rowwise": (LAST_BITS, LAST_BITS), "blockwise": (LAST_BITS, LAST_BITS)}
# Measured SQNR in dB against the plain run of one process: of the losses, and of the worst weight's gradient.
# Delayed: tensor parallel ranks have the scales of one process. The gradients of a share are larger than those of a
# whole batch, and in the first step, whose scales are 1, E5M2 represents larger ones better: one process whose loss is
# as much larger has the ranks' gradients, to 137 dB.
TWO_SHARES = {
    "tensorwise": (59.4, 22.9),
    "delayed": (72.3, 25.7),
    **POWERS_OF_TWO,
    "rowwise, any scale": (72.2, 29.2),
    "blockwise, any scale": (76.4, 29.5),
}
FOUR_SHARES = {
    "tensorwise": (61.5, 22.8),
    "delayed": (71.5, 28.1),
    **POWERS_OF_TWO,
    "rowwise, any scale": (74.5, 29.9),
    "blockwise, any scale": (70.1, 29.7),
}
TWO_SHARDS = {
    "tensorwise": (60.1, 23.3),
    "delayed": (LAST_BITS, LAST_BITS),
    **POWERS_OF_TWO,
    "rowwise, any scale": (64.0, 28.7),
    "blockwise, any scale": (58.5, 27.0),
}
FOUR_SHARDS = {
    "tensorwise": (69.8, 23.2),
    "delayed": (LAST_BITS, LAST_BITS),
    **POWERS_OF_TWO,
    "rowwise, any scale": (60.0, 30.1),
    "blockwise, any scale": (62.5, 26.0),
}
TWO_SHARES_OF_TWO_SHARDS = {
    "tensorwise": (54.9, 22.5),
    "delayed": (72.4, 28.0),
    **POWERS_OF_TWO,
    "rowwise, any scale": (65.7, 29.4),
    "blockwise, any scale": (62.5, 27.0),
}
BELOW = 1.0  # dB, for the order of sums on another CPU
# Each kind on two ranks; on four, one that splits the batch, one that splits the weights, and both at once.
MEASURED = {
    ("ddp", 2): TWO_SHARES,
    ("ddp of compiled", 2): TWO_SHARES,
    ("fsdp", 2): TWO_SHARES,
    ("tp", 2): TWO_SHARDS,
    ("tp and sp", 2): TWO_SHARDS,
    ("ddp", 4): FOUR_SHARES,
    ("tp and sp", 4): FOUR_SHARDS,
    ("fsdp and tp", 4): TWO_SHARES_OF_TWO_SHARDS,
}
ALONE = delayed(reduce_amax=False)
GENERATED = ("ddp", "tp and sp")
FIRST = {"all layers first": 0, "none first": 3}
RECIPES_OF: dict[tuple[str, int], tuple[str, ...]] = {  # of each kind on so many ranks
    **dict.fromkeys(MEASURED, tuple(RECIPES)),
    **{(f"{how}, generated", 2): ("tensorwise", "delayed") for how in GENERATED},
}
# the others wait for a release
SLOW = {
    *(("ddp", 2, name) for name in ("tensorwise", "delayed")),
    *(("fsdp", 2, name) for name in ("delayed", "blockwise, any scale")),
    *(("tp and sp", 2, name) for name in ("delayed", "rowwise, any scale")),
    ("ddp, generated", 2, "delayed"),
}


def cases(*, generated: bool) -> list[Any]:
    return [
        pytest.param(how, ranks, name, marks=() if (how, ranks, name) in SLOW else pytest.mark.release)
        for (how, ranks), names in RECIPES_OF.items()
        if how.endswith(", generated") == generated
        for name in names
    ]


def runs(ranks: int, *, slow: bool) -> dict[str, tuple[Callable[..., Any], tuple[Any, ...]]]:
    """The runs that so many ranks do in one start, by name: of the slow tests, or of a release."""
    found: dict[str, tuple[Callable[..., Any], tuple[Any, ...]]] = {}
    for how, names in ((how, names) for (how, count), names in RECIPES_OF.items() if count == ranks):
        recipes = [RECIPES[name] for name in names if ((how, ranks, name) in SLOW) == slow]
        kind, _, generated = how.partition(", ")
        if recipes:
            found[how] = parallelism.run, (kind, recipes, "inductor" if generated else "eager")
    if slow:
        found |= {name: (parallelism.run_skipping, (delayed(), first)) for name, first in FIRST.items()}
        found["without the reduction"] = parallelism.run, ("ddp", [ALONE])
    elif ranks == 4:
        found["in pairs"] = parallelism.run_in_pairs, (delayed(),)
    return found


pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(1200),  # all that runs on so many ranks, on a busy machine
    pytest.mark.skipif(not torch.distributed.is_available(), reason="torch without torch.distributed"),
]


@pytest.fixture(scope="module")
def of_ranks(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., list[Any]]:
    """By rank: what a recipe gave in one of ``cases``; or, without a recipe, what another of ``runs`` did."""

    @functools.cache
    def run(ranks: int, slow: bool) -> list[dict[str, Any]]:
        folder = tmp_path_factory.mktemp(f"of{ranks}")
        return run_ranks(run_each, ranks, folder, runs(ranks, slow=slow), seconds=1100, collective_seconds=300)

    def found(how: str, ranks: int, name: str | None = None) -> list[Any]:
        if name is None:
            return [of_rank[how] for of_rank in run(ranks, ranks == 2)]
        return [of_rank[how][str(RECIPES[name])] for of_rank in run(ranks, (how, ranks, name) in SLOW)]

    return found


def split(how: str, ranks: int) -> dict[str, int]:
    """The arguments of ``emulation.train`` that say by which ranks model and batch are split."""
    if how == "fsdp and tp":
        return {"shards": ranks // 2, "shares": 2}
    if how == "tp and sp":  # what it gathers has one scale: quantized as tensor parallel alone quantizes it
        return {"shards": ranks, "parts": ranks}
    return {"shards": ranks} if how == "tp" else {"shares": ranks}


@functools.cache
def emulated(name: str, ranks: int, **kwargs: int) -> dict[str, Any]:
    return emulation.train(RECIPES[name], ranks, **kwargs)


def assert_same(found: Tensor, expected: Tensor, *, exact: bool) -> None:
    """Equal, or but for the order of sums: measured 5e-7 of the largest number."""
    if exact:
        assert torch.equal(found, expected)
    else:
        torch.testing.assert_close(found, expected, rtol=0.0, atol=2e-6 * expected.abs().max().item())


@pytest.mark.parametrize(("how", "ranks", "name"), cases(generated=False))
def test_the_ranks_are_one_process_with_the_scales_of_each_shard(
    how: str, ranks: int, name: str, of_ranks: Any
) -> None:
    """Losses, gradients and scaling state after 5 steps; and how far they are from one process's own scales."""
    results = of_ranks(how, ranks, name)
    kwargs = split(how, ranks)
    # sums of two numbers have one order; sequence parallel sums rows in parts that one process sums at once
    exact = how != "tp and sp" and (ranks == 2 or how == "fsdp and tp")
    expected, alone = emulated(name, ranks, **kwargs), emulated(name, ranks)
    columns = expected["losses"].shape[1]  # the ranks of one share see the same loss
    losses = torch.tensor([found["losses"] for found in results[:: ranks // columns]]).t()
    for rank, found in enumerate(results):
        assert_same(torch.tensor(found["losses"]), expected["losses"][:, rank * columns // ranks], exact=exact)
        assert found["gradients"].keys() == expected["gradients"].keys()
        for parameter, gradient in expected["gradients"].items():
            assert_same(found["gradients"][parameter], gradient, exact=exact)
        assert found["fp8"] == LINEARS
        assert found["gemms"] == 3 * len(LINEARS)
        # each weight once per update; what FSDP2 gathers in each call, and kept in FP8 it would not be sharded
        assert found["quantized"] == (0 if how.startswith("fsdp") else len(LINEARS) * parallelism.STEPS)
        assert_same_state(found["state"], results[0]["state"], expected["state"], exact=exact)
    decibels = [sqnr_db(alone["losses"].flatten(), losses.sum(1) / kwargs.get("shares", 1))]
    weights = [f"{linear}.weight" for linear in LINEARS]
    decibels.append(min(sqnr_db(alone["gradients"][w], results[0]["gradients"][w]) for w in weights))
    measured = MEASURED[how, ranks][name]
    assert all(found > least - BELOW for found, least in zip(decibels, measured, strict=True)), decibels


def assert_same_state(found: Any, first: Any, expected: dict[emulation.Field, Tensor], *, exact: bool) -> None:
    """Bit for bit that of the first rank, and that of the emulation but for the order of the sums that led to it."""
    assert found.keys() == first.keys()
    assert all(torch.equal(value, first[field]) for field, value in found.items())
    if not expected:
        assert not [field for field in found if field.endswith("|scale")]
        return
    state = emulation.by_tensor(found)
    assert state.keys() == expected.keys()
    for (tensor, field), value in expected.items():
        torch.testing.assert_close(state[tensor, field], value, rtol=0.0 if exact else 1e-5, atol=0.0)
        # the first step's weights, and the input of the first layer, were no sums yet
        if field == "amax_history" and (tensor.endswith(".weight") or tensor == "layers.0.up.input"):
            first_step = len(value) - parallelism.STEPS
            assert value[first_step] > 0.0
            assert torch.equal(state[tensor, field][first_step], value[first_step])


@pytest.mark.parametrize(("how", "ranks", "name"), cases(generated=True))
def test_generated_code_trains_as_the_graph_does(how: str, ranks: int, name: str, of_ranks: Any) -> None:
    """Inductor rounds as eager does, but for the last bits of norms and sums: 132.8 dB measured, or no difference."""
    results = of_ranks(how, ranks, name)
    for eager, found in zip(of_ranks(how.removesuffix(", generated"), ranks, name), results, strict=True):
        assert (eager["by_inductor"], found["by_inductor"] > 0) == (0, True)
        assert found["fp8"] == eager["fp8"] == LINEARS
        assert found["gemms"] == eager["gemms"] == 3 * len(LINEARS)
        assert found["collectives"] == eager["collectives"]
        torch.testing.assert_close(found["losses"], eager["losses"], rtol=1e-6, atol=0.0)
        for parameter, gradient in eager["gradients"].items():
            assert sqnr_db(gradient, found["gradients"][parameter]) > 130
        assert found["state"].keys() == eager["state"].keys() == results[0]["state"].keys()
        for field, value in eager["state"].items():
            assert torch.equal(found["state"][field], results[0]["state"][field])
            # amaxes of what silu or a norm made differ in the last bit; those of the weights do not
            rtol = 0.0 if ".weight" in field else 1e-6
            torch.testing.assert_close(found["state"][field], value, rtol=rtol, atol=0.0)


@pytest.mark.slow
def test_models_that_are_moved_between_steps(tmp_path: Path) -> None:
    """``model.to()`` swaps DTensors. Their scales and steps are those of the same parameters, and die with them."""
    calls = {how: (parallelism.moved, (how, delayed())) for how in ("tp", "fsdp")}
    for rank in run_ranks(run_each, 2, tmp_path, calls):
        for stayed, moved in rank.values():
            assert moved["losses"] == stayed["losses"]
            for kind in ("gradients", "state", "weights"):
                assert moved[kind].keys() == stayed[kind].keys()
                assert same_bits(moved[kind].values(), stayed[kind].values())
            assert all(moved["freed"])
            assert all(stayed["freed"])


def test_without_the_reduction_the_scales_differ(of_ranks: Any) -> None:
    first, second = (found[str(ALONE)]["state"] for found in of_ranks("without the reduction", 2))
    differ = {name for name, value in first.items() if not torch.equal(value, second[name])}
    assert {name for name in first if "weight" not in name and "version" not in name} == differ


def test_one_collective_a_step(of_ranks: Any) -> None:
    """The numbers that must agree, and of 4 linears 4 inputs, 4 weights and 4 gradients."""
    assert of_ranks("ddp", 2, "delayed")[0]["collectives"] == [("all_reduce", "step", "float32", (HEAD + 12,))]


@pytest.mark.parametrize("name", FIRST)
def test_a_rank_that_skips_layers_neither_hangs_nor_drifts(name: str, of_ranks: Any) -> None:
    """Both ranks have the histories of the one that skips nothing, and whose numbers are the larger ones."""
    ranks = of_ranks(name, 2)
    alone = parallelism.run_skipping(0, delayed(), FIRST[name])
    for step, expected in enumerate(alone):
        for states in ranks:
            found = states[step]
            shared = found.keys() & expected.keys()
            assert all(torch.equal(found[name], expected[name]) for name in shared), step
    assert ranks[0][-1].keys() == ranks[1][-1].keys() == alone[-1].keys()


@pytest.mark.release
def test_a_group_of_ones_own(of_ranks: Any) -> None:
    """Ranks 0, 1 and 2, 3 reduce among themselves."""
    states = of_ranks("in pairs", 4)
    same = [[all(map(torch.equal, a.values(), b.values())) for b in states] for a in states]
    assert same == [[i // 2 == j // 2 for j in range(4)] for i in range(4)]
