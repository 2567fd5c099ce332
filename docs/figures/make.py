"""The figures of docs/how_fp8_works.md, drawn from the numbers that fp8graph computes: python docs/figures/make.py

They have no background, and colors that show on white and on black. tests/docs/test_figures.py holds what is drawn
against torch's own types, and runs this file.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import matplotlib
import torch
from torch import Tensor

import fp8graph
from fp8graph.numerics.formats import SCALE, exp2_biased, unpack_e2m1
from fp8graph.numerics.hints import saturating_cast
from fp8graph.numerics.history import HEADER, new_page, updated_page
from fp8graph.recipes import FP8_MAX, GEMM_LAYOUTS, GEMM_OPERANDS, GemmName

matplotlib.use("Agg")
from matplotlib import pyplot

FOLDER: Final = Path(__file__).parent
TEXT: Final = "#7d858d"  # on white and on black
BLUE, ORANGE, GREEN, RED = "#3b82d6", "#e07b28", "#3aa35c", "#d64550"
OPERAND_COLORS: Final = {"input": BLUE, "weight": GREEN, "grad_output": ORANGE}
STYLE: Final[dict[Any, Any]] = {
    "svg.hashsalt": "fp8graph",  # the same file each time
    "font.size": 9,
    "savefig.transparent": True,
    **dict.fromkeys(("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color"), TEXT),
    "axes.spines.top": False,
    "axes.spines.right": False,
}


def positive_numbers(name: str) -> list[float]:
    """Every positive number of a type, from the smallest to the largest."""
    if name == "E2M1":
        codes = torch.arange(16, dtype=torch.uint8)
        numbers = unpack_e2m1(codes)[::2]  # the low half of each byte
    elif name == "E8M0":
        numbers = exp2_biased(torch.arange(255, dtype=torch.int32))  # 255 is NaN
    else:
        dtype = {"E4M3": torch.float8_e4m3fn, "E5M2": torch.float8_e5m2}[name]
        numbers = torch.arange(256, dtype=torch.uint8).view(dtype).float()
    return sorted(set(numbers[(numbers > 0) & numbers.isfinite()].tolist()))


def formats() -> Any:
    """One tick for each positive number of E4M3, E5M2 and E2M1, on a logarithmic axis."""
    figure, axes = pyplot.subplots(figsize=(8, 2.1), layout="constrained")
    rows = (("E2M1", GREEN), ("E5M2", ORANGE), ("E4M3", BLUE))
    for row, (name, color) in enumerate(rows):
        numbers = positive_numbers(name)
        axes.vlines(numbers, row - 0.3, row + 0.3, color=color, linewidth=0.8, label=name)
        axes.annotate(f"{numbers[-1]:g}", (numbers[-1], row), (4, 0), textcoords="offset points", va="center")
        smallest = f"$2^{{{round(torch.tensor(numbers[0]).log2().item())}}}$"
        axes.annotate(smallest, (numbers[0], row), (-4, 0), textcoords="offset points", va="center", ha="right")
    axes.set_xscale("log", base=2)
    axes.set(xlim=(2.0**-19, 2.0**19), yticks=range(3), yticklabels=[name for name, _ in rows])
    axes.spines["left"].set_visible(False)
    axes.tick_params(left=False)
    return figure


def largest_errors(name: str) -> tuple[Tensor, Tensor]:
    """Numbers, and the largest relative error of a cast among those up to the next one (a quarter octave)."""
    starts = torch.exp2(torch.arange(-80, 72) / 4)
    x = starts[:, None] * torch.exp2(torch.linspace(0, 0.25, 257))[None, :-1]
    if name == "E2M1":
        grid = torch.tensor([0.0, *positive_numbers(name)])
        cast = grid[(x[..., None] - grid).abs().argmin(-1)]
    else:
        dtype = {"E4M3": torch.float8_e4m3fn, "E5M2": torch.float8_e5m2}[name]
        cast = saturating_cast(x, dtype).float()
    return starts, ((cast - x) / x).abs().amax(1)


def errors() -> Any:
    """The largest relative error of a cast, against the number that is cast."""
    figure, axes = pyplot.subplots(figsize=(8, 2.8), layout="constrained")
    for name, color in (("E4M3", BLUE), ("E5M2", ORANGE), ("E2M1", GREEN)):
        starts, error = largest_errors(name)
        axes.step(starts.tolist(), (100 * error).tolist(), where="post", color=color, label=name)
    axes.set_xscale("log", base=2)
    axes.set_xticks([2.0**power for power in range(-20, 19, 4)])
    axes.set_yscale("log")
    ticks = (3.125, 6.25, 12.5, 25, 50, 100)
    axes.set_yticks(ticks, [f"{tick:g} %" for tick in ticks])
    axes.minorticks_off()
    axes.set(xlabel="the number, after it was multiplied by its scale", ylabel="largest relative error")
    axes.legend(frameon=False, labelcolor="linecolor")
    return figure


RECIPES: Final = {
    "tensorwise": fp8graph.Float8CurrentScaling(),
    "rowwise": fp8graph.Float8RowwiseScaling(),
    "blockwise": fp8graph.Float8BlockScaling(),
    "mxfp8": fp8graph.MXFP8BlockScaling(),
}


def example() -> Tensor:
    """[64 tokens, 256 channels], normal numbers; token 20 and channel 90 are 2,000 times as large."""
    x = torch.randn(64, 256, generator=torch.Generator().manual_seed(0))
    x[20] *= 2000
    x[:, 90] *= 2000
    return x.bfloat16()


def scale_map(x: Tensor, recipe: Any, layout: Any) -> Tensor:
    """log2 of the scale_inv of each element of ``x``, as the copy in ``layout`` has it."""
    q = fp8graph.numerics.quantize(x, recipe, "input", layout)
    scales = q.scale_inv
    scales = exp2_biased(scales.int()) if scales.dtype == torch.uint8 else scales.float()
    rows, columns = x.shape if layout == "rowwise" else x.shape[::-1]
    scales = scales.reshape(1, 1) if scales.ndim == 0 else scales.reshape(scales.shape[0], -1)
    scales = scales.repeat_interleave(rows // scales.shape[0], 0).repeat_interleave(columns // scales.shape[1], 1)
    return (scales if layout == "rowwise" else scales.t()).log2()


def scales() -> Any:
    """What shares a scale in both layouts, under four recipes, and how many numbers become zero."""
    x = example()
    figure, axes = pyplot.subplots(2, 4, figsize=(9, 3), layout="constrained", sharex=True, sharey=True)
    image: Any = None
    for column, (name, recipe) in enumerate(RECIPES.items()):
        for row, layout in enumerate(("rowwise", "columnwise")):
            found = fp8graph.numerics.statistics(x, recipe, "input", layout)
            image = axes[row, column].imshow(
                scale_map(x, recipe, layout).tolist(), vmin=-8, vmax=15, cmap="viridis", aspect="auto"
            )
            axes[row, column].set_title(f"{name}, {layout}\n{found['underflows%']:.1f} % become 0", fontsize=8)
            axes[row, column].set(xticks=(), yticks=())
        axes[1, column].set_xlabel("channels")
    axes[0, 0].set_ylabel("tokens")
    axes[1, 0].set_ylabel("tokens")
    bar = figure.colorbar(image, ax=axes, shrink=0.8)
    bar.set_label("log2 of scale_inv")
    bar.outline.set_visible(False)
    return figure


def gemms() -> Any:
    """The three GEMMs of a linear, which copies they read, and along what they add up."""
    results: dict[GemmName, tuple[str, str, str, str]]
    results = {"fprop": ("y", "M", "N", "K"), "dgrad": ("dx", "M", "K", "N"), "wgrad": ("dw", "N", "K", "M")}
    symbols = {"input": "x", "weight": "w", "grad_output": "dy"}
    figure, axes = pyplot.subplots(1, 3, figsize=(9, 2.6), layout="constrained")
    for one, (gemm, (result, m, n, k)) in zip(axes, results.items(), strict=True):
        for side, (operand, layout) in enumerate(zip(GEMM_OPERANDS[gemm], GEMM_LAYOUTS[gemm], strict=True)):
            top, left = 1.6 * (1 - side), 0.0
            color = OPERAND_COLORS[operand]
            one.add_patch(pyplot.Rectangle((left, top), 1.9, 1.0, facecolor="none", edgecolor=color, linewidth=2))
            one.annotate(
                "", (left + 1.8, top + 0.18), (left + 0.1, top + 0.18), arrowprops={"arrowstyle": "->", "color": color}
            )
            one.text(left + 0.95, top + 0.64, f"{symbols[operand]}, {layout}", ha="center", va="center")
            one.text(left + 0.95, top + 0.34, f"along {k}", ha="center", va="center", fontsize=7.5)
            one.text(left - 0.12, top + 0.5, (m, n)[side], ha="right", va="center")
        one.text(2.25, 1.3, "→", ha="center", va="center", fontsize=14)
        one.add_patch(pyplot.Rectangle((2.6, 0.8), 1.1, 1.0, facecolor="none", edgecolor=TEXT))
        one.text(3.15, 1.3, f"{result}\n[{m}, {n}]", ha="center", va="center")
        one.set_title(gemm)
        one.set(xlim=(-0.4, 3.8), ylim=(-0.1, 2.8))
        one.axis("off")
    return figure


LENGTH: Final = 8


def delayed() -> tuple[list[float], list[float]]:
    """The amaxes of 40 steps with one outlier, and the largest number that the scale of each step leaves room for."""
    fp8_max = FP8_MAX[torch.float8_e4m3fn]
    noise = torch.randn(40, generator=torch.Generator().manual_seed(0))
    amaxes = torch.exp2(0.3 * noise)
    amaxes[20] *= 8
    page, room = new_page(LENGTH, 1), list[float]()
    for amax in amaxes:
        room.append(fp8_max / page[0, SCALE].item())
        page = updated_page(page, [amax.reshape(1)], fp8_max, 0, "max")
    assert page.shape[1] == HEADER + LENGTH
    return amaxes.tolist(), room


def history() -> Any:
    """Delayed scaling: what the scale leaves room for follows the largest amax of the last steps."""
    amaxes, room = delayed()
    figure, axes = pyplot.subplots(figsize=(8, 2.6), layout="constrained")
    axes.step(range(40), room, where="mid", color=BLUE, label=f"room: 448 / scale, from the last {LENGTH} amaxes")
    axes.plot(amaxes, ".", color=TEXT, label="amax of the step")
    clipped = [(step, amax) for step, (amax, most) in enumerate(zip(amaxes, room, strict=True)) if amax > most]
    axes.plot(*zip(*clipped, strict=True), "o", color=RED, fillstyle="none", label="clipped: more than the room")
    axes.set_yscale("log", base=2)
    axes.set(xlabel="step", ylim=(0.5, 700))
    axes.legend(frameon=False, labelcolor="linecolor")
    return figure


FIGURES: Final[dict[str, Callable[[], Any]]] = {
    "formats": formats,
    "errors": errors,
    "scales": scales,
    "gemms": gemms,
    "history": history,
}


def main(folder: Path = FOLDER) -> None:
    """Write every figure into ``folder``."""
    with matplotlib.rc_context(STYLE):
        for name, draw in FIGURES.items():
            figure = draw()
            figure.savefig(folder / f"{name}.svg", metadata={"Date": None})
            pyplot.close(figure)


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
