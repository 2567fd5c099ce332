"""Signals that a prepared call is stale: the backend's state has changed (:class:`Epoch`), or parameters have.

Those of parameters are versions, addresses and steps of optimizers. They are cheap, and none of them is certain:
``.data`` writes, ``AdamW(fused=True)``, other processes and inference tensors change some or all of them without a
trace. ``runtime/contents.py`` looks at the numbers themselves.

PEFT merges adapters into weights through ``.data``, which no tensor shows. The layers of all its methods list what is
merged into them in ``merged_adapters``: lists that only they change, in place. It is cheap to compare
them in each call (:class:`PeftMerges`). Dynamo guards on them too, but compiles nothing when it finds code that it made
before the last merge.
"""

from __future__ import annotations

import array
import ctypes
import functools
import logging
import operator
import sys
import weakref
from collections.abc import Callable, Sequence
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.optim import Optimizer

from fp8graph.compat import autograd
from fp8graph.compat.anchors import Anchor, anchor
from fp8graph.compat.distributed import local
from fp8graph.compat.fakes import FakeTensor
from fp8graph.runtime.contents import contents_of
from fp8graph.runtime.parameters import ParameterTable

_log = logging.getLogger("fp8graph")


class Epoch:
    """A number that grows when prepared calls may no longer be valid."""

    def __init__(self) -> None:
        self.now = 0

    def advance(self) -> None:
        self.now += 1


def picker(positions: Sequence[int]) -> Callable[[Sequence[Any]], tuple[Any, ...]]:
    """Return a function that returns the items at ``positions``, in one call of C code however many they are."""
    if len(positions) > 1:
        return operator.itemgetter(*positions)
    return lambda args: tuple(args[position] for position in positions)


def _pointers(objects: tuple[Any, ...]) -> bytes:
    """Return the addresses of a tuple's items, in one copy of its memory: CPython keeps them there in order."""
    return ctypes.string_at(id(objects) + tuple.__basicsize__, tuple.__itemsize__ * len(objects))


def _ids(objects: tuple[Any, ...]) -> bytes:
    return array.array("Q", map(id, objects)).tobytes()


def _reads_pointers() -> bool:
    """Return whether this Python keeps them so."""
    probe = Epoch(), Epoch(), "", 0
    return sys.implementation.name == "cpython" and tuple.__itemsize__ == 8 and _pointers(probe) == _ids(probe)


# The ids of the items of a tuple, as bytes. Called in each call, with hundreds of parameters.
identities: Final = _pointers if _reads_pointers() else _ids


class OptimizerSteps:
    """The steps of all optimizers of this process, per parameter. One hook counts for all backends."""

    def __init__(self) -> None:
        self.count = 0  # steps of all optimizers
        self.held = ParameterTable[list[int]]()  # the last step of its optimizer, and how many its optimizers took
        self._waiting: list[Callable[[Optimizer], bool]] = []
        disabled: Any = torch.compiler.disable(self._after_step)  # Dynamo traces the hook where a step is compiled
        autograd.after_optimizer_steps(self, disabled)

    def _after_step(self, optimizer: Optimizer, _args: Any, _kwargs: Any) -> None:
        self.count += 1
        for group in optimizer.param_groups:
            for parameter in map(anchor, group["params"]):
                held = self.held.get(id(parameter)) or self.held.set(parameter, [0, 0])
                held[:] = self.count, held[1] + 1
        for waits in [*self._waiting]:
            if waits(optimizer):
                self._waiting.remove(waits)

    def wait(self, waits: Callable[[Optimizer], bool]) -> None:
        """Call ``waits`` after each step, until it returns True."""
        self._waiting.append(waits)

    def of(self, parameter: Tensor) -> int:
        """Return the last step after which ``parameter`` may be another: of the optimizer that holds it.

        What no optimizer was seen to hold and trains may be held in slices: each step counts.
        """
        if (held := self.held.of(parameter)) is not None:
            return held[0]
        return self.count if parameter.requires_grad else 0


@functools.cache
def optimizer_steps() -> OptimizerSteps:
    """Return the one count of this process, begun at its first use."""
    return OptimizerSteps()


