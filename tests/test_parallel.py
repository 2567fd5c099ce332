"""DDP, FSDP2 and tensor parallel on real processes: the numbers of one process, and the names that users know."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import fp8graph
import parallelism
from fp8graph.numerics import sqnr_db
from ranks import run_ranks

RECIPES = ["tensorwise", "rowwise", "blockwise"]  # without a state: delayed scaling wants a reduction of amaxes
LINEARS = ["layers.0.down", "layers.0.up", "layers.1.down", "layers.1.up"]
# what is averaged over ranks differs in the last bits from what one process adds up
SAME: Any = {"rtol": 1e-4, "atol": 1e-6}

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not torch.distributed.is_available(), reason="torch without torch.distributed"),
]


def one_process(recipe: Any, ranks: int, shares: int) -> dict[str, Any]:
    """The training of one process in which each share of the batch is quantized by itself."""
    model, data = parallelism.model_and_data(ranks)
    backend = parallelism.backend_for(recipe)
    compiled = torch.compile(model, backend=backend)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    losses: list[list[float]] = []
    gradients: dict[str, Tensor] = {}
    for batch in data:
        optimizer.zero_grad()
        losses.append([])
        for share in batch.chunk(shares):
            loss = compiled(share).square().mean() / shares
            loss.backward()
            losses[-1].append(loss.item() * shares)
        gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
        optimizer.step()
    return {"losses": torch.tensor(losses), "gradients": gradients, "state": backend.state_dict()}


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("how", ["ddp", "ddp of compiled", "fsdp"])
def test_data_parallel_is_one_process_with_each_ranks_scales(how: str, ranks: int, tmp_path: Path) -> None:
    results = run_ranks(parallelism.run, ranks, tmp_path, how, RECIPES)
    for recipe in RECIPES:
        expected = one_process(recipe, ranks, ranks)
        for rank, result in enumerate(found[recipe] for found in results):
            torch.testing.assert_close(torch.tensor(result["losses"]), expected["losses"][:, rank], **SAME)
            for name, gradient in expected["gradients"].items():
                torch.testing.assert_close(result["gradients"][name], gradient, **SAME)
            assert result["fp8"] == LINEARS
            # each weight once per update; what FSDP2 gathers in each call, and kept in FP8 it would not be sharded
            assert result["quantized"] == (0 if how == "fsdp" else len(LINEARS) * parallelism.STEPS)


@pytest.mark.parametrize(("how", "ranks"), [("tp", 2), ("tp", 4), ("tp and sp", 2), ("fsdp and tp", 4)])
def test_tensor_parallel_is_near_one_process(how: str, ranks: int, tmp_path: Path) -> None:
    """Each rank has scales of its own shards: other FP8 numbers than one process has, as far from bf16's."""
    results = run_ranks(parallelism.run, ranks, tmp_path, how, RECIPES)
    for recipe in RECIPES:
        expected = one_process(recipe, ranks, 2 if how == "fsdp and tp" else 1)
        first = results[0][recipe]["gradients"]
        for found in results:
            result = found[recipe]
            assert result["fp8"] == LINEARS
            assert result["gemms"] == 3 * len(LINEARS)
            assert result["quantized"] == (0 if how == "fsdp and tp" else len(LINEARS) * parallelism.STEPS)
            for name in (f"{linear}.weight" for linear in LINEARS):
                assert torch.equal(result["gradients"][name], first[name])
                assert sqnr_db(expected["gradients"][name], result["gradients"][name]) > 18


def delayed(**kwargs: Any) -> fp8graph.DelayedScaling:
    return fp8graph.DelayedScaling(amax_history_len=8, **kwargs)


def by_tensor(state: dict[str, Tensor]) -> dict[tuple[str, str], Tensor]:
    """A state dict by tensor and field, whatever the recipe is called."""
    return {(name.partition("|")[0], name.rpartition("|")[2]): value for name, value in state.items()}


