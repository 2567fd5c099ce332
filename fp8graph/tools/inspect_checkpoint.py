"""``fp8graph inspect``: what is in an FP8 checkpoint, as text, with progress where it takes long."""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Callable, Generator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from fp8graph.checkpoints import Checkpoint
from fp8graph.checkpoints.inspect import Inspection, LayerSummary, inspect
from fp8graph.errors import printable
from fp8graph.report.tables import aligned, any_layer, progress_console, size_text
from fp8graph.tools.architecture import compared

if TYPE_CHECKING:
    from rich.console import Console

PATIENCE: Final = 2.0  # seconds before progress is shown


def inspected(folder: Path) -> Inspection:
    """:func:`inspect`, with a bar on a terminal, and a comparison of the names with those of the config's model."""
    with progress_bar(f"reading {folder}") as progress:
        found = inspect(folder, progress=progress)
    names, problems = compared(Checkpoint(folder))
    return dataclasses.replace(found, architecture=names, problems=[*found.problems, *problems])


def text(found: Inspection) -> str:
    """What was found, for people."""
    share = f"{100 * found.quantized_share:.1f} % of the numbers"
    files = f"{found.files} file{'s' * (found.files != 1)}"
    parts = [
        [f"{found.folder}: {found.format}, {files}, {size_text(found.bytes)}. {_layers(found)} quantized: {share}."],
        aligned(
            [
                ("scheme", "layers", "one scale per", "scales", "inputs"),
                *((one.name, str(one.layers), one.tile, one.scales, one.input) for one in found.schemes),
            ],
            ruled=True,
        ),
        aligned(
            [
                ("dtype", "tensors", "size"),
                *((name, str(count), size_text(size)) for name, (count, size) in found.dtypes.items()),
            ],
            ruled=True,
        ),
        [f"in high precision: {_some(found.high_precision)}", f"ignore list: {_some(found.ignore)}"],
        *([[printable(f"key-value cache: {found.kv_cache}")]] if found.kv_cache is not None else []),
    ]
    if found.layers:
        rows = [_outlier(one) for one in found.outliers()]
        header = ("layers that stand out", "shape", "scales max/min", "max scale", "saturated", "zero", "not finite")
        parts.append(aligned([header, *rows], ruled=True))
    parts.append([found.architecture])
    some = [f"  {printable(problem)}" for problem in found.problems[:50]]
    more = [f"  and {len(found.problems) - 50} more"] if len(found.problems) > 50 else []
    wrong = [f"{len(found.problems)} things do not fit together:", *some, *more]
    parts.append(wrong if found.problems else ["Nothing is missing, left over or of a wrong shape."])
    return "\n\n".join("\n".join(lines) for lines in parts)


def _layers(found: Inspection) -> str:
    count = sum(one.layers for one in found.schemes)
    return f"{count} layer{'s' * (count != 1)}"


def _outlier(one: LayerSummary) -> tuple[str, ...]:
    shape = " x ".join(map(str, one.shape))
    shares = (f"{100 * share:.2f} %" for share in (one.saturated, one.zero))
    return printable(one.layer), shape, f"{one.scale_ratio:.3g}", f"{one.largest_scale:.3g}", *shares, str(one.nan)


def _some(names: list[str]) -> str:
    """Names, with one entry for layers that differ only in their numbers."""
    kinds = list(dict.fromkeys(printable(any_layer(f"{name}.").removesuffix(".")) for name in names))
    return ", ".join(kinds[:12]) + (f" and {len(kinds) - 12} more" if len(kinds) > 12 else "") or "none"


@contextlib.contextmanager
def progress_bar(title: str) -> Generator[Callable[[int, int], None]]:
    """A function of what is done and of all, which shows a bar on a terminal once two seconds are over."""
    started, bar, task = time.monotonic(), None, None
    console = progress_console()

    def progress(done: int, total: int) -> None:
        nonlocal bar, task
        if console is None or time.monotonic() - started < PATIENCE:
            return
        if bar is None:
            bar = _started_bar(console)
            task = bar.add_task(title, total=total)
        bar.update(task, completed=done)

    try:
        yield progress
    finally:
        if bar is not None:
            bar.stop()


def _started_bar(console: Console) -> Any:
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    bar = Progress(*columns, console=console, transient=True)
    bar.start()
    return bar