def adapted_modules(model: nn.Module) -> list[str]:
    """Return the names of the modules that PEFT has put into ``model``, merged or not."""
    named = model.named_modules()
    return [name or type(module).__name__ for name, module in named if _is_adapter(module)]


def _is_adapter(module: nn.Module) -> bool:
    layer = isinstance(getattr(module, "merged_adapters", None), list)
    return layer or type(module).__module__.partition(".")[0] == "peft"


class PeftMerges:
    """The adapter layers of some models. Holds no layer alive."""

    def __init__(self) -> None:
        self._merged: dict[int, list[str]] = {}  # by the layer's id: its own list
        self._seen: dict[int, tuple[str, ...]] = {}
        self._layers: list[weakref.ref[nn.Module]] = []
        self._warned = False

    def watch(self, model: nn.Module, *, compiled: bool = False) -> None:
        """Look at the adapter layers of ``model`` from now on.

        Args:
            compiled: calls of ``model`` itself are compiled, not those of a function around it or of modules in it.
        """
        # PeftModel has it, and what it wraps has not: that is what it returns
        unloads = compiled and hasattr(model, "merge_and_unload")
        for parent in model.modules():
            for name, layer in parent.named_children():
                merged = getattr(layer, "merged_adapters", None)
                if isinstance(merged, list):
                    self._watch(layer, merged, parent, name, unloads)

    def _watch(self, layer: nn.Module, merged: list[str], parent: nn.Module, name: str, unloads: bool) -> None:
        key, base = id(layer), getattr(layer, "base_layer", None)
        if key in self._merged and not unloads:
            return
        if key not in self._merged:
            self._merged[key], self._seen[key] = merged, tuple(merged)
        this, around = weakref.ref(self), weakref.ref(parent)
        inner = weakref.ref(base) if isinstance(base, nn.Module) else None

        def gone(reference: weakref.ref[nn.Module]) -> None:
            if (adapters := this()) is None:
                return
            adapters._layers.remove(reference)
            adapters._merged.pop(key, None)
            adapters._seen.pop(key, None)
            # its place was given to what it wrapped: the model lives on, without adapters
            place, wrapped = around(), inner() if inner is not None else None
            if unloads and place is not None and wrapped is not None and place._modules.get(name) is wrapped:
                adapters._warn()

        self._layers.append(weakref.ref(layer, gone))

    def _warn(self) -> None:
        if not self._warned:
            self._warned = True
            _log.warning(
                "PEFT has unloaded the adapters of a compiled model. The model that merge_and_unload() or unload() "
                "returns is not compiled, it runs without FP8: give it to fp8graph.compile()."
            )

    def changed(self) -> bool:
        """Return whether anything was merged or taken out since the last time that this was asked."""
        if not self._merged:
            return False
        now: list[Any] = [*map(tuple, list(self._merged.values()))]
        if now == list(self._seen.values()):
            return False
        self._seen = {key: tuple(merged) for key, merged in list(self._merged.items())}
        return True


class WeightUpdates:
    """The updates of weights that one backend knows of: steps since it began, and how often all may have changed."""

    def __init__(self) -> None:
        self.adapters: Final = PeftMerges()
        self.all: Final = optimizer_steps()
        self._began = self.all.count
        self._refreshes = 0  # how often the user said that weights have changed, or PEFT showed it
        self.gradients: bool | None = None  # whether the last call was with gradients
        self.switches = 0  # how often calls with and without gradients have followed each other
        self._listeners: list[Callable[[Optimizer], None]] = []
        self.restart()

    @property
    def count(self) -> int:
        """Steps of all optimizers."""
        return self.all.count - self._began

    @property
    def refreshes(self) -> int:
        """The number of times that all weights were taken for changed."""
        self._refreshes += self.adapters.changed()
        return self._refreshes

    def refresh(self) -> None:
        """Take all weights for changed."""
        self._refreshes += 1

    def switch(self, *, gradients: bool) -> None:
        """Note that the calls that begin now are with or without gradients."""
        self.gradients = gradients
        self.switches += 1

    def listen(self, listener: Callable[[Optimizer], None]) -> None:
        """Call ``listener`` after each step, as long as this object lives."""
        disabled: Any = torch.compiler.disable(listener)  # as OptimizerSteps
        self._listeners.append(disabled)
        if len(self._listeners) == 1:
            reference = weakref.ref(self)

            def after_step(optimizer: Optimizer, _args: Any, _kwargs: Any) -> None:
                for listener in steps._listeners if (steps := reference()) is not None else ():
                    listener(optimizer)

            autograd.after_optimizer_steps(self, after_step)

    def of_optimizers(self, parameters: Sequence[Tensor | Anchor]) -> int:
        """Steps of the optimizers that hold some of ``parameters`` (their anchors), since the last restart.

        Of all, if none does.
        """
        held = [*filter(None, map(self.all.held.get, map(id, parameters)))] or self.all.held.values()
        return max(map(self._since, held), default=0)

    def restart(self) -> None:
        """Let :meth:`of_optimizers` count anew."""
        # by the ids of the counts, which are kept, so that no others get these ids
        self._earlier = {id(held): (held, held[1]) for held in self.all.held.values()}

    def _since(self, held: list[int]) -> int:
        _, before = self._earlier.get(id(held), (held, 0))
        return held[1] - before


