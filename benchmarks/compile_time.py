"""The compile time that fp8graph adds: ``make bench``. Runs on any machine.

compile    cold and warm compile of a training step in fresh processes (the first step less the second), plain Inductor
           beside fp8graph: the whole model, its layers one by one (the way of FSDP2, with names bound), and repeated
           regions; with how often each traced and generated code, its C++ kernels, and CPU seconds, the C++ compiler's
           included, which other work on the machine changes less than seconds
gpu        CPU seconds to generate one Llama-3-8B layer for sm_90, forward and backward, and to compile its kernels in
           all configurations that Inductor would try; no GPU is needed
passes     time in fp8graph's own passes against the number of layers, on meta tensors, with a linear fit

Results are written after each process: a run that is stopped loses nothing. ``gpu`` has a file of its own, so that
``--layers --pass-layers``, without numbers, measures it alone and leaves the other as it was.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any, Final

import torch
from torch._dynamo.utils import compilation_time_metrics, counters

import fp8graph
from benchmarks.records import console, write_json

PASS_LAYERS: Final = (8, 16, 32, 80, 126)
PLAIN, WHOLE = "inductor", "tensorwise"
PLAIN_LAYERS, LAYERS = "inductor, layer by layer", "tensorwise, layer by layer, names bound"
REGIONS: Final = "tensorwise, regions"
CONTENDERS: Final = (PLAIN, WHOLE, PLAIN_LAYERS, LAYERS, REGIONS)
BF16, TARGET = "bf16", "sm_90"
GPU_CODE: Final = "gpu_code_time"  # a file of its own: each says when and with what all of it was measured
GPU_CONTENDERS: Final = (BF16, "tensorwise", "delayed")


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


def cpu_seconds() -> float:
    """CPU seconds, user and system, of this process and of its children that have ended: compilers."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(each.ru_utime + each.ru_stime for each in used)


def warm_up(name: str) -> None:
    """Compile a small linear as the contender does: what torch does once per process and set of C++ flags."""
    backend: Any = "inductor" if name in (PLAIN, PLAIN_LAYERS) else fp8graph.Backend(recipe="tensorwise")
    small = torch.compile(torch.nn.Linear(32, 32).bfloat16(), backend=backend)
    small(torch.randn(16, 32, dtype=torch.bfloat16)).sum().backward()


def compile_once(name: str, layers: int) -> dict[str, Any]:
    """The first training step of this process: its seconds less those of the next, and what was done how often."""
    from fp8graph.tools.demo import build_model

    model = build_model(0, layers)
    ids = torch.randint(0, 256, (8, 128), generator=torch.Generator().manual_seed(0))
    warm_up(name)
    torch._dynamo.reset()
    counters.clear()
    compiled_before = len(compile_times("compile_file"))
    start, start_cpu = time.perf_counter(), cpu_seconds()
    run, backend = compiled(name, model)
    run(input_ids=ids, labels=ids).loss.backward()
    first, first_cpu = time.perf_counter(), cpu_seconds()
    run(input_ids=ids, labels=ids).loss.backward()  # a CPU multiplies FP8 slowly: not what is compared
    return {
        "seconds": (first - start) - (time.perf_counter() - first),
        "cpu_seconds": (first_cpu - start_cpu) - (cpu_seconds() - first_cpu),
        "passes": 0.0 if backend is None else backend.pass_seconds,
        "counts": counts() | {"kernels": len(compile_times("compile_file")) - compiled_before},
    }


def compile_times(phase: str) -> list[float]:
    """The seconds of each time that torch entered a phase of its own."""
    return compilation_time_metrics.get(phase, [])


