"""Progress is shown on a terminal with rich, and nowhere else."""

from __future__ import annotations

import importlib.util
import sys
from typing import Any

import pytest
from rich.console import Console

from fp8graph.report import terminal


@pytest.mark.parametrize(("is_terminal", "rich"), [(True, True), (True, False), (False, True)])
def test_where_progress_is_shown(is_terminal: bool, rich: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: is_terminal)
    if not rich:
        monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    console = terminal.progress_console()
    assert (console is not None) == (is_terminal and rich)
    assert console is None or console.stderr


class Bar:
    """A bar that notes its calls."""

    def __init__(self) -> None:
        self.calls: list[Any] = []

    def add_task(self, title: str, *, total: int) -> int:
        self.calls.append((title, total))
        return 0

    def update(self, task: int, *, completed: int) -> None:
        self.calls.append(completed)

    def stop(self) -> None:
        self.calls.append("stop")


@pytest.mark.parametrize(("is_terminal", "patience"), [(True, 0.0), (True, 60.0), (False, 0.0)])
def test_a_bar(is_terminal: bool, patience: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a terminal, after two seconds."""
    bar = Bar()
    monkeypatch.setattr(terminal, "_started_bar", lambda console: bar)
    monkeypatch.setattr(terminal, "PATIENCE", patience)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: is_terminal)
    with terminal.progress_bar("reading") as progress:
        progress(1, 2)
        progress(2, 2)
    assert bar.calls == ([("reading", 2), 1, 2, "stop"] if is_terminal and not patience else [])


def test_the_bar_itself() -> None:
    bar = terminal._started_bar(Console(stderr=True))
    bar.update(bar.add_task("reading", total=2), completed=1)
    bar.stop()