class Unchanged:
    """A quick check that no signal tells of a change of one call's parameters since their copies were made.

    After False, each copy is checked. An address may be used again for other memory, so weak references to the
    storages call back when their memory is freed.

    Args:
        counters: how often anything happened that makes every copy stale.
    """

    def __init__(self, counters: Callable[[], Any], positions: Sequence[int], args: Sequence[Any]) -> None:
        self._counters = counters
        self._pick = picker(positions)
        tensors = self._pick(args)
        self._read = _reader(tensors)
        self._seen = counters(), self._read(tensors)
        lost: list[None] = []  # not empty: some storage is gone
        self._lost = lost
        storages = (local(x).untyped_storage() for x in tensors)
        self._storages = [weakref.ref(storage, lambda _: lost.append(None)) for storage in storages]

    def __call__(self, args: Sequence[Any]) -> bool:
        return not self._lost and self._seen == (self._counters(), self._read(self._pick(args)))


def signature(
    parameters: Sequence[Tensor],
    *,
    steps: OptimizerSteps | None = None,
    storages: bool = True,
    contents: bool = False,
) -> tuple[Any, ...]:
    """Return a value that changes with each write to ``parameters`` that leaves a trace: a version, an address, or
    more.

    Args:
        steps: take those of optimizers for traces.
        storages: see :func:`storage_of`; for signatures between which memory may be freed.
        contents: read the numbers, too, where that is quick: on a CPU.
    """
    shards, steps_taken = [*map(local, parameters)], [*map(steps.of, parameters)] if steps is not None else []
    versions = [*map(version, parameters)]
    if FakeTensor in map(type, shards):
        return versions, steps_taken
    memory = [*map(storage_of, shards)] if storages else []
    read = contents and all(x.is_cpu for x in shards)
    return versions, [*map(Tensor.data_ptr, shards)], memory, steps_taken, contents_of(shards) if read else []


def _reader(parameters: Sequence[Tensor]) -> Callable[[Sequence[Tensor]], tuple[Any, ...]]:
    """Return a function that reads the signature of tensors such as these, without storages, in as few calls as they
    allow.
    """
    if any(local(x) is not x for x in parameters):
        return functools.partial(signature, storages=False)
    tracked = [i for i, x in enumerate(parameters) if not x.is_inference()]  # the others have no version
    if len(tracked) == len(parameters):
        return lambda tensors: ([*map(autograd.version, tensors)], [*map(Tensor.data_ptr, tensors)])
    return lambda tensors: ([autograd.version(tensors[i]) for i in tracked], [*map(Tensor.data_ptr, tensors)])


def version(parameter: Tensor) -> tuple[int, ...]:
    """Return the number of writes to a parameter: of a DTensor, those to itself and those to its shard."""
    shard = local(parameter)
    versions = (0 if shard.is_inference() else autograd.version(shard),)
    return versions if shard is parameter else (autograd.version(parameter), *versions)


def storage_of(tensor: Tensor) -> StorageWeakRef:
    """Give a key equal for tensors of one storage. It keeps no data alive, yet no other storage becomes equal to it."""
    return StorageWeakRef(tensor.untyped_storage())