def emulated(recipe: Any, ranks: int) -> dict[str, Any]:
    """Two backends in one process, one for each rank; after each step their histories are made those of both."""
    model, data = parallelism.model_and_data(ranks)
    backends = [parallelism.backend_for(recipe) for _ in range(ranks)]
    compiled = [torch.compile(model, backend=backend) for backend in backends]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    gradients: dict[str, Tensor] = {}
    state: dict[str, Tensor] = {}
    for batch in data:
        optimizer.zero_grad()
        for run, share in zip(compiled, batch.chunk(ranks), strict=True):
            run(share).square().mean().backward()
        gradients = {name: p.grad.div_(ranks).clone() for name, p in model.named_parameters() if p.grad is not None}
        optimizer.step()
        states = [backend.state_dict() for backend in backends]
        state = dict(states[0])
        for name in [name for name in state if name.endswith("|amax_history")]:  # longer than the training
            state[name] = torch.stack([other[name] * 1.0 for other in states]).amax(0)
            top = 57344.0 if "grad_output" in name else 448.0
            state[name.removesuffix("amax_history") + "scale"] = torch.tensor([top]) / state[name].max()
        for backend in backends:
            backend.load_state_dict(state)
    return {"gradients": gradients, "state": state}


@pytest.mark.parametrize("how", ["ddp", "fsdp"])
def test_delayed_scaling_reduces_amaxes_over_the_ranks(how: str, tmp_path: Path) -> None:
    """The scales of every rank are those of all ranks' amaxes, bit for bit, after each of the steps."""
    results = run_ranks(parallelism.run, 2, tmp_path, how, [delayed()])
    expected = emulated(delayed(reduce_amax=False), 2)
    for found in (result[str(delayed())] for result in results):
        state, wanted = by_tensor(found["state"]), by_tensor(expected["state"])
        assert state.keys() == wanted.keys()
        assert all(torch.equal(value, wanted[name]) for name, value in state.items())
        for name, gradient in expected["gradients"].items():
            torch.testing.assert_close(found["gradients"][name], gradient, **SAME)


def test_without_the_reduction_the_scales_differ(tmp_path: Path) -> None:
    alone = delayed(reduce_amax=False)
    first, second = (r[str(alone)]["state"] for r in run_ranks(parallelism.run, 2, tmp_path, "ddp", [alone]))
    differ = {name for name, value in first.items() if not torch.equal(value, second[name])}
    assert {name for name in first if "weight" not in name and "version" not in name} == differ


def test_one_collective_a_step(tmp_path: Path) -> None:
    """A flag, and of 4 linears 4 inputs, 4 weights and 4 gradients."""
    result = run_ranks(parallelism.run, 2, tmp_path, "ddp", [delayed()])[0][str(delayed())]
    assert result["collectives"] == [("all_reduce", "step", "float32", (13,))]


@pytest.mark.parametrize("first", [0, 3], ids=["all layers first", "none first"])
def test_a_rank_that_skips_layers_neither_hangs_nor_drifts(first: int, tmp_path: Path) -> None:
    """Both ranks have the histories of the one that skips nothing, and whose numbers are the larger ones."""
    recipe = delayed()
    ranks = run_ranks(parallelism.run_skipping, 2, tmp_path, recipe, first)
    alone = parallelism.run_skipping(0, recipe, first)
    for step, expected in enumerate(alone):
        for states in ranks:
            found = states[step]
            shared = found.keys() & expected.keys()
            assert all(torch.equal(found[name], expected[name]) for name in shared), step
    assert ranks[0][-1].keys() == ranks[1][-1].keys() == alone[-1].keys()


def test_a_group_of_ones_own(tmp_path: Path) -> None:
    """Ranks 0, 1 and 2, 3 reduce among themselves."""
    states = run_ranks(parallelism.run_in_pairs, 4, tmp_path, delayed())
    same = [[all(map(torch.equal, a.values(), b.values())) for b in states] for a in states]
    assert same == [[i // 2 == j // 2 for j in range(4)] for i in range(4)]
