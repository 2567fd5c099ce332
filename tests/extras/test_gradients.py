"""Gradients in FP8 between ranks: near those in high precision, in a quarter of the bytes."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import gradients
from fp8graph.errors import Fp8GraphError
from fp8graph.extras.gradients import GradientWire, from_bytes, send_gradients_in_fp8, to_bytes
from fp8graph.numerics import sqnr_db
from helpers import first_slow, in_one_test
from ranks import run_each, run_ranks

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2


@in_one_test("dtype", [E4M3, E5M2])
@in_one_test("numbers", [1, 128, 300])
def test_bytes_hold_the_numbers(numbers: int, dtype: torch.dtype) -> None:
    x = torch.randn(3, numbers) * torch.logspace(-6, 6, numbers)
    message = to_bytes(x, dtype)
    assert message.shape == (3, -(-numbers // 128) * (128 + 4))
    decoded = from_bytes(message, numbers, dtype)
    # a normal number is off by half a step: 2^-4 or 2^-3; small ones of a block by half of its smallest step
    steps = {E4M3: (2**-4, 448 * 2**9), E5M2: (2**-3, 57344 * 2**16)}[dtype]
    blocks = nn.functional.pad(x, (0, -numbers % 128)).view(3, -1, 128).abs().amax(-1, keepdim=True).expand(-1, -1, 128)
    largest = blocks.reshape(3, -1)[:, :numbers]
    assert ((decoded - x).abs() <= torch.maximum(x.abs() * steps[0], largest / steps[1]) * 1.0001).all()


@pytest.mark.parametrize("dtype", [E4M3, E5M2])
def test_a_block_fills_the_range(dtype: torch.dtype) -> None:
    sent = to_bytes(torch.randn(3, 256) * torch.logspace(-6, 6, 256), dtype)
    largest = sent[:, :256].contiguous().view(dtype).float().abs().view(-1, 128).amax(1)
    assert torch.equal(largest, torch.full((6,), torch.finfo(dtype).max))


def test_numbers_that_fp8_has_come_back() -> None:
    x = torch.arange(-14.0, 15.0).view(1, -1) * 32  # 448 is the largest: the scale is 1
    assert torch.equal(from_bytes(to_bytes(x, E4M3), 29, E4M3), x)
    zeros = torch.zeros(2, 5)
    assert torch.equal(from_bytes(to_bytes(zeros, E4M3), 5, E4M3), zeros)


@pytest.mark.parametrize("bad", [torch.inf, torch.nan])
def test_overflow_is_not_hidden(bad: float) -> None:
    """GradScaler finds it; other blocks are as they were."""
    x = torch.ones(1, 256)
    x[0, 3] = bad
    decoded = from_bytes(to_bytes(x, E4M3), 256, E4M3)
    assert not decoded[0, 3].isfinite()
    assert torch.equal(decoded[0, 128:], x[0, 128:])


def test_wrong_arguments() -> None:
    with pytest.raises(ValueError, match=r"dtype must be one of torch.float8_e4m3fn, torch.float8_e5m2, not torch.bf"):
        send_gradients_in_fp8(nn.Linear(2, 2), dtype=torch.bfloat16)
    with pytest.raises(Fp8GraphError, match="Linear has no gradients to send: call fully_shard on its modules, or"):
        send_gradients_in_fp8(nn.Linear(2, 2))


RUNS = {
    f"{how} {name}": (gradients.gradients, (how, dtype))
    for how in ("fsdp", "ddp")
    for name, dtype in (("in high precision", None), ("E4M3", E4M3), ("E5M2", E5M2))
}


@pytest.fixture(scope="module")
def on_ranks(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], list[dict[str, Any]]]:
    @cache
    def found(ranks: int) -> list[dict[str, Any]]:
        calls = {
            **RUNS,
            "fsdp overflowed": (gradients.gradients, ("fsdp", E4M3, torch.inf)),
            "divided": (gradients.divided, ()),
        }
        return run_ranks(run_each, ranks, tmp_path_factory.mktemp(f"gradients{ranks}"), calls)

    return found


@first_slow("ranks", [2, 4])
@first_slow(("how", "dtype", "bound"), [("fsdp", "E4M3", 28), ("fsdp", "E5M2", 22), ("ddp", "E4M3", 26)])
def test_gradients_are_near(how: str, dtype: str, bound: float, ranks: int, on_ranks: Any) -> None:
    """And the same on all ranks."""
    first, *others = on_ranks(ranks)
    for name, exact in first[f"{how} in high precision"]["gradients"].items():
        got = first[f"{how} {dtype}"]["gradients"][name]
        assert sqnr_db(exact, got) > bound
        assert all(torch.equal(got, other[f"{how} {dtype}"]["gradients"][name]) for other in others)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 4])
def test_bytes_are_counted(ranks: int, on_ranks: Any) -> None:
    """About one byte for each number that FSDP2 reduces, and twice that under DDP; 4 and 8 in FP32."""
    for found in on_ranks(ranks):
        numbers = sum(found["fsdp E4M3"]["sizes"])  # of all ranks, padding not counted
        share = (ranks - 1) / ranks
        assert 1 <= found["fsdp E4M3"]["bytes"] / (numbers * share) < 1.25  # small layers: blocks are filled up
        assert 2 <= found["ddp E4M3"]["bytes"] / (numbers * share) < 2.2
        assert found["fsdp E5M2"]["bytes"] == found["fsdp E4M3"]["bytes"]


@pytest.mark.slow
def test_an_overflow_reaches_all_that_reduce_it(on_ranks: Any) -> None:
    for found in on_ranks(2):
        assert not any(g.isfinite().any() for g in found["fsdp overflowed"]["gradients"].values())


@pytest.mark.slow
def test_other_factors_are_refused(on_ranks: Any) -> None:
    for found in on_ranks(2):
        assert "call set_gradient_divide_factor only with the number of ranks" in found["divided"]


def test_the_documents_say_what_was_measured() -> None:
    from benchmarks.gradient_wire import PATH, distances

    found = json.loads(PATH.read_text())
    text = " ".join((Path(__file__).parents[2] / "docs" / "distributed.md").read_text().split())
    away = distances(found["runs"])
    first, second = (one["losses"][-1] for one in found["runs"]["bf16"].values())
    assert f"{found['steps']} steps, two seeds: the last held-out loss is {away['E4M3']:.2%}".replace("%", " %") in text
    assert f"{away['E5M2']:.2%} with E5M2; the two seeds lie {second / first - 1:.1%} apart".replace("%", " %") in text
    for one in found["runs"]["E4M3"].values():
        assert one["bytes_per_number"] == pytest.approx(2 * 132 / 128, rel=1e-3)  # twice 1.03


def test_ranks_are_averaged(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two ranks with equal gradients, without the other: the mean is what each has."""

    def exchanged(received: torch.Tensor, sent: torch.Tensor, **_: Any) -> None:
        received.copy_(sent[:1].expand_as(received))

    def gathered(every: torch.Tensor, message: torch.Tensor, **_: Any) -> None:
        every.copy_(message.expand_as(every))

    monkeypatch.setattr(torch.distributed, "get_world_size", lambda group: 2)
    monkeypatch.setattr(torch.distributed, "all_to_all_single", exchanged)
    monkeypatch.setattr(torch.distributed, "all_gather_into_tensor", gathered)
    own = torch.linspace(1, 448, 128)
    both = torch.cat([own, own])
    bucket = SimpleNamespace(buffer=both.clone)
    assert torch.allclose(GradientWire(E4M3).hook(None, bucket).value(), both, rtol=2**-3)
    for op, factor in ((torch.distributed.ReduceOp.AVG, 1), (torch.distributed.ReduceOp.SUM, 2)):
        reduced = torch.empty(128)
        GradientWire(E4M3)(reduced, both, None, op)
        assert torch.allclose(reduced, factor * own, rtol=2**-4)
