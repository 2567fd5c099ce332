"""The goals, as shares of what the GEMMs allow, and whether measurements meet them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final

Line = Mapping[str, Any]

# of R: how much faster the GEMMs of the linears are under scaling per tensor than in bf16, in the same run
LINEARS: Final = {"delayed": 0.93, "tensorwise": 0.90, "rowwise": 0.87, "blockwise": 0.80}
STACK_OVER_BF16: Final = 1.35
STACK_OVER_TORCHAO: Final = 1.05
DECODE_OVER_BF16: Final = 1.2
WORST_CASE: Final = 0.98


@dataclass(frozen=True, kw_only=True)
class Goal:
    """One goal, and what was found; ``found`` None: not measured."""

    name: str
    bar: str  # in words
    wanted: float | None  # times as fast; None: it depends on an R that was not measured
    found: float | None
    detail: str = ""

    @property
    def verdict(self) -> str:
        if self.found is None or self.wanted is None:
            return "not measured"
        return "holds" if self.found >= self.wanted else "missed"


def speedups(lines: Iterable[Line], section: str, weights: str = "kept") -> dict[str, float]:
    """Times as fast as bf16 by wall time, per contender: the last value, where there are several runs."""
    return {
        line["contender"]: line["speedup"]
        for line in lines
        if line["section"] == section
        and line.get("measure") == "rounds"
        and line.get("weights") == weights
        and line.get("speedup")
    }


def whole_speedups(lines: Iterable[Line]) -> dict[str, float]:
    """Times as many tokens per second as bf16 in the same run, per contender of ``table``: the last value."""
    runs: dict[str, dict[str, float]] = {}
    for line in lines:
        if "tokens_per_s" in line:
            runs.setdefault(line.get("file", ""), {})[line["contender"]] = line["tokens_per_s"]
    return {name: rate / run["bf16"] for run in runs.values() if "bf16" in run for name, rate in run.items()}


def is_profile(line: Line, section: str) -> bool:
    """Whether ``line`` has the kernels of a contender of ``section``, its weights kept."""
    alone = line["section"] == section and line.get("measure") == "alone"
    return alone and bool(line.get("profile")) and "weights" not in line


def bounds(lines: Iterable[Line], section: str) -> dict[str, float]:
    """R per scaling."""
    return {line["scaling"]: line["R"] for line in lines if line["section"] == section and "R" in line}


def by_gpu_time(lines: Iterable[Line]) -> dict[tuple[int, int, int, str], float]:
    """(tokens, inputs, outputs, recipe) -> times as fast as bf16 by GPU time, from ``sweep``."""
    times = {
        (line["tokens"], line["inputs"], line["outputs"], line["contender"]): line["gpu_ms"]
        for line in lines
        if line["section"] == "sweep" and line.get("gpu_ms")
    }
    return {
        (*case, name): times[(*case, "bf16")] / ms
        for (*case, name), ms in times.items()
        if name != "bf16" and (*case, "bf16") in times
    }


def decoding(lines: Iterable[Line]) -> dict[tuple[int, str], float]:
    """(sequences, recipe) -> times as fast as bf16 by wall time, both with CUDA graphs."""
    times = {
        (line["batch"], line["contender"]): line["wall_ms"]
        for line in lines
        if line["section"] == "decode" and line.get("cuda_graphs") and "wall_ms" in line
    }
    return {
        (batch, name): times[batch, "bf16"] / ms
        for (batch, name), ms in times.items()
        if name != "bf16" and (batch, "bf16") in times
    }


def judge(lines: list[Line]) -> list[Goal]:
    """Every goal, measured or not."""
    limit = bounds(lines, "linears").get("tensor")
    linears, stack = speedups(lines, "linears"), speedups(lines, "layers")
    goals = [
        Goal(
            name=f"linears, {recipe}",
            bar=f"{share:.2f} R",
            wanted=None if limit is None else share * limit,
            found=linears.get(recipe),
            detail="" if limit is None or recipe not in linears else f"{linears[recipe] / limit:.2f} R",
        )
        for recipe, share in LINEARS.items()
    ]
    ours, theirs = stack.get("tensorwise"), stack.get("torchao tensorwise")
    goals.append(_over("stack, tensorwise over bf16", STACK_OVER_BF16, ours))
    ratio = ours / theirs if ours and theirs else None
    goals.append(_over("stack, tensorwise over torchao tensorwise", STACK_OVER_TORCHAO, ratio))
    whole = whole_speedups(lines)
    ours, theirs = whole.get("tensorwise"), whole.get("torchao tensorwise")
    ratio = ours / theirs if ours and theirs else None
    goals.append(_over("Llama-3-8B, tensorwise over bf16", STACK_OVER_BF16, ours))
    goals.append(_over("Llama-3-8B, tensorwise over torchao tensorwise", STACK_OVER_TORCHAO, ratio))
    decoded = decoding(lines)
    for batch in sorted({batch for batch, _ in decoded}) or [1]:
        of_batch: dict[str, float] = {name: value for (b, name), value in decoded.items() if b == batch}
        name = f"decode, sequences: {batch}, CUDA graphs, the best recipe"
        goals.append(_extreme(name, DECODE_OVER_BF16, of_batch, max))
    cases = {f"{t} x {i} -> {o}, {name}": value for (t, i, o, name), value in by_gpu_time(lines).items()}
    goals.append(_extreme("one linear by GPU time, the worst case", WORST_CASE, cases, min))
    return goals


def _over(name: str, wanted: float, found: float | None) -> Goal:
    return Goal(name=name, bar=f"{wanted:.2f}", wanted=wanted, found=found)


def _extreme(name: str, wanted: float, found: dict[str, float], choose: Callable[..., str]) -> Goal:
    case = choose(found, key=found.__getitem__) if found else ""
    return Goal(name=name, bar=f"{wanted:.2f}", wanted=wanted, found=found.get(case), detail=case)
