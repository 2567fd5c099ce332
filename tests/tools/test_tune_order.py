"""benchmarks/tune_order.py and order_evidence.py: what is switched, and the arithmetic of rank correlations."""

from __future__ import annotations

import math
import random
import statistics
from typing import Any

import pytest
import torch

from benchmarks import order_evidence, tune_order
from benchmarks.order_evidence import ceiling, half_by_half, interval, rank_correlation, ranks
from benchmarks.records import RESULTS


def test_equal_values_share_their_rank() -> None:
    assert ranks([10.0, 20.0, 20.0, 5.0, 20.0]) == [2.0, 4.0, 4.0, 1.0, 4.0]
    assert rank_correlation([1, 2, 2, 3], [10, 20, 30, 40]) == pytest.approx(math.sqrt(0.9))
    assert math.isnan(rank_correlation([1, 1, 1], [1, 2, 3]))


def test_without_ties_it_is_spearmans_formula() -> None:
    draw = random.Random(0)
    a, b = ([draw.random() for _ in range(30)] for _ in range(2))
    places = [[sorted(own).index(value) for value in own] for own in (a, b)]
    squares = sum((x - y) ** 2 for x, y in zip(*places, strict=True))
    assert rank_correlation(a, b) == pytest.approx(1 - 6 * squares / (30 * (30**2 - 1)))
    assert rank_correlation(a, [math.exp(5 * value) for value in a]) == pytest.approx(1)
    assert rank_correlation(a, [-value for value in a]) == pytest.approx(-1)


def made_up(sites: int, signal: float) -> list[dict[str, Any]]:
    """The batches of each site are its number times ``signal``, and noise of one size."""
    draw = random.Random(0)
    rows: list[dict[str, Any]] = []
    for site in range(sites):
        batches = [signal * site + draw.gauss(0, 1) for _ in range(32)]
        rows.append({"score": site, "measured": statistics.fmean(batches), "batch_errors": batches})
    return rows


def test_halves_say_how_much_of_a_measurement_is_noise() -> None:
    assert half_by_half(made_up(50, 10)) == pytest.approx(1)
    rows = made_up(50, 0.02)
    half = half_by_half(rows)
    assert 0.4 < half < 0.7  # variances: 0.083 of the sites, 0.0625 of the mean of a half
    reached = rank_correlation([row["score"] for row in rows], [row["measured"] for row in rows])
    assert ceiling(half) == pytest.approx(reached, abs=0.08)  # the score here is perfect
    assert abs(half_by_half(made_up(50, 0))) < 0.3
    assert [ceiling(half) for half in (-0.2, 0, 0.5, 1)] == pytest.approx([0, 0, math.sqrt(2 / 3), 1])
    assert ceiling(0.5, 0.5) == pytest.approx(2 / 3)  # scores as noisy as what was measured


def test_the_interval_is_that_of_the_sites() -> None:
    assert interval([made_up(50, 10)]) == pytest.approx((1, 1))
    low, high = interval([made_up(50, 0.02)])
    few_low, few_high = interval([made_up(10, 0.02)])
    assert 0.05 < high - low < few_high - few_low


def test_the_order_in_parts() -> None:
    """In each layer the scores are right; those of one linear in both layers are upside down."""
    scores = {"0.mlp.up_proj": 3.0, "0.mlp.down_proj": 4.0, "1.mlp.up_proj": 1.0, "1.mlp.down_proj": 2.0}
    measured = (1.0, 2.0, 3.0, 4.0)
    rows = [
        {"site": f"model.layers.{site}", "score": score, "measured": one}
        for (site, score), one in zip(scores.items(), measured, strict=True)
    ]
    assert order_evidence.within(rows, order_evidence.layer) == pytest.approx(1)
    assert order_evidence.within(rows, order_evidence.linear) == pytest.approx(-1)
    assert order_evidence.correlation(rows) == pytest.approx(-0.6)


def test_a_batch_is_the_mean_of_its_windows() -> None:
    row = {"window_changes": [1.0, -1.0, 1.0, -1.0, 2.0, 2.0, 4.0, 4.0]}
    assert order_evidence.samples(row) == [0.0, 9.0]


def test_each_matrix_has_equal_weight() -> None:
    exact = [{"a": torch.ones(2, 2), "b": torch.full((1, 4), 100.0)}, {"a": torch.ones(2, 2), "b": torch.zeros(1, 4)}]
    found = [{"a": torch.ones(2, 2), "b": torch.full((1, 4), 110.0)}, {"a": 3 * torch.ones(2, 2), "b": exact[1]["b"]}]
    each = tune_order.relative_errors(found, exact)
    assert each == pytest.approx([0.01, 4 / 2])
    assert statistics.fmean(each) == pytest.approx((16 / 8 + 400 / 40000) / 2)  # all errors over all squares


@pytest.mark.slow
def test_one_gemm_is_switched() -> None:
    """fprop changes the loss; dgrad the gradients of earlier weights; wgrad that of its own weight."""
    switched = tune_order.Switched(2, "fp32", "tensorwise")
    tokens = torch.randint(0, 256, (4, 32), generator=torch.Generator().manual_seed(0))

    def now() -> tuple[float, tune_order.Gradients]:
        return switched.losses([tokens]).mean().item(), tune_order.gradients(switched.model, tokens)

    loss, exact = now()
    site = "model.layers.1.mlp.up_proj"
    for gemm in ("fprop", "dgrad", "wgrad"):
        with switched.switched(site, gemm):
            other, found = now()
        changed = {name for name in exact if not torch.equal(found[name], exact[name])}
        assert (other != loss) == (gemm == "fprop")
        if gemm == "dgrad":
            assert f"{site}.weight" not in changed
            assert "model.layers.0.self_attn.q_proj.weight" in changed
        if gemm == "wgrad":
            assert changed == {f"{site}.weight"}
    again, found = now()
    assert again == loss
    assert all(torch.equal(found[name], exact[name]) for name in exact)


@pytest.mark.slow
def test_the_results_are_in_the_documents() -> None:
    runs = order_evidence.read(RESULTS / "tune_order_cpu")
    table, short = order_evidence.tables(runs)
    page = (RESULTS / "README.md").read_text(encoding="utf-8")
    assert [line for line in [*table, *order_evidence.table_of_parts(runs)] if line not in page] == []
    page = (RESULTS.parents[1] / "docs" / "tune.md").read_text(encoding="utf-8")
    assert [line for line in short if line not in page] == []
