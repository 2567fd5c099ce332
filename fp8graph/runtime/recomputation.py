"""Forwards that activation checkpointing runs again: as they ran the first time, whatever holds by then.

A recomputation is called in backward, perhaps on another thread, when the regions around its forward are closed, the
policy may be another and delayed scales have moved on. So each call of compiled code in a checkpointed forward is
noted with the forward (``compat/checkpointing.py``). When the forward runs again, its first call takes what the first
call took, its second call what the second took, and so on, also where the forward has checkpointed parts of its own.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from fp8graph.compat import autograd, checkpointing
from fp8graph.errors import Fp8GraphError

_ADVICE = (
    "Open the region inside the checkpointed function, where it is opened again (fp8graph.autocast(recipe=...), or "
    "fp8graph.autocast() for the policy), or checkpoint with torch.utils.checkpoint."
)


@dataclass(frozen=True, kw_only=True, eq=False)
class Call:
    """A call of compiled code in a forward that may run again."""

    situation: Any  # that decided how it was compiled
    records: bool  # it recorded amaxes. The first call of the reentrant variant, without gradients, does not
    noted: list[Any] = field(default_factory=list[Any])  # what the slots of its repetition have to know


@dataclass(kw_only=True, eq=False)
class _Forward:
    """The calls of a checkpointed forward, in order, and how many of them each repetition has repeated."""

    task: int  # the backward in which it ran
    calls: list[Call] = field(default_factory=list[Call])
    repeated: dict[Any, int] = field(default_factory=dict[Any, int])

    def next(self, number: Any, *, is_made: bool) -> Call:
        place = self.repeated.get(number, 0)
        if is_made:
            self.repeated[number] = place + 1
        if place < len(self.calls):
            return self.calls[place]
        last = self.calls[-1]
        if any(call.situation[:-1] != last.situation[:-1] for call in self.calls):  # all but the conditions
            raise Fp8GraphError(
                "a checkpointed forward calls compiled code more often in its recomputation than the first time "
                f"({len(self.calls)} calls, under different regions or policies), so that it cannot be known which of "
                f"them call {place + 1} repeats. {_ADVICE}"
            )
        return Call(situation=last.situation, records=last.records)


class Recomputations:
    """The checkpointed forwards of one backend whose backward may still come."""

    def __init__(self) -> None:
        self._forwards: weakref.WeakKeyDictionary[Any, _Forward] = weakref.WeakKeyDictionary()
        self.regions: set[Any] = set()  # around calls outside of backward

    def of_call(self, *, is_made: bool = True) -> Checkpointed:
        """Return the present call as a part of checkpointed forwards. ``is_made=False``: it is only prepared."""
        position, task, first = checkpointing.now(), checkpointing.graph_task(), None
        if position.repeats is not None and (forward := self._forwards.get(position.repeats.forward)) is not None:
            first = forward.next(position.repeats.number, is_made=is_made)
        running: list[_Forward] = []
        for key in position.running if is_made else ():
            forward = self._forwards.setdefault(key, _Forward(task=task))
            if forward.task == task:  # else a backward runs inside of that forward, and this is a part of the backward
                running.append(forward)
        return Checkpointed(first=first, running=running)

    def check(self, region: Any) -> None:
        """Check that a call in backward that repeats no known forward cannot be the repetition of one in a region.

        Raises:
            Fp8GraphError: it may be.
        """
        if region is None:
            if self.regions and autograd.in_backward():
                raise Fp8GraphError(
                    "compiled code was called in backward by other than torch.utils.checkpoint. If it recomputes a "
                    f"forward, it cannot be known which, and forwards ran under fp8graph.autocast "
                    f"({', '.join(sorted(map(str, self.regions)))}). {_ADVICE}"
                )
        elif not autograd.in_backward():
            self.regions.add(region)


@dataclass(kw_only=True, eq=False)
class Checkpointed:
    """A call that is a part of checkpointed forwards, or of the repetition of one.

    Attributes:
        first: the call that it repeats; None: it repeats none.
        kept: it as a call that may be repeated, while it runs; None: it cannot be.
    """

    first: Call | None
    running: Sequence[_Forward]
    kept: Call | None = None

    def keep(self, situation: Any, *, records: bool) -> None:
        """Note the call for its repetition, before it runs."""
        if self.running:
            self.kept = Call(situation=situation, records=records)
            for forward in self.running:
                forward.calls.append(self.kept)
