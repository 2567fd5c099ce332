"""One call of a compiled graph: its code and extra inputs are bound once, and used as long as they are valid.

To find the needs of a call (the variant for its situation, pages of scaling state, FP8 copies of weights) takes
hundreds of microseconds for a model of hundreds of weights. To check that those of the last call are still valid
takes tens: the parameters are the same objects, nobody changed names or state (``staleness.Epoch``), and no
weight has changed (``staleness.Unchanged``).
"""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from fp8graph.compat.anchors import anchor
from fp8graph.compat.dynamo import outermost_call
from fp8graph.ir.compilation import Findings
from fp8graph.ir.decisions import Condition
from fp8graph.runtime.recomputation import Checkpointed
from fp8graph.runtime.stores import Run, Slot


class FirstCall:
    """The first call of a graph under a policy, and whether all graphs of its step are known by now.

    The second call of a graph is not the second step: layers share graphs, and a function may be called several times
    before the first linear. All are known once the same layer is called again, and the outermost call around its first
    call has returned, or an optimizer has stepped (a method of a module may train it all the time).

    Args:
        policy: the identity of the policy.
        parameter: the first parameter of the call, by which layers that share a graph are told apart.
        steps: of optimizers.
    """

    def __init__(self, policy: str, parameter: torch.Tensor | None, steps: int) -> None:
        self.policy = policy
        self._steps = steps
        self._runs = outermost_call()
        self._layer = None if parameter is None else weakref.ref(anchor(parameter))

    def is_over(self, parameter: torch.Tensor | None, steps: int) -> bool:
        """Return whether the call that begins now is of a later step, or a later outermost call."""
        if parameter is not None and not self._is_of(parameter):
            return False
        return self._steps != steps or self._runs() is None

    def _is_of(self, parameter: torch.Tensor) -> bool:
        """Return whether it was a call of the same layer; a layer that is gone made place for another."""
        layer = self._layer() if self._layer is not None else None
        return layer is None or layer is anchor(parameter)


@dataclass(frozen=True, kw_only=True, eq=False)
class BoundCall:
    """A graph's code with all that it takes in calls with one set of parameters, in one situation.

    It keeps no parameter alive.

    Attributes:
        run: the code: ``run(*args, *more)``.
        more: the inputs after Dynamo's.
        acting: the slots that do something in each run, and their places in ``more``.
        fresh: whether all slots are, for later arguments; None: always.
        epoch: of the backend, when it was bound; -1: it is no longer valid.
        ids: those of the parameters, as bytes; b"" if it is valid for any parameters.
        parameters: the ids of the parameters.
        alive: references to their anchors.
        policy: the identity of the policy.
        findings: of the graph, under the names of these parameters.
        conditions: of its variant, beside those of the call's situation.
        turn: grows with each call that is bound.
    """

    run: Callable[..., Any]
    more: Sequence[torch.Tensor]
    acting: Sequence[tuple[Slot, Sequence[int]]]
    fresh: Callable[[Sequence[Any]], bool] | None
    epoch: int
    ids: bytes
    parameters: tuple[int, ...]
    alive: Sequence[weakref.ref[Any]]
    policy: str
    findings: Findings
    conditions: tuple[Condition, ...]
    turn: int

    def is_alive(self) -> bool:
        """Return whether all its parameters are."""
        return all(reference() is not None for reference in self.alive)

    def released(self) -> BoundCall:
        """Return an entry of what ran with these parameters, which holds none of what it took."""
        return dataclasses.replace(self, run=_not_valid, more=(), acting=(), fresh=None, epoch=-1)

    def act(self, args: Sequence[Any], checkpointed: Checkpointed | None) -> Any:
        """Run the graph where slots do something before and after it."""
        run, more = Run(args, checkpointed), [*self.more]
        try:
            for slot, places in self.acting:
                for place, tensor in zip(places, slot.before(run), strict=True):
                    more[place] = tensor
            results = self.run(*run.inputs, *more)
        finally:
            run.leave()
        for slot, _ in self.acting:
            slot.after(run, results)
        return results


def _not_valid(*_: Any) -> Any:
    raise AssertionError("its epoch is over")
