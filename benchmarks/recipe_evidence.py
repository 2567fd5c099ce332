"""The table and the picture of the runs of ``benchmarks/train_recipes.py``, with confidence intervals.

Each run is compared with the bf16 run of its seed: relative difference of the held-out loss. The interval is
Student's, 95 %, over the seeds. "bf16, eager" is the yardstick: a recipe whose interval overlaps with that one has not
been shown to differ from bf16.
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

import matplotlib
from rich.console import Console
from rich.table import Table

from benchmarks.train_recipes import BACKENDS, BF16, BF16_AGAIN, RESULTS

# Student's t, two-sided 95 %, by degrees of freedom
T_95: Final = {1: 12.706, 2: 4.303, 3: 3.182, 4: 2.776, 5: 2.571, 6: 2.447, 7: 2.365, 8: 2.306, 9: 2.262}
EARLY: Final = slice(20, 60)  # steps in which recipes with power-of-two scales once lay above bf16
_LINES: Final = ("-", "--", ":", "-.", (0, (6, 2, 1, 2, 1, 2)))
Run = dict[str, Any]
Runs = dict[str, dict[int, Run]]
Number = Callable[[Run], float]


def read(folder: Path) -> Runs:
    """All runs by recipe and seed, in the order of the benchmark."""
    found: Runs = {}
    for path in folder.glob("*.json"):
        run = json.loads(path.read_text())
        found.setdefault(run["name"], {})[run["seed"]] = run
    return {name: dict(sorted(found[name].items())) for name in BACKENDS if name in found}


def interval(values: Sequence[float]) -> tuple[float, float]:
    """The mean, and half the width of its 95 % confidence interval."""
    if len(values) < 2:
        return statistics.mean(values), math.nan
    return statistics.mean(values), T_95[len(values) - 1] * statistics.stdev(values) / math.sqrt(len(values))


def early(run: Run) -> float:
    return statistics.mean(run["losses"][EARLY])


def own(run: Run) -> float:
    return run["own_precision"]


def at(step: int) -> Number:
    """The held-out loss after a step."""
    return lambda run: run["evaluations"][str(step)]


def differences(runs: Runs, name: str, number: Number, beside: str = BF16) -> list[float]:
    """The relative differences from another run's number, seed by seed."""
    return [number(run) / number(runs[beside][seed]) - 1 for seed, run in runs[name].items() if seed in runs[beside]]


def rows(runs: Runs) -> dict[str, dict[str, Any]]:
    """The numbers of the table: by recipe, means and half widths."""
    last = max(int(step) for step in next(iter(runs[BF16].values()))["evaluations"])
    columns = {
        "held out, weights in FP32": at(last),
        "held out, own precision": own,
        "held out, step 100": at(100),
        "trained on, steps 20 to 60": early,
    }
    return {
        name: {"seeds": len(runs[name])}
        | {title: interval(differences(runs, name, number)) for title, number in columns.items()}
        for name in runs
        if name != BF16
    }


def text(mean: float, half: float) -> str:
    shown = f"{mean:+.2%} ± {half:.2%}" if not math.isnan(half) else f"{mean:+.2%}"
    return shown.replace("%", " %")


def lines(found: dict[str, dict[str, Any]]) -> list[str]:
    """The rows of the table in ``results/README.md``; one with fewer seeds than the others says so."""
    all_seeds = max(row["seeds"] for row in found.values())
    return [
        "| "
        + " | ".join(
            [
                name if row["seeds"] == all_seeds else f"{name} ({row['seeds']} of {all_seeds} seeds)",
                *(text(*value) for title, value in row.items() if title != "seeds"),
            ]
        )
        + " |"
        for name, row in found.items()
    ]


def plot(runs: Runs, path: Path) -> None:
    """The held-out loss minus that of bf16, mean over the seeds, and the intervals of the last step."""
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(11, 4.5), layout="constrained")
    names = [name for name in runs if name != BF16]
    kinds = list(dict.fromkeys(name.split(",")[0] for name in names))  # a color each; what is changed of it, a line
    for index, name in enumerate(names):
        color = "black" if name == BF16_AGAIN else f"C{kinds.index(name.split(',')[0]) % 10}"
        line = _LINES[[other for other in names if other.split(",")[0] == name.split(",")[0]].index(name)]
        steps = sorted(int(step) for step in next(iter(runs[name].values()))["evaluations"])
        means = [interval(differences(runs, name, at(step)))[0] for step in steps]
        left.plot(steps, [100 * mean for mean in means], label=name, color=color, linestyle=line, marker=".")
        mean, half = interval(differences(runs, name, at(steps[-1])))
        right.errorbar(100 * mean, index, xerr=100 * half, fmt="o", color=color, capsize=4)
    left.set(xscale="log", xlabel="step", ylabel="held-out loss, % above bf16", title="mean over the seeds")
    right.set(xlabel="held-out loss after the last step, % above bf16", title="95 % confidence")
    right.set_yticks(range(len(names)), names)
    right.invert_yaxis()
    for axes in (left, right):
        axes.grid(alpha=0.3)
    left.axhline(0, color="black", linewidth=1)
    right.axvline(0, color="black", linewidth=1)
    left.set_ylim(bottom=-3.2)  # room for the legend
    left.legend(fontsize=7, ncols=3, loc="lower center")
    figure.savefig(path, dpi=130)
    pyplot.close(figure)


def main() -> int:
    folder = RESULTS / "train_recipes_cpu"
    runs = read(folder)
    if BF16 not in runs:
        Console().print(f"no runs of {BF16} in {folder}: python -m benchmarks.train_recipes makes them")
        return 1
    found = rows(runs)
    table = Table(title="relative difference from the bf16 run of the same seed, 95 % confidence")
    titles = list(next(iter(found.values())))
    for title in ("recipe", *titles):
        table.add_column(title, justify="left" if title == "recipe" else "right")
    for name, row in found.items():
        table.add_row(name, str(row["seeds"]), *(text(*row[title]) for title in titles[1:]))
    console = Console(width=150)
    console.print(table)
    for name in BACKENDS:
        if len(runs.get(name, {})) < len(runs[BF16]):
            console.print(f"not run yet: {name}, {len(runs[BF16]) - len(runs.get(name, {}))} seeds", highlight=False)
    plot(runs, RESULTS / "train_recipes_cpu.png")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
