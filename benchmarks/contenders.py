"""Who is compared: bf16, fp8graph's recipes and their variations, torchao; each alone, then all in turns."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any, Final

import torch
from torch import Tensor, nn

import fp8graph
from benchmarks import measure
from benchmarks.measure import DEVICE, MIB
from benchmarks.records import Run, importable
from fp8graph.recipes import resolve_recipe

RECIPES: Final = ("tensorwise", "delayed", "rowwise", "blockwise")
OF_POLICY: Final = ("min_speedup", "extends")
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


def converted_by_torchao(
    model: nn.Module, recipe: str, module_filter_fn: Callable[[nn.Module, str], bool] | None = None
) -> nn.Module:
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training  # pyright: ignore[reportMissingImports]

    config: Any = Float8LinearConfig.from_recipe_name(recipe)
    return convert_to_float8_training(model, config=config, module_filter_fn=module_filter_fn)


def usual(run: Run) -> dict[str, Compile]:
    """bf16, which is the baseline, and one contender per recipe; with --tiny only two of them."""
    recipes = RECIPES[:2] if run.tiny else RECIPES
    return {"bf16": bf16(run), **{recipe: fp8(run, recipe) for recipe in recipes}}


def others(run: Run, section: str) -> dict[str, Compile]:
    """torchao's two recipes, or a line that says it is missing."""
    if not importable("torchao"):
        run.write(section, contender="torchao", skipped="torchao is not installed")
        return {}
    return {f"torchao {recipe}": torchao(run, recipe) for recipe in ("tensorwise", "rowwise")}


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
    return {
        f"{recipe}, fast accumulation": fp8(run, fast),
        f"{recipe}, no groups": fp8(run, recipe, group=False),
        f"{recipe}, all that is legal": fp8(run, recipe, min_speedup=0.0),
        **{f"{recipe}, {name}": fp8(run, recipe, inductor_options=option) for name, option in options.items()},
    }


def training_step(model: Any, x: Tensor) -> Callable[[], None]:
    """Forward and backward. dy is random: GEMMs of constant numbers take less power and are faster."""
    dy = torch.randn_like(x)  # every model here returns the shape of its input

    def step() -> None:
        model(x).backward(dy)
        model.zero_grad(set_to_none=True)
        x.grad = None

    return step


def after_update(step: Callable[[], None], backend: fp8graph.Backend) -> Callable[[], None]:
    """``step`` as it is after an optimizer's: the FP8 copies of the weights are made anew."""

    def run() -> None:
        fp8graph.refresh_weights(backend)
        step()

    return run


def coverage(backend: fp8graph.Backend | None) -> dict[str, Any]:
    if backend is None:
        return {}
    report = backend.report
    return {"gemms": len(report.gemms), "gemms_in_fp8": sum(g.recipe is not None for g in report.gemms)}


def compare(
    run: Run, section: str, make: Callable[[], nn.Module], x: Tensor, contenders: Mapping[str, Compile]
) -> None:
    """Forward and backward of each: alone (compile time, host, GPU, memory, kernels), then in turns (wall time).

    Weights "kept": the step that does not change them. "updated": fp8graph quantizes all of them again. bf16 has
    nothing to do again, and torchao does it in every step.
    """
    steps: dict[tuple[str, str], Callable[[], None]] = {}
    for name, compile in contenders.items():
        if run.late(0.75):
            run.write(section, contender=name, stopped="the section's time is over")
            continue
        with run.attempt(section, contender=name):
            before, loaded, start = measure.allocated(), measure.loaded_code(), time.perf_counter()
            model, backend = compile(make())
            step = training_step(model, x)
            for _ in range(3):
                step()
            measure.synchronize()
            run.write(
                section, contender=name, measure="alone", first_3_steps_s=round(time.perf_counter() - start, 2),
                resident_mib=(measure.allocated() - before) / MIB, peak_mib=measure.peak_mib(step, before),
                host_ms=measure.host_ms(step), events_ms=measure.events_ms(step), profile=measure.profile(step),
                configurations=measure.chosen_configurations(loaded), **coverage(backend),
            )  # fmt: skip
            steps[name, "kept"] = step
            if backend is not None and backend.report.weights:
                again = after_update(step, backend)
                again()
                updated = measure.profile(again)
                run.write(section, contender=name, measure="alone", weights="updated", profile=updated)
                steps[name, "updated"] = again
    in_turns(run, section, steps)


def in_turns(run: Run, section: str, steps: Mapping[tuple[str, str], Callable[[], None]]) -> None:
    """Each once a round, so that a machine that slows down slows all; ratios are medians over the rounds' ratios."""
    times: dict[tuple[str, str], list[float]] = {key: [] for key in steps}
    for done in range(2 if run.tiny else 7):
        if done >= 3 and run.late():
            break
        for (name, weights), step in steps.items():
            if len(times[name, weights]) < done:  # it failed, and has its line
                continue
            with run.attempt(section, contender=name, weights=weights, measure="rounds"):
                times[name, weights].append(measure.wall_ms(step, 2 if run.tiny else 5))
    baseline = times.get(("bf16", "kept"), [])
    for (name, weights), values in times.items():
        if values:
            ratios = [b / v for b, v in zip(baseline, values, strict=False)]
            run.write(
                section, contender=name, measure="rounds", weights=weights, wall_ms=statistics.median(values),
                low_ms=min(values), high_ms=max(values), speedup=statistics.median(ratios) if ratios else None,
            )  # fmt: skip


@contextlib.contextmanager
def fresh() -> Any:
    """Nothing of another contender: Dynamo's caches and free memory."""
    torch._dynamo.reset()
    gc.collect()  # compiled modules are in cycles: their memory would count as the next contender's
    torch.manual_seed(0)
    yield
    if DEVICE.type == "cuda":
        torch.cuda.empty_cache()
