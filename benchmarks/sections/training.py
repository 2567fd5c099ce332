"""``linears``, ``layers``, ``sweep``, ``smallest``, ``train``: forward and backward, beside bf16 and torchao."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any, Final

import torch
from torch import nn

from benchmarks import measure
from benchmarks.attention import CAUSAL, STOCK, Linears, llama
from benchmarks.contenders import ablations, bf16, compare, fp8, fresh, others, training_step, usual
from benchmarks.measure import DEVICE, MIB
from benchmarks.records import Run
from benchmarks.sections.limits import bound

BF16 = torch.bfloat16


def linears(run: Run) -> None:
    """The four linears of a layer: hidden 4096, ffn 16384, 15872 tokens (Transformer Engine's benchmark)."""
    tokens, hidden, inner = (64, 128, 256) if run.tiny else (15872, 4096, 16384)
    bound(run, "linears", tokens, Linears.sizes(hidden, inner))
    x = torch.randn(tokens, hidden, device=DEVICE, dtype=BF16, requires_grad=True)
    contenders = usual(run) | others(run, "linears") | ({} if run.tiny else ablations(run, "tensorwise"))
    compare(run, "linears", lambda: Linears(hidden, inner, DEVICE), x, contenders)


def layers(run: Run) -> None:
    """Two Llama-3-8B decoder layers, 8192 tokens, causal attention; bf16 with transformers' own mask beside it."""
    count, tokens, hidden = (1, 64, 128) if run.tiny else (2, 8192, 4096)
    inner, keys = hidden * 7 // 2, hidden // 4
    projections = [(hidden, hidden), (hidden, keys), (hidden, keys), (hidden, hidden)]
    bound(run, "layers", tokens, [*projections, (hidden, inner), (hidden, inner), (inner, hidden)])
    x = torch.randn(1, tokens, hidden, device=DEVICE, dtype=BF16, requires_grad=True)
    memory: dict[str, Any] = {"save": "memory"}
    contenders = usual(run) | others(run, "layers")
    contenders["tensorwise, save memory"] = fp8(run, "tensorwise", **memory)
    if not run.tiny:
        memory |= {"save_activations_in_fp8": True}
        contenders["tensorwise, save memory, activations in FP8"] = fp8(run, "tensorwise", **memory)
        contenders |= ablations(run, "tensorwise")
    compare(run, "layers", lambda: llama(count, hidden, CAUSAL, DEVICE), x, contenders)
    if run.late(0.95):
        return run.write("layers", contender="bf16, transformers' own mask", stopped="the section's time is over")
    with run.attempt("layers", contender="bf16, transformers' own mask"):
        model, _ = bf16(run)(llama(count, hidden, STOCK, DEVICE))
        step = training_step(model, x)
        for _ in range(3):
            step()
        run.write(
            "layers", contender="bf16, transformers' own mask", measure="alone",
            wall_ms=measure.wall_ms(step), profile=measure.profile(step),
        )  # fmt: skip
    return None


SHAPES = ((4096, 4096), (4096, 14336), (2048, 8192), (2048, 2048), (4096, 1024))  # (inputs, outputs)
TOKENS = (256, 512, 1024, 2048, 8192)


def sweep(run: Run) -> None:
    """One linear, forward and backward: wall, host and GPU time apart, so that a ratio below 1 has a reason."""
    cases = [(16, 64, 128)] if run.tiny else [(tokens, *shape) for tokens in TOKENS for shape in SHAPES]
    for tokens, inputs, outputs in cases:
        x = torch.randn(tokens, inputs, device=DEVICE, dtype=BF16, requires_grad=True)
        dy = torch.randn(tokens, outputs, device=DEVICE, dtype=BF16)
        case = {"tokens": tokens, "inputs": inputs, "outputs": outputs}
        for name, compile in {k: v for k, v in usual(run).items() if k != "blockwise"}.items():
            if run.late():
                return run.write("sweep", **case, stopped="the section's time is over")
            with run.attempt("sweep", **case, contender=name), fresh():
                linear = nn.Linear(inputs, outputs, bias=False, device=DEVICE, dtype=BF16)
                model, backend = compile(linear)

                def step(model: Any = model, x: Any = x, dy: Any = dy) -> None:
                    model(x).backward(dy)
                    model.zero_grad(set_to_none=True)
                    x.grad = None

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


WIDTHS: Final = (256, 512, 768, 1024, 1536, 2048, 3072, 4096)  # of a Llama layer


def pays(run: Run, width: int, tokens: int) -> bool:
    """Measure one layer in bf16, and under tensorwise with every legal GEMM in FP8; whether that was faster."""
    steps: dict[str, Callable[[], None]] = {}
    predicted = dict[str, float | None]()
    x = torch.randn(1, tokens, width, device=DEVICE, dtype=BF16, requires_grad=True)
    for name, compile in (("bf16", bf16(run)), ("tensorwise", fp8(run, "tensorwise", min_speedup=0.0))):
        model, backend = compile(llama(1, width, CAUSAL, DEVICE))
        steps[name] = training_step(model, x)
        for _ in range(3):
            steps[name]()
        if backend is not None:
            predicted = {f"{g.name} {g.gemm}": g.speedup for g in backend.report.gemms}
    times: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(3 if run.tiny else 7):  # in turns
        for name, step in steps.items():
            times[name].append(measure.wall_ms(step, 2 if run.tiny else 20))
    ratio = statistics.median(b / t for b, t in zip(times["bf16"], times["tensorwise"], strict=True))
    profiles = {name: measure.profile(step, longest=8) for name, step in steps.items()}
    run.write(
        "smallest", hidden=width, tokens=tokens, speedup=ratio, predicted=predicted, profiles=profiles,
        wall_ms={name: statistics.median(values) for name, values in times.items()},
    )  # fmt: skip
    return ratio > 1


def smallest(run: Run) -> None:
    """Bisect the narrowest Llama layer whose forward and backward are faster in FP8, for few tokens and for many."""
    for tokens in (32,) if run.tiny else (8192, 2048):
        widths = WIDTHS[:2] if run.tiny else WIDTHS
        low, high = 0, len(widths)  # those from ``high`` on are faster, those before ``low`` are not
        while low < high:
            middle = (low + high) // 2
            if run.late():
                return run.write("smallest", tokens=tokens, stopped="the section's time is over")
            with fresh():
                low, high = (low, middle) if pays(run, widths[middle], tokens) else (middle + 1, high)
        found = widths[high] if high < len(widths) else None
        run.write("smallest", tokens=tokens, narrowest=found)
    return None


def train(run: Run) -> None:
    """Steps with fused AdamW: what an update costs, cached weights against none bit for bit, growth of memory."""
    hidden, tokens, steps = (128, 64, 6) if run.tiny else (4096, 4096, 20)
    contenders = {
        "bf16": bf16(run),
        "tensorwise": fp8(run, "tensorwise", cache_weights="update"),
        "tensorwise, each forward": fp8(run, "tensorwise"),
        "delayed": fp8(run, "delayed", cache_weights="update"),
        "delayed, each forward": fp8(run, "delayed"),
        "blockwise": fp8(run, "blockwise", cache_weights="update"),
    }
    losses: dict[str, list[float]] = {}
    for name, compile in contenders.items():
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
                memory.append(measure.allocated() / MIB)
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
