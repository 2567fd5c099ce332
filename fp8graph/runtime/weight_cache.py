"""Cache FP8 copies of weights: they are made once per update of a weight, not once per call.

A graph takes the copies as inputs; ``passes/hoist_weights.py`` found how each is made. Before a call, every weight
whose parameters may have changed since its copy was made is quantized again, into the same memory. No single signal
shows that a parameter has changed, so three are combined:

* the version counter, which an in-place write bumps, but ``AdamW(fused=True)`` does not;
* the storage and the address in it, which change when ``.data`` is replaced or the model moves (the address alone is
  not enough: ``model.to(bfloat16).to(float32)`` may get back the memory that it has just freed);
* steps of optimizers (torch's hook fires for fused ones too): a step makes stale what the optimizer holds, and
  every trainable parameter that no optimizer was seen to hold (an optimizer may hold slices of it).

Writes through ``.data`` change none of the three. Those of PEFT's merges are noticed by what else they change
(``runtime/adapters.py``); after others, ``fp8graph.refresh_weights(backend)``, or ``cache_weights=False``. Strict mode
compares a few elements of each weight with those of the time of its copy, and raises.

Weights that are computed in the same way are quantized together, up to ``BATCH`` at a time by one compiled function, so
that their kernels are fused. With delayed scaling, quantizing a weight for a training graph also records its amax; a
weight that was first quantized for evaluation is quantized again.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, cast

import torch
from torch import Tensor, fx

from fp8graph.compat import autograd
from fp8graph.compat.distributed import local
from fp8graph.compat.fakes import FakeTensor
from fp8graph.errors import StateError
from fp8graph.ir.extra_inputs import PageLayout, QuantizedWeight
from fp8graph.ir.nodes import aten
from fp8graph.runtime.call import Epoch
from fp8graph.runtime.staleness import Steps, Unchanged, samples, storage_of, version

BATCH: Final = 8
Pages = Callable[[Sequence[PageLayout]], list[Tensor]]
Compile = Callable[[fx.GraphModule, list[Any]], Callable[..., Any]]


@dataclass(eq=False)
class _Copy:
    """One quantized weight. Its tensors keep their addresses, and belong to ``owners``."""

    weight: QuantizedWeight
    owners: list[weakref.ref[Tensor]]
    tensors: dict[str, Tensor]  # by output name
    made_of: Any = None  # the state of the owners when it was made
    recorded: bool = False  # its amax is recorded in the scaling state
    samples: list[Tensor] = field(default_factory=list[Tensor])  # of the owners when it was made, in strict mode

    def belongs_to(self, parameters: Sequence[Tensor]) -> bool:
        return all(owner() is p for owner, p in zip(self.owners, parameters, strict=True))


@dataclass(frozen=True)
class _Found:
    """The copies of one graph for one set of parameters."""

    weights: Sequence[QuantizedWeight]  # kept alive, so that its id is not used again
    copies: list[_Copy]
    tensors: list[Tensor]
    pages: list[PageLayout]  # pages of the weights with delayed scaling
    alive: list[weakref.ref[Tensor]] = field(default_factory=list[weakref.ref[Tensor]])  # called when they are freed


class Weights:
    """The quantized weights of one backend.

    Args:
        epoch: it is advanced when graphs have to look for their copies again.
        strict: raise where a weight was written to and nothing told of it.
    """

    def __init__(self, epoch: Epoch, *, strict: bool = False) -> None:
        self._epoch, self._strict = epoch, strict
        self.steps: Final = Steps()
        self._found: dict[Any, _Found] = {}  # it changes whenever a parameter is freed: iterate over a list of it
        self._functions: dict[Any, Callable[..., Any]] = {}
        self.quantized = 0  # number of weights quantized so far

    def refresh(self) -> None:
        """Mark every copy as stale."""
        self.steps.refresh()

    def forget(self, weights: Sequence[QuantizedWeight]) -> None:
        """Drop the copies of a graph that is gone, unless another graph uses them.

        Copies with delayed scaling stay as long as their parameters: made again, they would have a newer scale.
        """
        for key in [key for key in list(self._found) if key[0] == id(weights)]:
            if (found := self._found.get(key)) is not None:
                if scaled := [copy for copy in found.copies if copy.weight.page is not None]:
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

    def __len__(self) -> int:
        return sum(copy.weight.linears for copy in self._copies())

    @property
    def bytes(self) -> int:
        """The memory of all copies."""
        return sum(t.nbytes for copy in self._copies() for t in copy.tensors.values())

    def tensors(
        self, weights: Sequence[QuantizedWeight], args: Sequence[Any], pages: Pages, compile: Compile
    ) -> list[Tensor]:
        """The copies for one call of a graph, in the order of its inputs and up to date with the parameters.

        Args:
            weights: the weights whose copies the graph takes.
            args: its other inputs, the parameters among them.
            pages: the scaling state for page layouts.
            compile: compiles a graph of dialect nodes into a function.
        """
        found = self._find(weights, args)
        stale: list[tuple[QuantizedWeight, _Copy]] = []
        for weight, copy in zip(weights, found.copies, strict=True):
            seen = self.steps.refreshes, *(self._state_of(args[index]) for index in weight.parameters)
            if copy.made_of != seen:
                copy.made_of, copy.recorded = seen, False
                copy.samples = self._samples(weight, args)
                stale.append((weight, copy))
            elif weight.records and not copy.recorded:
                stale.append((weight, copy))
        self._verify(weights, found.copies, args)
        if stale:
            with torch.inference_mode(False), torch.no_grad(), autograd.without_autocast():
                self._quantize(stale, args, dict(zip(found.pages, pages(found.pages), strict=True)), compile)
        return found.tensors

    def unchanged(
        self, weights: Sequence[QuantizedWeight], args: Sequence[Any]
    ) -> Callable[[Sequence[Any]], bool] | None:
        """A check whether the copies from :meth:`tensors` are valid for later arguments; None without weights."""
        positions = sorted({index for weight in weights for index in weight.parameters})
        if not positions:
            return None
        if any(isinstance(local(args[index]), FakeTensor) for index in positions):
            return lambda _: False  # changes of a fake tensor cannot be detected
        unchanged = Unchanged(self.steps, positions, args)
        if not self._strict:
            return unchanged
        copies = self._find(weights, args).copies
        return lambda args: unchanged(args) and self._verify(weights, copies, args)

    def _samples(self, weight: QuantizedWeight, args: Sequence[Any]) -> list[Tensor]:
        tensors = [local(args[index]) for index in weight.parameters] if self._strict else []
        return [] if any(isinstance(tensor, FakeTensor) for tensor in tensors) else [*map(samples, tensors)]

    def _verify(self, weights: Sequence[QuantizedWeight], copies: Sequence[_Copy], args: Sequence[Any]) -> bool:
        """Strict mode: raise for a weight that is another than the one that its copy was made of."""
        if not any(made := [copy.samples for copy in copies]):
            return True
        now = [self._samples(weight, args) for weight in weights]
        flat = [torch.cat([sample for several in found for sample in several]) for found in (made, now)]
        if not torch.equal(*flat):  # one comparison: on a GPU it waits
            pairs = zip(weights, made, now, strict=True)
            first = next(w for w, a, b in pairs if not all(map(torch.equal, a, b)))
            fused = f" or of one of the {first.linears} linears fused with it" if first.linears > 1 else ""
            raise StateError(
                f"strict mode: the weight of {first.name}{fused} was written to, and nothing told of it "
                "(.data?). Call backend.refresh_weights() after such writes, or compile with cache_weights=False."
            )
        return True

    def _state_of(self, parameter: Tensor) -> tuple[Any, ...]:
        tensor, steps = local(parameter), self.steps.of(parameter)
        if isinstance(tensor, FakeTensor):
            return version(parameter), steps
        return version(parameter), storage_of(tensor), tensor.data_ptr(), steps

    def _copies(self) -> set[_Copy]:
        return {copy for found in list(self._found.values()) for copy in found.copies}

    def _find(self, weights: Sequence[QuantizedWeight], args: Sequence[Any]) -> _Found:
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
            alike = known.setdefault((weight.signature, *map(id, several)), [])
            copy = next((c for c in alike if _covers(c.weight, weight) and c.belongs_to(several)), None)
            if copy is None:
                if alike:  # other graphs will find this copy, which has more layouts than theirs
                    self._found.clear()
                    self._epoch.advance()
                alike.append(copy := _new_copy(weight, several))
            copies.append(copy)
        tensors = [copy.tensors[name] for weight, copy in zip(weights, copies, strict=True) for name in weight.outputs]
        layouts = [weight.page for weight in weights if weight.page is not None]
        self._keep(key, found := _Found(weights, copies, tensors, layouts))
        return found

    def _quantize(
        self,
        stale: Sequence[tuple[QuantizedWeight, _Copy]],
        args: Sequence[Any],
        pages: Mapping[PageLayout, Tensor],
        compile: Compile,
    ) -> None:
        # Copies of one weight with several paddings share one row, whatever its name in each of them: all are made with
        # its scale before one of them records.
        last = {
            (storage_of(pages[weight.page]), *(id(args[index]) for index in weight.parameters)): copy
            for weight, copy in stale
            if weight.records and weight.page is not None
        }
        recorders = set(last.values())
        alike: dict[Any, list[tuple[QuantizedWeight, _Copy]]] = {}
        for weight, copy in stale:
            alike.setdefault((copy in recorders, copy.weight.signature, copy.weight.layouts), []).append((weight, copy))
        for key, group in sorted(alike.items(), key=lambda item: item[0][0]):
            records = key[0]
            for batch in _batches(group):
                inputs: list[Tensor] = []
                buffers: list[Tensor] = []
                for weight, copy in batch:
                    inputs += [local(args[index]) for index in weight.parameters]
                    inputs += [pages[weight.page]] if weight.page is not None else []
                    buffers += copy.tensors.values()
                    copy.recorded = weight.records
                function = self._functions.get((key, len(batch)))
                if function is None:
                    (weight, copy), *_ = batch
                    graph = copy.weight.recording if records else copy.weight.quantizing
                    module = _module(graph, len(batch), len(inputs) // len(batch))
                    function = self._functions[key, len(batch)] = compile(module, [*inputs, *buffers])
                function(*inputs, *buffers)
                torch.autograd.graph.increment_version(buffers)  # generated code does not
        self.quantized += sum(weight.linears for weight, _ in stale)


def _batches(group: Sequence[Any]) -> list[Sequence[Any]]:
    """Full batches and single ones: two functions to compile at most, however many weights there are."""
    full = len(group) - len(group) % BATCH
    return [*(group[i : i + BATCH] for i in range(0, full, BATCH)), *([item] for item in group[full:])]


def _covers(made: QuantizedWeight, wanted: QuantizedWeight) -> bool:
    """Whether the copy ``made`` has the layouts of ``wanted``."""
    return all(not want or want == have for have, want in zip(made.layouts, wanted.layouts, strict=True))


def _new_copy(weight: QuantizedWeight, owners: Sequence[Tensor]) -> _Copy:
    with torch.inference_mode(False):  # a model that was first evaluated may be trained later
        device = owners[0].device
        tensors = {
            name: torch.empty(val.shape, dtype=val.dtype, device=device) for name, val in weight.made_outputs().items()
        }
    return _Copy(weight, [weakref.ref(owner) for owner in owners], tensors)


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
