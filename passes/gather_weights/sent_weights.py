"""FSDP2 gathers weights in FP8: each rank quantizes its rows, and graphs take what was gathered.

    rows of a parameter (FP32 or bf16) -> quantized in each forward -> bytes (and scales of tiles) are gathered
    -> rowwise data; columnwise: their transposed copy, if gradients are computed

The whole parameter in high precision does not exist. What FSDP2 puts in its place, for autograd and names, reads memory
that all such parameters share and that holds NaN: code that reads it outside of the compiled graphs gets NaN.

A weight is sent in FP8 from the first step of its optimizer on. With one scale for a whole tensor, the amaxes of all
weights are then reduced over the ranks by one collective, when the first of them is gathered for a forward; with
delayed scaling, together with those of activations and gradients (``passes/connect_scales/``), where the scale comes
from. Backward gathers what forward gathered. With ``cache_weights="update"``, rows are quantized, and amaxes reduced,
once for each update that is noticed.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from fp8graph.compat import autograd, fsdp
from fp8graph.compat.ops import largest_of_columns, largest_of_each
from fp8graph.ir import ops
from fp8graph.ir.nodes import nodes
from fp8graph.ir.quantize_node import QuantizeNode
from fp8graph.ir.weight_graphs import WeightGraph
from fp8graph.numerics.quantization import reducible_amax, reducible_amaxes
from fp8graph.passes.gather_weights import GatheredWeight, ReadWhole, ToGather, source_of_part
from fp8graph.passes.gather_weights.gathered_copies import GatheredCopies, Memory, quantizes_rows, scales_are_given
from fp8graph.recipes import LAYOUTS
from fp8graph.runtime.staleness import signature
from fp8graph.runtime.stores import CallContext, GatheredInHighPrecision, KeptScales, Run, Services, Slot, Store


class SentWeights(Store):
    """The weights of one backend that FSDP2 gathers in FP8. It keeps none alive: their shards do."""

    name: ClassVar = GatheredWeight.store

    def __init__(self, services: Services) -> None:
        self._services, self._steps, self._epoch = services, services.steps, services.epoch
        self._keeps = services.settings.keeps_weights(training=True)  # rows are quantized once for each update
        self.forwards = 0  # how many have begun
        self._gathered: set[tuple[int, int]] = set()  # weights, by id, and their parts: for this forward
        self._kept_scales: list[KeptScales] = []  # the stores of weights' scales that outlive a step
        self._attached: list[weakref.ref[SentWeight]] = []  # in the same order on all ranks
        self._restored: list[weakref.ref[SentWeight]] = []
        self._to_send: list[tuple[WeightGraph, list[weakref.ref[Any]]]] = []
        self._memory = Memory()
        self._listens = False

    @staticmethod
    def fact(parameter: Tensor, *, sharded: Any) -> fsdp.Shard | None:
        return None if sharded is None else fsdp.facts(sharded)

    def report(self) -> Mapping[str, int]:
        """Return the weights, and this rank's quantized rows, which it keeps from update to update."""
        alive = self._alive()
        return {"weights": sum(len(x.sharded) for x in alive), "weight_bytes": sum(x.bytes for x in alive)}

    @property
    def quantized(self) -> int:
        """The number of weights quantized so far."""
        return sum(weight.quantized for weight in self._alive())

    def _alive(self) -> list[SentWeight]:
        pairs = ((reference, reference()) for reference in self._attached)
        alive = [(reference, weight) for reference, weight in pairs if weight is not None and weight.attached]
        self._attached = [reference for reference, _ in alive]
        return [weight for _, weight in alive]

    def slot(self, extra_inputs: Sequence[GatheredWeight | ReadWhole | ToGather], context: CallContext) -> Slot:
        """Return the copies that a graph takes of what was gathered."""
        arrived, copies, read = context.arrived, list[Tensor](), set[int]()
        apart: list[SentWeight] = []
        for weight in extra_inputs:
            if isinstance(weight, ReadWhole):
                read.update(weight.parameters)
            elif isinstance(weight, GatheredWeight):
                owner: SentWeight | None = arrived.get(weight.parameters[0])
                made = owner and owner.copies(weight, [context.args[index] for index in weight.parameters])
                copies += made or []
                apart += [owner] if owner is not None and owner.differ else []
                read.update(() if made is not None else arrived.keys() & {*weight.parameters})
        if read:
            self.restore(arrived[index] for index in read)
            raise GatheredInHighPrecision(frozenset(read))
        self.ask([each for each in extra_inputs if isinstance(each, ToGather)], context.args)
        if apart:
            return RowsOfForward(tensors=copies, weights=[weakref.ref(weight) for weight in apart])
        return Slot(tensors=copies)

    def ask(self, weights: Sequence[WeightGraph], args: Sequence[Any]) -> None:
        """Gather ``weights``, which a graph reads by FP8 GEMMs alone, in FP8 after the next step."""
        by_id = fsdp.gathered() if weights else {}
        for weight in weights:
            sharded = [by_id.get(id(args[index])) for index in weight.parameters]
            ids = {id(reference()) for _, references in self._to_send for reference in references}
            if None not in sharded and not any(id(x) in ids for x in sharded):
                self._to_send.append((weight, [weakref.ref(x) for x in sharded]))
                self._listen()
                scales = self._services.kept_scales(weight.extra_inputs)
                if scales is not None and scales not in self._kept_scales:
                    self._kept_scales.append(scales)
                    scales.before_commit.append(functools.partial(self._stage, scales))

    def arrived(self, args: Sequence[Any], positions: Iterable[int]) -> dict[int, SentWeight]:
        """Return those that were gathered in FP8, for this backend or another one."""
        by_id = fsdp.gathered()
        sharded = {index: by_id[id(args[index])] for index in positions if id(args[index]) in by_id}
        owners = {index: fsdp.owner_of(x) for index, x in sharded.items()}
        return {index: owner for index, owner in owners.items() if owner is not None}

    def restore(self, weights: Iterable[SentWeight]) -> None:
        """Gather ``weights`` in high precision, too: a graph reads them. After the next step, not in FP8 any more."""
        for weight in dict.fromkeys(weights):
            if not weight.restored:
                self._restored.append(weakref.ref(weight))
            weight.restore()
            self._listen()

    def _listen(self) -> None:
        if not self._listens:
            self._listens = True
            self._steps.listen(self._after_step)

    def _stage(self, scales: KeptScales) -> None:
        """Stage the amaxes of weights, which are then reduced over the ranks with those of the graphs."""
        pairs = [pair for weight in self._alive() if (pair := weight.take_amaxes()) is not None]
        if pairs:
            scales.stage([tensor for tensor, _ in pairs], [amaxes for _, amaxes in pairs])

    def _after_step(self, optimizer: Optimizer) -> None:
        for scales in self._kept_scales:
            scales.commit()  # before weights are given back, whose amaxes it takes
        held = {id(p) for group in optimizer.param_groups for p in group["params"]}  # no backward waits for these

        def free(sharded: Sequence[Any]) -> bool:
            return all(id(x.sharded_param) in held and not fsdp.is_gathered(x) for x in sharded)

        for reference in list(self._restored):
            weight = reference()
            if weight is None or not weight.restored:
                self._restored.remove(reference)
            elif free(weight.sharded):
                weight.detach()
                self._epoch.advance()
        new = False
        for entry in list(self._to_send):
            weight, references = entry
            sharded = [x for reference in references if (x := reference()) is not None]
            if len(sharded) < len(references) or any(fsdp.owner_of(x) is not None for x in sharded):
                self._to_send.remove(entry)
            elif free(sharded):
                self._to_send.remove(entry)
                sent = SentWeight(
                    weight,
                    sharded,
                    services=self._services,
                    all_sent=self,
                    memory=self._memory,
                )
                sent.attach()
                new = True
                self._attached.append(weakref.ref(sent))
                self._epoch.advance()
        for weight in self._alive() if new else ():
            weight.stand_in()  # in the memory of the largest
        if self._keeps:
            self._reduce([w for w in self._alive() if all(id(x.sharded_param) in held for x in w.sharded)])

    def gathers(self, weight: SentWeight, part: int) -> None:
        """Note that ``part`` of ``weight`` is gathered, outside of backward. A part comes once in each forward."""
        if not self._gathered or (id(weight), part) in self._gathered:
            self._gathered.clear()
            self.forwards += not self._keeps
            self._reduce([] if self._keeps else self._alive())
        self._gathered.add((id(weight), part))

    @staticmethod
    def _reduce(weights: Sequence[SentWeight]) -> None:
        """Make the scales of those of ``weights`` that have one for a whole tensor. A collective."""
        waiting: dict[Any, list[SentWeight]] = {}
        for weight in weights:
            if weight.waits_for_amax:
                waiting.setdefault(weight.group, []).append(weight)
        for group, weights in waiting.items():
            amaxes = torch.cat(own := [weight.amax() for weight in weights])
            dist.all_reduce(amaxes, dist.ReduceOp.MAX, group=group)
            for weight, amax in zip(weights, amaxes.split([len(amax) for amax in own]), strict=True):
                weight.set_amax(amax)


