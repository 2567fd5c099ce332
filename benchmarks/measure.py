"""The measurements: wall, host and GPU time apart, memory, and the kernels of a call."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable
from typing import Any, Final

import torch
from torch._inductor.codecache import PyCodeCache
from torch._inductor.runtime.triton_heuristics import CachingAutotuner

from fp8graph.offline.kernels import text_of
from fp8graph.tools.bench import elapsed
from fp8graph.tools.record import machine
from fp8graph.tools.record.machine import sampled, synchronize

GPU: Final = torch.cuda.is_available()
DEVICE: Final = torch.device("cuda" if GPU else "cpu")
LONGEST: Final = 80  # kernels that a profile lists: 25 left out 0.9 of 5.1 ms of Triton's
LONGEST_ON_CPU: Final = 20

# The first kind whose part of a name is found. cuDNN's attention is "cudnn_generated_fort_native_sdpa...", cuBLAS's
# GEMMs on Hopper are "nvjet_...".
KINDS: Final = {
    "triton": ("triton_",),
    "attention": ("flash", "fmha", "sdpa", "attention", "cudnn"),
    "gemm": ("nvjet", "gemm", "cutlass", "xmma", "cublas", "splitk"),
    "optimizer": ("multi_tensor_apply",),
    "copy": ("memcpy", "memset", "copy", "fill"),
}

Call = Callable[[], Any]


def wall_ms(run: Call, iterations: int = 5) -> float:
    """Milliseconds of one call, over ``iterations`` in a row: the longer of what the host and the GPU need."""
    return 1e3 * elapsed(run, iterations)


def host_ms(run: Call, rounds: int = 5) -> float:
    """Milliseconds until a call returns, the GPU idle before: what the host needs, the median of ``rounds``."""
    times: list[float] = []
    for _ in range(rounds):
        synchronize()
        start = time.perf_counter()
        run()
        times.append(1e3 * (time.perf_counter() - start))
    synchronize()
    return statistics.median(times)


def events_ms(run: Call, iterations: int = 5) -> float | None:
    """Milliseconds of one call between two CUDA events: the GPU's time with the gaps between kernels. None: no GPU."""
    if not GPU:
        return None
    synchronize()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(iterations):
        run()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / iterations


def replayed_ms(run: Call, iterations: int = 20, rounds: int = 7) -> float:
    """GPU milliseconds of one call without launches: replays of a CUDA graph of ``iterations`` calls (CPU: wall)."""
    for _ in range(3):
        run()
    synchronize()
    if not GPU:
        return wall_ms(run, 2)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(iterations):
            run()
    graph.replay()
    return statistics.median(events_ms(graph.replay, 1) or 0.0 for _ in range(rounds)) / iterations


def kind_of(kernel: str) -> str:
    """A key of ``KINDS``, or "other"."""
    name = kernel.lower()
    return next((kind for kind, parts in KINDS.items() if any(part in name for part in parts)), "other")


def kernels_of(events: Iterable[Any], calls: int, longest: int = LONGEST) -> dict[str, Any]:
    """Return the kernels that the profiler saw on the GPU in ``calls`` calls, and the host's longest rows; per call.

    Args:
        events: ``profiler.key_averages()``. Ranges that torch or the user named span kernels on the GPU's own row:
            counted too, they would count everything twice.
    """
    events = list(events)
    rows = [
        (event.key, event.count / calls, event.self_device_time_total / calls / 1e3)
        for event in events
        if str(event.device_type).endswith("CUDA") and not event.is_user_annotation and event.self_device_time_total
    ]
    on_cpu = [
        (event.key, event.count / calls, event.self_cpu_time_total / calls / 1e3)
        for event in events
        if str(event.device_type).endswith("CPU") and event.self_cpu_time_total
    ]
    rows.sort(key=lambda row: -row[2])
    on_cpu.sort(key=lambda row: -row[2])
    by_kind: dict[str, float] = {}
    for name, _, ms in rows:
        by_kind[kind_of(name)] = by_kind.get(kind_of(name), 0.0) + ms
    return {
        "gpu_ms": sum(ms for *_, ms in rows),
        "launches": sum(count for _, count, _ in rows),
        "by_kind_ms": {kind: round(ms, 4) for kind, ms in by_kind.items()},
        "kernels": [[name[:120], count, round(ms, 4)] for name, count, ms in rows[:longest]],  # name, launches, ms
        "cpu": [[name[:120], count, round(ms, 4)] for name, count, ms in on_cpu[:LONGEST_ON_CPU]],  # name, calls, ms
    }


def profile(run: Call, calls: int = 3, longest: int = LONGEST) -> dict[str, Any] | None:
    """:func:`kernels_of` ``calls`` calls; None without a GPU."""
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as record

    if not GPU:
        return None
    run()
    synchronize()
    with record(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as recorded:
        for _ in range(calls):
            run()
        synchronize()
    return kernels_of(recorded.key_averages(), calls, longest)


def loaded_code() -> int:
    """The number of modules of generated code that Inductor has loaded."""
    return len(PyCodeCache.modules)


def chosen_configurations(since: int = 0) -> list[tuple[str, int, str]]:
    """The kernels of the modules loaded since there were ``since``, as this GPU tuned them.

    Returns:
        Of each its name, how many configurations were tried, and the fastest.
    """
    loaded = [value for module in PyCodeCache.modules[since:] for value in vars(module).values()]
    return [
        (tuner.inductor_meta.get("kernel_name", ""), len(tuner.compile_results), text_of(tuner.launchers[0].config))
        for tuner in {id(value): value for value in loaded if isinstance(value, CachingAutotuner)}.values()
        if len(tuner.launchers) == 1  # more: it did not run
    ]


def board(run: Call, seconds: float = 1.5) -> dict[str, float | None]:
    """Return the median watts and SM clock while ``run`` is called for ``seconds``: the power cap sets the clock."""
    if not GPU:
        return {"watts": None, "sm_mhz": None}
    with sampled() as samples:
        end = time.perf_counter() + seconds
        while time.perf_counter() < end:
            run()
            synchronize()
    return samples.medians(last=round(4 * seconds))


def peak_mib(run: Call, before: int) -> float | None:
    """Return the most that a call has allocated at once beyond ``before`` bytes, in MiB; None without a GPU."""
    machine.start_peak()
    run()
    synchronize()
    return machine.peak_mib(before)
