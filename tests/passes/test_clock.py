"""clock: a graph is never slower by the clock than in high precision, as far as a model of the host can tell."""

from __future__ import annotations

import dataclasses
import json
import logging
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import fp8graph
from benchmarks.attention import CAUSAL, llama
from fp8graph import Policy
from fp8graph.passes.assign.clock import Clock, Others, in_time
from fp8graph.passes.assign.profit import Choice, judge
from helpers import first_fast
from predicted import BF16, H200, linear

RECORDED = Path(__file__).parents[2] / "benchmarks/results/first_hour/20261127-084524.jsonl"
NOTHING = Others(seconds=0.0, launches=0.0)


def some(count: int, m: int, k: int, n: int, **speed: float) -> list[Choice]:
    """The GEMMs of equal linears, of which each pays by the GPU's time."""
    own = dataclasses.replace(H200, **speed)
    found: list[Choice] = []
    for layer in range(count):
        for choice in linear(m, k, n, "tensor", own).values():
            products = tuple(
                dataclasses.replace(
                    product,
                    reads=tuple((dataclasses.replace(q, key=(layer, m, q.key)), how) for q, how in product.reads),
                )
                for product in choice.products
            )
            found.append(dataclasses.replace(choice, products=products))
    assert min(judge(found, 0).values()) >= 1.05
    return found


def test_the_longer_of_gpu_and_host_is_the_time_of_a_graph() -> None:
    assert (Clock(gpu=2.0, host=3.0).seconds, Clock(gpu=2.0, host=3.0).waits) == (3.0, True)
    assert (Clock(gpu=3.0, host=2.0).seconds, Clock(gpu=3.0, host=2.0).waits) == (3.0, False)


def test_a_graph_that_the_gpu_paces_is_as_each_gemm_decides() -> None:
    large = some(4, 8192, 4096, 4096)
    timed = in_time(large, large, NOTHING, 1.05)
    assert timed.chosen == large
    assert timed.now == timed.then
    assert not timed.now.waits


def test_a_graph_that_the_host_would_pace_stays_in_high_precision() -> None:
    """The same GEMMs, on a host that takes ten times as long: bf16 has fewer launches."""
    large = some(4, 8192, 4096, 4096, host_launch=400e-6)
    timed = in_time(large, large, NOTHING, 1.05)
    assert timed.chosen == []
    assert timed.then.waits
    assert timed.now.host == pytest.approx(12 * 400e-6)  # one launch for each GEMM
    assert timed.then.host > 2 * timed.now.host


@pytest.mark.parametrize("change", ["CUDA graph", "no bar"])
def test_the_host_does_not_count_in_cuda_graphs_nor_without_a_bar(change: str) -> None:
    large = some(4, 8192, 4096, 4096, host_launch=0.0 if change == "CUDA graph" else 400e-6)
    timed = in_time(large, large, NOTHING, 1.05 if change == "CUDA graph" else 0)
    assert timed.chosen == large
    assert timed.now.waits == (change == "no bar")


def test_gemms_that_save_the_least_for_each_launch_leave_first() -> None:
    """One wide linear among narrow ones, which alone would make the host set the pace."""
    wide, narrow = some(1, 8192, 8192, 8192), some(40, 4096, 2048, 2048)
    everything = [*narrow, *wide]
    timed = in_time(everything, everything, NOTHING, 1.05)
    assert timed.then.waits
    assert set(wide) <= set(timed.chosen)
    assert not set(narrow) <= set(timed.chosen)
    assert timed.now.seconds < timed.then.seconds
    assert in_time(everything, [], NOTHING, 1.05).now.seconds >= 1.05 * timed.now.seconds


@pytest.mark.parametrize("gain", [0.02, 0.08])
def test_the_clock_has_to_save_what_the_bar_asks_for(gain: float) -> None:
    """A GEMM that is 1.05 times as fast takes 0.048 of its time less; the size of the graph does not matter."""
    (fprop, *_) = some(1, 8192, 4096, 4096)
    for more in (0.0, 1.0):
        before = in_time([fprop], [], Others(seconds=more, launches=0), 1.05).now.gpu
        end = before - gain * fprop.seconds()
        launches = end / H200.host_launch - in_time([fprop], [fprop], NOTHING, 0).now.host / H200.host_launch
        timed = in_time([fprop], [fprop], Others(seconds=more, launches=launches), 1.05)
        assert timed.then.waits
        assert timed.then.seconds == pytest.approx(end)
        assert timed.chosen == ([fprop] if gain > 1 - 1 / 1.05 else [])


def test_other_kernels_keep_the_gpu_busy() -> None:
    """Behind an attention that takes long, there is time to launch more."""
    narrow = some(12, 4096, 2048, 2048)
    alone, behind = (in_time(narrow, narrow, Others(seconds=s, launches=1), 1.0) for s in (0.0, 20e-3))
    assert alone.chosen == []
    assert behind.chosen == narrow


