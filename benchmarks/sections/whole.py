"""``table``: Llama-3-8B trained whole on one GPU: tokens per second, losses, memory, compile time, power.

The rows are those of ``fp8graph bench record`` (``fp8graph/tools/record``).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from benchmarks import measure
from benchmarks.measure import DEVICE
from benchmarks.records import Run
from fp8graph.tools.record import STEPS, train
from fp8graph.tools.record.contenders import CONTENDERS, why_not
from fp8graph.tools.record.machine import memory_mib
from fp8graph.tools.record.workloads import WORKLOADS, tiny


def table(run: Run) -> None:
    """Fresh text in each step, the same for all rows; a row that would not end in time is not begun."""
    workload = tiny(WORKLOADS["llama-3-8b"]) if run.tiny else WORKLOADS["llama-3-8b"]
    mode = workload.mode(memory_mib(DEVICE))
    longest = 0.0
    if mode is None:
        return run.write("table", skipped=f"{workload.name} does not fit into this GPU")
    for name in run.chosen(CONTENDERS):
        if reason := why_not(name, DEVICE):
            run.write("table", contender=name, skipped=reason)
            continue
        if run.late() or run.left < 0.9 * longest:
            run.write("table", contender=name, stopped="the section's time is over")
            continue
        began = run.seconds

        def look(step: Callable[[], Any], name: str = name) -> None:
            if not run.late(0.9):
                run.write("table", contender=name, profile=measure.profile(step, calls=1))

        with run.attempt("table", contender=name):
            steps = 6 if run.tiny else STEPS
            run.write(
                "table", **train(workload, name, DEVICE, mode, steps=steps, compiler=run.compiler, afterwards=look)
            )
        longest = max(longest, run.seconds - began)
    return None
