"""Values that are kept for parameters, as long as these live.

A backend keeps much for a parameter: its name, FP8 copies, rows of scaling state, a gradient buffer. None of it keeps
the parameter alive, and all of it goes with the parameter. An id is used again as soon as a parameter is freed; an
entry of a table is gone by then.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable, Iterable
from typing import Any, Final, Generic, TypeVar

from torch import Tensor

from fp8graph.compat.anchors import Anchor, anchor

_Value = TypeVar("_Value")


class ParameterTable(Generic[_Value]):
    """Values of one parameter each, or of several together. An entry goes when any of its parameters is freed.

    Args:
        gone: called with the value of an entry that goes so.
    """

    def __init__(self, gone: Callable[[_Value], None] | None = None) -> None:
        self._gone = gone
        self._values: dict[Hashable, _Value] = {}
        self.get: Final = self._values.get  # by key; no function of Python, as it is called in each call of a graph
        self._alive: dict[Hashable, list[weakref.ref[Any]]] = {}  # called when their parameters are freed

    def __len__(self) -> int:
        return len(self._values)

    def of(self, parameter: Tensor | Anchor) -> _Value | None:
        """Return the value of one parameter."""
        return self._values.get(id(anchor(parameter)))

    def set(self, parameter: Tensor | Anchor, value: _Value) -> _Value:
        """Give one parameter a value."""
        return self.keep(id(anchor(parameter)), value, [parameter])

    def keep(self, key: Hashable, value: _Value, parameters: Iterable[Tensor | Anchor]) -> _Value:
        """Keep ``value`` as long as all of ``parameters`` live, whose ids are a part of ``key``."""
        this = weakref.ref(self)

        def freed(_: Any) -> None:
            if (table := this()) is not None and (gone := table.drop(key)) is not None and table._gone is not None:
                table._gone(gone)

        self._alive[key] = [weakref.ref(anchor(parameter), freed) for parameter in parameters]
        self._values[key] = value
        return value

    def drop(self, key: Hashable) -> _Value | None:
        """Take an entry out."""
        self._alive.pop(key, None)
        return self._values.pop(key, None)

    def items(self) -> list[tuple[Any, _Value]]:
        """Return the entries. The table changes whenever a parameter is freed, this list does not."""
        return list(self._values.items())

    def parameters(self) -> list[tuple[Tensor | Anchor, _Value]]:
        """Return the parameters of the entries, alive, each with its value."""
        alive = [(reference(), key) for key, references in list(self._alive.items()) for reference in references]
        return [(owner, self._values[key]) for owner, key in alive if owner is not None]

    def values(self) -> list[_Value]:
        """See :meth:`items`."""
        return list(self._values.values())