def generate_once(name: str) -> dict[str, Any]:
    """A layer's kernels for ``TARGET`` in this process: CPU seconds to generate them and to compile each once."""
    from benchmarks.decoder_layer import DecoderLayer
    from fp8graph.offline.kernels import precompile

    def generated(tokens: int, hidden: int, inner: int) -> list[str]:
        layer = DecoderLayer(hidden, hidden // 4, inner, device="meta", dtype=torch.bfloat16)
        x = torch.empty(tokens, hidden, dtype=torch.bfloat16, device="meta", requires_grad=True)
        policy = fp8graph.Policy(default=None if name == BF16 else name)
        kernels = fp8graph.explain(layer, x, policy=policy, target=TARGET).kernels
        return [kernel.source for kernel in kernels if kernel.kind == "triton"]

    precompile(generated(256, 128, 256)[0], TARGET)  # what torch and triton do once per process
    torch._dynamo.reset()
    start = cpu_seconds()
    sources = generated(8192, 4096, 14336)
    after = cpu_seconds()
    distinct = dict.fromkeys(sources)
    configurations = sum(len(precompile(source, TARGET).compile_results) for source in distinct)
    return {
        "generate": after - start,
        "compile": cpu_seconds() - after,
        "kernels": len(sources),
        "distinct": len(distinct),
        "configurations": configurations,
    }


def counts() -> dict[str, int]:
    """Counts of graphs by Dynamo, traces by AOTAutograd and code generations by Inductor since ``counters.clear()``."""
    aot, inductor = counters["aot_autograd"], counters["inductor"]
    return {
        "graphs": counters["stats"]["unique_graphs"],
        "traces": aot["total"] - aot["autograd_cache_hit"],
        "code_generations": inductor["fxgraph_cache_miss"] + inductor["fxgraph_cache_bypass"],
    }


def in_fresh_process(cache: str, *arguments: str) -> dict[str, Any]:
    """The result of this module with ``arguments`` and the caches of Inductor and triton in the folder ``cache``; its
    last line of errors where it fails.
    """
    command = [sys.executable, "-m", "benchmarks.compile_time", *arguments]
    caches = {"TORCHINDUCTOR_CACHE_DIR": cache, "TRITON_CACHE_DIR": f"{cache}/triton"}
    environment = {**os.environ, **caches}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        return {"failed": (done.stderr.strip().splitlines() or [f"exit {done.returncode}"])[-1]}
    return json.loads(done.stdout.splitlines()[-1])


def measure_compile(
    layers: int, rounds: int, names: list[str], results: dict[str, Any], write: Callable[[], None]
) -> None:
    """All contenders in turns, so that all see the same machine; ``results`` and the file grow with each process."""
    found: dict[str, Any] = {"seconds": {}, "cpu_seconds": {}, "counts": {}, "passes": [], "failed": {}}
    results[str(layers)] = found
    for _ in range(rounds):
        for name in names:
            with tempfile.TemporaryDirectory() as cache:
                for temperature in ("cold", "warm"):
                    case = f"{name} {temperature}"
                    one = in_fresh_process(cache, "--once", name, str(layers))
                    if "failed" in one:
                        found["failed"][case] = one["failed"]
                        console.print(f"{layers} layers, {case}: {one['failed']}", markup=False)
                        break
                    found["seconds"].setdefault(case, []).append(one["seconds"])
                    found["cpu_seconds"].setdefault(case, []).append(one["cpu_seconds"])
                    found["counts"][case] = one["counts"]
                    if case == f"{WHOLE} cold":
                        found["passes"].append(one["passes"])
                    times = f"{one['seconds']:.1f} s, {one['cpu_seconds']:.1f} CPU s"
                    console.print(f"{layers} layers, {case}: {times}, {one['counts']}", markup=False)
                    write()


def measure_gpu(rounds: int, names: list[str], results: dict[str, Any], write: Callable[[], object]) -> None:
    """All contenders of a GPU's layer in turns; ``results`` and the file grow with each process."""
    for _ in range(rounds):
        for name in names:
            with tempfile.TemporaryDirectory() as cache:
                one = in_fresh_process(cache, "--gpu-once", name)
            results.setdefault(name, []).append(one)
            console.print(f"{TARGET}, {name}: {one}", markup=False)
            write()


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
    parser.add_argument("--gpu-once", metavar="CONTENDER", help=argparse.SUPPRESS)
    parser.add_argument("--layers", nargs="*", type=int, default=[2, 32])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--contenders", nargs="+", choices=CONTENDERS, default=list(CONTENDERS))
    parser.add_argument("--gpu", nargs="*", choices=GPU_CONTENDERS, default=list(GPU_CONTENDERS))
    parser.add_argument("--pass-layers", nargs="*", type=int, default=list(PASS_LAYERS))
    arguments = parser.parse_args()
    if arguments.once:
        print(json.dumps(compile_once(arguments.once[0], int(arguments.once[1]))))
        return 0
    if arguments.gpu_once:
        print(json.dumps(generate_once(arguments.gpu_once)))
        return 0
    results: dict[str, Any] = {"passes": {}, "compile": {}}
    gpu: dict[str, Any] = {}

    def write() -> None:
        write_json("compile_time", results)

    if arguments.pass_layers:
        results["passes"] = pass_times(arguments.pass_layers)
        write()
    measure_gpu(arguments.rounds, arguments.gpu, gpu, lambda: write_json(GPU_CODE, gpu))
    for layers in arguments.layers:  # 32: minutes each, so once
        rounds = arguments.rounds if layers <= 8 else 1
        measure_compile(layers, rounds, arguments.contenders, results["compile"], write)
    console.print("python -m benchmarks.report --write makes the tables and pictures of it")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
