"""Look at the whole graph by the clock: does the host launch kernels as fast as the GPU runs them?

    one layer, bf16: 2.4 ms of the GPU, 2.0 of launches; in FP8: 2.3, 2.9    ->   2.9 ms for 2.4: all GEMMs refused
    32 layers, bf16: 768 ms, 64; in FP8: 570, 93                             ->   as `profit` chose
    a wide linear and many narrow ones, in FP8: 2.2, 2.9; the wide one alone: 2.3, 2.1   ->   the narrow ones refused

The host runs ahead of the GPU, so that a graph takes the longer of both: the sum of its kernels' times, or the number
of its kernels times the host's time for each (``Speed.host_launch``). FP8 saves the one and adds to the other. Where
the host sets the pace, GEMMs leave FP8 until it no longer does, those first that save the least for each kernel that
they add; for what is left, the clock has to save as much as the required speedup does. Under CUDA graphs the host sets
no pace.

Both are estimates: of the kernels beside GEMMs by the tensors that fused code writes for a GEMM, an attention or the
caller, and by reductions: 29 in a Llama layer, forward and backward, where a profile of it has 31 to 41
(``benchmarks/results/first_hour``, section ``smallest``). What they all move is ``speed.MOVED``.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch
from torch import fx

from fp8graph.compat.attention import FORMS
from fp8graph.hardware.speed import ATTENTION_SHARE, MOVED, Speed
from fp8graph.ir.compilation import Compilation
from fp8graph.ir.nodes import is_view, size_hint, value
from fp8graph.passes.assign.profit import Choice, Uses, high_precision_seconds, judge, sizes

_BACKWARDS = {form.backward: form.first for form in FORMS.values()}  # of attention, with the place of q
_KERNELS = {False: 1, True: 3}  # of attention: forward; what backward reads, dQ, and dK with dV


@dataclass(frozen=True, kw_only=True)
class Clock:
    """The predicted seconds of a graph's kernels: on the GPU, and of the host, which launches them meanwhile."""

    gpu: float
    host: float

    @property
    def seconds(self) -> float:
        return max(self.gpu, self.host)

    @property
    def waits(self) -> bool:
        return self.host > self.gpu

    def __str__(self) -> str:
        return f"{1e3 * self.host:.2g} ms of launches, {1e3 * self.gpu:.2g} ms on the GPU"


@dataclass(frozen=True, kw_only=True)
class Others:
    """The kernels of a graph that are the same in FP8 and in high precision."""

    seconds: float
    launches: float


@dataclass(frozen=True, kw_only=True)
class Timed:
    """The choices that stay in FP8, and the clock of the graph."""

    chosen: Sequence[Choice]
    now: Clock  # with those in FP8
    then: Clock  # with all that `profit` accepted


def in_time(
    choices: Sequence[Choice],
    accepted: Sequence[Choice],
    others: Others,
    min_speedup: float,
    fixed: Sequence[Choice] = (),
) -> Timed:
    """Return the part of ``accepted`` that makes the graph fastest; it is empty if that saves too little.

    Too little: the clock saves less than GEMMs do that are ``min_speedup`` times as fast.

    ``fixed``: those that are in FP8 in any case, too. Of two equally fast parts, it is the larger one.
    """

    def clock(in_fp8: Sequence[Choice]) -> Clock:
        return _clock(choices, {*in_fp8, *fixed}, others)

    then = clock(accepted)
    if not then.waits or min_speedup == 0:
        return Timed(chosen=accepted, now=then, then=then)
    best, now, left = accepted, then, accepted
    for kind in _by_gain(accepted):
        left = _accepted([choice for choice in left if _kind(choice) != kind], min_speedup)
        if (clocked := clock(left)).seconds < now.seconds:
            best, now = left, clocked
    plain = clock(())
    before = sum(choice.seconds() for choice in best if choice.speed is not None)
    if plain.seconds - now.seconds < (1 - 1 / min_speedup) * before:
        best, now = [], plain
    return Timed(chosen=best, now=now, then=then)


def _accepted(choices: Sequence[Choice], min_speedup: float) -> list[Choice]:
    """Return those that are faster by the time of the GPU alone."""
    speedups = judge(choices, min_speedup)
    return [choice for choice in choices if speedups.get(choice, min_speedup) >= min_speedup]


