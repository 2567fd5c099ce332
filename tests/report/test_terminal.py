"""Progress is shown on a terminal with rich, and nowhere else."""

from __future__ import annotations

import importlib.util
import sys

import pytest

from fp8graph.report.tables import progress_console


@pytest.mark.parametrize(("terminal", "rich"), [(True, True), (True, False), (False, True)])
def test_where_progress_is_shown(terminal: bool, rich: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: terminal)
    if not rich:
        monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    console = progress_console()
    assert (console is not None) == (terminal and rich)
    assert console is None or console.stderr
