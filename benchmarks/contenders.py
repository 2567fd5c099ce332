"""Who is compared: bf16, fp8graph's recipes and their variations, torchao; each alone, then all in shuffled turns."""

from __future__ import annotations

import contextlib
import dataclasses
import random
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import torch
from torch import Tensor, nn

import fp8graph
from benchmarks import measure
from benchmarks.records import Run, importable
from benchmarks.sections import limits
from fp8graph.recipes import resolve_recipe
from fp8graph.tools import bench
from fp8graph.tools.record import coverage
from fp8graph.tools.record.contenders import converted_by_torchao
from fp8graph.tools.record.machine import MIB, allocated, baseline, synchronize

RECIPES: Final = ("tensorwise", "delayed", "rowwise", "blockwise")
OF_POLICY: Final = ("min_speedup", "extends")
ROUNDS: Final = 10
TORCHAO: Final = {f"torchao {recipe}": recipe for recipe in ("tensorwise", "rowwise")}
# the options of mode="max-autotune-no-cudagraphs"
AUTOTUNED: Final[Mapping[str, Any]] = {"max_autotune": True, "coordinate_descent_tuning": True}
Compiled = tuple[Any, fp8graph.Backend | None]  # the model to call, and fp8graph's backend where it is one
Compile = Callable[[nn.Module], Compiled]


def bf16(run: Run, **options: Any) -> Compile:
    backend = "inductor" if run.compiler == "inductor" else "aot_eager"
    kwargs: dict[str, Any] = {"options": options} if options and run.compiler == "inductor" else {}
    return lambda model: (torch.compile(model, backend=backend, **kwargs), None)


def fp8(run: Run, recipe: Any, **settings: Any) -> Compile:
    """fp8graph with its defaults but ``settings``; those in ``OF_POLICY`` are the policy's."""

    def compile(model: nn.Module) -> Compiled:
        chosen = dict(settings)
        policy = {key: chosen.pop(key) for key in OF_POLICY if key in chosen}
        backend = fp8graph.Backend(fp8graph.Policy(default=recipe, **policy), compiler=run.compiler, **chosen)
        return torch.compile(model, backend=backend), backend

    return compile


def torchao(run: Run, recipe: str) -> Compile:
    return lambda model: bf16(run)(converted_by_torchao(model, recipe))


def everyone(run: Run, first: Sequence[str] = ()) -> dict[str, Compile]:
    """Return bf16, the recipes, torchao's and the variations; after bf16, the baseline, those named ``first``."""
    made = {
        "bf16": bf16(run),
        **{recipe: fp8(run, recipe) for recipe in RECIPES},
        **{name: torchao(run, recipe) for name, recipe in TORCHAO.items()},
        **ablations(run, "tensorwise"),
        "bf16, max-autotune": bf16(run, **AUTOTUNED),
    }
    return {name: made[name] for name in dict.fromkeys(("bf16", *first, *made))}


def ablations(run: Run, recipe: str) -> dict[str, Compile]:
    """One setting changed at a time: what each of them is worth."""
    resolved: Any = resolve_recipe(recipe)
    fast = dataclasses.replace(resolved, use_fast_accum=(True, True, True))
    options: dict[str, dict[str, Any]] = {
        "combo kernels": {"combo_kernels": True},
        "no combo kernels": {"combo_kernels": False},
        "exact division": {"eager_numerics.division_rounding": True},
        "approximate division": {"eager_numerics.division_rounding": False},
    }
    memory: dict[str, Any] = {"save": "memory"}
    return {
        f"{recipe}, save memory": fp8(run, recipe, **memory),
        f"{recipe}, fast accumulation": fp8(run, fast),
        f"{recipe}, save memory, activations in FP8": fp8(run, recipe, **memory, save_activations_in_fp8=True),
        f"{recipe}, no groups": fp8(run, recipe, fuse_linears=False),
        f"{recipe}, all that is legal": fp8(run, recipe, min_speedup=0.0),
        **{f"{recipe}, {name}": fp8(run, recipe, inductor_options=option) for name, option in options.items()},
    }


