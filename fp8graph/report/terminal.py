"""Progress on a terminal, through rich, and nowhere else."""

from __future__ import annotations

import contextlib
import importlib.util
import sys
import time
from collections.abc import Callable, Generator
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from rich.console import Console

PATIENCE: Final = 2.0  # seconds before a bar is shown


def progress_console() -> Console | None:
    """Return a console on stderr for progress; None in a pipe, or if rich is not installed."""
    if not sys.stderr.isatty() or importlib.util.find_spec("rich") is None:
        return None
    from rich.console import Console

    return Console(stderr=True)


@contextlib.contextmanager
def progress_bar(title: str) -> Generator[Callable[[int, int], None]]:
    """A function of the amounts done and in all, which shows a bar on a terminal after two seconds."""
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


@contextlib.contextmanager
def working(what: str) -> Generator[None]:
    """Show on a terminal the name of work of unknown length, its duration, and a moving line."""
    if (console := progress_console()) is None:
        yield
        return
    from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        progress.add_task(what, total=None)
        yield
