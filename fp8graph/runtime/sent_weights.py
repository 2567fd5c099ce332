"""FSDP2 gathers weights in FP8: each rank quantizes its rows, and graphs take what was gathered.

    rows of a parameter (FP32 or bf16) -> quantized, once per update -> bytes (and scales of tiles) are gathered
    -> rowwise data; columnwise: their transposed copy, if gradients are computed

The whole parameter in high precision does not exist. What FSDP2 puts in its place, for autograd and names, reads memory
that all such parameters share and that holds NaN: code that reads it outside of the compiled graphs gets NaN.

A weight is sent in FP8 from the first step of its optimizer on. With one scale for a whole tensor, the amaxes of all
weights are then reduced over the ranks by one collective per step.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from fp8graph.compat import autograd, fsdp
from fp8graph.ir.extra_inputs import QuantizedWeight
from fp8graph.runtime.call import Epoch
from fp8graph.runtime.sent_weight import Compile, Memory, SentWeight
from fp8graph.runtime.staleness import Steps


class SentWeights:
    """The weights of one backend that FSDP2 gathers in FP8."""

    def __init__(self, steps: Steps, epoch: Epoch) -> None:
        self._steps, self._epoch = steps, epoch
        self._known: list[SentWeight] = []
        self._asked: list[SentWeight] = []  # for the next step of their optimizers
        self._memory = Memory()
        reference = weakref.ref(self)

        def after_step(optimizer: Optimizer, _args: Any, _kwargs: Any) -> None:
            if (own := reference()) is not None:
                own._after_step({id(p) for group in optimizer.param_groups for p in group["params"]})

        autograd.after_optimizer_steps(self, after_step)

    def __len__(self) -> int:
        return sum(len(weight.sharded) for weight in self._known)

    @property
    def bytes(self) -> int:
        """The memory of this rank's quantized rows, which it keeps from update to update."""
        return sum(weight.bytes for weight in self._known)

    @property
    def quantized(self) -> int:
        """The number of weights quantized so far."""
        return sum(weight.quantized for weight in self._known)

    def ask(self, weights: Sequence[QuantizedWeight], args: Sequence[Any], compile: Compile) -> None:
        """Gather ``weights``, which a graph reads by FP8 GEMMs alone, in FP8 after the next step."""
        found = fsdp.gathered() if weights else {}
        for weight in weights:
            sharded = [found.get(id(args[index])) for index in weight.parameters]
            if None not in sharded and not any(x in y.sharded for x in sharded for y in (*self._known, *self._asked)):
                self._asked.append(SentWeight(weight, sharded, self._steps, compile, self._memory))

    def positions(self, args: Sequence[Any], positions: Iterable[int]) -> frozenset[int]:
        """Those of ``positions`` whose arguments were gathered in FP8."""
        ids = {id(getattr(x, "_unsharded_param", None)) for weight in self._known for x in weight.sharded}
        return frozenset(index for index in positions if id(args[index]) in ids)

    def copies(self, weight: QuantizedWeight, args: Sequence[Any]) -> list[Tensor] | None:
        """The copies of ``weight`` for a call; None if they were not gathered."""
        parameters = [args[index] for index in weight.parameters]
        for known in self._known:
            made = known.weight
            alike = made.signature == weight.signature and {*weight.outputs} <= {*made.made}
            if alike and known.stands_for(parameters):
                return [known.tensors[name] for name in weight.outputs]
        return None

    def restore(self, parameters: Sequence[Any]) -> None:
        """Put numbers in high precision into ``parameters``, which a graph reads; after the next step FSDP2 does."""
        ids = {id(parameter) for parameter in parameters}
        for known in self._known:
            if any(id(getattr(x, "_unsharded_param", None)) in ids for x in known.sharded):
                known.restore()

    def _after_step(self, held: set[int]) -> None:
        """``held``: the ids of the optimizer's parameters. No backward waits for these."""

        def free(weight: SentWeight) -> bool:
            return all(id(x.sharded_param) in held and not fsdp.is_gathered(x) for x in weight.sharded)

        for weight in [weight for weight in self._known if weight.restored and free(weight)]:
            weight.detach()
            self._known.remove(weight)
            self._epoch.advance()
        for weight in [weight for weight in self._asked if free(weight)]:
            weight.attach()
            self._asked.remove(weight)
            self._known.append(weight)
            self._epoch.advance()
        waiting: dict[Any, list[SentWeight]] = {}
        for weight in self._known:
            if weight.attached and weight.waits_for_amax and all(id(x.sharded_param) in held for x in weight.sharded):
                waiting.setdefault(weight.group, []).append(weight)
        for group, weights in waiting.items():
            amaxes = torch.cat([weight.amax() for weight in weights])
            dist.all_reduce(amaxes, dist.ReduceOp.MAX, group=group)
            for weight, amax in zip(weights, amaxes.split(1), strict=True):
                weight.set_amax(amax)
