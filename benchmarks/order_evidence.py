"""The table of the runs of ``benchmarks/tune_order.py``: rank correlations, their intervals, and what bounds them.

Spearman's rank correlation of the scores of ``fp8graph.tune`` with what was measured: 1 if both put the sites in one
order, 0 if the scores say nothing. Beside it:

* the interval: 95 % of 1,000 bootstrap samples of the sites and of the seeds;
* half by half: the rank correlation of what one half of the measured batches says with what the other half says, mean
  over 20 random halves. Where it is low, the measurement itself is noise;
* scored again: the same of the scores, of one half of tune's batches and the other;
* at most: what a score that is right, and no less noisy, would reach, from both;
* spread: the largest measured change over the smallest. Sites that hardly differ are hard to put in order;
* middle: the median of the measured changes. Where bf16's is far above FP32's, it is that of rounding.

A second table splits the order of the larger models: of the linears of one layer, and of one linear (all q_proj, say)
in all layers; and with two other scores: the mean over the batches of the relative square error, and the square error
alone, which was dgrad's score before it counted the gradients that an error reaches.
"""

from __future__ import annotations

import json
import math
import operator
import random
import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks.train_recipes import BATCH, RESULTS
from fp8graph.recipes import GEMMS

SAMPLES, HALVES = 1000, 20
Row = Mapping[str, Any]  # of one site
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


def samples(row: Row) -> list[float]:
    """The measurements of one site, batch by batch: their mean is ``row["measured"]``."""
    if "batch_errors" in row:
        return row["batch_errors"]
    changes = row["window_changes"]
    return [statistics.fmean(changes[i : i + BATCH]) ** 2 for i in range(0, len(changes), BATCH)]


def half_by_half(rows: Sequence[Row]) -> float:
    """The agreement of one half of the measured batches with the other half on the order of the sites."""
    values = [samples(row) for row in rows]
    count, draw = len(values[0]), random.Random(0)
    found: list[float] = []
    for _ in range(HALVES):
        mixed = draw.sample(range(count), count)
        one, other = ([sum(own[i] for i in some) for own in values] for some in (mixed[::2], mixed[1::2]))
        found.append(rank_correlation(one, other))
    return statistics.fmean(found)


def ceiling(half: float, again: float = 1.0) -> float:
    """The rank correlation of a right score with a measurement, if halves of them have these with each other."""
    whole = [max(0.0, 2 * r / (1 + r)) for r in (half, again)]  # Spearman and Brown: all batches beside half of them
    return math.sqrt(whole[0] * whole[1])


def scored_again(rows: Sequence[Row], gemm: str) -> float:
    """The rank correlation of the scores of the first half of tune's batches with those of the second."""
    one, other = ([_score(row, gemm, half) for row in rows] for half in (0, 1))
    return rank_correlation(one, other)


def _score(row: Row, gemm: str, half: int) -> float:
    middle = len(row["square_error"]) // 2
    error, square, reference = (
        sum(row[part][middle:] if half else row[part][:middle])
        for part in ("weighted_error", "square_error", "square_reference")
    )
    if gemm == "dgrad":
        return square * reached(row)
    return error if gemm == "fprop" else square / reference


def relative(row: Row) -> float:
    """The mean of the relative square errors of tune's batches. wgrad's score is that of all batches together."""
    return statistics.fmean(
        error / own for error, own in zip(row["square_error"], row["square_reference"], strict=True)
    )


def interval(runs: Sequence[Sequence[Row]]) -> tuple[float, float]:
    """95 % of the bootstrap: each sample draws seeds, and one set of sites for all of them."""
    draw, found = random.Random(0), list[float]()
    pairs = [[(row["score"], row["measured"]) for row in rows] for rows in runs]
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
        if run["gemm"] == "dgrad":  # the sums are kept; the first runs scored them without what they reach
            for row in run["rows"]:
                row["score"] = sum(row["square_error"]) * reached(row)
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


def correlation(rows: Sequence[Row], score: Callable[[Row], float] = lambda row: row["score"]) -> float:
    return rank_correlation([score(row) for row in rows], [row["measured"] for row in rows])


def layer(row: Row) -> int:
    """The number of the layer of "model.layers.3.mlp.up_proj", from 1."""
    return int(row["site"].split(".")[2]) + 1


def linear(row: Row) -> str:
    return row["site"].rpartition(".")[2]


