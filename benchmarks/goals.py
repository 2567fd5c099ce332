"""The goals, as shares of what the GEMMs allow, and whether measurements meet them.

Each is judged by the last clean run that has all that the goal compares.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from benchmarks.published import (
    BF16,
    CHOSEN,
    LLAMA,
    SAVING,
    TENSORWISE,
    TORCHAO,
    Run,
    all_rows,
    bounds,
    comparable,
    latest,
    measured,
    times,
)

# Of R: how much faster the GEMMs of the linears are under scaling per tensor than in bf16, in the same run. Bytes at an
# H200's 4.24 TB/s allow 0.926 R under delayed and 0.895 R under tensorwise (benchmarks/results/first_hour, section
# linears: 1,171 and 1,757 us of bytes beside 14.86 ms of GEMMs); 0.93 and 0.90, the first goals, were above that.
LINEARS: Final = {"delayed": 0.91, "tensorwise": 0.87, "rowwise": 0.87, "blockwise": 0.80}
OVER_BF16: Final = {"layers": 1.35, "table": 1.40}
OVER_TORCHAO: Final = {"layers": 1.05, "table": 1.10}
BLOCKWISE_OVER_BF16: Final = 1.22
DECODE_OVER_BF16: Final = 1.25
WORST_CASE: Final = 0.98


@dataclass(frozen=True, kw_only=True)
class Goal:
    """One goal, and the ratio that ``run`` measured; ``ratio`` None: it was not measured."""

    name: str
    bar: str  # in words
    wanted: float | None  # times as fast; None: it depends on an R that was not measured
    ratio: float | None = None
    detail: str = ""
    run: str = ""

    @property
    def verdict(self) -> str:
        if self.ratio is None or self.wanted is None:
            return "not measured"
        return "holds" if self.ratio >= self.wanted else "missed"


def judge(runs: Sequence[Run]) -> list[Goal]:
    """Judge every goal, measured or not."""
    goals = [_of_linears(runs, recipe, share) for recipe, share in LINEARS.items()]
    goals.append(_over(runs, "layers", "stack", BLOCKWISE_OVER_BF16, "blockwise", BF16))
    for section, name in (("layers", "stack"), ("table", "Llama-3-8B")):
        goals.append(_over(runs, section, name, OVER_BF16[section], TENSORWISE, BF16))
        goals.append(_over(runs, section, name, OVER_TORCHAO[section], TENSORWISE, TORCHAO))
    return [*goals, _of_memory(runs), *_of_decoding(runs), _of_one_linear(runs), _of_narrow_layers(runs)]


def _of_linears(runs: Sequence[Run], recipe: str, share: float) -> Goal:
    name, bar = f"linears, {recipe}", f"{share:.2f} R"
    run = latest([run for run in runs if "tensor" in bounds(run, "linears")], "linears", BF16, recipe)
    if run is None:
        return Goal(name=name, bar=bar, wanted=None)
    lines, bound = measured(run, "linears"), bounds(run, "linears")["tensor"]
    ratio = times(lines[(), recipe], lines[(), BF16])
    of_bound = f"{ratio / bound['R']:.2f} R" if ratio else ""
    detail = f"{of_bound}; R: {bound['bf16_ms']:.3f} / {bound['fp8_ms']:.3f} ms = {bound['R']:.3f}"
    return Goal(name=name, bar=bar, wanted=share * bound["R"], ratio=ratio, detail=detail, run=run.file)


def _over(runs: Sequence[Run], section: str, name: str, wanted: float, ours: str, other: str) -> Goal:
    goal: dict[str, Any] = {"name": f"{name}, {ours} over {other}", "bar": f"{wanted:.2f}", "wanted": wanted}
    case = (LLAMA,) if section == "table" else ()
    if (run := latest(runs, section, ours, other, case=case)) is None:
        return Goal(**goal)
    lines = measured(run, section)
    return Goal(**goal, ratio=times(lines[case, ours], lines[case, other]), run=run.file)


def _of_memory(runs: Sequence[Run]) -> Goal:
    name, case = f"Llama-3-8B, peak of {TORCHAO} over that of {SAVING}", (LLAMA,)
    goal: dict[str, Any] = {"name": name, "bar": "1.00", "wanted": 1.0}
    if (run := latest(runs, "table", SAVING, TORCHAO, case=case)) is None:
        return Goal(**goal)
    ours, theirs = (measured(run, "table")[case, name]["peak_mib"] for name in (SAVING, TORCHAO))
    return Goal(**goal, ratio=theirs / ours, detail=f"{theirs:,.0f} / {ours:,.0f} MiB", run=run.file)


def _of_decoding(runs: Sequence[Run]) -> list[Goal]:
    """Judge each number of sequences, by the last run that has bf16 and a recipe, both with CUDA graphs."""
    ratios: dict[int, tuple[str, dict[str, float]]] = {}
    for run in comparable(runs, "decode"):
        of_run: dict[int, dict[str, float]] = {}
        for row in all_rows(run, "decode"):
            batch, cuda_graphs = row.case
            if cuda_graphs and row.contender != BF16 and row.times_bf16:
                of_run.setdefault(batch, {})[row.contender] = row.times_bf16
        ratios |= {batch: (run.file, values) for batch, values in of_run.items()}
    return [
        _extreme(f"decode, sequences: {batch}, CUDA graphs, the best recipe", DECODE_OVER_BF16, *ratios[batch], max)
        if batch in ratios
        else Goal(name="decode, CUDA graphs, the best recipe", bar=f"{DECODE_OVER_BF16:.2f}", wanted=DECODE_OVER_BF16)
        for batch in sorted(ratios) or [0]
    ]


def _of_one_linear(runs: Sequence[Run]) -> Goal:
    run = next(reversed(comparable(runs, "sweep")), None)
    cases = {f"{t} x {i} -> {o}, {name}": ratio for (t, i, o, name), ratio in by_gpu_time(run).items()} if run else {}
    return _extreme("one linear by GPU time, the worst case", WORST_CASE, run.file if run else "", cases, min)


def _of_narrow_layers(runs: Sequence[Run]) -> Goal:
    """Judge narrow layers by the clock, with the GEMMs in FP8 of which the speed model says that it pays."""
    of_runs = {
        run.file: {"{} tokens, hidden size {}".format(*row.case): row.times_bf16 or 0.0 for row in chosen}
        for run in comparable(runs, "smallest")
        if (chosen := [row for row in all_rows(run, "smallest") if row.contender == CHOSEN])
    }
    file = next(reversed(of_runs), "")
    return _extreme(f"narrow layers, {CHOSEN}, the worst case", WORST_CASE, file, of_runs.get(file, {}), min)


def by_gpu_time(run: Run) -> dict[tuple[int, int, int, str], float]:
    """Map (tokens, inputs, outputs, recipe) to the times as fast as bf16 by GPU time, from ``sweep``."""
    return {
        (*row.case, row.contender): row.bf16["gpu_ms"] / row.line["gpu_ms"]
        for row in all_rows(run, "sweep")
        if row.contender != BF16 and row.bf16 and row.bf16.get("gpu_ms") and row.line.get("gpu_ms")
    }


def _extreme(name: str, wanted: float, file: str, ratios: Mapping[str, float], choose: Callable[..., str]) -> Goal:
    goal: dict[str, Any] = {"name": name, "bar": f"{wanted:.2f}", "wanted": wanted}
    if not ratios:
        return Goal(**goal)
    case = choose(ratios, key=ratios.__getitem__)
    which = "best" if choose is max else "worst"
    return Goal(**goal, ratio=ratios[case], detail=f"{case}: the {which} of {len(ratios)} measured", run=file)


def spread_of_bound(runs: Sequence[Run]) -> tuple[float, float, int]:
    """Return the least and the largest R per tensor over the clean runs of ``layers``, and their number."""
    ratios = [bounds(run, "layers")["tensor"]["R"] for run in runs if run.clean and "tensor" in bounds(run, "layers")]
    return min(ratios, default=0.0), max(ratios, default=0.0), len(ratios)
