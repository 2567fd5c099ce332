"""The statistics that observed graphs return, from their tensors to numbers per step.

An observed call gets tensors of its own, filled with NaN: what no backward has filled is dropped. The parts of several
micro-batches are merged (``numerics/stats.py``), but for weights, which are the same in each.

Several readers may ask, each for steps and layers of its own. One variant of a graph measures for all of them, so that
it is compiled once; a reader then takes what it asked for (:meth:`Request.takes`).
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Final

import torch
from torch import Tensor

from fp8graph.compat import autograd
from fp8graph.compat.distributed import gathered_objects
from fp8graph.numerics.stats import Parts, merged, named
from fp8graph.passes.observe.measuring import Observed, StatisticsPage
from fp8graph.runtime.stores import CallContext, Run, Services, Slot, Store

_log = logging.getLogger("fp8graph")
_MOST_PENDING: Final = 256  # pages that are not read yet: each keeps a small tensor alive
_MOST_CALLS: Final = 64  # calls of a graph on one step that are not read yet


@dataclass(frozen=True, kw_only=True)
class Measured:
    """One tensor, or one copy of it, at one step."""

    step: int
    site: str
    operand: str
    layout: str  # "" for the tensor itself
    recipe: str  # "" for the tensor itself
    what_if: bool
    group: str = ""  # of an error: equal for sites that read one input

    @property
    def fqn(self) -> str:
        """The name of the site's module, without the index of further sites."""
        return re.sub(r"\[\d+\]$", "", self.site)


@dataclass(kw_only=True, eq=False)
class Request:
    """The measurements that one reader asks for.

    Args:
        since, until: the steps of the calls of ``measure`` and ``stop``.
        when_over: called with the current step, at the first call after a step that was measured for this reader.
        keeps: what was measured stays, even if it was read.
    """

    condition: Observed
    is_due: Callable[[int], bool]
    since: int
    until: int | None = None
    when_over: Callable[[int], None] | None = None
    keeps: bool = True
    read: set[int] = field(default_factory=set[int])

    def wants(self, step: int) -> bool:
        """Return whether a step is measured for this reader."""
        return step >= self.since and (self.until is None or step <= self.until) and self.is_due(step)

    def takes(self, key: Measured) -> bool:
        """Return whether this was measured for this reader."""
        fits = not key.what_if or key.recipe in {recipe.name for recipe in self.condition.what_if}
        return fits and self.wants(key.step) and self.condition.takes(key.fqn)


def together(several: Sequence[Observed]) -> Observed | None:
    """Return all that several readers ask for, in one variant; None: nobody asks."""
    if not several:
        return None
    return Observed(
        layers=tuple(dict.fromkeys(pattern for each in several for pattern in each.layers)),
        copies=any(each.copies for each in several),
        block_size=max(each.block_size for each in several),
        what_if=tuple(dict.fromkeys(recipe for each in several for recipe in each.what_if)),
        candidates=tuple(recipe for each in several for recipe in each.candidates),
    )