# of the linears of a Llama's layer: how many come before the tensor that each reads
_BEFORE = {"q_proj": 0, "k_proj": 0, "v_proj": 0, "o_proj": 3, "gate_proj": 4, "up_proj": 4, "down_proj": 6}


def reached(row: Row) -> int:
    """The number of gradients that an error of this linear's dgrad goes into: the linears before it, and one more."""
    return len(_BEFORE) * (layer(row) - 1) + _BEFORE[linear(row)] + 1


def within(rows: Sequence[Row], part: Callable[[Row], Any]) -> float:
    """The mean of the rank correlations among the sites that have one ``part``."""
    parts = [[row for row in rows if part(row) == one] for one in dict.fromkeys(map(part, rows))]
    return statistics.fmean(correlation(own) for own in parts)


def columns(own: Sequence[Sequence[Row]], gemm: str) -> dict[str, str]:
    """The text on the runs of one table line, seed by seed."""
    half = statistics.fmean(map(half_by_half, own))
    again = statistics.fmean(scored_again(rows, gemm) for rows in own)
    sizes = [[row["measured"] for row in rows] for rows in own]
    spread = statistics.geometric_mean([max(size) / min(size) for size in sizes])
    low, high = interval(own)
    return {
        "each seed": ", ".join(f"{correlation(rows):.2f}" for rows in own),
        "mean": f"**{statistics.fmean(map(correlation, own)):.2f}**",
        "95 %": f"{low:.2f} to {high:.2f}",
        "half by half": f"{half:.2f}",
        "scored again": f"{again:.2f}",
        "at most": f"{ceiling(half, again):.2f}",
        "spread": f"{spread:.0f}" if spread >= 10 else f"{spread:.1f}",
        "middle": f"{statistics.geometric_mean(map(statistics.median, sizes)):.0e}",
    }


def tables(runs: Runs) -> tuple[list[str], list[str]]:
    """Two tables in Markdown, a line per number of layers, recipe, GEMM and dtype: all columns, and the main ones."""
    all_titles = "each seed, mean, 95 %, half by half, scored again, at most, spread, middle"
    chosen = [all_titles.split(", "), ["mean", "95 %", "at most"]]
    found = [_head(", ".join(["layers, recipe, GEMM, model in", *titles])) for titles in chosen]
    for key, by_seed in runs.items():
        cells = columns([by_seed[seed]["rows"] for seed in sorted(by_seed)], key[3])
        for lines, titles in zip(found, chosen, strict=True):
            lines.append(_line(key, [cells[title] for title in titles]))
    return found[0], found[1]


def parts(rows: Sequence[Row]) -> list[float]:
    """The columns of the second table; nan for one linear in all layers if there are only two of them."""
    return [
        correlation(rows),
        within(rows, layer),
        within(rows, linear) if max(map(layer, rows)) > 2 else math.nan,
        correlation(rows, relative),
        correlation(rows, lambda row: sum(row["square_error"])),
    ]


def table_of_parts(runs: Runs) -> list[str]:
    """Where the order comes from, and what other scores would reach: means over the seeds."""
    lines = _head(
        "layers, recipe, GEMM, model in, all sites, of one layer, of one linear, relative errors, by size alone"
    )
    for key, by_seed in runs.items():
        found = map(statistics.fmean, zip(*(parts(run["rows"]) for run in by_seed.values()), strict=True))
        lines.append(_line(key, ["" if math.isnan(number) else f"{number:.2f}" for number in found]))
    return lines


def _head(titles: str) -> list[str]:
    return [f"| {titles.replace(', ', ' | ')} |", "|---" * len(titles.split(", ")) + "|"]


def _line(key: Key, cells: Sequence[str]) -> str:
    layers, recipe, dtype, gemm = key
    return f"| {' | '.join([str(layers), recipe, gemm, dtype, *cells])} |"


def main() -> int:
    folder = RESULTS / "tune_order_cpu"
    runs = read(folder)
    console = Console(soft_wrap=True)
    if not runs:
        console.print(f"no runs in {folder}: python -m benchmarks.tune_order makes them")
        return 1
    table, short = tables(runs)
    console.print("\n".join([*table, "", *short, "", *table_of_parts(runs), ""]), markup=False, highlight=False)
    for layers, recipe in dict.fromkeys(key[:2] for key in runs):
        for gemm in GEMMS:
            if (both := measured_in_both(runs, layers, recipe, gemm)) is not None:
                what = f"{layers} layers, {recipe}, {gemm}: what bf16 measures with what FP32 measures: {both:.2f}"
                console.print(what, highlight=False)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