def _clock(choices: Sequence[Choice], in_fp8: Collection[Choice], others: Others) -> Clock:
    uses = Uses([choice for choice in choices if choice in in_fp8])
    gpu, launches, host_launch = others.seconds, others.launches, 0.0
    for choice in choices:
        if choice.speed is not None:
            gpu += choice.fp8_seconds(uses) if choice in in_fp8 else choice.seconds()
            host_launch = choice.speed.host_launch
        launches += choice.fp8_launches(uses) if choice in in_fp8 else len(choice.before)
    return Clock(gpu=gpu, host=launches * host_launch)


def _kind(choice: Choice) -> object:
    """Equal for the same GEMMs of other layers."""
    sizes = tuple((product.m, product.n, product.k) for product in choice.products)
    return choice.before, sizes, choice.scaling, choice.dtype


def _by_gain(choices: Sequence[Choice]) -> list[object]:
    """Give the kinds of ``choices`` by the GPU's time that they save for each kernel that they add; the least first."""
    uses, saved, added = Uses(choices), dict[object, float](), dict[object, float]()
    for choice in choices:
        if choice.speed is not None:
            kind = _kind(choice)
            saved[kind] = saved.get(kind, 0.0) + choice.seconds() - choice.fp8_seconds(uses)
            added[kind] = added.get(kind, 0.0) + choice.fp8_launches(uses) - len(choice.before)
    return sorted(saved, key=lambda kind: saved[kind] / added[kind] if added[kind] > 0 else math.inf)


def others_of(graph: fx.Graph, choices: Sequence[Choice], speed: Speed, compilation: Compilation) -> Others:
    """Return what a graph runs beside ``choices``: GEMMs without a recipe, attention, and fused code."""
    chosen = {gemm.node for choice in choices for gemm in choice.gemms}
    left = [gemm for site in compilation.sites for gemm in site.gemms if gemm.node not in chosen]
    attentions = [node for node in graph.nodes if node.target in FORMS or node.target in _BACKWARDS]
    read = {*chosen, *(gemm.node for gemm in left), *attentions}
    launches = len(left) + sum(_KERNELS[node.target in _BACKWARDS] for node in attentions) + _fused(graph, read)
    flops = sum(map(_attention_flops, attentions))
    seconds = sum(high_precision_seconds(gemm, compilation) or 0.0 for gemm in left)
    seconds += flops / (ATTENTION_SHARE * speed.bf16_flops) + launches * speed.launch
    for gemm in (site.gemms[0] for site in compilation.sites if site.gemms[0].gemm == "fprop"):
        m, n, k = sizes(gemm)
        share = 1 if compilation.facts.training else 1 / 3
        seconds += share * MOVED * m * (n + k) * value(gemm.node).itemsize / speed.bandwidth
    return Others(seconds=seconds, launches=launches)


def _fused(graph: fx.Graph, multiply: Collection[fx.Node]) -> int:
    """Return the kernels of fused code: what it writes for the nodes that ``multiply`` or for the caller, and
    reductions.
    """
    writes = {
        _origin(x) for node in graph.nodes if node in multiply or node.op == "output" for x in node.all_input_nodes
    }
    reductions = sum(torch.Tag.reduction in getattr(node.target, "tags", ()) for node in graph.nodes)
    return reductions + sum(node.op == "call_function" and node not in multiply for node in writes)


def _origin(node: fx.Node) -> fx.Node:
    while is_view(node) or node.target is operator.getitem:
        node = node.all_input_nodes[0]
    return node


def _attention_flops(node: fx.Node) -> float:
    """Of q [..., tokens, size] and k [..., keys, size], as if causal; packed sequences as if they were one."""
    backward = node.target in _BACKWARDS
    first = _BACKWARDS.get(node.target, 0)
    q, k = (value(x).shape for x in node.args[first : first + 2] if isinstance(x, fx.Node))
    keys = size_hint(k[-2]) if len(k) == 4 else size_hint(k[0])
    return (5.0 if backward else 2.0) * math.prod(map(size_hint, q)) * keys
