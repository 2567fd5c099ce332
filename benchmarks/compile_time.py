"""The compile time that fp8graph adds: ``make bench``. Runs on any machine.

compile    cold and warm compile of a training step in fresh processes (the first step less the second), plain Inductor
           beside fp8graph: the whole model, its layers one by one (the way of FSDP2, with names bound), and repeated
           regions; with how often each traced and generated code
passes     time in fp8graph's own passes against the number of layers, on meta tensors, with a linear fit

The file of results is written after each process: a run that is stopped loses nothing.
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
from typing import Any, Final

import torch
from torch._dynamo.utils import counters

import fp8graph
from benchmarks.records import console, write_json

PASS_LAYERS: Final = (8, 16, 32, 80, 126)
PLAIN, WHOLE = "inductor", "tensorwise"
PLAIN_LAYERS, LAYERS = "inductor, layer by layer", "tensorwise, layer by layer, names bound"
REGIONS: Final = "tensorwise, regions"
CONTENDERS: Final = (PLAIN, WHOLE, PLAIN_LAYERS, LAYERS, REGIONS)


def compiled(name: str, model: Any) -> tuple[Any, fp8graph.Backend | None]:
    """The model to call, and its backend, as the contender ``name`` compiles it."""
    if name == PLAIN:
        return torch.compile(model), None
    if name == PLAIN_LAYERS:
        for layer in model.model.layers:
            layer.compile()
        return model, None
    if name == REGIONS:
        settings: dict[str, Any] = {"regions": "auto"}
        model = fp8graph.compile(model, recipe="tensorwise", **settings)
        return model, None
    backend = fp8graph.Backend(recipe="tensorwise")
    if name == WHOLE:
        return torch.compile(model, backend=backend), backend
    backend.bind(model)
    for layer in model.model.layers:
        layer.compile(backend=backend)
    return model, backend


def compile_once(name: str, layers: int) -> dict[str, Any]:
    """The first training step of this process: its seconds less those of the next, and what was done how often."""
    from fp8graph.tools.demo import build_model

    model = build_model(0, layers)
    ids = torch.randint(0, 256, (8, 128), generator=torch.Generator().manual_seed(0))
    small = torch.compile(torch.nn.Linear(8, 8))  # what torch does once per process is nobody's compile time
    small(torch.randn(2, 8)).sum().backward()
    counters.clear()
    start = time.perf_counter()
    run, backend = compiled(name, model)
    run(input_ids=ids, labels=ids).loss.backward()
    first = time.perf_counter()
    run(input_ids=ids, labels=ids).loss.backward()  # a CPU multiplies FP8 slowly: not what is compared
    return {
        "seconds": (first - start) - (time.perf_counter() - first),
        "passes": 0.0 if backend is None else backend.pass_seconds,
        "counts": counts(),
    }


def counts() -> dict[str, int]:
    """Counts of graphs by Dynamo, traces by AOTAutograd and code generations by Inductor since ``counters.clear()``."""
    aot, inductor = counters["aot_autograd"], counters["inductor"]
    return {
        "graphs": counters["stats"]["unique_graphs"],
        "traces": aot["total"] - aot["autograd_cache_hit"],
        "code_generations": inductor["fxgraph_cache_miss"] + inductor["fxgraph_cache_bypass"],
    }


def in_fresh_process(name: str, layers: int, cache: str) -> dict[str, Any]:
    """:func:`compile_once` with Inductor's caches in the folder ``cache``; its last line of errors where it fails."""
    command = [sys.executable, "-m", "benchmarks.compile_time", "--once", name, str(layers)]
    environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": cache}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        return {"failed": (done.stderr.strip().splitlines() or [f"exit {done.returncode}"])[-1]}
    return json.loads(done.stdout.splitlines()[-1])


def measure_compile(layers: int, rounds: int, names: list[str], results: dict[str, Any], passes: Any) -> None:
    """All contenders in turns, so that all see the same machine; ``results`` and the file grow with each process."""
    found: dict[str, Any] = {"seconds": {}, "counts": {}, "passes": [], "failed": {}}
    results[str(layers)] = found
    for _ in range(rounds):
        for name in names:
            with tempfile.TemporaryDirectory() as cache:
                for temperature in ("cold", "warm"):
                    case = f"{name} {temperature}"
                    one = in_fresh_process(name, layers, cache)
                    if "failed" in one:
                        found["failed"][case] = one["failed"]
                        console.print(f"{layers} layers, {case}: {one['failed']}", markup=False)
                        break
                    found["seconds"].setdefault(case, []).append(one["seconds"])
                    found["counts"][case] = one["counts"]
                    if case == f"{WHOLE} cold":
                        found["passes"].append(one["passes"])
                    console.print(f"{layers} layers, {case}: {one['seconds']:.1f} s, {one['counts']}", markup=False)
                    write_json("compile_time", {"passes": passes, "compile": results})


def pass_times(layer_counts: list[int]) -> dict[str, Any]:
    """Seconds in the passes for a Llama of each depth, and the line through them."""
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 128, "vocab_size": 256}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128}
    seconds: dict[int, float] = {}
    for layers in layer_counts:
        torch._dynamo.reset()
        with torch.device("meta"):
            model: Any = LlamaForCausalLM(LlamaConfig(num_hidden_layers=layers, **sizes)).bfloat16()
        ids = torch.zeros(1, 64, dtype=torch.long)
        report = fp8graph.explain(model, input_ids=ids, labels=ids)
        seconds[layers] = report.pass_seconds
        console.print(f"{layers} layers: {seconds[layers]:.2f} s in the passes")
    if len(seconds) < 2:
        return {"seconds": seconds}
    slope, intercept = statistics.linear_regression(list(seconds), list(seconds.values()))
    worst = max(abs(intercept + slope * n - s) / s for n, s in seconds.items())
    return {"seconds": seconds, "per_layer": slope, "fixed": intercept, "worst_deviation_from_line": worst}


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--once", nargs=2, metavar=("CONTENDER", "LAYERS"), help=argparse.SUPPRESS)
    parser.add_argument("--layers", nargs="+", type=int, default=[2, 32])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--contenders", nargs="+", choices=CONTENDERS, default=list(CONTENDERS))
    parser.add_argument("--pass-layers", nargs="*", type=int, default=list(PASS_LAYERS))
    arguments = parser.parse_args()
    if arguments.once:
        print(json.dumps(compile_once(arguments.once[0], int(arguments.once[1]))))
        return 0
    passes, compiles = pass_times(arguments.pass_layers), dict[str, Any]()
    write_json("compile_time", {"passes": passes, "compile": compiles})
    for layers in arguments.layers:  # 32: minutes each, so once
        measure_compile(layers, arguments.rounds if layers <= 8 else 1, arguments.contenders, compiles, passes)
    console.print("python -m benchmarks.report --write makes the tables and pictures of it")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
