"""The demo: what it chooses on a machine of given rates, its progress, its verdict, and a run of three steps."""

from __future__ import annotations

import dataclasses
import io
import itertools
import math
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from fp8graph.tools import demo
from fp8graph.tools.demo import TrainingRun, run_demo, train, verdict
from fp8graph.tools.demo_choice import (
    BATCH,
    COMPILATION,
    ENOUGH,
    FEWEST,
    FP8_STEP,
    LAST_PART,
    LEAST,
    MOST,
    SECONDS,
    SEQUENCE,
    SIZES,
    Dtype,
    Size,
    choose_again,
    choose_compiler,
    choose_size,
    choose_steps,
)
from helpers import in_one_test

LARGE, MIDDLE, SMALL = SIZES


def tiny_model() -> Any:
    return demo.build_model(0, 1, hidden_size=64, intermediate_size=64, num_attention_heads=1, num_key_value_heads=1)


@in_one_test(
    ("bf16", "fp32", "choice"),
    [
        (2e10, 1.5e10, (LARGE, "bf16")),  # two cores with AVX-512 and its bf16
        (1e10, 1.2e10, (LARGE, "bf16")),  # a little slower than FP32: bf16 is what models are trained in
        (8e8, 1.1e10, (LARGE, "FP32")),  # AVX2: torch multiplies bf16 in a loop of its own
        (5e8, 6e9, (MIDDLE, "FP32")),
        (1e8, 1.5e9, (SMALL, "FP32")),
        (1.0, 1.0, (SMALL, "bf16")),  # whatever that machine is
    ],
)
def test_size_and_type_follow_the_rates(bf16: float, fp32: float, choice: tuple[object, Dtype]) -> None:
    assert choose_size({"bf16": bf16, "FP32": fp32}, SECONDS - 10) == choice


def test_a_machine_that_is_twice_as_fast_gets_no_smaller_size() -> None:
    rates = [1e8 * 2.0**power for power in range(12)]
    sizes = [SIZES.index(choose_size({"bf16": rate, "FP32": rate}, SECONDS)[0]) for rate in rates]
    assert sizes == sorted(sizes, reverse=True)
    assert {*sizes} == {0, 1, 2}


def test_more_steps_take_a_smaller_size() -> None:
    rates: dict[Dtype, float] = {"bf16": 1.2e10, "FP32": 1e10}
    assert choose_size(rates, SECONDS, steps=20) == (LARGE, "bf16")
    assert choose_size(rates, SECONDS, steps=1000) == (SMALL, "bf16")


@pytest.mark.parametrize("size", SIZES)
def test_weights_of_a_size_are_those_of_its_model(size: Size) -> None:
    named = demo.build_model(0, **dataclasses.asdict(size)).named_parameters()
    assert size.weights == sum(p.numel() for name, p in named if p.ndim == 2 and "embed" not in name)


@in_one_test(
    ("step", "seconds", "steps"),
    [(1e-3, 100.0, MOST), (1.0, LAST_PART + 100, 100), (1.0, LAST_PART + 3, FEWEST), (60.0, -5.0, FEWEST)],
)
def test_steps_fill_the_time_that_is_left(step: float, seconds: float, steps: int) -> None:
    assert choose_steps(step, seconds) == steps


@in_one_test(
    ("done", "step", "seconds", "steps"),
    [
        (5, 1.0, LAST_PART + 95.0, 100),  # as fast as before
        (5, 0.5, LAST_PART + 95.0, 100),  # faster: the learning rate has begun to follow these steps
        (5, 2.0, 2 * LAST_PART + 90.0, 50),  # what comes after them takes twice as long, too
        (5, 4.0, 2 * LAST_PART + 95.0, 5 + int((95.0 - LAST_PART) / 4)),  # but not more than three times as long
        (5, 9.0, 60.0, FEWEST),
        (30, 9.0, LAST_PART, 30),  # enough for a comparison: it ends here
    ],
)
def test_a_machine_that_becomes_slower_gets_fewer_steps(done: int, step: float, seconds: float, steps: int) -> None:
    assert choose_again(100, done=done, step=step, before=1.0, seconds=seconds) == steps


