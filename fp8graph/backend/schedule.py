"""The step that a policy's schedule is at: counted, unless the user moves it himself."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Iterable

import torch

from fp8graph.backend.policies import Policies
from fp8graph.compat import autograd
from fp8graph.runtime.call import Epoch
from fp8graph.runtime.staleness import Steps

_log = logging.getLogger("fp8graph")


class Schedule:
    """Moves a policy with a schedule on, one step of training at a time.

    A step of training is a step of an optimizer that holds parameters of the compiled models, however many backwards
    came before it. Where several hold some, the parameter that was stepped most often says how many there were. Where
    none holds any (it has slices of them, or flat copies), every optimizer counts.

    A step is taken at the next call of compiled code outside of backward: whatever belongs to one step, checkpointed
    forwards too, has one policy.
    """

    def __init__(self, policies: Policies, epoch: Epoch, steps: Steps) -> None:
        self._policies, self._epoch, self._steps = policies, epoch, steps
        self._start = 0  # the step that was loaded
        self._seen = 0  # of the optimizers' steps
        self._parameters: dict[int, weakref.ref[torch.Tensor]] = {}  # of the compiled models, by id
        self.counts = False  # someone asks for the step, whether the policy has a schedule or not
        self._asked: int | None = None  # the optimizers' steps when it was last asked for
        self._now = 0

    @property
    def runs(self) -> bool:
        """Whether the policy has a schedule that the user does not move himself."""
        return self._policies.scheduled is not None

    @property
    def due(self) -> bool:
        """Whether an optimizer has stepped since :meth:`advance`. Asked in every call."""
        scheduled = self._policies.scheduled is not None
        return scheduled and self._seen != self._steps.count and not autograd.in_backward()

    def meets(self, parameters: Iterable[torch.Tensor]) -> None:
        """Learn what the models train."""
        known = self._parameters
        for parameter in parameters:
            if (self.runs or self.counts) and parameter.requires_grad and id(parameter) not in known:
                key = id(parameter)
                known[key] = weakref.ref(parameter, lambda _, key=key: known.pop(key, None))

    def advance(self) -> None:
        """Take the policy as it is at the step of now."""
        self._seen = self._steps.count
        if self.runs and self._policies.advance(self.step()):
            self._epoch.advance()

    def step(self) -> int:
        """How many steps of training are over."""
        alive = [parameter for reference in list(self._parameters.values()) if (parameter := reference()) is not None]
        return self._start + self._steps.taken(alive)

    def step_of_call(self) -> int:
        """The same at a call of compiled code: a recomputation in backward belongs to the step of its forward."""
        if self._asked != self._steps.count and not autograd.in_backward():
            self._asked, self._now = self._steps.count, self.step()
        return self._now

    def count(self) -> None:
        """Count a step that no optimizer makes."""
        self._start, self._asked = self._start + 1, None

    def load(self, step: int | None) -> None:
        """Go on from a saved step; None: it was not saved."""
        if step is not None:
            self._start, self._asked = step, None
            self._steps.restart()
            self.advance()
        elif self.runs:
            _log.warning(
                "the state that was loaded has no step number: it was saved without a schedule, or by an older "
                "fp8graph. The policy's schedule goes on at step %d.",
                self.step(),
            )
