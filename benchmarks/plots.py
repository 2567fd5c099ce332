"""The pictures of ``benchmarks.report``: each says one thing, with its numbers written where they are."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Final

from benchmarks.goals import Line, bounds, by_gpu_time, is_profile, speedups

TITLES: Final = {"linears": "the linears of one layer, 15,872 tokens", "layers": "two Llama-3-8B layers, 8,192 tokens"}
COLORS: Final = {
    "gemm": "#4c72b0", "attention": "#8172b3", "triton": "#dd8452", "copy": "#c44e52", "optimizer": "#937860",
    "other": "#8c8c8c",
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


def speedup(lines: list[Line], section: str, path: Path) -> Path | None:
    """One row per contender: times as fast as bf16, weights kept and after an update, beside what the GEMMs allow."""
    kept, updated = speedups(lines, section), speedups(lines, section, "updated")
    names = [name for name in kept if name != "bf16"]
    if not names:
        return None
    names.sort(key=kept.__getitem__)
    figure, (axes,) = _axes(8, 0.36 * len(names) + 1.5)
    rows = range(len(names))
    for row, name in zip(rows, names, strict=True):
        ours = "torchao" not in name
        axes.plot(kept[name], row, "o", color=COLORS["gemm"] if ours else COLORS["other"], markersize=7)
        axes.annotate(
            f"{kept[name]:.2f}", (kept[name], row), (8, 0), textcoords="offset points", va="center", fontsize=9
        )
        if name in updated:
            axes.plot(updated[name], row, "|", color=COLORS["triton"], markersize=11, markeredgewidth=2)
    limit = bounds(lines, section).get("tensor")
    for value, text in ((1.0, "bf16"), (limit, f"its GEMMs alone: {limit or 0:.2f}")):
        if value is not None:
            axes.axvline(value, ymax=0.93, color="#b0b0b0", linewidth=1, zorder=0)
            axes.annotate(text, (value, len(names) - 0.4), ha="center", va="bottom", fontsize=9, color="#606060")
    axes.set(yticks=rows, yticklabels=names, ylim=(-0.6, len(names)))
    axes.set_xlabel("times as fast as bf16, by wall time; bar: after an update of the weights")
    axes.margins(x=0.1)
    axes.set_title(f"Forward and backward of {TITLES[section]}", loc="left", fontsize=11)
    axes.tick_params(axis="y", length=0)
    return _save(figure, path)


def kinds(lines: list[Line], section: str, path: Path) -> Path | None:
    """One bar per contender: its GPU time by kind of kernel."""
    profiles = {line["contender"]: line["profile"] for line in lines if is_profile(line, section)}
    names = [name for name in profiles if "," not in name or "mask" in name][::-1]  # bf16 on top, no ablations
    if not names:
        return None
    figure, (axes,) = _axes(8, 0.42 * len(names) + 1.5)
    used = [kind for kind in COLORS if any(profiles[name]["by_kind_ms"].get(kind) for name in names)]
    longest = max(profiles[name]["gpu_ms"] for name in names)
    left = [0.0] * len(names)
    for kind in used:
        widths = [profiles[name]["by_kind_ms"].get(kind, 0.0) for name in names]
        axes.barh(names, widths, left=left, color=COLORS[kind], height=0.66)
        for row, (width, start) in enumerate(zip(widths, left, strict=True)):
            if width > 0.055 * longest:
                axes.text(start + width / 2, row, f"{width:.1f}", ha="center", va="center", color="white", fontsize=9)
            if row == len(names) - 1 and width > 0.02 * longest:  # the top bar names the kinds
                axes.text(start + width / 2, row + 0.5, kind, ha="center", fontsize=9, color=COLORS[kind])
        left = [start + width for start, width in zip(left, widths, strict=True)]
    for row, total in enumerate(left):
        axes.text(total + 0.01 * longest, row, f"{total:.1f}", va="center", fontsize=9)
    missing = [kind for kind in used if profiles[names[-1]]["by_kind_ms"].get(kind, 0.0) <= 0.02 * longest]
    for index, kind in enumerate(missing):
        axes.text(1.0, 1.02 + 0.05 * index, kind, transform=axes.transAxes, ha="right", fontsize=9, color=COLORS[kind])
    axes.set_xlabel("GPU time of one forward and backward [ms]")
    axes.set_title(f"Where the GPU's time goes: {TITLES[section]}", loc="left", fontsize=11, pad=16)
    axes.tick_params(axis="y", length=0)
    return _save(figure, path)


def sweep(lines: list[Line], path: Path) -> Path | None:
    """A column per shape: times as fast as bf16 by GPU time, against tokens."""
    found = by_gpu_time(lines)
    shapes = sorted({(inputs, outputs) for _, inputs, outputs, _ in found})
    if not shapes:
        return None
    figure, columns = _axes(2.2 * len(shapes) + 1.2, 3.2, len(shapes), sharey=True)
    for axes, (inputs, outputs) in zip(columns, shapes, strict=True):
        ends: list[tuple[float, str]] = []
        for recipe in FP8:
            points = sorted((t, v) for (t, i, o, r), v in found.items() if (i, o, r) == (inputs, outputs, recipe))
            if points:
                axes.plot(*zip(*points, strict=True), "o-", color=FP8[recipe], markersize=3.5, linewidth=1.3)
                ends.append((points[-1][1], recipe))
        axes.axhline(1.0, color="#b0b0b0", linewidth=1, zorder=0)
        axes.set_xscale("log", base=2)
        tokens = sorted({t for t, i, o, _ in found if (i, o) == (inputs, outputs)})
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
    """The name of each line beside its end, far enough from each other to be read."""
    low, high = axes.get_ylim()
    least, last = 0.08 * (high - low), float("-inf")
    for value, name in sorted(ends):
        last = max(value, last + least)
        axes.annotate(
            name, (1.03, last), xycoords=axes.get_yaxis_transform(), va="center", fontsize=9, color=colors[name],
            annotation_clip=False,
        )  # fmt: skip


def host(lines: list[Line], path: Path) -> Path | None:
    """A column per kind of call: what a call takes on the host beyond plain torch.compile, against layers."""
    found = [line for line in lines if line["section"] == "host" and "us" in line]
    modes = sorted({line["mode"] for line in found})
    if not found:
        return None
    figure, columns = _axes(3.6 * len(modes) + 2.6, 3.4, len(modes))
    names = list(dict.fromkeys(line["contender"] for line in found))
    palette = ["#404040", "#55a868", "#4c72b0", "#937860", "#8172b3", "#dd8452"]
    colors = {name: palette[index % len(palette)] for index, name in enumerate(names)}
    for axes, mode in zip(columns, modes, strict=True):
        for name in names:
            points = sorted((x["layers"], x["us"]) for x in found if (x["mode"], x["contender"]) == (mode, name))
            if points:
                style: dict[str, Any] = {"color": colors[name], "markersize": 3.5, "linewidth": 1.3}
                axes.plot(*zip(*points, strict=True), "o-", label=name, **style)
        axes.set_title(mode, fontsize=10)
        axes.set_xlabel("layers")
        axes.set_xticks(sorted({line["layers"] for line in found}))
        axes.set_ylim(bottom=0)
    figure.legend(*columns[0].get_legend_handles_labels(), loc="outside right center", frameon=False, fontsize=9)
    columns[0].set_ylabel("CPU time around the\ncompiled code [us per call]")
    figure.suptitle("Host time of a call", x=0.01, ha="left", fontsize=11)
    return _save(figure, path)


def passes(results: Path) -> list[Path]:
    """``compile_time.png`` beside the results: time in the passes against layers."""
    if not results.exists():
        return []
    found = json.loads(results.read_text(encoding="utf-8"))["results"]["passes"]
    if "per_layer" not in found:
        return []
    figure, (axes,) = _axes(6, 4)
    counts = [int(layers) for layers in found["seconds"]]
    axes.plot(counts, list(found["seconds"].values()), "o", color=COLORS["gemm"])
    line = [found["fixed"] + found["per_layer"] * n for n in counts]
    axes.plot(counts, line, "-", color=COLORS["gemm"], linewidth=1)
    text = f"{1e3 * found['per_layer']:.0f} ms per layer"
    axes.annotate(text, (counts[-1], line[-1]), (-10, 4), textcoords="offset points", ha="right", fontsize=9)
    axes.set(xlabel="layers", ylabel="time in fp8graph's passes [s]", ylim=(0, None))
    axes.set_title("Passes over a Llama's training graph", loc="left", fontsize=11)
    return [_save(figure, results.with_suffix(".png"))]


def draw(gpu: list[Line], anywhere: list[Line], folder: Path) -> list[Path]:
    """Every picture that there are numbers for, in ``folder``: of runs on a GPU, and on any machine."""
    pictures: list[Callable[[], Path | None]] = [
        *(lambda s=section: speedup(gpu, s, folder / f"{s}_speedup.png") for section in TITLES),
        *(lambda s=section: kinds(gpu, s, folder / f"{s}_kinds.png") for section in TITLES),
        lambda: sweep(gpu, folder / "sweep.png"),
        lambda: host(anywhere, folder / "host.png"),
    ]
    return [path for make in pictures if (path := make()) is not None]
