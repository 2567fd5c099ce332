"""What fp8graph adds to compile time: ``make bench``. Runs on any machine.

compile    cold and warm compile of a training step, plain Inductor and fp8graph, each in a fresh process
passes     time in fp8graph's own passes against the number of layers, on meta tensors, with a linear fit
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from typing import Any

import matplotlib
import torch

import fp8graph
from benchmarks.common import RESULTS, console, write

PASS_LAYERS = (8, 16, 32, 80, 126)


def compile_once(backend: str, layers: int) -> None:
    """One training step of a fresh process; prints its seconds as JSON."""
    from fp8graph.demo import build_model

    model = build_model(0, layers)
    ids = torch.randint(0, 256, (8, 128), generator=torch.Generator().manual_seed(0))
    small = torch.compile(torch.nn.Linear(8, 8))  # what torch does once per process is nobody's compile time
    small(torch.randn(2, 8)).sum().backward()
    chosen: Any = "inductor" if backend == "inductor" else fp8graph.Backend(recipe=backend)
    start = time.perf_counter()
    torch.compile(model, backend=chosen)(input_ids=ids, labels=ids).loss.backward()
    print(json.dumps({"seconds": time.perf_counter() - start, "passes": passes_of(chosen)}))


def passes_of(backend: Any) -> float:
    return backend.pass_seconds if isinstance(backend, fp8graph.Backend) else 0.0


def compile_times(layers: int, rounds: int) -> dict[str, Any]:
    """Plain and FP8 in turns, so that both see the same machine."""
    times: dict[str, list[float]] = {}
    passes: list[float] = []
    for _ in range(rounds):
        for backend in ("inductor", "tensorwise"):
            with tempfile.TemporaryDirectory() as cache:
                for temperature in ("cold", "warm"):
                    command = [sys.executable, "-m", "benchmarks.compile_time", "--once", backend, str(layers)]
                    environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": cache}
                    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
                    found = json.loads(done.stdout.splitlines()[-1])
                    times.setdefault(f"{backend} {temperature}", []).append(found["seconds"])
                    if backend != "inductor" and temperature == "cold":
                        passes.append(found["passes"])
    cold = list(zip(times["inductor cold"], times["tensorwise cold"], passes, strict=True))
    warm = list(zip(times["inductor warm"], times["tensorwise warm"], strict=True))
    result: dict[str, Any] = {
        "seconds": times,
        "cold_ratio": statistics.median(fp8 / plain for plain, fp8, _ in cold),
        "warm_ratio": statistics.median(fp8 / plain for plain, fp8 in warm),
        "passes_share": statistics.median(p / plain for plain, _, p in cold),
    }
    console.print(
        f"{layers} layers: cold {result['cold_ratio']:.2f} x plain Inductor, warm {result['warm_ratio']:.2f} x, "
        f"own passes {100 * result['passes_share']:.1f} % of the plain compile"
    )
    return result


def pass_times(layer_counts: tuple[int, ...]) -> dict[str, Any]:
    """Seconds in the passes for a Llama of each depth, and the line through them."""
    from transformers import LlamaForCausalLM

    from fp8graph.models.llama import tiny_config

    seconds: dict[int, float] = {}
    for layers in layer_counts:
        torch._dynamo.reset()
        with torch.device("meta"):
            model: Any = LlamaForCausalLM(tiny_config(layers)).bfloat16()
        ids = torch.zeros(1, 64, dtype=torch.long)
        report = fp8graph.explain(model, input_ids=ids, labels=ids)
        seconds[layers] = report.pass_seconds
        console.print(f"{layers} layers: {seconds[layers]:.2f} s in the passes")
    slope, intercept = statistics.linear_regression(list(seconds), list(seconds.values()))
    worst = max(abs(intercept + slope * n - s) / s for n, s in seconds.items())
    return {"seconds": seconds, "per_layer": slope, "fixed": intercept, "worst_deviation_from_line": worst}


def plot(passes: dict[str, Any]) -> None:
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(6, 4))
    counts = list(passes["seconds"])
    axes.plot(counts, list(passes["seconds"].values()), "o", label="measured")
    line = [passes["fixed"] + passes["per_layer"] * n for n in counts]
    axes.plot(counts, line, "-", label=f"{1e3 * passes['per_layer']:.0f} ms a layer")
    axes.set(xlabel="layers", ylabel="seconds in fp8graph's passes", title="Pass time of a Llama training graph")
    axes.legend()
    figure.savefig(RESULTS / "compile_time.png", dpi=120, bbox_inches="tight")


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--once", nargs=2, metavar=("BACKEND", "LAYERS"), help=argparse.SUPPRESS)
    parser.add_argument("--layers", nargs="+", type=int, default=[2, 32])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--pass-layers", nargs="+", type=int, default=list(PASS_LAYERS))
    arguments = parser.parse_args()
    if arguments.once:
        compile_once(arguments.once[0], int(arguments.once[1]))
        return 0
    passes = pass_times(tuple(arguments.pass_layers))
    compiles = {n: compile_times(n, arguments.rounds if n <= 8 else 1) for n in arguments.layers}  # minutes each
    write("compile_time", {"passes": passes, "compile": compiles})
    plot(passes)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
