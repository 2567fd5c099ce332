"""A tensor keeps its amaxes when its recipe changes: the rows of one tensor, and the newest of them.

A row is recorded under one recipe, and a tensor may have several at once: fprop's and wgrad's, or those of two regions
of the program. They are apart, since each has its own updates. When the policy changes, the rows of recipes that are
no longer in use stay as they are, and a new row, or one that comes into use again, starts as a copy of the newest
(:class:`Successors`). Policies divide time into phases (:class:`Phases`): a row is outdated if it was not used in a
phase that is over, and another row of its tensor was. A row that evaluation alone has asked for follows the others.

The copy has the length of its own recipe (``numerics/history.py``), and a scale for its own FP8 type. Other fields
decide the next update alone. Transformer Engine does the same with the tensors of a module whose recipe changes.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Final

from torch import Tensor

from fp8graph.compat import distributed
from fp8graph.passes.connect_scales import PageLayout
from fp8graph.passes.connect_scales.pages import RowKey
from fp8graph.passes.connect_scales.saved import SavedRow
from fp8graph.runtime.policies import Policies, ResolvedPolicy
from fp8graph.runtime.state_dict import shown

_log = logging.getLogger("fp8graph")

_COPY: Final = -1  # a copy of another row, which has recorded nothing since


class Phases:
    """Numbers of the times between changes of the policy, from 1. The same policy, set again, begins no new one."""

    def __init__(self, policies: Policies) -> None:
        self._policies = policies
        self._seen: ResolvedPolicy | None = None
        self._identity = ""
        self._number = 0

    def now(self) -> int:
        """Return the present one. Asked in every call."""
        if (seen := self._policies.now) is not self._seen:
            self._seen = seen
            if (identity := seen.of(())[1]) != self._identity:
                self._identity = identity
                self._number += 1
        return self._number


@dataclass
class _Use:
    """The phases in which a row has recorded: the last one, and the last one before that; 0: none."""

    last: int = 0
    before: int = 0

    def until(self, phase: int) -> int:
        """Return the last one before ``phase``."""
        return self.last if self.last < phase else self.before


class Successors:
    """The rows of each tensor, by key, and when they were in use."""

    def __init__(self) -> None:
        self._uses: dict[RowKey, _Use] = {}
        self._alike: dict[object, list[RowKey]] = {}  # by tensor
        self._logged: set[object] = set()
        self._phase = 0

    def add(self, key: RowKey, *, copied: bool, phase: int = 0) -> None:
        """Note a new row.

        Args:
            key: of the row.
            copied: it is a copy of another row of its tensor.
            phase: in which other ranks have recorded it.
        """
        self._uses[key] = _Use(_COPY if copied else phase)
        self._alike.setdefault(key.of_tensor, []).append(key)

    def drop(self, key: RowKey) -> None:
        self._uses.pop(key, None)
        self._alike.pop(key.of_tensor, None)  # the rows of one tensor have one owner, and go together

    def used(self, key: RowKey, phase: int) -> None:
        """Note that a row records in ``phase``."""
        use = self._uses[key]
        if use.last != phase:
            use.before, use.last = use.last, phase

    def last(self, key: RowKey) -> int:
        """Return the last phase in which a row has recorded."""
        return self._uses[key].last

    def newest(self, key: RowKey) -> RowKey | None:
        """Return the row of the same tensor that was used last; None if it has none."""
        alike = [other for other in self._alike.get(key.of_tensor, ()) if other != key]
        return max(alike, key=lambda other: self._uses[other].last, default=None)

    def newer(self, key: RowKey, phase: int) -> RowKey | None:
        """Return the row that ``key``'s has to follow before it is used in ``phase``; None if it is up to date."""
        use = self._uses[key]
        other = None
        if use.last == _COPY:
            other = self.newest(key)
            return other if other is not None and self._uses[other].last > _COPY else None
        if use.last < phase:
            alike = (each for each in self._alike[key.of_tensor] if each != key)
            other = max(alike, key=lambda each: self._uses[each].until(phase), default=None)
        return other if other is not None and self._uses[other].until(phase) > use.last else None

    def outdated(self, key: RowKey) -> bool:
        """Return whether another row has the present state of its tensor."""
        use, other = self._uses[key].last, self.newest(key)
        return bool(use) and other is not None and self._uses[other].last > use

    def restart(self) -> None:
        """Take the rows that are up to date for equally new, after another state was loaded."""
        self._uses = {key: _Use(_COPY if self.outdated(key) else 0) for key in self._uses}
        self._logged.clear()

    def converted(self, row: SavedRow, layout: PageLayout, name: str, phase: int) -> tuple[Tensor, Tensor] | None:
        """Scale and history of ``row`` for a page of another recipe. Logs once for all rows if it cannot have all.

        Returns None, so that nothing is copied, if ranks have scales of their own, and are to have one.
        """
        if phase != self._phase:
            self._phase = phase
            self._logged.clear()
        recipe, place, had = layout.recipe, shown(name.partition("|")[0]), row.amax_history.numel()
        if recipe.reduce_amax and not row.reduced and distributed.number_of_ranks(None) > 1:
            self._log(
                "afresh",
                "delayed scaling now reduces amaxes over the ranks (%s, and perhaps more), which had scales of their "
                "own under reduce_amax=False: those are not taken over.",
                place,
            )
            return None
        if had != recipe.amax_history_len and bool(row.amax_history.any()):
            self._log(
                (had, recipe.amax_history_len),
                "the amax histories of delayed scaling have another length now (%s, and perhaps more: %d before, %d "
                "now): the scales are kept, and the histories are cut or padded at their end.",
                place, had, recipe.amax_history_len,
            )  # fmt: skip
        return row.under(layout.fp8_max, recipe.amax_history_len)

    def _log(self, kind: object, text: str, *values: object) -> None:
        if kind not in self._logged:
            self._logged.add(kind)
            _log.warning(text, *values)
