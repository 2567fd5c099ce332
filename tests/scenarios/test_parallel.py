"""DDP, FSDP2 and tensor parallel on real processes: the numbers of one process, and the names that users know."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import emulation
import fp8graph
import parallelism
from fp8graph.numerics import sqnr_db
from ranks import run_each, run_ranks

LINEARS = ["layers.0.down", "layers.0.up", "layers.1.down", "layers.1.up"]


def delayed(**kwargs: Any) -> fp8graph.DelayedScaling:
    return fp8graph.DelayedScaling(amax_history_len=8, **kwargs)


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
RUNS: dict[int, dict[str, tuple[Callable[..., Any], tuple[Any, ...]]]] = {  # on so many ranks
    ranks: {how: (parallelism.run, (how, list(RECIPES.values()))) for how, count in MEASURED if count == ranks}
    for ranks in (2, 4)
}
RUNS[2] |= {
    f"{how}, generated": (parallelism.run, (how, [RECIPES["tensorwise"], RECIPES["delayed"]], "inductor"))
    for how in GENERATED
}
RUNS[2] |= {name: (parallelism.run_skipping, (delayed(), first)) for name, first in FIRST.items()}
RUNS[2]["without the reduction"] = parallelism.run, ("ddp", [ALONE])
RUNS[4]["in pairs"] = parallelism.run_in_pairs, (delayed(),)

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(1200),  # all that runs on so many ranks, on a busy machine
    pytest.mark.skipif(not torch.distributed.is_available(), reason="torch without torch.distributed"),
]


@pytest.fixture(scope="module")
def of_ranks(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], list[dict[str, Any]]]:
    """What each of so many ranks found, by the names of ``RUNS``."""

    @functools.cache
    def found(ranks: int) -> list[dict[str, Any]]:
        folder = tmp_path_factory.mktemp(f"of{ranks}")
        return run_ranks(run_each, ranks, folder, RUNS[ranks], seconds=1100, collective_seconds=300)

    return found


def split(how: str, ranks: int) -> dict[str, int]:
    """How the ranks split model and batch: the arguments of ``emulation.train``."""
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


@pytest.mark.parametrize(
    ("how", "ranks"), [pytest.param(*case, marks=pytest.mark.release if case[1] == 4 else ()) for case in MEASURED]
)
def test_the_ranks_are_one_process_with_the_scales_of_each_shard(how: str, ranks: int, of_ranks: Any) -> None:
    """Losses, gradients and scaling state after 5 steps; and how far they are from one process's own scales."""
    results = [found[how] for found in of_ranks(ranks)]
    kwargs = split(how, ranks)
    # sums of two numbers have one order; sequence parallel sums rows in parts that one process sums at once
    exact = how != "tp and sp" and (ranks == 2 or how == "fsdp and tp")
    for name, recipe in RECIPES.items():
        of_recipe = [result[str(recipe)] for result in results]
        expected, alone = emulated(name, ranks, **kwargs), emulated(name, ranks)
        columns = expected["losses"].shape[1]  # the ranks of one share see the same loss
        losses = torch.tensor([found["losses"] for found in of_recipe[:: ranks // columns]]).t()
        for rank, found in enumerate(of_recipe):
            assert_same(torch.tensor(found["losses"]), expected["losses"][:, rank * columns // ranks], exact=exact)
            assert found["gradients"].keys() == expected["gradients"].keys()
            for parameter, gradient in expected["gradients"].items():
                assert_same(found["gradients"][parameter], gradient, exact=exact)
            assert found["fp8"] == LINEARS
            assert found["gemms"] == 3 * len(LINEARS)
            # each weight once per update; what FSDP2 gathers in each call, and kept in FP8 it would not be sharded
            assert found["quantized"] == (0 if how.startswith("fsdp") else len(LINEARS) * parallelism.STEPS)
            assert_same_state(found["state"], of_recipe[0]["state"], expected["state"], exact=exact)
        decibels = [sqnr_db(alone["losses"].flatten(), losses.sum(1) / kwargs.get("shares", 1))]
        weights = [f"{linear}.weight" for linear in LINEARS]
        decibels.append(min(sqnr_db(alone["gradients"][w], of_recipe[0]["gradients"][w]) for w in weights))
        assert all(
            found > measured - BELOW for found, measured in zip(decibels, MEASURED[how, ranks][name], strict=True)
        ), (name, decibels)


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


@pytest.mark.parametrize("how", GENERATED)
def test_generated_code_trains_as_the_graph_does(how: str, of_ranks: Any) -> None:
    """Inductor rounds as eager does, but for the last bits of norms and sums: 132.8 dB measured, or no difference."""
    results = [(of_rank[how], of_rank[f"{how}, generated"]) for of_rank in of_ranks(2)]
    for recipe in map(str, (RECIPES["tensorwise"], RECIPES["delayed"])):
        first = results[0][1][recipe]["state"]
        for eager, found in ((interpreted[recipe], generated[recipe]) for interpreted, generated in results):
            assert (eager["by_inductor"], found["by_inductor"] > 0) == (0, True)
            assert found["fp8"] == eager["fp8"] == LINEARS
            assert found["gemms"] == eager["gemms"] == 3 * len(LINEARS)
            assert found["collectives"] == eager["collectives"]
            torch.testing.assert_close(found["losses"], eager["losses"], rtol=1e-6, atol=0.0)
            for name, gradient in eager["gradients"].items():
                assert sqnr_db(gradient, found["gradients"][name]) > 130
            assert found["state"].keys() == eager["state"].keys() == first.keys()
            for field, value in eager["state"].items():
                assert torch.equal(found["state"][field], first[field])
                # amaxes of what silu or a norm made differ in the last bit; those of the weights do not
                rtol = 0.0 if ".weight" in field else 1e-6
                torch.testing.assert_close(found["state"][field], value, rtol=rtol, atol=0.0)


def test_without_the_reduction_the_scales_differ(of_ranks: Any) -> None:
    first, second = (found["without the reduction"][str(ALONE)]["state"] for found in of_ranks(2))
    differ = {name for name, value in first.items() if not torch.equal(value, second[name])}
    assert {name for name in first if "weight" not in name and "version" not in name} == differ


def test_one_collective_a_step(of_ranks: Any) -> None:
    """A flag, two numbers of the step, and of 4 linears 4 inputs, 4 weights and 4 gradients."""
    result = of_ranks(2)[0]["ddp"][str(RECIPES["delayed"])]
    assert result["collectives"] == [("all_reduce", "step", "float32", (15,))]


@pytest.mark.parametrize("name", FIRST)
def test_a_rank_that_skips_layers_neither_hangs_nor_drifts(name: str, of_ranks: Any) -> None:
    """Both ranks have the histories of the one that skips nothing, and whose numbers are the larger ones."""
    ranks = [found[name] for found in of_ranks(2)]
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
    states = [found["in pairs"] for found in of_ranks(4)]
    same = [[all(map(torch.equal, a.values(), b.values())) for b in states] for a in states]
    assert same == [[i // 2 == j // 2 for j in range(4)] for i in range(4)]
