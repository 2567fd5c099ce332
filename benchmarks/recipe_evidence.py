"""The table and the two pictures of the runs of ``benchmarks/train_recipes.py``, with confidence intervals.

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


def styles(names: Sequence[str]) -> dict[str, tuple[str, Any]]:
    """The color and the line of each run: a color for each recipe, a line for what is changed of it."""
    kinds = list(dict.fromkeys(name.split(",")[0] for name in names))
    found: dict[str, tuple[str, Any]] = {}
    for name in names:
        kind = name.split(",")[0]
        line = _LINES[sum(other.split(",")[0] == kind for other in found)]
        found[name] = ("black" if name == BF16_AGAIN else f"C{kinds.index(kind) % 10}", line)
    return found


def recipes(runs: Runs) -> list[str]:
    """The runs of a recipe as it is, without those of which something is changed, after bf16's second run."""
    return [name for name in runs if name == BF16_AGAIN or (name != BF16 and "," not in name)]


def curves(axes: Any, runs: Runs) -> None:
    """The held-out loss minus that of bf16, mean over the seeds."""
    for name, (color, line) in styles([name for name in runs if name != BF16]).items():
        steps = sorted(int(step) for step in next(iter(runs[name].values()))["evaluations"])
        means = [interval(differences(runs, name, at(step)))[0] for step in steps]
        axes.plot(steps, [100 * mean for mean in means], label=name, color=color, linestyle=line, marker=".")
    axes.set(xscale="log", xlabel="step", ylabel="held-out loss, % above bf16", title="mean over the seeds")
    axes.grid(alpha=0.3)
    axes.axhline(0, color="black", linewidth=1)
    axes.set_ylim(bottom=-3.2)  # room for the legend
    axes.legend(fontsize=7, ncols=3, loc="lower center")


def intervals(axes: Any, runs: Runs, names: Sequence[str]) -> None:
    """The 95 % confidence intervals of the last step, one row for each of ``names``."""
    colors = styles([name for name in runs if name != BF16])
    for index, name in enumerate(names):
        last = max(int(step) for step in next(iter(runs[name].values()))["evaluations"])
        mean, half = interval(differences(runs, name, at(last)))
        axes.errorbar(100 * mean, index, xerr=100 * half, fmt="o", color=colors[name][0], capsize=4)
    axes.set(xlabel="held-out loss after the last step, % above bf16", title="95 % confidence")
    axes.set_yticks(range(len(names)), names)
    axes.invert_yaxis()
    axes.grid(alpha=0.3)
    axes.axvline(0, color="black", linewidth=1)


def plot(runs: Runs, path: Path, confidence: Path) -> None:
    """Two pictures: curves and intervals of all runs, and the intervals of the recipes alone (README's)."""
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(11, 4.5), layout="constrained")
    curves(left, runs)
    intervals(right, runs, [name for name in runs if name != BF16])
    figure.savefig(path, dpi=130)
    pyplot.close(figure)
    figure, axes = pyplot.subplots(figsize=(8, 3.2), layout="constrained")
    intervals(axes, runs, recipes(runs))
    figure.savefig(confidence, dpi=130)
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
    plot(runs, RESULTS / "train_recipes_cpu.png", RESULTS / "train_recipes_confidence.png")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
