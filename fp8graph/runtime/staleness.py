"""Detect whether parameters have changed."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any, Final

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.optim import Optimizer

from fp8graph.compat import autograd
from fp8graph.compat.distributed import local
from fp8graph.runtime.adapters import Adapters
from fp8graph.runtime.call import picker


class Steps:
    """Counts the steps of optimizers, per parameter."""

    def __init__(self) -> None:
        self.count = 0  # steps of all optimizers
        self.adapters: Final = Adapters()
        # Called after a step. Where a step is compiled, Dynamo traces this class, but must not trace them.
        self.listeners: Final[list[Callable[[Optimizer], None]]] = []
        self._refreshes = 0  # how often the user said that weights have changed, or PEFT showed it
        # by id: the last step of its optimizer, and how many steps its optimizers took since the last restart
        self._held: dict[int, tuple[weakref.ref[Tensor], int, int]] = {}
        self._full = 1024  # length at which freed parameters are dropped
        reference = weakref.ref(self)

        def after_step(optimizer: Optimizer, _args: Any, _kwargs: Any) -> None:
            if (steps := reference()) is not None:
                steps._count(optimizer)

        autograd.after_optimizer_steps(self, after_step)

    @property
    def refreshes(self) -> int:
        """How often all weights were taken for changed."""
        self._refreshes += self.adapters.changed()
        return self._refreshes

    def refresh(self) -> None:
        """Take all weights for changed."""
        self._refreshes += 1

    def _count(self, optimizer: Optimizer) -> None:
        self.count += 1
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                reference, _, taken = self._held.get(id(parameter), (None, 0, 0))
                taken = taken if reference is not None and reference() is parameter else 0
                self._held[id(parameter)] = weakref.ref(parameter), self.count, taken + 1
        if len(self._held) > self._full:
            self._held = {key: held for key, held in self._held.items() if held[0]() is not None}
            self._full = 2 * len(self._held) + 1024
        for listener in self.listeners:
            listener(optimizer)

    def of(self, parameter: Tensor) -> int:
        reference, step, _ = self._held.get(id(parameter), (None, 0, 0))
        if reference is not None and reference() is parameter:
            return step
        return self.count if parameter.requires_grad else 0

    def taken(self, parameters: Sequence[Tensor]) -> int:
        """Steps of the optimizers that hold some of ``parameters``, since the last restart; of all, if none does."""
        held = [self._held.get(id(parameter)) for parameter in parameters]
        own = [h[2] for h, p in zip(held, parameters, strict=True) if h is not None and h[0]() is p]
        return max(own or [taken for _, _, taken in self._held.values()], default=0)

    def restart(self) -> None:
        """Let :meth:`taken` count anew."""
        self._held = {key: (reference, step, 0) for key, (reference, step, _) in self._held.items()}


class Unchanged:
    """A quick check that none of one call's parameters has changed since their copies were made.

    True is certain; after False, each copy is checked. An address may be used again for other memory, so weak
    references to the storages call back when their memory is freed.
    """

    def __init__(self, steps: Steps, positions: Sequence[int], args: Sequence[Any]) -> None:
        self._steps = steps
        self._pick = picker(positions)
        tensors = self._pick(args)
        self._sharded = any(local(x) is not x for x in tensors)
        self._tracked = [i for i, x in enumerate(tensors) if not x.is_inference()]  # the others have no version
        self._all_tracked = len(self._tracked) == len(tensors)
        self._seen = self._state(tensors)
        lost: list[None] = []  # not empty: some storage is gone
        self._lost = lost
        storages = (local(x).untyped_storage() for x in tensors)
        self._storages = [weakref.ref(storage, lambda _: lost.append(None)) for storage in storages]

    def _state(self, tensors: Sequence[Tensor]) -> tuple[Any, ...]:
        tracked = tensors if self._all_tracked else [tensors[i] for i in self._tracked]
        versions = [*map(version, tracked)] if self._sharded else [*map(autograd.version, tracked)]
        shards = [*map(local, tensors)] if self._sharded else tensors
        return self._steps.count, self._steps.refreshes, versions, [*map(Tensor.data_ptr, shards)]

    def __call__(self, args: Sequence[Any]) -> bool:
        return not self._lost and self._state(self._pick(args)) == self._seen


def version(parameter: Tensor) -> tuple[int, ...]:
    """The number of writes to a parameter: of a DTensor, those to itself and those to its shard."""
    shard = local(parameter)
    versions = (0 if shard.is_inference() else autograd.version(shard),)
    return versions if shard is parameter else (autograd.version(parameter), *versions)


def storage_of(tensor: Tensor) -> StorageWeakRef:
    """A key equal for tensors of one storage. It keeps no data alive, yet no other storage becomes equal to it."""
    return StorageWeakRef(tensor.untyped_storage())


def samples(tensor: Tensor) -> Tensor:
    """A few elements of a tensor, as bytes: a grid of at most 8 per dim (4, of more than two dims)."""
    most = 8 if tensor.ndim <= 2 else 4
    grid = tensor.detach()[tuple(slice(None, None, max(1, -(-size // most))) for size in tensor.shape)]
    return grid.clone(memory_format=torch.contiguous_format).reshape(-1).view(torch.uint8)
