"""The tensors that the calls of one graph with one set of parameters take beside Dynamo's inputs: slots of stores.

As long as every slot is fresh, the next call with the same parameters takes the same tensors again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor

from fp8graph.runtime.recomputation import Checkpointed

_T = TypeVar("_T")


@dataclass(frozen=True, kw_only=True)
class Caller:
    """The call for which slots are made.

    Attributes:
        args: the graph's inputs from Dynamo, the parameters among them.
        gradients: the graph has a backward.
        group: the name of the process group over which it reduces amaxes; None: this rank alone.
        arrived: the parameters that FSDP2 gathered in FP8, by position, with their owners.
    """

    args: Sequence[Any]
    gradients: bool
    group: str | None
    arrived: Mapping[int, Any]


class Run:
    """One run of a graph, for slots that do something before or after it."""

    def __init__(self, args: Sequence[Any], checkpointed: Checkpointed | None) -> None:
        self.args, self.checkpointed = args, checkpointed
        self._entered: ExitStack | None = None

    def enter(self, context: AbstractContextManager[_T]) -> _T:
        """Run the graph inside of ``context``."""
        if self._entered is None:
            self._entered = ExitStack()
        return self._entered.enter_context(context)

    def leave(self) -> None:
        """Leave all of these, also after an error."""
        if self._entered is not None:
            self._entered.close()


@dataclass(kw_only=True, eq=False)
class Slot:
    """The tensors of one store in the calls of one graph with one set of parameters.

    Attributes:
        acts: :meth:`before` and :meth:`after` do something.
        tensors: in the order in which they were asked for.
        fresh: whether they serve later arguments, too, with the same parameters; None: always.
    """

    acts: ClassVar[bool] = False
    tensors: Sequence[Tensor]
    fresh: Callable[[Sequence[Any]], bool] | None = None

    def before(self, run: Run) -> Sequence[Tensor]:
        """The tensors for one run."""
        return self.tensors

    def after(self, run: Run, results: Any) -> None:
        """See what a run returned."""


def accelerator_of(args: Sequence[Any]) -> torch.device:
    """The device that a model runs on. A model on a GPU may have inputs on the CPU, too: numbers held in tensors."""
    devices = [x.device for x in args if isinstance(x, torch.Tensor)]
    return next((device for device in devices if device.type != "cpu"), torch.device("cpu"))
