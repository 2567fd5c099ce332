"""``linears``, ``layers``, ``sweep``, ``smallest``, ``train``: forward and backward, beside bf16 and torchao."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import torch
from torch import nn
from torch._dynamo.utils import counters

from benchmarks import measure
from benchmarks.attention import CAUSAL, Linears, llama
from benchmarks.contenders import RECIPES, Compile, bf16, compare, everyone, fp8, fresh, in_turns, training_step
from benchmarks.measure import DEVICE
from benchmarks.published import CHOSEN, GRAPHS
from benchmarks.records import Run
from benchmarks.sections.limits import gemms_of
from fp8graph.tools import bench
from fp8graph.tools.record.machine import MIB, allocated

BF16 = torch.bfloat16


def linears_contenders(run: Run) -> dict[str, Compile]:
    """Return those that were never reached first."""
    return everyone(run, ["tensorwise", "torchao tensorwise", "delayed", "tensorwise, fast accumulation"])


def linears(run: Run) -> None:
    """The four linears of a layer: hidden 4096, ffn 16384, 15872 tokens (Transformer Engine's benchmark)."""
    tokens, hidden, inner = (64, 128, 256) if run.tiny else (15872, 4096, 16384)
    x = torch.randn(tokens, hidden, device=DEVICE, dtype=BF16, requires_grad=True)
    contenders = linears_contenders(run)
    gemms = gemms_of(tokens, Linears.sizes(hidden, inner), run.chosen(contenders))
    compare(run, "linears", lambda: Linears(hidden, inner, DEVICE), x, contenders, gemms)


def layers_contenders(run: Run) -> dict[str, Compile]:
    """Return those that were never reached first."""
    first = ["tensorwise", "torchao tensorwise", "tensorwise, save memory", "delayed", "tensorwise, fast accumulation"]
    return everyone(run, [*first, "bf16, max-autotune"])


def layers(run: Run) -> None:
    """Two Llama-3-8B decoder layers, 8192 tokens, causal attention without a mask."""
    count, tokens, hidden = (1, 64, 128) if run.tiny else (2, 8192, 4096)
    inner, keys = hidden * 7 // 2, hidden // 4
    projections = [(hidden, hidden), (hidden, keys), (hidden, keys), (hidden, hidden)]
    x = torch.randn(1, tokens, hidden, device=DEVICE, dtype=BF16, requires_grad=True)
    contenders = layers_contenders(run)
    gemms = gemms_of(tokens, [*projections, (hidden, inner), (hidden, inner), (inner, hidden)], run.chosen(contenders))
    compare(run, "layers", lambda: llama(count, hidden, CAUSAL, DEVICE), x, contenders, gemms)


SHAPES = ((4096, 4096), (4096, 14336), (2048, 8192), (2048, 2048), (4096, 1024))  # (inputs, outputs)
TOKENS = (256, 512, 1024, 2048, 8192)


def sweep_contenders(run: Run) -> dict[str, Compile]:
    return {"bf16": bf16(run), **{recipe: fp8(run, recipe) for recipe in RECIPES if recipe != "blockwise"}}


def sweep(run: Run) -> None:
    """One linear, forward and backward: wall, host and GPU time apart, so that a ratio below 1 has a reason."""
    cases = [(16, 64, 128)] if run.tiny else [(tokens, *shape) for tokens in TOKENS for shape in SHAPES]
    for tokens, inputs, outputs in cases:
        x = torch.randn(tokens, inputs, device=DEVICE, dtype=BF16, requires_grad=True)
        dy = torch.randn(tokens, outputs, device=DEVICE, dtype=BF16)
        case = {"tokens": tokens, "inputs": inputs, "outputs": outputs}
        for name, compile in run.chosen(sweep_contenders(run)).items():
            if run.late():
                return run.write("sweep", **case, stopped="the section's time is over")
            with run.attempt("sweep", **case, contender=name), fresh():
                linear = nn.Linear(inputs, outputs, bias=False, device=DEVICE, dtype=BF16)
                model, backend = compile(linear)
                step = bench.training_step(model, x, dy)
                for _ in range(3):
                    step()
                profile = measure.profile(step, longest=12) or {}
                decided = [] if backend is None else backend.report.gemms
                run.write(
                    "sweep", **case, contender=name, wall_ms=measure.wall_ms(step, 20), host_ms=measure.host_ms(step),
                    gpu_ms=profile.get("gpu_ms"), profile=profile or None,
                    in_fp8={g.gemm: g.speedup for g in decided if g.recipe},  # and what the model predicts
                )  # fmt: skip
    return None


WIDTHS: Final = (768, 1536, 3072, 1024, 2048, 4096, 512, 256)  # of a Llama layer, in the order of what they tell


def smallest_contenders(run: Run) -> dict[str, Compile]:
    """Return bf16, every legal GEMM in FP8, and those that are to pay; the first two also with CUDA graphs."""
    graphs = {"triton.cudagraphs": True}
    return {
        "bf16": bf16(run),
        "tensorwise": fp8(run, "tensorwise", min_speedup=0.0),
        CHOSEN: fp8(run, "tensorwise"),
        f"bf16{GRAPHS}": bf16(run, **graphs),
        f"tensorwise{GRAPHS}": fp8(run, "tensorwise", min_speedup=0.0, inductor_options=graphs),
    }


def smallest(run: Run) -> None:
    """Forward and backward of one narrow Llama layer: from which width on FP8 is faster by the clock."""
    for tokens in (32,) if run.tiny else (8192, 2048):
        for width in run.widths or (WIDTHS[-2:] if run.tiny else WIDTHS):
            case = {"hidden": width, "tokens": tokens}
            if run.late():
                return run.write("smallest", **case, stopped="the section's time is over")
            with fresh():
                _narrow(run, case)
    return None


def _narrow(run: Run, case: dict[str, int]) -> None:
    x = torch.randn(1, case["tokens"], case["hidden"], device=DEVICE, dtype=BF16, requires_grad=True)
    steps: dict[str, Callable[[], None]] = {}
    for name, compile in run.chosen(smallest_contenders(run)).items():
        counters.clear()
        with run.attempt("smallest", **case, contender=name):
            model, backend = compile(llama(1, case["hidden"], CAUSAL, DEVICE))
            step = training_step(model, x)
            for _ in range(4):  # CUDA graphs are recorded in the second
                step()
            profile = measure.profile(step, longest=8) or {}
            run.write(
                "smallest", **case, contender=name, measure="alone", host_ms=measure.host_ms(step),
                events_ms=measure.events_ms(step), launches=profile.get("launches"), profile=profile or None,
                skips=counters["inductor"]["cudagraph_skips"],
                predicted={f"{g.name} {g.gemm}": g.speedup for g in (backend.report.gemms if backend else ())},
            )  # fmt: skip
            steps[name] = step
    in_turns(run, "smallest", steps, **case)


def train_contenders(run: Run) -> dict[str, Compile]:
    return {
        "bf16": bf16(run),
        "tensorwise": fp8(run, "tensorwise", cache_weights="update"),
        "tensorwise, each forward": fp8(run, "tensorwise"),
        "delayed": fp8(run, "delayed", cache_weights="update"),
        "delayed, each forward": fp8(run, "delayed"),
        "blockwise": fp8(run, "blockwise", cache_weights="update"),
    }


def train(run: Run) -> None:
    """Steps with fused AdamW: what an update costs, cached weights against none bit for bit, growth of memory."""
    hidden, tokens, steps = (128, 64, 6) if run.tiny else (4096, 4096, 20)
    losses: dict[str, list[float]] = {}
    for name, compile in run.chosen(train_contenders(run)).items():
        if run.late():
            return run.write("train", contender=name, stopped="the section's time is over")
        with run.attempt("train", contender=name), fresh():
            layer = llama(1 if run.tiny else 2, hidden, CAUSAL, DEVICE)
            model, backend = compile(layer)
            optimizer = torch.optim.AdamW(layer.parameters(), lr=1e-4, fused=True)
            x = torch.randn(1, tokens, hidden, device=DEVICE, dtype=BF16)

            def step(model: Any = model, optimizer: Any = optimizer, x: Any = x) -> torch.Tensor:
                loss = (model(x).float() - 1).square().mean()
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                return loss.detach()

            found: list[torch.Tensor] = []
            memory: list[float] = []
            for _ in range(steps):
                found.append(step())
                memory.append(allocated() / MIB)
            losses[name] = [float(loss) for loss in found]
            run.write(
                "train", contender=name, losses=losses[name], resident_mib=[memory[3], memory[-1]],
                wall_ms=measure.wall_ms(step), host_ms=measure.host_ms(step), events_ms=measure.events_ms(step),
                weights_quantized=None if backend is None else backend.weights.quantized,
                profile=measure.profile(step),
            )  # fmt: skip
    for recipe in ("tensorwise", "delayed"):
        if {recipe, f"{recipe}, each forward"} <= losses.keys():
            cached, anew = losses[recipe], losses[f"{recipe}, each forward"]
            worst = max(abs(a - b) for a, b in zip(cached, anew, strict=True))
            run.write("train", check="cached weights change no loss", recipe=recipe, holds=cached == anew, worst=worst)
    return None