@in_one_test(("load", "steps"), [(1.0, ENOUGH), (1.5, 34), (2.0, 21), (3.0, FEWEST)])
def test_load_that_comes_with_the_training_makes_it_shorter(load: float, steps: int) -> None:
    """From the longest step for which a size is chosen, in the time that then is left."""
    before, left, done = (SECONDS - COMPILATION - LAST_PART) / ENOUGH, SECONDS - COMPILATION, 0
    chosen = choose_steps(before, left)
    while done < chosen:
        done, left = done + 1, left - load * before
        chosen = choose_again(chosen, done=done, step=load * before, before=before, seconds=left)
    assert done == pytest.approx(steps, abs=1)
    assert left >= load * LAST_PART - 1e-6 or done == FEWEST


def test_fp8_runs_node_by_node_where_its_compilation_would_take_too_long() -> None:
    assert choose_compiler(compilation=40.0, step=0.3, seconds=120.0) == "inductor"
    assert choose_compiler(compilation=100.0, step=0.3, seconds=60.0) == "eager"
    assert choose_compiler(compilation=10.0, step=100 / (LEAST * (1 + FP8_STEP)), seconds=LAST_PART + 100) == "eager"


def test_progress_is_lines_with_an_estimate_outside_of_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = iter([0.0, 2.0, 6.0, 7.0, 12.0])  # at the start, and after each step
    monkeypatch.setattr(time, "monotonic", lambda: next(seconds))
    file = io.StringIO()
    with demo.progress(8, Console(file=file)) as advance:
        for step in range(1, 5):
            advance(f"step {step}", 8)
    assert file.getvalue() == "step 2, about 18 s left\nstep 4, about 12 s left\n"


def test_progress_is_a_bar_on_a_terminal() -> None:
    file = io.StringIO()
    with demo.progress(2, Console(file=file, force_terminal=True, width=80)) as advance:
        advance("step 1", 2)
        advance("step 2", 2)
    assert "━" in file.getvalue()
    assert "step 2" in file.getvalue()


def test_both_runs_see_the_same_batches_and_get_fewer_steps_together() -> None:
    data = demo.batches(demo.corpus(), FEWEST + 5, 0, 1)
    models = [tiny_model() for _ in range(2)]
    runs = [TrainingRun(name="x", model=m, compiled=m, compile_seconds=0.0, step_seconds=0.0) for m in models]
    shown: list[tuple[str, int]] = []
    train(runs, data, lambda *each: shown.append(each), lambda done, _: FEWEST if done > 2 else FEWEST + 5)
    assert len(shown) == len(runs[0].losses) == FEWEST
    assert shown[0][0].startswith(f"step 1 of {FEWEST + 5}: loss x ")
    assert [steps for _, steps in shown] == [FEWEST + 5] * 2 + [FEWEST] * (FEWEST - 2)
    assert runs[0].losses == runs[1].losses
    assert runs[0].mean < runs[0].losses[0]


def test_one_long_step_is_not_taken_for_a_slower_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = [1.0, 1.0, 60.0, 1.0, 1.0, 2.0, 2.0, 2.0]  # of each step
    times = itertools.chain.from_iterable((0.0, each) for each in seconds)
    model = tiny_model()
    run = TrainingRun(name="x", model=model, compiled=model, compile_seconds=0.0, step_seconds=0.0)
    data, shown = demo.batches(demo.corpus(), len(seconds), 0, 1), list[float]()
    monkeypatch.setattr(time, "monotonic", lambda: next(times))
    train([run], data, lambda *_: None, lambda _, step: (shown.append(step), len(data))[1])
    assert shown[2:] == [1.0, 1.0, 1.0, 1.0, 2.0, 2.0]


