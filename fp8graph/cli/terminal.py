"""What a terminal shows while one waits. Nothing is shown in a pipe, or if rich is not installed."""

from __future__ import annotations

import contextlib
from collections.abc import Generator

from fp8graph.report.terminal import progress_console


@contextlib.contextmanager
def working(what: str) -> Generator[None]:
    """``what``, how long it has taken, and a moving line, for work whose length nobody knows."""
    if (console := progress_console()) is None:
        yield
        return
    from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        progress.add_task(what, total=None)
        yield
