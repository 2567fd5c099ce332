"""The statistics that observed graphs return, from their tensors to numbers per step.

An observed call gets tensors of its own, filled with NaN: what no backward has filled is dropped. The parts of several
micro-batches are merged (``numerics/statistic_parts.py``), but for weights, which are the same in each.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from fp8graph.compat import autograd
from fp8graph.compat.distributed import gathered_objects
from fp8graph.ir.extra_inputs import StatisticsPage
from fp8graph.ir.observed import Observed
from fp8graph.numerics.finished_statistics import Parts, merged, named

_MOST_PENDING: Final = 256  # pages that are not read yet: each keeps a small tensor alive


@dataclass(frozen=True, kw_only=True)
class Measured:
    """One tensor, or one copy of it, at one step."""

    step: int
    site: str
    operand: str
    layout: str  # "" for the tensor itself
    recipe: str  # "" for the tensor itself
    what_if: bool


class Observation:
    """The observed steps of one backend, and what was measured in them."""

    def __init__(self) -> None:
        self._asked: Observed | None = None
        self._is_due: Callable[[int], bool] = lambda _: False
        self._step_now: Callable[[], int] = lambda: 0
        self._trains = False  # a graph with gradients was called: evaluations are not measured
        self._found: dict[Measured, list[Parts]] = {}
        self._pending: list[tuple[int, StatisticsPage, Tensor]] = []
        self._reduced: set[Measured] = set()
        self._recomputed: dict[int, int] = {}  # calls that a backward will repeat, by the id of their page

    def start(self, asked: Observed, is_due: Callable[[int], bool], step_now: Callable[[], int]) -> None:
        """Measure on the steps that ``is_due`` names, from the next call on."""
        self._asked, self._is_due, self._step_now = asked, is_due, step_now

    def stop(self) -> None:
        """Measure no more. What was measured stays."""
        self._asked = None

    def asked(self, *, gradients: bool) -> Observed | None:
        """What the call of a graph measures now; None on all other steps. Asked in every call."""
        if self._asked is None:
            return None
        if gradients and not self._trains:
            self._trains = True
            self._forget(self._step_now())
        if self._trains and not gradients:
            return None
        return self._asked if self._is_due(self._step_now()) else None

    def tensors(self, pages: Sequence[StatisticsPage]) -> list[Tensor]:
        """The tensors that one observed call fills."""
        step, again = self._step_now(), autograd.in_backward()
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
            self._read(before=step)
        return made

    def found(self) -> dict[Measured, Parts]:
        """What was measured so far, its names being those of the parts."""
        self._read()
        for key, vectors in self._found.items():
            if len(vectors) > 1:
                self._found[key] = vectors[-1:] if key.operand == "weight" else [merged(vectors)]
        return {key: vectors[0] for key, vectors in self._found.items()}

    def reduce(self, group: object = None) -> None:
        """Merge what the ranks of a process group have measured in the steps that are over. All of them call it."""
        over = {key: parts for key, parts in self.found().items() if key.step < self._step_now()}
        own = {key: parts for key, parts in over.items() if key not in self._reduced}
        for other in gathered_objects(own, group, others=True):
            for key, parts in other.items():
                if key.operand != "weight" or key not in own:
                    self._found.setdefault(key, []).append(parts)
                    own.setdefault(key, parts)
        self._reduced.update(own)

    def _forget(self, step: int) -> None:
        """Forget a step: before its first call with gradients, the model was only evaluated."""
        self._pending = [entry for entry in self._pending if entry[0] != step]
        self._found = {key: vectors for key, vectors in self._found.items() if key.step != step}

    def _read(self, before: int | None = None) -> None:
        waiting = [entry for entry in self._pending if before is not None and entry[0] >= before]
        for step, page, tensor in self._pending:
            if before is not None and step >= before:
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
                    )
                    self._found.setdefault(key, []).append(named(of.parts, vector))
        self._pending = waiting
