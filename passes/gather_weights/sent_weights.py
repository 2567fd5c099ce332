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
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from fp8graph.compat import fsdp
from fp8graph.ir.weight_graphs import WeightGraph
from fp8graph.passes.gather_weights import GatheredWeight, ReadWhole, ToGather
from fp8graph.passes.gather_weights.gathered_copies import Memory
from fp8graph.passes.gather_weights.sent_weight import SentWeight, kept_scales
from fp8graph.runtime.stores import ArrivesOtherwise, Caller, KeptScales, Services, Slot, Store


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
        self._asked: list[tuple[WeightGraph, list[weakref.ref[Any]]]] = []
        self._memory = Memory()
        self._listens = False

    @classmethod
    def of(cls, services: Services) -> SentWeights:
        return cls(services)

    @staticmethod
    def fact(parameter: Tensor, *, sharded: Any) -> fsdp.Shard | None:
        return None if sharded is None else fsdp.facts(sharded)

    def report(self) -> Mapping[str, int]:
        """The weights, and this rank's quantized rows, which it keeps from update to update."""
        alive = self._alive()
        return {"weights": sum(len(x.sharded) for x in alive), "weight_bytes": sum(x.bytes for x in alive)}

    @property
    def quantized(self) -> int:
        """The number of weights quantized so far."""
        return sum(weight.quantized for weight in self._alive())

    def _alive(self) -> list[SentWeight]:
        found = ((reference, reference()) for reference in self._attached)
        alive = [(reference, weight) for reference, weight in found if weight is not None and weight.attached]
        self._attached = [reference for reference, _ in alive]
        return [weight for _, weight in alive]

    def slot(self, asked: Sequence[GatheredWeight | ReadWhole | ToGather], caller: Caller) -> Slot:
        """The copies that a graph takes of what was gathered."""
        arrived, copies, read = caller.arrived, list[Tensor](), set[int]()
        for weight in asked:
            if isinstance(weight, ReadWhole):
                read.update(weight.parameters)
            elif isinstance(weight, GatheredWeight):
                owner: SentWeight | None = arrived.get(weight.parameters[0])
                made = owner and owner.copies(weight, [caller.args[index] for index in weight.parameters])
                copies += made or []
                read.update(() if made is not None else arrived.keys() & {*weight.parameters})
        if read:
            self.restore(arrived[index] for index in read)
            raise ArrivesOtherwise(frozenset(read))
        self.ask([each for each in asked if isinstance(each, ToGather)], caller.args)
        return Slot(tensors=copies)

    def ask(self, weights: Sequence[WeightGraph], args: Sequence[Any]) -> None:
        """Gather ``weights``, which a graph reads by FP8 GEMMs alone, in FP8 after the next step."""
        found = fsdp.gathered() if weights else {}
        for weight in weights:
            sharded = [found.get(id(args[index])) for index in weight.parameters]
            asked = {id(reference()) for _, references in self._asked for reference in references}
            if None not in sharded and not any(id(x) in asked for x in sharded):
                self._asked.append((weight, [weakref.ref(x) for x in sharded]))
                self._listen()
                scales = kept_scales(weight, self._services)
                if scales is not None and scales not in self._kept_scales:
                    self._kept_scales.append(scales)
                    scales.before_commit.append(functools.partial(self._stage, scales))

    def arrived(self, args: Sequence[Any], positions: Iterable[int]) -> dict[int, SentWeight]:
        """Those that were gathered in FP8, for this backend or another one."""
        found = fsdp.gathered()
        sharded = {index: found[id(args[index])] for index in positions if id(args[index]) in found}
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
        taken = [found for weight in self._alive() if (found := weight.take_amaxes()) is not None]
        if taken:
            scales.stage([tensor for tensor, _ in taken], [amaxes for _, amaxes in taken])

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
        for asked in list(self._asked):
            weight, references = asked
            sharded = [x for reference in references if (x := reference()) is not None]
            if len(sharded) < len(references) or any(fsdp.owner_of(x) is not None for x in sharded):
                self._asked.remove(asked)
            elif free(sharded):
                self._asked.remove(asked)
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
            amaxes = torch.cat([weight.amax() for weight in weights])
            dist.all_reduce(amaxes, dist.ReduceOp.MAX, group=group)
            for weight, amax in zip(weights, amaxes.split(1), strict=True):
                weight.set_amax(amax)