class Observation(Store):
    """The observed steps of one backend, and their measurements."""

    name: ClassVar = StatisticsPage.store

    def __init__(self, services: Services) -> None:
        self._schedule = services.schedule
        self._requests: list[Request] = []
        self._active: list[Request] = []
        self._condition: Observed | None = None  # what the active requests ask for, together
        self._at: int | None = None  # the step of the last call
        self._trains = False  # a graph with gradients was called: evaluations are not measured
        self._by_step: dict[int, dict[Measured, list[Parts]]] = {}  # the measurements
        self._pending: list[tuple[int, StatisticsPage, Tensor]] = []
        self._reduced: set[Measured] = set()
        self._counted, self._calls = -1, dict[int, int]()  # a step, and its calls by the id of their first page
        self._late: set[int] = set()  # ids of tensors that no backward had filled when the others were read
        self._endless = False  # it was said that one step goes on and on
        self._recomputed: dict[int, int] = {}  # calls that a backward will repeat, by the id of their page

    def measure(
        self,
        condition: Observed,
        is_due: Callable[[int], bool],
        when_over: Callable[[int], None] | None = None,
        *,
        keeps: bool = True,
    ) -> Request:
        """Measure on the steps that ``is_due`` names, too, from the next call on."""
        self._schedule.counts = True
        since = self._schedule.step_of_call()
        request = Request(condition=condition, is_due=is_due, since=since, when_over=when_over, keeps=keeps)
        self._requests.append(request)
        self._active.append(request)
        self._condition = together([each.condition for each in self._active])
        return request

    def stop(self, request: Request) -> None:
        """End the measurements for one reader. Those so far stay."""
        if request in self._active:
            self._active.remove(request)
            request.until = self._schedule.step_of_call()
            self._condition = together([each.condition for each in self._active])
            if not request.keeps:
                self._requests.remove(request)

    def condition(self, *, gradients: bool) -> Observed | None:
        if self._condition is None:
            return None
        now = self._schedule.step_of_call()
        if now != self._at:
            over, self._at = self._at, now
            for request in [*self._active]:
                if over is not None and request.when_over is not None and request.wants(over):
                    request.when_over(now)
        if gradients and not self._trains:
            self._trains = True
            self._forget(now)
        if self._trains and not gradients:
            return None
        return self._condition if any(request.is_due(now) for request in self._active) else None

    def slot(self, extra_inputs: Sequence[StatisticsPage], context: CallContext) -> Slot:
        """Return the tensors that observed calls fill, each its own."""
        nothing = [torch.empty(0, device=page.device) for page in extra_inputs]
        return _Filled(tensors=nothing, observation=self, pages=extra_inputs)

    def tensors(self, pages: Sequence[StatisticsPage]) -> list[Tensor]:
        """Return the tensors that one observed call fills."""
        step, again = self._schedule.step_of_call(), autograd.in_backward()
        made: list[Tensor] = []
        for page in pages:
            with torch.inference_mode(False):
                size = sum(len(tensor.parts) for tensor in page.tensors)
                made.append(torch.full((size,), torch.nan, device=page.device))
            if not page.backward and again and self._recomputed.get(id(page), 0):
                self._recomputed[id(page)] -= 1  # the first call has measured forward
            else:
                self._pending.append((step, page, made[-1]))
                if not page.backward and not again and autograd.saved_tensors_hooks():
                    self._recomputed[id(page)] = self._recomputed.get(id(page), 0) + 1
        if len(self._pending) > _MOST_PENDING and not again:
            self._read(but=step)
        if pages and not again and self._calls_of(pages[0], step) > _MOST_CALLS:
            self._read_calls(step, made)
        return made

    def _calls_of(self, page: StatisticsPage, step: int) -> int:
        """Return the calls of a graph that were measured on ``step`` and are not read yet."""
        if self._counted != step:
            self._counted, self._calls = step, {}
        self._calls[id(page)] = self._calls.get(id(page), 0) + 1
        return self._calls[id(page)]

    def _read_calls(self, step: int, made: Sequence[Tensor]) -> None:
        """Read the calls of one step that are over: a later step may never come.

        A backward that has not come is waited for once more, and then no longer.

        Args:
            made: the tensors of the call that begins.
        """
        new, late, self._late = {id(x) for x in made}, self._late, set()
        waiting: list[tuple[int, StatisticsPage, Tensor]] = []
        dropped = False
        for entry in self._pending:
            unfilled = entry[0] == step and entry[1].backward and id(entry[2]) not in new and entry[2].isnan().all()
            dropped |= bool(unfilled and id(entry[2]) in late)
            if id(entry[2]) in new or (unfilled and id(entry[2]) not in late):
                waiting.append(entry)
        self._late = {id(entry[2]) for entry in waiting} - new
        kept = self._late | new
        self._pending = [entry for entry in self._pending if id(entry[2]) not in kept]
        self._read()
        self._pending, self._calls = waiting, {}
        self.measurements([step])  # merges its parts
        if not self._endless and (dropped or not self._trains):
            self._endless = True
            _log.warning(
                "observe: the calls so far count as one step, %d, which each of them is measured for and adds to: no "
                "optimizer steps. Where none does, call step() of the object that backend.observe() returned after "
                "each batch, or stop().",
                step,
            )

    def measurements(self, steps: Collection[int] | None = None) -> dict[Measured, Parts]:
        """Return the measurements so far (None: in all steps); the names are those of the parts."""
        if steps is None:
            self._read()
        merged_now: dict[Measured, Parts] = {}
        for step in [*self._by_step] if steps is None else steps:
            for key, vectors in self._by_step.get(step, {}).items():
                if len(vectors) > 1:
                    vectors[:] = vectors[-1:] if key.operand == "weight" else [merged(vectors)]
                merged_now[key] = vectors[0]
        return merged_now

    def unread(self, request: Request, now: int | None) -> list[int]:
        """Return the steps that were measured for a reader and that it has not read yet, without that of ``now``.

        It waits for the device. They count as read: the reader calls :meth:`forget_steps` when it is done.
        """
        self._read(but=now)
        request.read &= self._by_step.keys()
        new = sorted(s for s in self._by_step if s != now and s not in request.read and request.wants(s))
        request.read.update(new)
        return new

    def forget_steps(self, steps: Collection[int]) -> None:
        """Forget steps that nobody wants to read any more."""
        for step in steps:
            wanted = (r.wants(step) and (r.keeps or step not in r.read) for r in self._requests)
            if not any(wanted):
                self._by_step.pop(step, None)

    def reduce(self, group: object = None) -> None:
        """Merge the measurements of the ranks of a process group, in the steps that are over. All of them call it."""
        over = {key: parts for key, parts in self.measurements().items() if key.step < self._schedule.step_of_call()}
        own = {key: parts for key, parts in over.items() if key not in self._reduced}
        for other in gathered_objects(own, group, others=True):
            for key, parts in other.items():
                if key.operand != "weight" or key not in own:
                    self._by_step.setdefault(key.step, {}).setdefault(key, []).append(parts)
                    own.setdefault(key, parts)
        self._reduced.update(own)

    def _forget(self, step: int) -> None:
        """Forget a step: before its first call with gradients, the model was only evaluated."""
        self._pending = [entry for entry in self._pending if entry[0] != step]
        self._by_step.pop(step, None)

    def _read(self, but: int | None = None) -> None:
        """Read the tensors of all steps, or of all but one, whose backward may not have come yet."""
        waiting = [entry for entry in self._pending if entry[0] == but]
        for step, page, tensor in self._pending:
            if step == but:
                continue
            start, numbers = 0, tensor.to("cpu", torch.float64)
            for of in page.tensors:
                vector = numbers[start : start + len(of.parts)]
                start += len(of.parts)
                if vector.isnan().all():
                    continue  # no backward came
                for fqn, index in of.names:
                    site = f"{fqn}[{index}]" if index else fqn
                    key = Measured(
                        step=step,
                        site=site,
                        operand=of.tensor,
                        layout=of.layout,
                        recipe=of.recipe,
                        what_if=of.what_if,
                        group=of.group,
                    )
                    self._by_step.setdefault(step, {}).setdefault(key, []).append(named(of.parts, vector))
        self._pending = waiting


@dataclass(kw_only=True, eq=False)
class _Filled(Slot):
    acts: ClassVar[bool] = True
    observation: Observation
    pages: Sequence[StatisticsPage]

    def before(self, run: Run) -> Sequence[Tensor]:
        return self.observation.tensors(self.pages)