def training_step(model: Any, x: Tensor) -> Callable[[], None]:
    """Forward and backward. dy is random: GEMMs of constant numbers take less power and are faster."""
    step = bench.training_step(model, x, torch.randn_like(x))  # every model here returns the shape of its input

    def marked() -> None:
        torch.compiler.cudagraph_mark_step_begin()
        step()

    return marked


def compare(
    run: Run,
    section: str,
    make: Callable[[], nn.Module],
    x: Tensor,
    contenders: Mapping[str, Compile],
    gemms: Mapping[str, limits.Gemms] = {},
) -> None:
    """Forward and backward of each: alone (compile time, host, GPU, memory, kernels), then in turns (wall time).

    Args:
        gemms: of a scaling the GEMMs of the same model alone, in bf16 and in FP8: measured in the same rounds, they
            give R, the limit by which the contenders are judged.
    """
    steps: dict[str, Callable[[], Any]] = {}
    for name, compile in run.chosen(contenders).items():
        if run.late(0.75):
            run.write(section, contender=name, stopped="the section's time is over")
        elif name in TORCHAO and not importable("torchao"):
            run.write(section, contender=name, skipped="torchao is not installed")
        else:
            with run.attempt(section, contender=name):
                steps[name] = _alone(run, section, name, make, compile, x)
    for scaling, pair in gemms.items():
        with run.attempt(section, measure="gemms", scaling=scaling):
            steps |= {f"GEMMs alone, {name}": call for name, call in pair().items()}
    medians = in_turns(run, section, steps)
    for scaling in gemms:
        before, after = (medians.get(f"GEMMs alone, {name}") for name in ("bf16", scaling))
        if before and after:
            run.write(section, measure="gemms", scaling=scaling, bf16_ms=before, fp8_ms=after, R=before / after)


def _alone(
    run: Run, section: str, name: str, make: Callable[[], nn.Module], compile: Compile, x: Tensor
) -> Callable[[], None]:
    """Measure one contender, and return its step. All that a failure leaves is gone with this function's frame."""
    before, loaded, start = baseline(), measure.loaded_code(), time.perf_counter()
    model, backend = compile(make())
    step = training_step(model, x)
    for _ in range(3):
        step()
    synchronize()
    run.write(
        section, contender=name, measure="alone", first_3_steps_s=round(time.perf_counter() - start, 2),
        resident_mib=(allocated() - before) / MIB, peak_mib=measure.peak_mib(step, before),
        host_ms=measure.host_ms(step), events_ms=measure.events_ms(step), **measure.board(step),
        profile=measure.profile(step), configurations=measure.chosen_configurations(loaded), **coverage(backend),
    )  # fmt: skip
    return step


def in_turns(run: Run, section: str, steps: Mapping[str, Callable[[], Any]], **case: Any) -> dict[str, float]:
    """Call each once a round, in an order drawn anew, so that what slows the machine slows all; return the medians."""
    times: dict[str, list[float]] = {name: [] for name in steps}
    for done in range(2 if run.tiny else ROUNDS):
        if done >= 3 and run.late():
            break
        order = [name for name in steps if len(times[name]) == done]  # one that failed has its line
        random.Random(done).shuffle(order)
        for name in order:
            with run.attempt(section, **case, contender=name, measure="rounds"):
                times[name].append(measure.wall_ms(steps[name], 2 if run.tiny else 5))
    medians = {name: statistics.median(values) for name, values in times.items() if values}
    for name, median in medians.items():
        values = times[name]
        run.write(
            section, **case, contender=name, measure="rounds", wall_ms=median, low_ms=min(values),
            high_ms=max(values), rounds_ms=values,
        )  # fmt: skip
    return medians


@contextlib.contextmanager
def fresh() -> Any:
    """Nothing of another contender: Dynamo's caches and free memory."""
    torch.compiler.reset()
    baseline()
    torch.manual_seed(0)
    yield
