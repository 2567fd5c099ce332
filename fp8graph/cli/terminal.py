"""What a terminal shows while one waits. Nothing is shown in a pipe, or if rich is not installed."""

from __future__ import annotations

import contextlib
import importlib.util
import sys
from collections.abc import Generator


@contextlib.contextmanager
def working(what: str) -> Generator[None]:
    """``what``, how long it has taken, and a moving line, for work whose length nobody knows."""
    if not sys.stderr.isatty() or importlib.util.find_spec("rich") is None:
        yield
        return
    from rich.console import Console
    from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        progress.add_task(what, total=None)
        yield
