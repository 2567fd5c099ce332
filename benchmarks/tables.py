"""The tables of ``benchmarks.report``, as Markdown. A ratio is that of two figures of its row."""

from __future__ import annotations

import functools
import statistics
import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

from benchmarks.goals import by_gpu_time, judge, spread_of_bound
from benchmarks.measure import kind_of
from benchmarks.published import (
    BF16,
    CASES,
    LLAMA,
    NO_NUMBER,
    TENSORWISE,
    TORCHAO,
    Line,
    Row,
    Run,
    bounds,
    measured,
)
from fp8graph import Policy
from fp8graph.hardware import bf16_sheet
from fp8graph.tools.record.workloads import WORKLOADS

Column = Callable[[Row], Any]
STEPS: Final = (1, 10, 20, 30)  # those whose loss is shown
FEW_ROWS: Final = 2048  # of a GEMM that decodes, or nearly
TOKENS: Final = WORKLOADS[LLAMA].tokens  # of rows that do not say it


def table(titles: Sequence[Any], rows: Iterable[Sequence[Any]]) -> str:
    lines = [[_cell(value) for value in row] for row in (titles, ["---"] * len(titles), *rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _cell(value: Any) -> str:
    if value is None:
        return ""
    return f"{value:,.3f}" if isinstance(value, float) else str(value)


def _whole_number(value: float | None) -> str | None:
    return None if value is None else f"{value:,.0f}"


def comparison(columns: Mapping[str, Column], rows: Iterable[Row]) -> str:
    """Return a row per contender; a column that no row has a value for is left out."""
    cells = [[_cell(column(row)) for column in columns.values()] for row in rows]
    kept = [index for index in range(len(columns)) if any(line[index] for line in cells)]
    titles = list(columns)
    return table([titles[index] for index in kept], [[line[index] for index in kept] for line in cells])


def prose(text: str) -> str:
    """Fill a paragraph into lines that people can read in a diff."""
    return textwrap.fill(text, 120, break_long_words=False, break_on_hyphens=False)


def run_line(run: Run) -> str:
    """Return where, when and with which code ``run`` was measured."""
    m = run.machine
    where = m.get("gpu") or f"CPU ({m['cpu']})"
    versions = [f"{k} {m[k]}" for k in ("torch", "triton", "transformers", "torchao") if k in m]
    if m.get("transformer_engine", "missing") != "missing":
        versions.append(f"transformer_engine {m['transformer_engine']}")
    return prose(f"Run `{run.file}`: {where}, {', '.join(versions)}, {m['date'][:10]}, commit {m['commit']}.")


def goals(runs: Sequence[Run]) -> str:
    rows = [
        (goal.name, goal.bar, goal.wanted, goal.ratio, goal.detail, goal.verdict, goal.run and f"`{goal.run}`")
        for goal in judge(runs)
    ]
    lines = [table(("goal", "bar", "times as fast", "measured", "", "verdict", "run"), rows)]
    low, high, count = spread_of_bound(runs)
    if count > 1:
        lines.append(f"\nOver {count} runs of the layers, R per tensor was {low:.3f} to {high:.3f}.")
    return "\n".join(lines)


def limits(run: Run, section: str) -> str:
    """Return R per scaling, with the milliseconds of which it is the ratio."""
    parts = [
        f"{scaling} {line['R']:.3f} ({line['bf16_ms']:.3f} / {line['fp8_ms']:.3f} ms)"
        for scaling, line in bounds(run, section).items()
    ]
    return prose(f"R of this run: {', '.join(parts)}.") if parts else ""


# --- columns --------------------------------------------------------------------------------------------------------


def _of(key: str) -> Column:
    return lambda row: row.line.get(key)


def _number(key: str) -> Column:
    return lambda row: _whole_number(row.line.get(key))


def _profile(row: Row) -> Line:
    return row.line.get("profile") or {}


def _gpu_ms(line: Line | None) -> float | None:
    return (line.get("gpu_ms") or (line.get("profile") or {}).get("gpu_ms")) if line else None


def _spread(row: Row) -> str | None:
    """Return how far apart the rounds are."""
    low, high = row.line.get("low_ms"), row.line.get("high_ms")
    return f"{high / low - 1:.1%}" if low and high else None


def _launches(row: Row) -> str | None:
    return _whole_number(_profile(row).get("launches", row.line.get("launches")))


def memory(line: Line) -> tuple[float | None, float | None]:
    """Return resident and peak MiB; neither where they cannot be true: another model was freed meanwhile."""
    resident, peak = line.get("resident_mib"), line.get("peak_mib")
    impossible = (resident is not None and resident <= 0) or (resident and peak and peak < resident)
    return (None, None) if impossible else (resident, peak)


def _share_of(kind: str) -> Column:
    """Return the column of what kernels of a kind take of the profile's GPU time; empty where it has none."""

    def share(row: Row) -> str | None:
        ms = _profile(row).get("by_kind_ms", {}).get(kind)
        return f"{100 * ms / _profile(row)['gpu_ms']:.0f}" if ms else None

    return share


TIMES: Final[Mapping[str, Column]] = {
    "contender": lambda row: row.contender,
    "wall ms": _of("wall_ms"),
    "bf16's ms": lambda row: row.bf16 and row.bf16["wall_ms"],
    "times bf16": lambda row: row.times_bf16,
    "torchao's ms": lambda row: row.torchao and row.torchao["wall_ms"],
    "times torchao": lambda row: row.times_torchao,
    "spread": _spread,
    "host ms": _of("host_ms"),
    "GPU ms (profile)": lambda row: _gpu_ms(row.line),
    "launches": _launches,
}
# of the profile's GPU time, per cent
KINDS: Final[Mapping[str, Column]] = {f"{kind}, %": _share_of(kind) for kind in ("gemm", "attention", "triton")}
MEMORY: Final[Mapping[str, Column]] = {
    "resident MiB": lambda row: _whole_number(memory(row.line)[0]),
    "peak MiB": lambda row: _whole_number(memory(row.line)[1]),
    "W": _number("watts"),
    "SM MHz": _number("sm_mhz"),
}


def contenders(rows: Sequence[Row]) -> str:
    """Return the table of ``linears`` or ``layers``."""
    return comparison({**TIMES, **KINDS, **MEMORY}, rows)


def decode(rows: Sequence[Row]) -> str:
    """Return milliseconds of one token, and the line on memory: FP8 copies stand beside the weights in bf16."""
    first: dict[str, Column] = {
        "sequences": lambda row: row.case[0],
        "CUDA graphs": lambda row: "yes" if row.case[1] else "no",
    }
    lines = [comparison({**first, **TIMES, **MEMORY}, rows)]
    held = {row.contender: row.line["resident_mib"] for row in rows if row.case[0] == 1 and "resident_mib" in row.line}
    stored = {name: mib for name, mib in held.items() if name.endswith("checkpoint")}
    if {BF16, TENSORWISE} <= held.keys() and stored:
        text = (
            f"For one sequence the weights, their FP8 copies and the cache take {held[TENSORWISE]:,.0f} MiB under "
            f"tensorwise and {held[BF16]:,.0f} MiB in bf16, since the copies stand beside the weights in bf16; only an "
            f"FP8 checkpoint takes less: {min(stored.values()):,.0f} MiB."
        )
        lines.append(f"\n{prose(text)}")
    return "\n".join(lines)


def smallest(rows: Sequence[Row]) -> str:
    """Return a row per layer and contender, the narrowest first, with the GEMMs that the speed model would choose."""

    def chosen(row: Row) -> str | None:
        gemms = [speedup for speedup in (row.line.get("predicted") or {}).values() if speedup is not None]
        return f"{sum(speedup >= Policy().min_speedup for speedup in gemms)} of {len(gemms)}" if gemms else None

    first: dict[str, Column] = {"tokens": lambda row: row.case[0], "hidden size": lambda row: row.case[1]}
    last: dict[str, Column] = {"GEMMs that the speed model would choose": chosen}
    return comparison({**first, **TIMES, **last}, sorted(rows, key=lambda row: row.case))


def sweep(rows: Sequence[Row]) -> str:
    """Return the 12 worst cases by the profile's GPU time."""
    ratios = {
        key: ratio
        for run in {row.run.file: row.run for row in rows}.values()
        for key, ratio in by_gpu_time(run).items()
    }
    worst = sorted(
        (row for row in rows if (*row.case, row.contender) in ratios), key=lambda row: ratios[*row.case, row.contender]
    )  # fmt: skip
    first: dict[str, Column] = {
        "the 12 worst: tokens x inputs -> outputs": lambda row: "{} x {} -> {}".format(*row.case)
    }
    last: dict[str, Column] = {
        "bf16's GPU ms": lambda row: _gpu_ms(row.bf16),
        "times bf16 by GPU time": lambda row: ratios[*row.case, row.contender],
    }
    return comparison({**first, **TIMES, **last}, worst[:12])


# --- a whole model --------------------------------------------------------------------------------------------------


def flop_per_token(line: Line) -> Line | None:
    """Return FLOPs per token: attention as torchtitan counts it, and as Megatron does, the causal half."""
    if counted := line.get("flop_per_token"):
        return counted
    return _of_llama() if line.get("model", LLAMA) == LLAMA else None


@functools.cache
def _of_llama() -> Line:
    return WORKLOADS[LLAMA].flop_per_token()


def peak_flops(row: Row) -> float | None:
    """Return FLOP/s in bf16 that the board's data sheet names."""
    return row.line["peak_flops"] if "peak_flops" in row.line else bf16_sheet(row.run.gpu or "")


def _rate(way: str) -> Column:
    def tflops(row: Row) -> str | None:
        counted = flop_per_token(row.line)
        return f"{counted[way] * row.line['tokens_per_s'] / 1e12:.0f}" if counted else None

    return tflops


def _share(row: Row) -> str | None:
    counted, peak = flop_per_token(row.line), peak_flops(row)
    return f"{counted['titan'] * row.line['tokens_per_s'] / peak:.0%}" if counted and peak else None


def _loss(step: int) -> Column:
    def loss(row: Row) -> str | None:
        losses = row.line.get("losses", ())
        return f"{losses[step - 1]:.3f}" if row.line.get("text") and len(losses) >= step else None

    return loss


def _tokens_per_s(line: Line | None) -> str | None:
    return _whole_number(line["tokens_per_s"]) if line else None


def whole(rows: Sequence[Row]) -> str:
    """Return a table per model, under the conditions that its rows share."""
    models = [[row for row in rows if row.case == case] for case in dict.fromkeys(row.case for row in rows)]
    return "\n\n".join(f"{prose(conditions(of_model))}\n\n{_whole(of_model)}" for of_model in models)


def _whole(rows: Sequence[Row]) -> str:
    """Return a row per contender."""
    new = all(row.line.get("text") for row in rows)
    columns: dict[str, Column] = {
        "contender": lambda row: row.contender,
        "tokens/s": lambda row: _tokens_per_s(row.line),
        "bf16's tokens/s": lambda row: _tokens_per_s(row.bf16),
        "times bf16": lambda row: row.times_bf16,
        "torchao's tokens/s": lambda row: _tokens_per_s(row.torchao),
        "times torchao": lambda row: row.times_torchao,
        "TFLOP/s as torchtitan counts": _rate("titan"),
        "TFLOP/s as Megatron counts": _rate("megatron"),
        "of the data sheet's bf16 (torchtitan's count)": _share,
        "peak MiB": lambda row: _whole_number(memory(row.line)[1]),
        "resident MiB": lambda row: _whole_number(memory(row.line)[0]),
        "W": _number("watts"),
        "SM MHz": _number("sm_mhz"),
        "seconds to compile" if new else "first step's extra s": lambda row: (
            f"{row.line['compile_s']:.1f}" if "compile_s" in row.line else None
        ),
        **{f"loss at step {step}": _loss(step) for step in STEPS},
    }
    return comparison(columns, rows)


def conditions(rows: Sequence[Row]) -> str:
    """Return the tokens, optimizer and text that the rows of one run share, and what old runs could not show."""
    line = rows[0].line
    model = line.get("model", LLAMA)
    sequence = f" in sequences of {line['sequence']:,}" if "sequence" in line else ""
    sentences = [
        f"{model}: {line.get('tokens', TOKENS):,} tokens per step{sequence}, {line['optimizer']}, {text_of(rows)}."
    ]
    if not line.get("text"):
        sentences += [
            "So the losses prove nothing: none is shown.",
            "bf16 came first: its first step also paid for the start of the process.",
        ]
    if peak := peak_flops(rows[0]):
        sentences.append(f"The board's data sheet names {peak / 1e12:.0f} TFLOP/s in bf16.")
    return " ".join(sentences)


def text_of(rows: Sequence[Row]) -> str:
    """Return the text that the rows of one run were trained on."""
    text = rows[0].line.get("text")
    return f"fresh text in each step ({text})" if text else "one batch of random tokens that each step repeats"


def cudnn_attends(rows: Iterable[Row]) -> bool:
    """Return whether the profiles of all rows have cuDNN's attention, and no other."""
    kernels = [[name for name, *_ in _profile(row).get("kernels", ()) if kind_of(name) == "attention"] for row in rows]
    return bool(kernels) and all(names and all("cudnn" in name for name in names) for names in kernels)


def speed(rows: Sequence[Row]) -> str:
    """Return README's table: one run, which has bf16 and torchao."""
    columns: dict[str, Column] = {
        "contender": lambda row: row.contender,
        "tokens/s": lambda row: _tokens_per_s(row.line),
        "times bf16": lambda row: row.times_bf16,
        "times torchao": lambda row: row.times_torchao,
        "peak MiB": lambda row: _whole_number(memory(row.line)[1]),
        "W": _number("watts"),
    }
    return comparison(columns, rows)


def against_torchao(rows: Sequence[Row]) -> str:
    """Return the sentence on peak memory, whoever needs less."""
    peaks = {row.contender: memory(row.line)[1] for row in rows}
    ours, theirs, plain = (peaks.get(name) for name in (TENSORWISE, TORCHAO, BF16))
    if not (ours and theirs and plain):
        return ""
    less = "torchao takes less memory" if theirs < ours else "torchao takes no less memory"
    return (
        f"{less}: {theirs:,.0f} MiB at the peak, where fp8graph's tensorwise takes {ours:,.0f} and bf16 {plain:,.0f}."
    )


# --- where the time goes --------------------------------------------------------------------------------------------


def on_the_host(rows: Iterable[Row], count: int = 5) -> Iterator[str]:
    """Yield the longest rows of the CPU's profile, of bf16 and of tensorwise."""
    for row in rows:
        if row.contender in (BF16, TENSORWISE) and (longest := _profile(row).get("cpu")):
            parts = "; ".join(f"`{name[:60]}` {ms:.2f} ms ({calls:g}x)" for name, calls, ms in longest[:count])
            yield f"* **{row.contender}**: {parts}"


# --- parts that are not compared ------------------------------------------------------------------------------------


def gemms(run: Run) -> str:
    """Return TFLOP/s: a row per shape, a column per variant; with few rows, the shapes of one weight."""
    lines = [line for line in run.of("gemm") if line.get("tflops") is not None]
    variants = list(dict.fromkeys(line["variant"] for line in lines))
    every = list(dict.fromkeys((line["m"], line["n"], line["k"]) for line in lines))
    few = [shape for shape in every if shape[0] <= FEW_ROWS]
    shapes = [shape for shape in every if shape[0] > FEW_ROWS or shape[1:] == few[0][1:]]
    rates = {(line["m"], line["n"], line["k"], line["variant"]): f"{line['tflops']:.0f}" for line in lines}
    rows = [(" x ".join(map(str, shape)), *(rates.get((*shape, v)) for v in variants)) for shape in shapes]
    lines = [table(("m x n x k", *variants), rows)]
    if left := len(every) - len(shapes):
        lines.append(f"\nThe file has {left} more shapes, of other weights with up to {FEW_ROWS:,} rows.")
    return "\n".join(lines)


def quantization(run: Run) -> str:
    """Return TB/s of what must be read and written once: a row per tensor and recipe, a column per option."""
    lines = [line for line in run.of("quant") if line.get("tb_s") is not None]
    options = list(dict.fromkeys(line["options"] for line in lines))
    keys = list(dict.fromkeys((line["producer"], line["recipe"]) for line in lines))
    rates = {(line["producer"], line["recipe"], line["options"]): f"{line['tb_s']:.2f}" for line in lines}
    return table(("", "recipe", *options), [(*key, *(rates.get((*key, o)) for o in options)) for key in keys])


def train(run: Run) -> str:
    rows = [
        (line["contender"], line["wall_ms"], line["host_ms"], _gpu_ms(line), line["losses"][-1], *line["resident_mib"])
        for line in run.of("train") if "losses" in line
    ]  # fmt: skip
    titles = ("contender", "wall ms", "host ms", "GPU ms (profile)", "last loss", "MiB after 4 steps", "MiB at the end")
    checks = [
        f"* {line['check']}, {line['recipe']}: {'yes' if line['holds'] else 'NO'}, largest difference {line['worst']:g}"
        for line in run.of("train") if "check" in line
    ]  # fmt: skip
    return "\n".join([table(titles, rows), "", *checks])


def host(run: Run) -> str:
    """Return a row per contender, a column per number of layers and kind of call.

    The raw lines hold one time per case, and no spread. How far some lie below plain's is the least that they are off.
    """
    lines = [line for line in run.of("host") if "us" in line]
    cases = list(dict.fromkeys((line["mode"], line["layers"]) for line in lines))
    cell = {
        (line["contender"], line["mode"], line["layers"]): f"{line['us']:.0f}"
        + (f" ({line['more_functions']:+d})" if line.get("more_functions") else "")
        for line in lines
    }
    titles = ("us per call (functions more than plain)", *(f"{mode}, {layers} layers" for mode, layers in cases))
    names = dict.fromkeys(line["contender"] for line in lines)
    rows = table(titles, [(name, *(cell.get((name, *case)) for case in cases)) for name in names])
    if (noise := 1 - min((line["times_plain"] for line in lines), default=1.0)) <= 0:
        return rows
    text = (
        f"The counts are exact. The times are not: a call that calls more functions took up to {noise:.0%} less time "
        "than plain's, so only differences well above that mean anything."
    )
    return f"{rows}\n\n{prose(text)}"


def compile_time(results: dict[str, Any]) -> str:
    """Return seconds of a training step's compile, and how often each contender traced and generated."""
    rows: list[Sequence[Any]] = []
    for layers, of_layers in results["compile"].items():
        for case in of_layers["seconds"]:
            name, _, cache = case.rpartition(" ")
            counts = of_layers.get("counts", {}).get(case, {})
            rows.append((
                layers, name, cache, *_times_plain(of_layers["seconds"], case),
                counts.get("traces"), counts.get("code_generations"), counts.get("kernels"),
            ))  # fmt: skip
        rows += [(layers, case, "", f"failed: {reason}") for case, reason in of_layers.get("failed", {}).items()]
    return table(("layers", "", "cache", "seconds", "times plain", "traces", "code generations", "C++ files"), rows)


def _times_plain(measured: Mapping[str, Sequence[float]], case: str) -> tuple[str, str]:
    """Return the median of a case, and how many times plain torch's that is."""
    if case not in measured:
        return "", ""
    median, plain = statistics.median(measured[case]), measured.get(f"inductor {case.rpartition(' ')[2]}")
    return f"{median:.1f}", f"{median / statistics.median(plain):.2f}" if plain else ""


def gpu_code_time(results: dict[str, list[dict[str, Any]]]) -> str:
    """Return CPU seconds of a layer's code for a GPU, with the kernels that were generated and compiled."""
    rows: list[Sequence[Any]] = []
    plain = None
    for name, processes in results.items():
        done = [one for one in processes if "failed" not in one]
        if not done:
            rows.append((name, f"failed: {processes[-1]['failed']}"))
            continue
        generated, compiled = (statistics.median(one[part] for one in done) for part in ("generate", "compile"))
        plain = plain or generated + compiled
        counts = (done[-1][count] for count in ("kernels", "distinct", "configurations"))
        ratio = (generated + compiled) / plain
        rows.append((name, f"{generated:.1f}", f"{compiled:.1f}", f"{ratio:.2f}", *counts))
    titles = ("", "generate", "compile", "both, times bf16's", "launches", "distinct kernels", "configurations")
    return table(titles, rows)


def checkpointing(rows: Iterable[Line]) -> str:
    """Return the MiB that a layer keeps until backward, kernels and their traffic: a column per recipe."""
    cells: dict[tuple[str, str], dict[str, str]] = {}
    for row in rows:
        kernels, mib = (row["forward"][count] + row["backward"][count] for count in ("kernels", "mib"))
        case = cells.setdefault((row["recomputed"], row["save"]), {})
        case[row["recipe"]] = f"{row['kept_mib']:,.0f} / {kernels} / {mib:,}"
    recipes = list(dict.fromkeys(recipe for case in cells.values() for recipe in case))
    titles = ("kept MiB / kernels / MiB moved: run again", "save", *recipes)
    return table(titles, [(*key, *(case.get(recipe) for recipe in recipes)) for key, case in cells.items()])


def failures(runs: Sequence[Run]) -> Iterator[str]:
    """Yield what failed or was skipped in a clean run and was not measured since; then who was never reached."""
    clean = [run for run in runs if run.clean and run.gpu]
    cases: dict[tuple[str, str], list[str]] = {}
    stopped: dict[str, dict[str, None]] = {}
    files: dict[str, None] = {}
    for index, run in enumerate(clean):
        for line in run.lines:
            if not NO_NUMBER & line.keys() or "section_s" in line or _is_measured(line, clean[index:]):
                continue
            if why := line.get("failed") or line.get("skipped"):
                reason = str(why).splitlines()[0][:100].split(" when calling")[0]  # then come sizes
                sizes = " x ".join(str(line[key]) for key in ("m", "n", "k", "tokens", "inputs") if key in line)
                named = ", ".join([line["section"], *_names(line)])
                cases.setdefault((run.file, f"{named}: {reason}"), []).append(sizes)
            elif name := ", ".join(_names(line)):
                if not _is_measured(line, clean):
                    stopped.setdefault(line["section"], {})[name] = None
                    files[run.file] = None
    for (file, what), sizes in cases.items():
        where = f" ({', '.join(sizes[:3])}{', ...' if len(sizes) > 3 else ''})" if any(sizes) else ""
        yield f"* `{file}`: {what}{where}"
    if stopped:
        count = sum(map(len, stopped.values()))
        names = "; ".join(
            f"{section}: {', '.join(f'`{name}`' for name in contenders)}" for section, contenders in stopped.items()
        )
        where = ", ".join(f"`{file}`" for file in files)
        yield f"* Contenders that no run reached before its time was over: {count} ({where}): {names}"


def _names(line: Line) -> list[str]:
    keys = ("contender", "variant", "scaling", "producer", "recipe", "options")
    batch = [f"sequences {line['batch']}"] if "batch" in line else []
    return [*batch, *(str(line[key]) for key in keys if key in line)]


def _is_measured(line: Line, runs: Iterable[Run]) -> bool:
    """Return whether one of ``runs`` has a number of the contender and case of ``line``."""
    section = line["section"]
    if section not in CASES or "contender" not in line:
        return False
    case = tuple(line.get(key, LLAMA if key == "model" else None) for key in CASES[section])
    return any((case, line["contender"]) in measured(run, section) for run in runs)
