"""Rows of a loaded state dict that wait here until their layers run and put them into pages."""

from __future__ import annotations

import logging
from collections.abc import Iterator

from torch import Tensor

from fp8graph.runtime.state_dict import SavedRow

_log = logging.getLogger("fp8graph")


class LoadedRows:
    """The loaded rows that no layer has asked for, by name."""

    def __init__(self) -> None:
        self._rows: dict[str, SavedRow] = {}
        self._warned = False

    def replace(self, rows: dict[str, SavedRow]) -> None:
        """Replace the rows by those of another state dict."""
        self._rows = rows
        self._warned = False

    def __iter__(self) -> Iterator[str]:
        return iter(self._rows)

    def entries(self) -> Iterator[tuple[str, Tensor]]:
        """The entries of these rows in a state dict."""
        for name, row in self._rows.items():
            yield from row.entries(name)

    def take(self, name: str, fp8_max: float) -> tuple[Tensor, Tensor] | None:
        """Scale and history of ``name`` for a type whose maximum is ``fp8_max``; None if nothing was loaded for it."""
        row = self._rows.pop(name, None)
        return None if row is None else self.converted(name, row, fp8_max)

    def converted(self, name: str, row: SavedRow, fp8_max: float) -> tuple[Tensor, Tensor]:
        """Scale and history of ``row`` for a type whose maximum is ``fp8_max``. Warns once if that was different."""
        if row.fp8_max != fp8_max and not self._warned:
            self._warned = True
            _log.warning(
                "the loaded scaling state is from a device whose FP8 types have other maxima (%s: %g there, %g here): "
                "its scales are converted, and its amax histories are kept.",
                name.partition("|")[0],
                row.fp8_max,
                fp8_max,
            )
        return row.under(fp8_max)

    def warn_of_other_recipes(self, name: str) -> None:
        """Warn if no row was loaded for ``name`` but one was for the same tensor under another recipe."""
        place = name.partition("|")[0]
        for other in self._rows:
            if other.partition("|")[0] == place:
                _log.warning("%s: the loaded state is for recipe %s; starting afresh.", name, other.partition("|")[2])
