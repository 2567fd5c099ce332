"""The table of the runs of ``benchmarks/tune_order.py``: rank correlations, their intervals, and what bounds them.

Spearman's rank correlation of the scores of ``fp8graph.tune`` with what was measured: 1 if both put the sites in one
order, 0 if the scores say nothing. Beside it:

* the interval: 95 % of 1,000 bootstrap samples of the sites and of the seeds;
* half by half: the rank correlation of what one half of the measured batches says with what the other half says, mean
  over 20 random halves. Where it is low, the measurement itself is noise;
* at most: what a perfect score would have, ``sqrt(2 r / (1 + r))`` for a correlation r of halves (Spearman and Brown:
  all batches together are that much better than half of them);
* spread: the largest measured change over the smallest. Sites that hardly differ are hard to put in order.
"""

from __future__ import annotations

import json
import math
import operator
import random
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks.train_recipes import BATCH, RESULTS
from fp8graph.recipes import GEMMS

SAMPLES, HALVES = 1000, 20
Run = dict[str, Any]
Key = tuple[int, str, str, str]  # layers, recipe, dtype, GEMM
Runs = dict[Key, dict[int, Run]]  # by seed


def ranks(values: Sequence[float]) -> list[float]:
    """From 1. Equal values share the mean of their ranks."""
    order = sorted(range(len(values)), key=lambda index: values[index])
    found = [0.0] * len(values)
    start = 0
    while start < len(order):
        end = start
        while end < len(order) and values[order[end]] == values[order[start]]:
            end += 1
        for index in order[start:end]:
            found[index] = (start + 1 + end) / 2
        start = end
    return found


def rank_correlation(a: Sequence[float], b: Sequence[float]) -> float:
    """Spearman's; nan if all values of one are equal."""
    ranked = ranks(a), ranks(b)
    if any(len(set(own)) < 2 for own in ranked):
        return math.nan
    return statistics.correlation(*ranked)


def samples(row: Mapping[str, Any]) -> list[float]:
    """What was measured for one site, batch by batch: its mean is ``row["measured"]``."""
    if "batch_errors" in row:
        return row["batch_errors"]
    changes = row["window_changes"]
    return [statistics.fmean(changes[i : i + BATCH]) ** 2 for i in range(0, len(changes), BATCH)]


def half_by_half(rows: Sequence[Mapping[str, Any]]) -> float:
    """How well one half of the measured batches orders the sites as the other half does."""
    values = [samples(row) for row in rows]
    count, draw = len(values[0]), random.Random(0)
    found: list[float] = []
    for _ in range(HALVES):
        mixed = draw.sample(range(count), count)
        one, other = ([sum(own[i] for i in some) for own in values] for some in (mixed[::2], mixed[1::2]))
        found.append(rank_correlation(one, other))
    return statistics.fmean(found)


def ceiling(half: float) -> float:
    """The correlation of a perfect score with all batches, of which two halves have the correlation ``half``."""
    return math.sqrt(max(0.0, 2 * half / (1 + half)))


def scored_again(rows: Sequence[Mapping[str, Any]], gemm: str) -> float:
    """The rank correlation of the scores of the first half of tune's batches with those of the second."""
    one, other = ([_score(row, gemm, half) for row in rows] for half in (0, 1))
    return rank_correlation(one, other)


def _score(row: Mapping[str, Any], gemm: str, half: int) -> float:
    middle = len(row["square_error"]) // 2
    error, square, reference = (
        sum(row[part][middle:] if half else row[part][:middle])
        for part in ("weighted_error", "square_error", "square_reference")
    )
    return {"fprop": error, "dgrad": square, "wgrad": square / reference}[gemm]


def relative(row: Mapping[str, Any]) -> float:
    """The score that dgrad does not have: the square of the relative error."""
    return sum(row["square_error"]) / sum(row["square_reference"])


