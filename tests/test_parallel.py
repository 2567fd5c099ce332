"""DDP, FSDP2 and tensor parallel on real processes: the numbers of one process, and the names that users know."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

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
    compiled = torch.compile(model, backend=parallelism.backend_for(recipe))
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
    return {"losses": torch.tensor(losses), "gradients": gradients}


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
            assert result["quantized"] == len(LINEARS) * parallelism.STEPS  # each weight once per update


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
            assert result["quantized"] == len(LINEARS) * parallelism.STEPS
            for name in (f"{linear}.weight" for linear in LINEARS):
                assert torch.equal(result["gradients"][name], first[name])
                assert sqnr_db(expected["gradients"][name], result["gradients"][name]) > 18
