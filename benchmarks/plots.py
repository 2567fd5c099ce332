"""The pictures of ``benchmarks.report``: each says one thing, with its numbers written where they are."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from benchmarks.goals import by_gpu_time
from benchmarks.published import BF16, TENSORWISE, TORCHAO, Row, Run, bounds, comparable, last_with, rows, whole_model

TITLES: Final = {"linears": "the linears of one layer, 15,872 tokens", "layers": "two Llama-3-8B layers, 8,192 tokens"}
COLORS: Final = {
    "gemm": "#4c72b0", "attention": "#8172b3", "triton": "#dd8452", "copy": "#c44e52", "optimizer": "#937860",
    "other": "#8c8c8c",
}  # fmt: skip
WHOLE: Final = "whole"  # README's picture
PANELS: Final = {"tokens per second": "tokens_per_s", "peak memory [GiB]": "peak_mib", "power [W]": "watts"}
NAMED: Final = {
    BF16: "bf16", TORCHAO: "torchao\ntensorwise", TENSORWISE: "fp8graph\ntensorwise", "delayed": "fp8graph\ndelayed",
}  # fmt: skip
FP8: Final = {"tensorwise": "#4c72b0", "delayed": "#dd8452", "rowwise": "#55a868", "blockwise": "#8172b3"}


def _axes(width: float, height: float, columns: int = 1, **settings: Any) -> tuple[Any, list[Any]]:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, columns, figsize=(width, height), layout="constrained", squeeze=False, **settings)
    for one in axes[0]:
        one.spines[["top", "right"]].set_visible(False)
    return figure, list(axes[0])


def _save(figure: Any, path: Path) -> Path:
    from matplotlib import pyplot

    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)
    pyplot.close(figure)
    return path


def of_section(section: str) -> list[str]:
    """Return the names of the pictures of a section, without the suffix."""
    return [f"{section}_speedup", f"{section}_kinds"] if section in TITLES else [section] if section == "sweep" else []


NAMES: Final = (*(name for section in (*TITLES, "sweep") for name in of_section(section)), "host", WHOLE)


def _where(run: Run) -> str:
    return f"{run.gpu}, {run.machine['date'][:10]}, run {run.file.removesuffix('.jsonl')}"


def _titled(axes: Any, title: str, run: Run, pad: float = 6) -> None:
    """Write the title, and under it the run, small."""
    axes.set_title(f"{title}\n", loc="left", fontsize=11, pad=pad)
    axes.annotate(
        _where(run), (0, 1), (0, pad + 2), xycoords="axes fraction", textcoords="offset points", fontsize=8.5,
        color="#606060",
    )  # fmt: skip


def speedup(rows: Sequence[Row], section: str, path: Path) -> Path | None:
    """Draw a dot per contender of one run: times as fast as bf16, beside the ratio of the GEMMs alone."""
    ratios = {row.contender: row.times_bf16 for row in rows if row.contender != BF16 and row.times_bf16}
    if not ratios:
        return None
    names = sorted(ratios, key=ratios.__getitem__)
    figure, (axes,) = _axes(8, 0.36 * len(names) + 1.7)
    for place, name in enumerate(names):
        color = COLORS["other"] if name.startswith(("torchao", "bf16")) else COLORS["gemm"]
        axes.plot(ratios[name], place, "o", color=color, markersize=7)
        axes.annotate(
            f"{ratios[name]:.2f}", (ratios[name], place), (8, 0), textcoords="offset points", va="center", fontsize=9
        )
    limit = bounds(rows[0].run, section).get("tensor")
    marks = {"bf16": 1.0} | ({f"its GEMMs alone: {limit['R']:.2f}": limit["R"]} if limit else {})
    for text, value in marks.items():
        axes.plot([value, value], [-0.6, len(names) - 0.45], color="#b0b0b0", linewidth=1, zorder=0)
        axes.annotate(text, (value, len(names) - 0.42), ha="center", va="bottom", fontsize=9, color="#606060")
    axes.set(yticks=range(len(names)), yticklabels=names, ylim=(-0.6, len(names) + 0.1))
    axes.set_xlabel("times as fast as bf16, by wall time")
    axes.margins(x=0.1)
    _titled(axes, f"Forward and backward of {TITLES[section]}", rows[0].run)
    axes.tick_params(axis="y", length=0)
    return _save(figure, path)


def kinds(rows: Sequence[Row], section: str, path: Path) -> Path | None:
    """Draw a bar per contender of one run: its GPU time by kind of kernel."""
    profiles: dict[str, Mapping[str, Any]] = {
        row.contender: row.line["profile"] for row in rows if row.line.get("profile")
    }
    names = [name for name in profiles if "," not in name or "mask" in name][::-1]  # bf16 on top, no ablations
    if not names:
        return None
    figure, (axes,) = _axes(8, 0.42 * len(names) + 1.7)
    used = [kind for kind in COLORS if any(profiles[name]["by_kind_ms"].get(kind) for name in names)]
    longest = max(profiles[name]["gpu_ms"] for name in names)
    left = [0.0] * len(names)
    for kind in used:
        widths = [profiles[name]["by_kind_ms"].get(kind, 0.0) for name in names]
        axes.barh(names, widths, left=left, color=COLORS[kind], height=0.66)
        for place, (width, start) in enumerate(zip(widths, left, strict=True)):
            if width > 0.055 * longest:
                axes.text(start + width / 2, place, f"{width:.1f}", ha="center", va="center", color="white", fontsize=9)
            if place == len(names) - 1 and width > 0.02 * longest:  # the top bar names the kinds
                axes.text(start + width / 2, place + 0.5, kind, ha="center", fontsize=9, color=COLORS[kind])
        left = [start + width for start, width in zip(left, widths, strict=True)]
    for place, total in enumerate(left):
        axes.text(total + 0.01 * longest, place, f"{total:.1f}", va="center", fontsize=9)
    small = [kind for kind in used if profiles[names[-1]]["by_kind_ms"].get(kind, 0.0) <= 0.02 * longest]
    for index, kind in enumerate(small):  # too narrow to be named on the bar
        axes.text(1.0, 1.01 + 0.05 * index, kind, transform=axes.transAxes, ha="right", fontsize=9, color=COLORS[kind])
    axes.set_xlabel("GPU time of one forward and backward [ms], by the profile")
    axes.margins(x=0.08)
    _titled(axes, f"Where the GPU's time goes: {TITLES[section]}", rows[0].run, pad=14)
    axes.tick_params(axis="y", length=0)
    return _save(figure, path)


def of_whole(rows: Sequence[Row]) -> list[Row]:
    """Return the rows of README's picture, from the top down."""
    by_name = {row.contender: row for row in rows}
    return [by_name[name] for name in NAMED if name in by_name]