def interval(runs: Sequence[Run]) -> tuple[float, float]:
    """95 % of the bootstrap: each sample draws seeds, and one set of sites for all of them."""
    draw, found = random.Random(0), list[float]()
    pairs = [[(row["score"], row["measured"]) for row in run["rows"]] for run in runs]
    for _ in range(SAMPLES):
        sites = draw.choices(range(len(pairs[0])), k=len(pairs[0]))
        chosen = draw.choices(pairs, k=len(pairs))
        found.append(statistics.fmean(rank_correlation(*zip(*(own[i] for i in sites), strict=True)) for own in chosen))
    found.sort()
    return found[SAMPLES // 40], found[-1 - SAMPLES // 40]


def read(folder: Path) -> Runs:
    """All runs, smaller models first, in the order of the GEMMs."""
    found: Runs = {}
    for path in sorted(folder.glob("*.json")):
        run = json.loads(path.read_text(encoding="utf-8"))
        run["rows"].sort(key=operator.itemgetter("site"))
        key = run["layers"], run["recipe"], run["dtype"], run["gemm"]
        found.setdefault(key, {})[run["seed"]] = run
    return dict(sorted(found.items(), key=lambda item: (item[0][0], item[0][1], GEMMS.index(item[0][3]), item[0][2])))


def measured_in_both(runs: Runs, layers: int, recipe: str, gemm: str) -> float | None:
    """The rank correlation of what bf16 and FP32 measure with the same weights and batches, mean over the seeds."""
    bf16, fp32 = (runs.get((layers, recipe, dtype, gemm), {}) for dtype in ("bf16", "fp32"))
    both = [
        rank_correlation(*([row["measured"] for row in by_seed[seed]["rows"]] for by_seed in (bf16, fp32)))
        for seed in bf16.keys() & fp32.keys()
    ]
    return statistics.fmean(both) if both else None


def table(runs: Runs) -> list[str]:
    """The lines of a table in Markdown: one per number of layers, recipe, GEMM and dtype."""
    titles = "layers, recipe, GEMM, model in, each seed, mean, 95 %, half by half, at most, scored again, spread"
    lines = [f"| {titles.replace(', ', ' | ')} |", "|---" * len(titles.split(", ")) + "|"]
    for (layers, recipe, dtype, gemm), by_seed in runs.items():
        own = [by_seed[seed] for seed in sorted(by_seed)]
        each = [
            rank_correlation([row["score"] for row in run["rows"]], [row["measured"] for row in run["rows"]])
            for run in own
        ]
        half = statistics.fmean(half_by_half(run["rows"]) for run in own)
        again = statistics.fmean(scored_again(run["rows"], gemm) for run in own)
        sizes = [[row["measured"] for row in run["rows"]] for run in own]
        spread = statistics.geometric_mean([max(size) / min(size) for size in sizes])
        low, high = interval(own)
        cells = [
            f"{layers}",
            recipe,
            gemm,
            dtype,
            ", ".join(f"{one:.2f}" for one in each),
            f"**{statistics.fmean(each):.2f}**",
            f"{low:.2f} to {high:.2f}",
            f"{half:.2f}",
            f"{ceiling(half):.2f}",
            f"{again:.2f}",
            f"{spread:.0f}" if spread >= 10 else f"{spread:.1f}",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def main() -> int:
    folder = RESULTS / "tune_order_cpu"
    runs = read(folder)
    console = Console(soft_wrap=True)
    if not runs:
        console.print(f"no runs in {folder}: python -m benchmarks.tune_order makes them")
        return 1
    console.print("\n".join(table(runs)), markup=False, highlight=False)
    for layers, recipe in dict.fromkeys(key[:2] for key in runs):
        for gemm in GEMMS:
            if (both := measured_in_both(runs, layers, recipe, gemm)) is not None:
                what = f"{layers} layers, {recipe}, {gemm}: what bf16 measures with what FP32 measures: {both:.2f}"
                console.print(what, highlight=False)
    for (layers, recipe, dtype, gemm), by_seed in runs.items():
        if gemm == "dgrad":
            each = [
                rank_correlation([relative(row) for row in run["rows"]], [row["measured"] for row in run["rows"]])
                for run in by_seed.values()
            ]
            what = f"{layers} layers, {recipe}, {dtype}, dgrad: if relative errors were the score: "
            console.print(f"{what}{statistics.fmean(each):.2f}", highlight=False)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
