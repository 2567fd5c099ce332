"""Keep FP8 copies of weights where no gradients are computed: they are made once, not once per call.

A graph takes the copies as inputs; ``hoist_weights`` found how each is made. A graph with a backward takes
none, and quantizes its weights in each forward, unless the user asks for copies (``cache_weights="update"``).

A copy is never older than its weight, whoever wrote that. Before a call, weights are quantized again, into the same
memory,

* after any step of an optimizer, after calls with gradients (hand-written updates follow them), and after
  ``refresh_weights()``;
* when the version or the address of a parameter has changed, or its storage (the address alone is not enough:
  ``model.to(bfloat16).to(float32)`` may get back the memory that it has just freed);
* on a CPU, when the numbers differ from those that the copy was made of: they are looked at in each call;
* elsewhere, after a pause between calls; and always for inference tensors, whose writes leave no version. In one of 64
  calls all numbers are looked at, without waiting (``runtime/contents.py``). A write that only this shows is late by
  some calls: a warning names the layer. Strict mode looks in each call, and waits.

With ``cache_weights="update"`` the same copies serve graphs with gradients. They must not change between forward and
backward, so that only signals of an update count: a step of the optimizer that holds the parameter (or of any, if it is
trainable and none was seen to hold it), version, address, ``refresh_weights()``, PEFT's merges
(``runtime/staleness.py``), and the numbers themselves.

Weights that are computed in the same way are quantized together, up to ``BATCH`` at a time by one compiled function, so
that their kernels are fused. With delayed scaling, quantizing a weight for a training graph also records its amax; a
weight that was first quantized for evaluation is quantized again.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Final, cast

import torch
from torch import Tensor, fx

from fp8graph.compat import autograd
from fp8graph.compat.distributed import local
from fp8graph.compat.fakes import FakeTensor
from fp8graph.compat.lives import life
from fp8graph.ir.extra_inputs import ExtraInput
from fp8graph.ir.nodes import aten
from fp8graph.passes.hoist_weights import KeptWeight
from fp8graph.runtime.contents import EVERY, Look, Watch, contents_of
from fp8graph.runtime.staleness import Unchanged, picker, storage_of, version
from fp8graph.runtime.stores import Caller, Services, Slot, Store

_log = logging.getLogger("fp8graph")

BATCH: Final = 8


@dataclass(eq=False)
class _Copy:
    """One quantized weight. Its tensors keep their addresses, and belong to ``owners``."""

    weight: KeptWeight
    owners: list[weakref.ref[Any]]  # to the lives of parameters
    tensors: dict[str, Tensor]  # by output name
    made_of: Any = None  # the state of the owners when it was made
    contents: list[Any] = field(default_factory=list[Any])  # the fingerprints of the owners when it was made
    recorded: bool = False  # its amax is recorded in the scaling state

    def belongs_to(self, parameters: Sequence[Tensor]) -> bool:
        return all(owner() is life(p) for owner, p in zip(self.owners, parameters, strict=True))


@dataclass(frozen=True)
class _Found:
    """The copies of one graph for one set of parameters."""

    weights: Sequence[KeptWeight]  # kept alive, so that its id is not used again
    copies: list[_Copy]
    tensors: list[Tensor]
    asked: list[ExtraInput]  # the tensors of another store that quantizing takes: pages of delayed scales
    alive: list[weakref.ref[Any]] = field(default_factory=list[weakref.ref[Any]])  # called when they are freed


class WeightCache(Store):
    """The quantized weights of one backend."""

    name: ClassVar = KeptWeight.store

    def __init__(self, services: Services) -> None:
        settings = services.settings
        self._epoch, self._names, self._compile = services.epoch, services.names, services.compile
        self._others: Final = services.tensors
        self._trains, self._strict = settings.keeps_weights(training=True), settings.strict
        self.steps: Final = services.steps  # of optimizers, and other signals of an update
        self._found: dict[Any, _Found] = {}  # it changes whenever a parameter is freed: iterate over a list of it
        self._functions: dict[Any, Callable[..., Any]] = {}
        self.quantized = 0  # number of weights quantized so far

    @classmethod
    def of(cls, services: Services) -> WeightCache:
        return cls(services)

    def refresh(self) -> None:
        """Mark every copy as stale."""
        self.steps.refresh()

    def forget(self, asked: Sequence[KeptWeight]) -> None:
        """Drop the copies of a graph that is gone, unless another graph uses them.

        Copies with delayed scaling stay as long as their parameters: made again, they would have a newer scale.
        """
        for key in [key for key in list(self._found) if key[0] == id(asked)]:
            if (found := self._found.get(key)) is not None:
                if scaled := [copy for copy in found.copies if copy.weight.asked]:
                    self._keep((None, *map(id, scaled)), _Found((), scaled, [], []))
                self._drop(key)

    def _keep(self, key: Any, found: _Found) -> None:
        """Keep ``found`` as long as its parameters are alive."""
        this = weakref.ref(self)

        def gone(_: Any) -> None:
            if (cache := this()) is not None:
                cache._drop(key)

        owners = [owner for copy in found.copies for reference in copy.owners if (owner := reference()) is not None]
        found.alive.extend(weakref.ref(owner, gone) for owner in owners)
        self._found[key] = found

    def _drop(self, key: Any) -> None:
        if self._found.pop(key, None) is not None:
            left = {copy.weight.signature for copy in self._copies()}
            for made in [made for made in list(self._functions) if made[0][1] not in left]:
                del self._functions[made]

    def report(self) -> Mapping[str, int]:
        return {"weights": sum(copy.weight.linears for copy in self._copies()), "weight_bytes": self.bytes}

    @property
    def bytes(self) -> int:
        """The memory of all copies."""
        return sum(t.nbytes for copy in self._copies() for t in copy.tensors.values())

    def slot(self, asked: Sequence[KeptWeight], caller: Caller) -> Slot:
        """The copies that a graph takes, up to date."""
        return Slot(tensors=self.tensors(asked, caller.args), fresh=self.unchanged(asked, caller.args))

    def tensors(self, weights: Sequence[KeptWeight], args: Sequence[Any]) -> list[Tensor]:
        """The copies for one call of a graph, in the order of its inputs and up to date with the parameters.

        Args:
            weights: the weights whose copies the graph takes.
            args: its other inputs, the parameters among them.
        """
        found, counters = self._find(weights, args), self._counters()
        counters = counters[:1] if self._trains else counters
        stale: list[tuple[KeptWeight, _Copy]] = []
        for weight, copy in zip(weights, found.copies, strict=True):
            parameters = [args[index] for index in weight.parameters]
            seen = counters, *map(self._state_of, parameters)
            if copy.made_of != seen or _unseen(parameters) or self._differs(copy, parameters):
                copy.made_of, copy.recorded = seen, False
                stale.append((weight, copy))
            elif weight.records and not copy.recorded:
                stale.append((weight, copy))
        if stale:
            with torch.inference_mode(False), torch.no_grad(), autograd.without_autocast():
                records = any(weight.records for weight, _ in stale)
                given = self._others(found.asked, args, records=records)
                self._quantize(stale, args, dict(zip(found.asked, given, strict=True)))
        return found.tensors

    def _counters(self) -> tuple[int, int, int]:
        """Counts whose change may make copies stale: all copies, unless graphs with gradients take them, too."""
        return self.steps.refreshes, self.steps.all.count, self.steps.switches

    def unchanged(self, weights: Sequence[KeptWeight], args: Sequence[Any]) -> Callable[[Sequence[Any]], bool] | None:
        """A check whether the copies from :meth:`tensors` are valid for later arguments; None without weights."""
        positions = sorted({index for weight in weights for index in weight.parameters})
        if not positions:
            return None
        parameters = [args[index] for index in positions]
        if any(isinstance(local(x), FakeTensor) for x in parameters) or _unseen(parameters):
            return lambda _: False  # their changes cannot be detected
        signals = Unchanged(self._counters, positions, args)
        made = {
            index: contents
            for weight, copy in zip(weights, self._find(weights, args).copies, strict=True)
            for index, contents in zip(weight.parameters, copy.contents, strict=True)
        }
        layers = {index: weight for weight in weights for index in weight.parameters}
        on_cpu = [index for index in positions if local(args[index]).is_cpu]
        looks = [Look(picker(on_cpu), [made[index] for index in on_cpu])] if on_cpu else []
        looks += [self._watch(own, made, layers, args) for own in _by_device(set(positions) - {*on_cpu}, args)]

        def unchanged(args: Sequence[Any]) -> bool:
            if not signals(args):
                return False
            if self._trains and autograd.in_backward():
                return True  # a recomputation takes the copies of its forward
            for look in looks:  # noqa: SIM110 (fewer calls than all() makes)
                if not look(args):
                    return False
            return True

        return unchanged

    def _watch(
        self, own: Sequence[int], made: Mapping[int, Any], layers: Mapping[int, KeptWeight], args: Sequence[Any]
    ) -> Watch:
        """Watch the parameters at the positions ``own``, which are on one device."""
        bound = {index: self._names.get(args[index]) if self._names else "" for index in own}
        names = [bound[index].removesuffix(".weight") or layers[index].name for index in own]

        def changed(positions: Sequence[int]) -> None:
            self.steps.refresh()
            if positions and not self._strict:
                more = f" and {len(positions) - 1} more layers" if len(positions) > 1 else ""
                _log.warning(
                    "the weight of %s%s was written to, and nothing showed it at once (.data, another process?): up to "
                    "%d calls may have multiplied the old numbers. Its FP8 copy is made again now. Call "
                    "backend.refresh_weights() after such writes, or compile with cache_weights=False.",
                    names[positions[0]], more, 2 * EVERY,
                )  # fmt: skip

        tensors = [local(args[index]) for index in own]
        pauses = None if self._trains else self.steps.refresh
        return Watch(tensors, [made[index] for index in own], changed, pauses, every=self._strict)

    def _differs(self, copy: _Copy, parameters: Sequence[Tensor]) -> bool:
        """Whether parameters on a CPU hold other numbers than those that ``copy`` was made of."""
        tensors = [*map(local, parameters)]
        if autograd.in_backward() or any(isinstance(x, FakeTensor) or not x.is_cpu for x in tensors):
            return False
        return contents_of(tensors) != copy.contents

    def _state_of(self, parameter: Tensor) -> tuple[Any, ...]:
        tensor, steps = local(parameter), self.steps.of(parameter) if self._trains else 0
        if isinstance(tensor, FakeTensor):
            return version(parameter), steps
        return version(parameter), storage_of(tensor), tensor.data_ptr(), steps

    def _copies(self) -> set[_Copy]:
        return {copy for found in list(self._found.values()) for copy in found.copies}

    def _find(self, weights: Sequence[KeptWeight], args: Sequence[Any]) -> _Found:
        owners = [[args[index] for index in weight.parameters] for weight in weights]
        key = id(weights), *(id(owner) for several in owners for owner in several)
        found = self._found.get(key)
        if found is not None and all(c.belongs_to(o) for c, o in zip(found.copies, owners, strict=True)):
            return found
        known: dict[Any, list[_Copy]] = {}
        for copy in self._copies():
            known.setdefault((copy.weight.signature, *map(id, (owner() for owner in copy.owners))), []).append(copy)
        copies: list[_Copy] = []
        for weight, several in zip(weights, owners, strict=True):
            alike = known.setdefault((weight.signature, *map(id, map(life, several))), [])
            copy = next((c for c in alike if covers(c.weight, weight) and c.belongs_to(several)), None)
            if copy is None:
                if alike:  # other graphs will find this copy, which has more layouts than theirs
                    self._found.clear()
                    self._epoch.advance()
                alike.append(copy := _new_copy(weight, several))
            copies.append(copy)
        tensors = [copy.tensors[name] for weight, copy in zip(weights, copies, strict=True) for name in weight.outputs]
        asked = [each for weight in weights for each in weight.asked]
        self._keep(key, found := _Found(weights, copies, tensors, asked))
        return found

    def _quantize(
        self,
        stale: Sequence[tuple[KeptWeight, _Copy]],
        args: Sequence[Any],
        given: Mapping[ExtraInput, Tensor],
    ) -> None:
        # Copies of one weight with several paddings share one row, whatever its name in each of them: all are made with
        # its scale before one of them records.
        self._note_contents(stale, args)
        last = {
            (*(storage_of(given[x]) for x in weight.asked), *(id(args[index]) for index in weight.parameters)): copy
            for weight, copy in stale
            if weight.records
        }
        recorders = set(last.values())
        alike: dict[Any, list[tuple[KeptWeight, _Copy]]] = {}
        for weight, copy in stale:
            alike.setdefault((copy in recorders, copy.weight.signature, copy.weight.layouts), []).append((weight, copy))
        for key, group in sorted(alike.items(), key=lambda item: item[0][0]):
            records = key[0]
            for batch in _batches(group):
                inputs: list[Tensor] = []
                buffers: list[Tensor] = []
                for weight, copy in batch:
                    inputs += [local(args[index]) for index in weight.parameters]
                    inputs += [given[x] for x in weight.asked]
                    buffers += copy.tensors.values()
                    copy.recorded = weight.records
                function = self._functions.get((key, len(batch)))
                if function is None:
                    (weight, copy), *_ = batch
                    graph = copy.weight.recording if records else copy.weight.quantizing
                    module = _module(graph, len(batch), len(inputs) // len(batch))
                    function = self._functions[key, len(batch)] = self._compile(module, [*inputs, *buffers])
                function(*inputs, *buffers)
                torch.autograd.graph.increment_version(buffers)  # generated code does not
        self.quantized += sum(weight.linears for weight, _ in stale)

    def _note_contents(self, stale: Sequence[tuple[KeptWeight, _Copy]], args: Sequence[Any]) -> None:
        """Keep the fingerprints of the weights that copies are made of now."""
        owners = {index: local(args[index]) for weight, _ in stale for index in weight.parameters}
        found: dict[int, Any] = {}
        if not any(isinstance(x, FakeTensor) for x in owners.values()):
            for own in _by_device(owners, args):
                found.update(zip(own, contents_of([owners[index] for index in own]), strict=True))
        for weight, copy in stale:
            copy.contents = [found.get(index) for index in weight.parameters]


def _by_device(positions: Iterable[int], args: Sequence[Any]) -> list[list[int]]:
    """The positions of parameters, those of one device together."""
    found: dict[torch.device, list[int]] = {}
    for index in sorted(positions):
        found.setdefault(local(args[index]).device, []).append(index)
    return [*found.values()]


def _unseen(parameters: Sequence[Tensor]) -> bool:
    """Whether writes to some parameters leave no trace, and their numbers are not looked at in each call."""
    return any(x.is_inference() and not x.is_cpu for x in parameters)


def _batches(group: Sequence[Any]) -> list[Sequence[Any]]:
    """Full batches and single ones: two functions to compile at most, however many weights there are."""
    full = len(group) - len(group) % BATCH
    return [*(group[i : i + BATCH] for i in range(0, full, BATCH)), *([item] for item in group[full:])]


def covers(made: KeptWeight, wanted: KeptWeight) -> bool:
    """Whether the copy ``made`` has the layouts of ``wanted``."""
    return all(not want or want == have for have, want in zip(made.layouts, wanted.layouts, strict=True))


def _new_copy(weight: KeptWeight, owners: Sequence[Tensor]) -> _Copy:
    with torch.inference_mode(False):  # a model that was first evaluated may be trained later
        device = owners[0].device
        tensors = {
            name: torch.empty(val.shape, dtype=val.dtype, device=device) for name, val in weight.made_outputs().items()
        }
    return _Copy(weight, [weakref.ref(life(owner)) for owner in owners], tensors)


def _module(body: fx.Graph, count: int, inputs: int) -> fx.GraphModule:
    """``body`` for ``count`` weights, each with ``inputs`` inputs, which writes its results into further inputs."""
    graph = fx.Graph()
    sources = [[graph.placeholder(f"input{i}_{j}") for j in range(inputs)] for i in range(count)]
    results: list[Any] = []
    for placeholders in sources:
        copies = dict(zip(body.find_nodes(op="placeholder"), placeholders, strict=True))
        results += cast(list[Any], graph.graph_copy(body, copies))
        for original, copy in copies.items():
            copy.meta.update(original.meta)
    first = next(node for node in graph.nodes if node.op != "placeholder")
    for position, result in enumerate(results):
        with graph.inserting_before(first):
            buffer = graph.placeholder(f"buffer{position}")
        graph.call_function(aten.copy_.default, (buffer, result))
    graph.output(())
    return fx.GraphModule(torch.nn.Module(), graph)