def whole(rows: Sequence[Row], path: Path) -> Path | None:
    """Draw Llama-3-8B in one run: a panel each for tokens per second, peak memory and power."""
    if not (rows := of_whole(rows)):
        return None
    panels = {title: key for title, key in PANELS.items() if any(row.line.get(key) for row in rows)}
    figure, columns = _axes(9, 0.5 * len(rows) + 1.2, len(panels), sharey=True)
    places = range(len(rows))[::-1]
    for axes, (title, key) in zip(columns, panels.items(), strict=True):
        values = [(row.line.get(key) or 0.0) / (1024 if key == "peak_mib" else 1) for row in rows]
        colors = [COLORS["gemm" if "fp8graph" in NAMED[row.contender] else "other"] for row in rows]
        axes.barh(places, values, color=colors, height=0.66)
        for place, value, row in zip(places, values, rows, strict=True):
            text = f"{value:,.1f}" if key == "peak_mib" else f"{value:,.0f}"
            if key == "tokens_per_s" and row.contender != BF16 and row.times_bf16:
                text += f"  ({row.times_bf16:.2f}x)"
            if value:
                axes.text(0.03 * max(values), place, text, va="center", color="white", fontsize=9)
        axes.set_title(title, loc="left", fontsize=10)
        axes.set_xticks([])
        axes.spines["bottom"].set_visible(False)
        axes.tick_params(axis="y", length=0)
    columns[0].set_yticks(places, [NAMED[row.contender] for row in rows], fontsize=9)
    figure.suptitle(f"Training Llama-3-8B on one {_where(rows[0].run)}", x=0.01, ha="left", fontsize=11)
    return _save(figure, path)


def sweep(run: Run, path: Path) -> Path | None:
    """Draw a column per shape: times as fast as bf16 by GPU time, against tokens."""
    ratios = by_gpu_time(run)
    shapes = sorted({(inputs, outputs) for _, inputs, outputs, _ in ratios})
    if not shapes:
        return None
    figure, columns = _axes(2.2 * len(shapes) + 1.2, 3.2, len(shapes), sharey=True)
    for axes, (inputs, outputs) in zip(columns, shapes, strict=True):
        ends: list[tuple[float, str]] = []
        for recipe in FP8:
            points = sorted((t, v) for (t, i, o, r), v in ratios.items() if (i, o, r) == (inputs, outputs, recipe))
            if points:
                axes.plot(*zip(*points, strict=True), "o-", color=FP8[recipe], markersize=3.5, linewidth=1.3)
                ends.append((points[-1][1], recipe))
        axes.axhline(1.0, color="#b0b0b0", linewidth=1, zorder=0)
        axes.set_xscale("log", base=2)
        tokens = sorted({t for t, i, o, _ in ratios if (i, o) == (inputs, outputs)})
        axes.set_xticks(tokens, [str(t) if t < 1024 else f"{t // 1024}k" for t in tokens])
        axes.minorticks_off()
        axes.set_title(f"{inputs} -> {outputs}", fontsize=10)
        axes.set_xlabel("tokens")
        if axes is columns[-1]:
            _name_lines(axes, ends, FP8)
    columns[0].set_ylabel("times as fast as bf16,\nby GPU time")
    figure.suptitle("One linear, forward and backward", x=0.01, ha="left", fontsize=11)
    return _save(figure, path)


