"""The graphs that one backend compiled: those that live, and what its report says of those that are gone."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from fp8graph.backend.program import Program
from fp8graph.report import GraphView

KEPT: Final = 256  # graphs that are gone and still in the report


@dataclass(eq=False)
class _Entry:
    program: weakref.ref[Program]
    views: list[GraphView]  # without modules: these would keep the graph alive
    gone: bool = False


class Programs:
    """Holds no program alive: torch does, until the model (or the function) is gone or ``torch._dynamo.reset()``.

    What the report says of a graph stays longer, as text: once where several were alike (models compiled in a loop),
    and for the last ``KEPT``.
    """

    def __init__(self) -> None:
        self._entries: list[_Entry] = []  # in the order of compilation
        self.forgotten = 0  # graphs that are gone and no longer in the report

    def __iter__(self) -> Iterator[Program]:
        """The programs that live."""
        return iter([program for entry in self._entries if (program := entry.program()) is not None])

    def add(self, program: Program) -> None:
        self._merge_those_gone()  # else they add up where nobody asks for a report
        self._entries.append(_Entry(weakref.ref(program), program.texts))

    def views(self) -> list[GraphView]:
        """What the report says of each graph; of those that live, with their modules."""
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
        self._entries = [entry for entry in self._entries if entry.views and entry not in old]