def test_fixed_gemms_are_in_fp8_on_both_sides() -> None:
    """Those whose weights arrive quantized: their launches are not to be had back."""
    fixed, large = some(4, 4096, 2048, 2048), some(1, 8192, 4096, 4096)
    timed = in_time([*fixed, *large], large, NOTHING, 1.05, fixed=fixed)
    assert timed.chosen == []
    without = in_time([*fixed, *large], [], NOTHING, 1.05)
    assert timed.now.host > without.now.host


# ---- what the compiler does


def timed(hidden: int, tokens: int) -> tuple[Clock, Clock]:
    """A Llama layer with all of its GEMMs in FP8, and with none of them."""
    given: list[Any] = []
    assign: Any = sys.modules["fp8graph.passes.assign"]  # the package has the function under this name
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(assign, "in_time", lambda *args, **kwargs: given.append(args) or in_time(*args, **kwargs))
        model = llama(1, hidden, CAUSAL, torch.device("meta"))
        x = torch.empty(1, tokens, hidden, dtype=BF16, device="meta", requires_grad=True)
        fp8graph.explain(model, x, policy=Policy(default="tensorwise", min_speedup=0), target="sm_90")
    every, accepted, others, _ = given[-1]
    return in_time(every, accepted, others, 0).now, in_time(every, [], others, 0).now


def recorded() -> dict[tuple[int, int], dict[str, Any]]:
    lines = map(json.loads, RECORDED.read_text(encoding="utf-8").splitlines())
    return {(line["hidden"], line["tokens"]): line for line in lines if "profiles" in line and "hidden" in line}


@first_fast(("hidden", "tokens"), sorted(recorded(), key=(1536, 8192).__ne__))
def test_recorded_layers_that_are_faster_by_the_clock_are_told_from_the_others(hidden: int, tokens: int) -> None:
    """Six of six, on one H200: two are faster in FP8, four are not."""
    line = recorded()[hidden, tokens]
    fp8, bf16 = timed(hidden, tokens)
    assert (bf16.seconds > fp8.seconds) == (line["speedup"] > 1)
    assert fp8.waits == (line["speedup"] < 1)
    for clock, name in ((bf16, "bf16"), (fp8, "tensorwise")):
        launches = clock.host / H200.host_launch
        assert 0.75 < launches / line["profiles"][name]["launches"] < 1.05
        assert 0.75 < 1e3 * clock.gpu / line["profiles"][name]["gpu_ms"] < 1.25


def report_on(**settings: Any) -> fp8graph.Report:
    """On sixteen narrow linears, which pay by the GPU's time."""
    layers = [nn.Linear(2048, 2048, bias=False, device="meta", dtype=BF16) for _ in range(16)]
    x = torch.empty(4096, 2048, device="meta", dtype=BF16, requires_grad=True)
    settings = {"recipe": "delayed"} | settings if "policy" not in settings else settings
    return fp8graph.explain(nn.Sequential(*layers), x, target="sm_90", **settings)


@pytest.mark.slow
def test_the_report_says_who_sets_the_pace() -> None:
    refused, replayed = report_on(), report_on(inductor_options={"triton.cudagraphs": True})
    reasons = {gemm.reason for gemm in refused.gemms}
    assert len(reasons) == 1
    assert " for the graph, whose pace the host would set: " in reasons.pop()
    assert all(gemm.by_profitability and gemm.speedup and gemm.speedup < 1.05 for gemm in refused.gemms)
    assert not any(gemm.recipe for gemm in refused.gemms)
    assert all(gemm.recipe for gemm in replayed.gemms)
    assert [r.what for r in replayed.refusals] == []
    everything = report_on(policy=Policy(default="delayed", min_speedup=0))
    (note,) = [r.reason for r in everything.refusals if r.what == "CUDA graphs"]
    assert note.startswith("the host sets the pace: ")
    assert 'options={"mode": "reduce-overhead"}' in note
    assert all(gemm.recipe for gemm in everything.gemms)


def test_a_model_that_gains_nothing_is_told_so(caplog: pytest.LogCaptureFixture) -> None:
    """After the first step, once: the report is read by few."""
    model = nn.Linear(64, 64, bias=False, dtype=BF16)
    for bar in (1.05, 0):
        caplog.clear()
        backend = fp8graph.Backend(Policy(default="tensorwise", min_speedup=bar), compiler="eager", target="sm_90")
        with caplog.at_level(logging.WARNING, "fp8graph"):
            torch.compile(model, backend=backend)(torch.randn(32, 64, dtype=BF16, requires_grad=True))
            for _ in range(2):
                backend.check_step()
        said = [text for text in caplog.messages if text.startswith("None of the 3 GEMMs runs in FP8")]
        assert len(said) == (bar > 0)