@dataclass(kw_only=True, eq=False)
class RowsOfForward(Slot):
    """The copies of weights of which a gather brings one layout: a forward has that of forward.

    A gather for backward also serves a forward that is run again there, and a forward after it if weights stay.
    """

    acts: ClassVar[bool] = True
    weights: Sequence[weakref.ref[SentWeight]]  # their shards keep them alive

    def before(self, run: Run) -> Sequence[Tensor]:
        for reference in self.weights:
            if (weight := reference()) is not None:
                weight.fetch("rowwise")
        return self.tensors


class SentWeight:
    """One weight, perhaps joined of several parameters, that FSDP2 gathers in FP8.

    Args:
        weight: as a graph takes it.
        sharded: FSDP2's objects for ``weight.parameters``.
        all_sent: knows when a forward begins.
        memory: for what stands in the place of whole parameters.
    """

    def __init__(
        self,
        weight: WeightGraph,
        sharded: Sequence[Any],
        *,
        services: Services,
        all_sent: SentWeights,
        memory: Memory,
    ) -> None:
        self.sharded = list(sharded)
        self._steps, self._compile, self._tensors = services.steps, services.compile, services.tensors
        self._memory = memory
        self._all = weakref.ref(all_sent)
        self._take(weight)
        self._backward_reads_rows = _backward_may_read_rows(weight)
        self._kept, self._scales_kept = weight.extra_inputs, services.kept_scales(weight.extra_inputs)
        placeholders = weight.quantizing.find_nodes(op="placeholder")
        sources = [source_of_part(part) for part in self._arguments.parts]
        self._parts = [(self.sharded[placeholders.index(source)], casts) for source, casts in sources]
        self._groups = [fsdp.group_of(sharded) for sharded, _ in self._parts]
        self._quantize: dict[int, Callable[..., Any]] = {}  # by part
        self.restored = False  # whole parameters are there, too: a graph reads them
        self._rows: list[dict[str, Tensor]] = []  # quantized rows of this rank, for each part
        self._made_of: list[Any] = []
        self._amaxes: list[Tensor] = []  # [] FP32 each: with delayed scaling, of the quantized rows of each part
        self._to_record: dict[int, bool] = {}  # part -> whether gradients were computed with it
        self._scales: Tensor | None = None  # [1, 2]
        self._scales_of: Any = None
        self.quantized = 0

    def _take(self, weight: WeightGraph) -> None:
        quantized = _quantize_node(weight)
        self.weight, self._arguments, self._kind = weight, quantized.arguments, quantized.kind
        self.differ = quantized.columnwise_differs  # forward gathers its layout, and backward the other
        self._scales_are_given = any(scales_are_given(self._kind, layout) for layout in self._arguments.layouts)

    @property
    def bytes(self) -> int:
        """The memory of this rank's quantized rows."""
        return sum(x.nbytes for made in self._rows for x in made.values())

    @property
    def attached(self) -> bool:
        """Whether FSDP2 gathers it in FP8."""
        return all(fsdp.owner_of(sharded) is self for sharded in self.sharded)

    def attach(self) -> None:
        """From the next gather on. The whole parameters must not be there now."""
        count = len(self._parts)
        self._rows, self._made_of = [{} for _ in range(count)], [None] * count
        self._there: list[frozenset[str]] = [frozenset()] * count  # the layouts that were gathered of each part
        if self._scales_kept is not None:
            self._amaxes = [torch.zeros((), device=fsdp.shard_of(sharded).device) for sharded, _ in self._parts]
        sizes = [sharded._orig_size[0] for sharded, _ in self._parts]
        self._copies = GatheredCopies(self.weight, sizes, fsdp.shard_of(self.sharded[0]).device)
        for part, (sharded, _) in enumerate(self._parts):
            fsdp.attach(sharded, *self._around(part), owner=self)

    def _widen(self, weight: WeightGraph) -> None:
        """Make the copies that ``weight`` has in addition."""
        kept = any(map(fsdp.is_kept, self._groups))
        self._take(weight)
        self._copies.widen(weight, backward=kept)
        fsdp.frees(self._parts[0][0], self._copies.kept(self._layouts(backward=kept)))
        if self.differ:
            count = len(self._parts)
            self._rows, self._made_of, self._quantize = [{} for _ in range(count)], [None] * count, {}
            if kept:
                self.fetch("columnwise")

    def stand_in(self) -> None:
        """Put NaN in the place of the whole parameters, unless a graph reads them."""
        for sharded in () if self.restored else self.sharded:
            fsdp.stand_in(sharded, self._nan(sharded))

    def copies(self, weight: WeightGraph, parameters: Sequence[Any]) -> list[Tensor] | None:
        """Get the copies of ``weight``, which a graph takes in the place of ``parameters``; None if they are others."""
        gathered = [getattr(sharded, "_unsharded_param", None) for sharded in self.sharded]
        own, other = ((x.signature, [each.kind() for each in x.extra_inputs]) for x in (self.weight, weight))
        if own != other:
            return None
        if len(gathered) != len(parameters) or any(a is not b for a, b in zip(gathered, parameters, strict=True)):
            return None
        # of a graph for training, after one for evaluation
        wide = self.weight if {*weight.outputs} <= {*self.weight.made} else weight
        if not {*self.weight.made} <= {*wide.made}:
            return None
        reads_rows = self._backward_reads_rows or _backward_may_read_rows(weight)
        if reads_rows and _quantize_node(wide).columnwise_differs:
            return None
        self._backward_reads_rows = reads_rows
        if wide is not self.weight:
            self._widen(wide)
        return [self._copies.tensors[name] for name in weight.outputs]

    @property
    def group(self) -> Any:
        """The process group that gathers."""
        return self.sharded[0].shard_mesh.get_group()

    @property
    def waits_for_amax(self) -> bool:
        """Whether its rows have changed since its scale was made of the amax of all rows."""
        return self._scales_are_given and not self._kind.has_state and self._scales_of != self._state()

    def amax(self) -> Tensor:
        """[1]: of this rank's rows; [columns]: of its columns."""
        of_parts: list[Tensor] = []
        with torch.no_grad():
            for sharded, casts in self._parts:
                rows = fsdp.shard_of(sharded).detach()
                of_parts += [largest_of_columns(rows)] if self.differ else largest_of_each([rows])
                for dtype in (sharded.param_dtype or sharded.orig_dtype, *casts):
                    of_parts[-1] = of_parts[-1].to(dtype)  # rounding keeps the order
        amaxes = torch.stack(of_parts).to(torch.float32)
        return reducible_amaxes(amaxes) if self.differ else reducible_amax(amaxes)

    def _take_scale(self, kept: KeptScales) -> None:
        """Take the scale that outlives a step, once the last step is recorded in it."""
        kept.commit()
        self._scales, self._scales_of = kept.scales_in(self._row()), self._state()

    def _row(self) -> Tensor:
        """Return the tensor that keeps the weight's scale."""
        owners = dict(zip(self.weight.parameters, map(fsdp.whole_of, self.sharded), strict=True))
        args = [owners.get(index) for index in range(max(owners) + 1)]
        (kept,) = self._tensors(self._kept, args)
        return kept

    def take_amaxes(self) -> tuple[Tensor, list[Tensor]] | None:
        """Return the tensor that keeps its scale, and the amaxes of this rank's rows that are not in it yet; None
        without any.

        As for kept copies, an amax is recorded once for each update of the weight, if gradients were computed with it.
        """
        parts = [part for part, used in self._to_record.items() if used]
        for part in parts:
            del self._to_record[part]
        return (self._row(), [self._amaxes[part] for part in parts]) if parts else None

    def set_amax(self, amax: Tensor) -> None:
        """``amax``: of all rows on all ranks, as :meth:`amax`."""
        arguments = self._arguments
        scales = ops.scales(amax, arguments.dtype, arguments.power_2_scale, arguments.amax_epsilon)
        self._scales = scales.t().reshape(1, 2, -1, 1) if self.differ else scales
        self._scales_of = self._state()

    def _state(self) -> tuple[Any, ...]:
        """Return a key that changes with the parameters."""
        forwards = all_sent.forwards if (all_sent := self._all()) is not None else 0
        shards = [sharded.sharded_param for sharded in self.sharded]
        return self._steps.refreshes, forwards, signature(shards, steps=self._steps.all)

    def _around(self, part: int) -> tuple[Callable[..., Any], Callable[..., Any]]:
        """Return the functions that FSDP2 calls before and after it gathers ``part``, with these names of arguments."""

        def before(mesh: Any, outer_size: Any, outer_stride: Any, module: Any, mp_policy: Any) -> Any:
            layout = "columnwise" if self.differ and fsdp.is_for_backward(self._groups[part]) else "rowwise"
            return tuple(self._sent(part, layout)), layout

        def after(outs: Sequence[Tensor], metadata: Any, param_dtype: torch.dtype, *, out: Any = None) -> Any:
            sharded, _ = self._parts[part]
            # backward is about to run, or may run before the next gather
            kept = fsdp.is_kept(self._groups[part])
            backward = autograd.in_backward() or kept
            self._receive(part, metadata, outs, backward=backward)
            if self.differ and kept:  # FSDP2 does not gather again for the other direction
                for layout in self._arguments.layouts:
                    self.fetch(layout, [part])
            if part in self._to_record:
                self._to_record[part] |= backward or torch.is_grad_enabled()
            freed = self._copies.kept(self._layouts(backward=backward)) if part == 0 else []
            fsdp.frees(sharded, freed)
            if out is not None:
                return self._restore(part) if self.restored else None
            return self._nan(sharded), tuple(freed)

        return before, after

    def _nan(self, sharded: Any) -> Tensor:
        dtype = sharded.param_dtype or sharded.orig_dtype
        return self._memory.nan(sharded._orig_size, dtype, fsdp.shard_of(sharded).device)

    def _layouts(self, *, backward: bool) -> frozenset[str]:
        """Return the layouts whose copies are needed until the next gather."""
        return self._there[0] if self.differ else frozenset(LAYOUTS if backward else ["rowwise"])

    def _receive(
        self, part: int, layout: str, outs: Sequence[Tensor], *, backward: bool = False, fetched: bool = False
    ) -> None:
        if layout == "columnwise":
            self._copies.receive_columns(part, outs, self._scales)
        else:
            self._copies.receive(part, outs, self._scales, backward=backward, fetched=fetched)
        self._there[part] = (self._there[part] if fetched else frozenset()) | {layout}

    @torch.no_grad()
    def fetch(self, layout: str, parts: Iterable[int] | None = None) -> None:
        """Gather ``layout`` of those of ``parts`` (None: all) whose last gather did not bring it. A collective."""
        missing = [p for p in (range(len(self._parts)) if parts is None else parts) if layout not in self._there[p]]
        for part in missing:
            outs: list[Tensor] = []
            for rows in self._sent(part, layout):
                count = len(rows) * self.sharded[0].shard_mesh.size()
                outs.append(torch.empty((count, *rows.shape[1:]), dtype=rows.dtype, device=rows.device))
                dist.all_gather([*outs[-1].split(len(rows))], rows, group=self.group)
            self._receive(part, layout, outs, fetched=True)
        if missing:
            fsdp.frees(self._parts[0][0], self._copies.kept(self._there[0]))

    @torch.no_grad()
    def _sent(self, part: int, layout: str) -> list[Tensor]:
        """Return the quantized rows of this rank in one layout, FP8 as bytes, and their scales.

        Both layouts take the same bytes, since FSDP2 gathers into the same memory: where the scales of columns are
        known, those of rows are sent again.
        """
        rows = self._quantized(part)
        names = [f"{layout}_scale_inv", "rowwise_scale_inv"]
        sent = [rows[layout], *[rows[name] for name in names if name in rows][:1]]
        return [x.view(torch.uint8) if x.itemsize == 1 else x for x in sent]

    def _quantized(self, part: int) -> dict[str, Tensor]:
        """Return the quantized rows of this rank, by the names of the outputs; those of columns, too, are [rows,
        columns].
        """
        if autograd.in_backward() and self._made_of[part] is not None:
            return self._rows[part]  # those of forward
        if (all_sent := self._all()) is not None:
            all_sent.gathers(self, part)
        state = self._state()
        if self._made_of[part] != state:
            if self.waits_for_amax:  # written to without a step, or the first gather is one of backward
                dist.all_reduce(amax := self.amax(), dist.ReduceOp.MAX, group=self.group)
                self.set_amax(amax)
            if self._scales_kept is not None and self._scales_of != state:
                self._take_scale(self._scales_kept)
            sharded, casts = self._parts[part]
            rows = fsdp.shard_of(sharded).detach()
            made = self._rows[part]
            if not made:
                for layout in LAYOUTS if self.differ else ["rowwise"]:
                    made[layout] = torch.empty(rows.shape, dtype=self._arguments.dtype, device=rows.device)
                    if not scales_are_given(self._kind, layout):
                        count, contracted = rows.shape if layout == "rowwise" else rows.shape[::-1]
                        grid = self._kind.scale_shape(count, contracted, self._arguments.block) or []
                        grid = grid if layout == "rowwise" else grid[::-1]
                        scales = torch.empty(grid, dtype=self._kind.scale_dtype, device=rows.device)
                        made[f"{layout}_scale_inv"] = scales
            buffers = {**made, **({"amax": self._amaxes[part]} if self._amaxes else {})}
            inputs = [rows, *([] if self._scales is None else [self._scales]), *buffers.values()]
            with autograd.without_autocast():
                if part not in self._quantize:
                    dtypes = (sharded.param_dtype or sharded.orig_dtype, *casts)
                    self._quantize[part] = self._compile(quantizes_rows(self._arguments, dtypes, list(buffers)), inputs)
                self._quantize[part](*inputs)
            self._made_of[part] = state
            if self._amaxes:
                self._to_record[part] = False
            self.quantized += 1
        return self._rows[part]

    def restore(self) -> None:
        """Gather the whole parameters in high precision, too: a graph reads them. Undone by :meth:`detach`."""
        self.restored = True
        for part in range(len(self._parts)):
            self._restore(part)

    @torch.no_grad()
    def _restore(self, part: int) -> None:
        sharded, _ = self._parts[part]
        dtype = sharded.param_dtype or sharded.orig_dtype
        rows = fsdp.shard_of(sharded).detach().to(dtype).contiguous()
        whole = torch.empty(sharded._orig_size, dtype=dtype, device=rows.device)
        dist.all_gather([*whole.split(len(rows))], rows, group=self.group)
        sharded._unsharded_param.data = whole

    def detach(self) -> None:
        """Let FSDP2 gather in high precision again. The whole parameters must not be there now."""
        for sharded in self.sharded:
            fsdp.detach(sharded)
        self.restored = False


def _quantize_node(weight: WeightGraph) -> QuantizeNode:
    (node,) = nodes(weight.quantizing, (ops.quantize,))
    return QuantizeNode(node)


def _backward_may_read_rows(weight: WeightGraph) -> bool:
    """Return whether the backward of a graph may read fprop's copy: it has none of its own."""
    return weight.trains and "columnwise" not in weight.made
