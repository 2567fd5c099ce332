"""What all benchmarks share: contenders in one process, interleaved rounds, ratios, one JSON file each."""

from __future__ import annotations

import datetime
import json
import platform
import shutil
import statistics
import subprocess
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

import matplotlib
import torch
from rich.console import Console
from rich.table import Table

from fp8graph.bench import elapsed

RESULTS: Final = Path(__file__).parent / "results"
console: Final = Console(soft_wrap=True)


def machine() -> dict[str, Any]:
    """Where and when: versions, the GPU and its clocks."""
    facts: dict[str, Any] = {
        "date": datetime.date.today().isoformat(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cpu": platform.processor() or platform.machine(),
        "threads": torch.get_num_threads(),
    }
    if torch.cuda.is_available():
        facts |= {"gpu": torch.cuda.get_device_name(), "cuda": torch.version.cuda}
        if tool := shutil.which("nvidia-smi"):
            query = [tool, "--query-gpu=clocks.sm,clocks.mem,power.limit,driver_version", "--format=csv,noheader"]
            facts["clocks"] = subprocess.run(query, capture_output=True, text=True, check=False).stdout.strip()
    return facts


def compare(contenders: Mapping[str, Callable[[], Any]], *, rounds: int = 7, iterations: int = 5) -> dict[str, Any]:
    """Each contender once a round, so that a machine that slows down slows all; the first one is the baseline.

    Returns:
        For each: the median time of a call in ms, the 10th and 90th percentile, and how many times faster than the
        baseline it is (the median of the rounds' ratios).
    """
    times: dict[str, list[float]] = {name: [] for name in contenders}
    for run in contenders.values():  # compiles
        for _ in range(3):
            run()
    for _ in range(rounds):
        for name, run in contenders.items():
            times[name].append(elapsed(run, iterations))
    baseline = next(iter(times.values()))
    return {
        name: {
            "ms": 1e3 * statistics.median(values),
            "spread_ms": [1e3 * min(values), 1e3 * max(values)],
            "speedup": statistics.median(b / v for b, v in zip(baseline, values, strict=True)),
        }
        for name, values in times.items()
    }


def show(title: str, results: Mapping[str, Mapping[str, Any]]) -> None:
    """A table of what :func:`compare` returned."""
    table = Table(title=title)
    for column in ("", "ms", "spread", "x baseline"):
        table.add_column(column, justify="left" if not column else "right")
    for name, values in results.items():
        low, high = values["spread_ms"]
        table.add_row(name, f"{values['ms']:.3f}", f"{low:.3f} - {high:.3f}", f"{values['speedup']:.3f}")
    console.print(table)


def plot(name: str, title: str, results: Mapping[str, Any]) -> None:
    """``benchmarks/results/<name>.png``: how many times faster than the first one, a point a case."""
    matplotlib.use("Agg")
    from matplotlib import pyplot

    cases = [results] if all("speedup" in values for values in results.values()) else list(results.values())
    names = list(cases[0])
    figure, axes = pyplot.subplots(figsize=(7, 0.5 * len(names) + 1.2))
    for row, contender in enumerate(names):
        speedups = [case[contender]["speedup"] for case in cases]
        axes.plot(speedups, [row] * len(speedups), "|" if len(speedups) > 1 else "o", markersize=10)
        axes.annotate(f"{statistics.median(speedups):.2f}", (statistics.median(speedups), row + 0.15), ha="center")
    axes.axvline(1.0, color="gray", linewidth=0.8)
    axes.set(yticks=range(len(names)), yticklabels=names, xlabel=f"times as fast as {names[0]}", title=title)
    axes.margins(y=0.15)
    RESULTS.mkdir(exist_ok=True)
    figure.savefig(RESULTS / f"{name}.png", dpi=120, bbox_inches="tight")


def write(name: str, results: Any) -> Path:
    """``benchmarks/results/<name>.json`` with the machine beside the numbers."""
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{name}.json"
    path.write_text(json.dumps({"machine": machine(), "results": results}, indent=1) + "\n", encoding="utf-8")
    console.print(f"wrote {path.relative_to(RESULTS.parent.parent)}")
    return path
