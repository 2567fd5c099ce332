"""The graphs that one backend compiled: those that are alive, and the report's rows of those that are gone."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from fp8graph.backend.program import Program
from fp8graph.report import GraphView

KEPT: Final = 256  # number of graphs that are gone and still in the report


@dataclass(eq=False)
class _Entry:
    program: weakref.ref[Program]
    views: list[GraphView]  # without modules: these would keep the graph alive
    gone: bool = False


class Programs:
    """The compiled graphs, none of which is kept alive here.

    torch keeps them alive until the model (or the function) is gone, or until ``torch._dynamo.reset()``. The report's
    rows stay longer, as text: for the last ``KEPT`` graphs, and once for graphs that were alike (models compiled in a
    loop).
    """

    def __init__(self) -> None:
        self._entries: list[_Entry] = []  # in the order of compilation
        self.forgotten = 0  # number of graphs that are gone and no longer in the report

    def __iter__(self) -> Iterator[Program]:
        """The programs that are alive."""
        return iter([program for entry in self._entries if (program := entry.program()) is not None])

    def add(self, program: Program) -> None:
        self._merge_those_gone()  # else they add up if nobody asks for a report
        self._entries.append(_Entry(weakref.ref(program), program.texts))

    def views(self) -> list[GraphView]:
        """The report's view of each graph, with the modules of those that are alive."""
        self._merge_those_gone()
        views: list[GraphView] = []
        for entry in self._entries:
            program = entry.program()
            views += entry.views if program is None else program.views
        return views

    def _merge_those_gone(self) -> None:
        for entry in [entry for entry in self._entries if not entry.gone and entry.program() is None]:
            entry.gone = True
            for other in self._entries:
                if other.gone and other is not entry:
                    other.views = [view for view in other.views if view not in entry.views]
        gone = [entry for entry in self._entries if entry.gone and entry.views]
        old = gone[: max(0, len(gone) - KEPT)]
        self.forgotten += sum(len(entry.views) for entry in old)
        self._entries = [entry for entry in self._entries if (entry.views or not entry.gone) and entry not in old]
