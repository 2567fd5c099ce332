"""One call of a compiled graph: its extra inputs are found once and used as long as they are valid.

To find the needs of a call (the variant for its situation, pages of scaling state, FP8 copies of weights) takes
hundreds of microseconds for a model of hundreds of weights. To check that those of the last call are still valid
takes tens: the parameters are the same objects, nobody changed policy, names or state (``staleness.Epoch``), and no
weight has changed (``staleness.Unchanged``).
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from fp8graph.compat.dynamo import outermost_call
from fp8graph.compat.lives import life
from fp8graph.ir.compilation import Condition
from fp8graph.runtime.recomputation import Checkpointed
from fp8graph.runtime.staleness import Epoch, identities, picker
from fp8graph.runtime.stores import Run, Slot


class Called:
    """The parameters that a graph was called with, and a note on the last call with them. It keeps no parameter alive.

    Args:
        parameters: the positions of the graph's inputs that are parameters.
    """

    def __init__(self, parameters: Sequence[int]) -> None:
        self._positions = parameters
        self._pick = picker(parameters)
        self._noted: dict[tuple[int, ...], tuple[list[weakref.ref[Any]], Any]] = {}  # by their ids

    def note(self, args: Sequence[Any], note: Any) -> None:
        """Remember a call with ``args``."""
        parameters, noted = self._pick(args), self._noted
        key = tuple(map(id, parameters))
        if key in noted:
            alive, _ = noted[key]
        else:
            alive = [weakref.ref(life(x), lambda _: noted.pop(key, None)) for x in parameters]
        noted[key] = alive, note

    def __iter__(self) -> Iterator[tuple[dict[int, int], Any]]:
        """The ids of the parameters by position, and the note of their last call."""
        for ids, (alive, note) in list(self._noted.items()):
            if all(reference() is not None for reference in alive):
                yield dict(zip(self._positions, ids, strict=True)), note


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
        self._layer = None if parameter is None else weakref.ref(life(parameter))

    def is_over(self, parameter: torch.Tensor | None, steps: int) -> bool:
        """Whether the call that begins now is of a later step, or a later outermost call."""
        if parameter is not None and not self._is_of(parameter):
            return False
        return self._steps != steps or self._runs() is None

    def _is_of(self, parameter: torch.Tensor) -> bool:
        """Whether it was a call of the same layer; a layer that is gone made place for another."""
        layer = self._layer() if self._layer is not None else None
        return layer is None or layer is life(parameter)


@dataclass(frozen=True, kw_only=True, eq=False)
class Prepared:
    """A prepared call: ``run(*args, *more)``."""

    run: Callable[..., Any]
    more: Sequence[torch.Tensor]  # the graph's inputs after Dynamo's
    acting: Sequence[
        tuple[Slot, Sequence[int]]
    ]  # the slots that do something in each run, and their places in ``more``
    epoch: int
    parameters: bytes  # their ids; b"" if the call is valid for any parameters
    fresh: Callable[[Sequence[Any]], bool] | None  # whether all slots are; None: always
    conditions: tuple[Condition, ...] = ()  # of its variant, beside those of the call's moment

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


class PreparedCalls:
    """The prepared calls of one graph. It keeps no parameter alive, and no call for freed ones.

    Args:
        epoch: of the backend.
        parameters: the positions of the graph's inputs that are parameters.
    """

    def __init__(self, epoch: Epoch, parameters: Sequence[int]) -> None:
        self._epoch = epoch
        self._pick = picker(parameters)
        self._first = parameters[0] if parameters else None
        self._kept = epoch.now  # the epoch of all calls that are kept
        self._calls: dict[Any, Prepared] = {}
        self._alive: dict[Any, list[weakref.ref[Any]]] = {}  # called when their parameters are freed

    def get(self, args: Sequence[Any], situation: Any) -> Prepared | None:
        """The prepared call for ``args`` in ``situation`` (hashable); None if there is none that is still valid."""
        first = 0 if self._first is None else id(args[self._first])  # one graph may serve many layers
        prepared = self._calls.get((first, situation))
        if prepared is None or prepared.epoch != self._epoch.now:
            return None
        if prepared.parameters and prepared.parameters != identities(self._pick(args)):
            return None
        return prepared if prepared.fresh is None or prepared.fresh(args) else None

    def keep(self, args: Sequence[Any], situation: Any, prepared: Prepared) -> None:
        """Keep ``prepared`` for later calls."""
        calls, alive = self._calls, self._alive
        if self._kept != self._epoch.now:  # none of them is valid any more
            self._kept = self._epoch.now
            calls.clear()
            alive.clear()
        key = 0 if self._first is None else id(args[self._first]), situation
        known = calls.get(key)
        calls[key] = prepared
        if known is None or known.parameters != prepared.parameters:

            def forget(_: Any) -> None:
                calls.pop(key, None)
                alive.pop(key, None)

            # an id identifies a parameter as long as that is alive
            watched = self._pick(args) if prepared.parameters else ()
            alive[key] = [weakref.ref(life(parameter), forget) for parameter in watched]

    def drop_outdated(self) -> None:
        """Drop the calls that policy, names or state have changed since: they hold the code that they ran."""
        for key in [key for key, call in list(self._calls.items()) if call.epoch != self._epoch.now]:
            self._calls.pop(key, None)
            self._alive.pop(key, None)

    def ids(self, args: Sequence[Any]) -> bytes:
        """The ids of the parameters among ``args``."""
        return identities(self._pick(args))