def test_the_learning_rate_follows_the_steps_that_are_left() -> None:
    steps = 100
    optimizer, rate = demo.optimizer_of(torch.nn.Linear(1, 1), lambda: steps)
    rates = [optimizer.param_groups[0]["lr"]]
    for step in range(1, 40):
        steps = 40 if step > 4 else 100
        optimizer.step()
        rate.step()
        rates.append(optimizer.param_groups[0]["lr"])
    assert rates[:4] == sorted(rates[:4])
    assert max(rates) == pytest.approx(1e-3, rel=0.01)
    assert rates[5:] == sorted(rates[5:], reverse=True)
    assert rates[-1] < 1.2e-4


def test_steps_that_are_timed_change_no_weight() -> None:
    model = tiny_model()
    before = {name: p.clone() for name, p in model.named_parameters()}
    run = demo.prepare("x", model, "eager", demo.batches(demo.corpus(), 1, 0, 1)[0])
    assert all(p.equal(before[name]) for name, p in model.named_parameters())
    assert run.step_seconds > 0


def test_losses_that_are_not_finite_are_left_out_of_the_picture_and_fail_the_verdict() -> None:
    model = torch.nn.Linear(1, 1)
    runs = [
        TrainingRun(name=name, model=model, compiled=model, compile_seconds=0.0, step_seconds=0.0)
        for name in ("a", "b")
    ]
    runs[0].losses, runs[1].losses = [3.0, 2.0], [math.nan, math.nan]
    assert "o" in demo.plot_terminal(runs[0], runs[1], 80)
    assert not verdict(runs[0].losses, runs[1].losses)[1]


def test_the_verdict() -> None:
    ones = [9.0] * 5 + [1.0] * demo.LAST
    assert verdict(ones, ones) == (0.0, True)
    difference, good = verdict(ones, [1.021] * 30)
    assert (round(difference, 3), good) == (0.021, False)
    assert verdict(ones, [0.985] * 30)[1]
    assert verdict([9.0, 9.0, 1.0, 1.0], [5.0, 5.0, 1.0, 1.0]) == (0.0, True)  # of few losses, the second half


@pytest.mark.slow
def test_a_machine_that_became_slower_while_it_compiled_trains_few_steps(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(demo, "rates", lambda tokens: {"bf16": 1.0, "FP32": 1.0})
    started = time.monotonic() - SECONDS
    arguments: dict[str, Any] = {"seed": 0, "recipe": "tensorwise", "compiler": "eager", "out": tmp_path}
    assert run_demo(steps=None, started=started, judge=lambda *_: (0.0, True), **arguments) == 0
    out = capsys.readouterr().out
    assert f"Chosen: {FEWEST} steps of {BATCH} x {SEQUENCE} bytes in bf16 and in FP8, node by node" in out
    assert "42 of 45 GEMMs in FP8" in out


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dtype", "good", "code"),
    [("bf16", True, 0), ("FP32", True, 0), pytest.param("bf16", False, 1, marks=pytest.mark.release)],
)
def test_demo_in_short(
    dtype: Dtype,
    good: bool,
    code: int,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rates: dict[Dtype, float] = {"bf16": 1.0, "FP32": 1.0, dtype: 2.0}
    monkeypatch.setattr(demo, "rates", lambda tokens: {**rates})  # of a machine on which only the smallest size fits
    done = run_demo(
        steps=3,
        seed=0,
        recipe="tensorwise",
        compiler="eager",
        out=tmp_path,
        started=time.monotonic(),
        judge=lambda *_: (0.0, good),
    )
    captured = capsys.readouterr()
    out = captured.out
    assert done == code
    assert f"0.4 million parameters in {dtype} (FP32 is {rates['FP32'] / rates['bf16']} times as fast" in out
    assert f"Chosen: 3 steps of {BATCH} x {SEQUENCE} bytes in {dtype} and in FP8, node by node: about " in out
    assert "42 of 45 GEMMs in FP8" in out
    assert f"difference of FP8 from {dtype} +0.00% (at most 2% is fine)" in out
    assert "SQNR" in out
    assert (tmp_path / "loss.png").stat().st_size > 10_000
    assert f"compiling forward and backward of {dtype}" in captured.err