def _name_lines(axes: Any, ends: Iterable[tuple[float, str]], colors: dict[str, str]) -> None:
    """Write the name of each line beside its end, far enough from each other to be read."""
    low, high = axes.get_ylim()
    least, last = 0.08 * (high - low), float("-inf")
    for value, name in sorted(ends):
        last = max(value, last + least)
        axes.annotate(
            name, (1.03, last), xycoords=axes.get_yaxis_transform(), va="center", fontsize=9, color=colors[name],
            annotation_clip=False,
        )  # fmt: skip


def host(run: Run, path: Path) -> Path | None:
    """Draw a column per kind of call: what a call takes on the host around the compiled code, against layers."""
    lines = [line for line in run.of("host") if "us" in line]
    modes = sorted({line["mode"] for line in lines})
    if not lines:
        return None
    figure, columns = _axes(3.6 * len(modes) + 2.6, 3.4, len(modes))
    names = list(dict.fromkeys(line["contender"] for line in lines))
    palette = ["#404040", "#55a868", "#4c72b0", "#937860", "#8172b3", "#dd8452", "#c44e52"]
    colors = {name: palette[index % len(palette)] for index, name in enumerate(names)}
    for axes, mode in zip(columns, modes, strict=True):
        for name in names:
            points = sorted((x["layers"], x["us"]) for x in lines if (x["mode"], x["contender"]) == (mode, name))
            if points:
                style: dict[str, Any] = {"color": colors[name], "markersize": 3.5, "linewidth": 1.3}
                axes.plot(*zip(*points, strict=True), "o-", label=name, **style)
        axes.set_title(mode, fontsize=10)
        axes.set_xlabel("layers")
        axes.set_xticks(sorted({line["layers"] for line in lines}))
        axes.set_ylim(bottom=0)
    figure.legend(*columns[0].get_legend_handles_labels(), loc="outside right center", frameon=False, fontsize=9)
    columns[0].set_ylabel("CPU time around the\ncompiled code [us per call]")
    figure.suptitle("Host time of a call", x=0.01, ha="left", fontsize=11)
    return _save(figure, path)


def passes(results: Path) -> list[Path]:
    """Draw ``compile_time.png`` beside the results: time in the passes against layers."""
    if not results.exists():
        return []
    measured = json.loads(results.read_text(encoding="utf-8"))["results"]["passes"]
    if "per_layer" not in measured:
        return []
    figure, (axes,) = _axes(6, 4)
    counts = [int(layers) for layers in measured["seconds"]]
    axes.plot(counts, list(measured["seconds"].values()), "o", color=COLORS["gemm"])
    line = [measured["fixed"] + measured["per_layer"] * n for n in counts]
    axes.plot(counts, line, "-", color=COLORS["gemm"], linewidth=1)
    text = f"{1e3 * measured['per_layer']:.0f} ms per layer"
    axes.annotate(text, (counts[-1], line[-1]), (-10, 4), textcoords="offset points", ha="right", fontsize=9)
    axes.set(xlabel="layers", ylabel="time in fp8graph's passes [s]", ylim=(0, None))
    axes.set_title("Passes over a Llama's training graph", loc="left", fontsize=11)
    return [_save(figure, results.with_suffix(".png"))]


def draw(runs: Sequence[Run], folder: Path) -> list[Path]:
    """Draw every picture that there are published numbers for, in ``folder``; each is of one run."""
    pictures: list[Callable[[], Path | None]] = []
    for section in TITLES:
        if of_runs := rows(runs, section):
            most = max(of_runs.values(), key=len)  # the run with the most contenders, the last of several
            speedups, times = (folder / f"{name}.png" for name in of_section(section))
            pictures.append(lambda most=most, section=section, path=speedups: speedup(most, section, path))
            pictures.append(lambda most=most, section=section, path=times: kinds(most, section, path))
    if of_model := whole_model(runs):
        pictures.append(lambda: whole(of_model, folder / f"{WHOLE}.png"))
    if swept := comparable(runs, "sweep"):
        pictures.append(lambda: sweep(swept[-1], folder / "sweep.png"))
    if run := last_with(runs, "host"):
        pictures.append(lambda: host(run, folder / "host.png"))
    return [path for make in pictures if (path := make()) is not None]
