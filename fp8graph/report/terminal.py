"""Where progress is shown: on a terminal, through rich, and nowhere else."""

from __future__ import annotations

import importlib.util
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console


def progress_console() -> Console | None:
    """A console on stderr for progress; None in a pipe, or if rich is not installed."""
    if not sys.stderr.isatty() or importlib.util.find_spec("rich") is None:
        return None
    from rich.console import Console

    return Console(stderr=True)
