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

Weights that arrive quantized, and are joined, are no copy where they can be moved into one memory
(``side_by_side.py``): the joined weight is as they are, and is looked for again only when one of them has moved.

A weight, and with it its copies, belongs to its parameters. Graphs that take it in the same layouts share a copy.

Weights that are computed in the same way are quantized together, up to ``BATCH`` at a time by one compiled function, so
that their kernels are fused. With delayed scaling, quantizing a weight for a training graph also records its amax, once
per update; a weight that was first quantized for evaluation is quantized again. All its copies have the scale from
before, also those that another graph wants later in the same step.
"""

from __future__ import annotations

import logging
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Final, cast

import torch
from torch import Tensor, fx

from fp8graph.compat import autograd, ops
from fp8graph.compat.anchors import anchor
from fp8graph.compat.distributed import local
from fp8graph.compat.fakes import FakeTensor
from fp8graph.ir.extra_inputs import ExtraInput
from fp8graph.ir.nodes import aten
from fp8graph.passes.hoist_weights import CachedWeight
from fp8graph.passes.hoist_weights.side_by_side import lie_side_by_side, side_by_side
from fp8graph.runtime.contents import EVERY, Watch, contents_of, same_contents
from fp8graph.runtime.parameters import ParameterTable
from fp8graph.runtime.staleness import Unchanged, picker, signature, storage_of
from fp8graph.runtime.stores import CallContext, Services, Slot, Store

_log = logging.getLogger("fp8graph")

BATCH: Final = 8
_kind: Final = operator.methodcaller("kind")


@dataclass(eq=False)
class _Copy:
    """A weight quantized in some layouts. Its tensors keep their addresses."""

    request: CachedWeight
    tensors: dict[str, Tensor]  # by output name
    made: bool = False  # of the weight's present numbers
    in_place: bool = False  # its rows are the parameters themselves: it is as they are, whoever writes them


@dataclass(eq=False)
class _Weight:
    """A weight that is computed from its owners in one way. All copies are made of the same numbers, with one scale."""

    way: tuple[Any, ...]  # in which it is quantized: its signature, and the recipes of its rows
    copies: dict[int, _Copy] = field(default_factory=dict[int, _Copy])  # by the id of the request that takes it
    made_of: Any = None  # the state of the owners when they were made
    contents: Sequence[Any] = ()  # the fingerprints of the owners when they were made
    recorded: bool = False  # its amax is recorded in the scaling state
    before: list[Tensor] = field(default_factory=list[Tensor])  # that state, as it was when copies were made

    def renew(self, made_of: Any) -> None:
        """Take all copies for stale."""
        self.made_of, self.recorded = made_of, False
        for copy in self.copies.values():
            copy.made = False


class WeightCache(Store):
    """The quantized weights of one backend."""

    name: ClassVar = CachedWeight.store

    def __init__(self, services: Services) -> None:
        settings = services.settings
        self._epoch, self._names, self._services = services.epoch, services.names, services
        self._trains, self._strict = settings.keeps_weights(training=True), settings.strict
        self.steps: Final = services.steps  # of optimizers, and other signals of an update
        self._weights: Final = ParameterTable[_Weight](self._free_functions)
        # by the id of a graph's requests, which are kept alive: the tensors of another store that quantizing takes
        self._graphs: dict[int, tuple[Sequence[CachedWeight], list[ExtraInput]]] = {}
        self._functions: dict[Any, Callable[..., Any]] = {}
        self.quantized = 0  # number of weights quantized so far

    def forget(self, extra_inputs: Sequence[CachedWeight]) -> None:
        """Drop the copies of a graph that is gone, unless another graph takes them. Made again, they are the same."""
        _, pages = self._graphs.pop(id(extra_inputs), (extra_inputs, []))
        if (store := self._services.kept_scales(pages)) is not None:
            store.forget(pages)
        requests = {*map(id, extra_inputs)}
        for key, weight in self._weights.items():
            weight.copies = {each: copy for each, copy in weight.copies.items() if each not in requests}
            if not weight.copies and not weight.recorded:
                self._weights.drop(key)
        self._free_functions()

    def _free_functions(self, *_: Any) -> None:
        """Drop those that quantize no weight any more."""
        for key in [*self._functions]:
            if not any(weight.copies and weight.way == key[0][1] for weight in self._weights.values()):
                del self._functions[key]

    def report(self) -> Mapping[str, int]:
        copied = [copy for copy in self._copies() if not copy.in_place]
        return {"weights": sum(copy.request.linears for copy in copied), "weight_bytes": self.bytes}

    @property
    def bytes(self) -> int:
        """The memory of all copies."""
        return sum(t.nbytes for copy in self._copies() if not copy.in_place for t in copy.tensors.values())

    def slot(self, extra_inputs: Sequence[CachedWeight], context: CallContext) -> Slot:
        """Return the copies that a graph takes, up to date."""
        return Slot(tensors=self.tensors(extra_inputs, context.args), fresh=self.unchanged(extra_inputs, context.args))

    def tensors(self, weights: Sequence[CachedWeight], args: Sequence[Any]) -> list[Tensor]:
        """Return the copies for one call of a graph, in the order of its inputs and up to date with the parameters.

        Args:
            weights: the weights whose copies the graph takes.
            args: its other inputs, the parameters among them.
        """
        _, pages = self._graphs.setdefault(
            id(weights), (weights, [each for one in weights for each in one.extra_inputs])
        )
        steps, counters = self.steps.all if self._trains else None, self._counters()[: 1 if self._trains else None]
        tensors: list[Tensor] = []
        stale: dict[_Copy, tuple[CachedWeight, _Weight]] = {}
        for request in weights:
            parameters, weight = [args[index] for index in request.parameters], self._weight(request, args)
            copy = self._copy(weight, request, parameters)
            if copy.in_place:
                tensors += copy.tensors.values()
                continue
            seen = counters, signature(parameters, steps=steps)
            if weight.made_of != seen or _unseen(parameters) or self._differs(weight, parameters):
                weight.renew(seen)
            if (copy not in stale and not copy.made) or (request.records and not weight.recorded):
                stale[copy] = request, weight
            tensors += [copy.tensors[name] for name in request.outputs]
        if stale:
            with torch.inference_mode(False), torch.no_grad(), autograd.without_autocast():
                records = any(request.records for request, _ in stale.values())
                given = self._services.tensors(pages, args, records=records)
                self._quantize([(*stale[copy], copy) for copy in stale], args, dict(zip(pages, given, strict=True)))
        return tensors

    def _counters(self) -> tuple[int, int, int]:
        """Counts whose change may make copies stale: all copies, unless graphs with gradients take them, too."""
        return self.steps.refreshes, self.steps.all.count, self.steps.switches

    def unchanged(self, weights: Sequence[CachedWeight], args: Sequence[Any]) -> Callable[[Sequence[Any]], bool] | None:
        """Give a check whether the copies from :meth:`tensors` are valid for later arguments; None without weights."""
        positions = sorted({index for weight in weights for index in weight.parameters})
        if not positions:
            return None
        parameters = [args[index] for index in positions]
        copied = [weight for weight in weights if not self._is_in_place(weight, args)]
        layers = {index: request for request in copied for index in request.parameters}
        fakes = any(isinstance(local(x), FakeTensor) for x in parameters)
        if fakes or _unseen([args[index] for index in layers]):
            return lambda _: False  # their changes cannot be detected
        signals = Unchanged(self._counters, positions, args)
        made = {
            index: contents
            for request in copied
            for index, contents in zip(request.parameters, self._weight(request, args).contents, strict=True)
        }
        on_cpu = [index for index in layers if local(args[index]).is_cpu]
        looks = [same_contents(picker(on_cpu), [made[index] for index in on_cpu])] if on_cpu else []
        looks += [self._watch(own, made, layers, args) for own in _by_device(layers.keys() - {*on_cpu}, args)]

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

    def _is_in_place(self, request: CachedWeight, args: Sequence[Any]) -> bool:
        copy = self._weight(request, args).copies.get(id(request))
        return copy is not None and copy.in_place

    def _watch(
        self, own: Sequence[int], made: Mapping[int, Any], layers: Mapping[int, CachedWeight], args: Sequence[Any]
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

    def _differs(self, weight: _Weight, parameters: Sequence[Tensor]) -> bool:
        """Return whether parameters on a CPU hold other numbers than those that copies were made of."""
        tensors = [*map(local, parameters)]
        if autograd.in_backward() or any(isinstance(x, FakeTensor) or not x.is_cpu for x in tensors):
            return False
        return contents_of(tensors) != weight.contents

    def _copies(self) -> list[_Copy]:
        return [copy for weight in self._weights.values() for copy in {*weight.copies.values()}]

    def _weight(self, request: CachedWeight, args: Sequence[Any]) -> _Weight:
        """Return the weight that graphs may request in several layouts. Its parameters own it, and no graph does."""
        owners = [args[index] for index in request.parameters]
        way = (request.signature, *map(_kind, request.extra_inputs))
        key = way, *map(id, map(anchor, owners))
        return self._weights.get(key) or self._weights.keep(key, _Weight(way), owners)

    def _copy(self, weight: _Weight, request: CachedWeight, parameters: Sequence[Tensor]) -> _Copy:
        """Return the copy of ``weight`` for a request. One that has more layouts than others takes their place."""
        if any(each.in_place and not _is_there(each, parameters) for each in weight.copies.values()):
            weight.copies.clear()  # the model has moved to another device, for example
            self._epoch.advance()
        copy = weight.copies.get(id(request))
        if copy is None:
            copy = next((copy for copy in weight.copies.values() if covers(copy.request, request)), None)
            if copy is None:
                copy = _in_place(request, parameters) if request.is_join else None
            if copy is None:
                copy = _Copy(request, _buffers(request.made_outputs(), parameters[0].device))
                for key, other in weight.copies.items():
                    if covers(request, other.request):
                        weight.copies[key] = copy
                        self._epoch.advance()  # for calls that are prepared with the other one
            weight.copies[id(request)] = copy
        return copy

    def _quantize(
        self,
        stale: Sequence[tuple[CachedWeight, _Weight, _Copy]],
        args: Sequence[Any],
        given: Mapping[ExtraInput, Tensor],
    ) -> None:
        """Make copies. All of one weight, in this call or a later one, get the scale from before its amax is recorded.

        Weights that have one row, whatever its name in each of them, have one scale, too.
        """
        self._note_contents(stale, args)
        last: dict[Any, _Copy] = {}
        saved: list[tuple[Tensor, Tensor]] = []
        for request, weight, copy in stale:
            if request.records and not weight.recorded:
                pages = [given[each] for each in request.extra_inputs]
                last[*map(storage_of, pages), *(id(args[index]) for index in request.parameters)] = copy
                weight.before = weight.before or [torch.empty_like(page) for page in pages]
                saved += zip(weight.before, pages, strict=True)
        if saved:
            ops.copy_each(*zip(*saved, strict=True))
        recorders = set(last.values())
        alike: dict[Any, list[tuple[CachedWeight, _Weight, _Copy]]] = {}
        for request, weight, copy in stale:
            key = copy in recorders, weight.way, copy.request.layouts
            alike.setdefault(key, []).append((request, weight, copy))
        for key, group in sorted(alike.items(), key=lambda item: item[0][0]):
            for batch in _batches(group):
                self._run(key, batch, args, given)
        for request, weight, _ in stale:
            weight.recorded |= request.records
        self.quantized += sum(request.linears for request, *_ in stale)

    def _run(
        self,
        key: tuple[bool, Any, Any],
        batch: Sequence[tuple[CachedWeight, _Weight, _Copy]],
        args: Sequence[Any],
        given: Mapping[ExtraInput, Tensor],
    ) -> None:
        """Make some copies by one function, which also records their amaxes if ``key`` says so."""
        inputs: list[Tensor] = []
        buffers: list[Tensor] = []
        for request, weight, copy in batch:
            inputs += [local(args[index]) for index in request.parameters]
            inputs += weight.before if weight.recorded else [given[each] for each in request.extra_inputs]
            buffers += copy.tensors.values()
        function = self._functions.get((key, len(batch)))
        if function is None:
            made = batch[0][-1].request
            graph = made.recording if key[0] else made.quantizing
            module = _module(graph, len(batch), len(inputs) // len(batch))
            function = self._functions[key, len(batch)] = self._services.compile(module, [*inputs, *buffers])
        function(*inputs, *buffers)
        torch.autograd.graph.increment_version(buffers)  # generated code does not
        for *_, copy in batch:
            copy.made = True

    def _note_contents(self, stale: Sequence[tuple[CachedWeight, _Weight, _Copy]], args: Sequence[Any]) -> None:
        """Keep the fingerprints of the weights that copies are made of now."""
        owners = {index: local(args[index]) for request, *_ in stale for index in request.parameters}
        prints: dict[int, Any] = {}
        if not any(isinstance(x, FakeTensor) for x in owners.values()):
            for positions in _by_device(owners, args):
                prints.update(zip(positions, contents_of([owners[index] for index in positions]), strict=True))
        for request, weight, _ in stale:
            weight.contents = [prints.get(index) for index in request.parameters]


def _by_device(positions: Iterable[int], args: Sequence[Any]) -> list[list[int]]:
    """Return the positions of parameters, those of one device together."""
    of_device: dict[torch.device, list[int]] = {}
    for index in sorted(positions):
        of_device.setdefault(local(args[index]).device, []).append(index)
    return [*of_device.values()]


def _unseen(parameters: Sequence[Tensor]) -> bool:
    """Return whether writes to some parameters leave no trace, and their numbers are not looked at in each call."""
    return any(x.is_inference() and not x.is_cpu for x in parameters)


def _batches(group: Sequence[Any]) -> list[Sequence[Any]]:
    """Full batches and single ones: two functions to compile at most, however many weights there are."""
    full = len(group) - len(group) % BATCH
    return [*(group[i : i + BATCH] for i in range(0, full, BATCH)), *([item] for item in group[full:])]


def covers(made: CachedWeight, wanted: CachedWeight) -> bool:
    """Return whether the copy ``made`` has the layouts of ``wanted``."""
    return all(not want or want == have for have, want in zip(made.layouts, wanted.layouts, strict=True))


def _in_place(request: CachedWeight, parameters: Sequence[Tensor]) -> _Copy | None:
    """Return the weight that joins ``parameters``, in their memory; None if they cannot be moved there."""
    with torch.inference_mode(False), torch.no_grad(), autograd.without_autocast():
        joined = side_by_side(parameters)
    return None if joined is None else _Copy(request, {request.outputs[0]: joined}, made=True, in_place=True)


def _is_there(copy: _Copy, parameters: Sequence[Tensor]) -> bool:
    """Return whether the rows of a joined weight still are ``parameters``."""
    (joined,) = copy.tensors.values()
    return lie_side_by_side(parameters) and joined.data_ptr() == parameters[0].data_ptr()


def _buffers(values: Mapping[str, Tensor], device: torch.device) -> dict[str, Tensor]:
    with torch.inference_mode(False):  # a model that was first evaluated may be trained later
        return {name: torch.empty(val.shape, dtype=val.dtype, device=device) for name, val in values.items()}


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
