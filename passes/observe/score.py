"""Measure what quantizing would change in the result of each GEMM, in the graph that ``fp8graph.tune`` runs.

    y = mm(x, w)                                        ->      y = mm(x, w)
    dx = mm(dy, w.t)                                            dx = mm(dy, w.t)
                                                                a = gemm_error(x, w, dy, a recipe)
                                                                b = gemm_error(dy, w.t, dx, a recipe)
                                                                copy_(statistics, cat([a, b]))

The GEMMs that ``assign`` gave a recipe are measured, with each of the candidates, and then all run in high precision.
For fprop the reference is the gradient of its result, so that an error counts by what it changes in the loss; for dgrad
and wgrad it is the result itself. All errors are computed in backward, one after the other, from tensors that are kept
for backward anyway.

Refuses (leaves out, with the reason in the report) experts, which share one matmul, matmuls without a backward, those
that autograd does not differentiate in the graph, and the bodies of higher-order ops.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any, ClassVar, Final

from torch import fx

from fp8graph.ir.compilation import Compilation
from fp8graph.ir.nodes import GROUPED, is_backward, matmul_arguments, value_key
from fp8graph.ir.sites import Gemm, Site
from fp8graph.passes.observe.measuring import Measuring, Observed
from fp8graph.passes.observe.observation import Observation
from fp8graph.records import RefusalRecord
from fp8graph.runtime.stores import Services, Store

_WHAT: Final = "score"


class Scores(Store):
    """The errors that candidates make in each GEMM, batch by batch, for ``fp8graph.tune``."""

    name: ClassVar = "score"

    def __init__(self, services: Services) -> None:
        self._observation, self._schedule = services.store(Observation), services.schedule

    def start(self, backend: object, arguments: Mapping[str, Any]) -> Scores:
        """Try out the ``candidates`` from the next call on."""
        self._observation.measure(Observed(candidates=tuple(arguments["candidates"])), lambda _: True)
        return self

    def next_batch(self) -> None:
        """Begin another batch: the current one is complete."""
        self._schedule.count()

    def batch(self, number: int) -> list[dict[str, Any]]:
        """Return the errors in one batch, as plain values."""
        return [
            {"site": key.site, "gemm": key.operand, "candidate": int(key.recipe), "group": key.group, **parts}
            for key, parts in self._observation.measurements().items()
            if key.step == number
        ]

    @staticmethod
    def left_out(refusals: Iterable[RefusalRecord]) -> list[str]:
        """Return the sites that are not measured, and why."""
        return list(dict.fromkeys(f"{r.fqn}: {r.reason}" for r in refusals if r.what == _WHAT))


def is_scored(graph: fx.Graph, compilation: Compilation) -> bool:
    """Return whether recipes are tried out in this variant of the graph."""
    condition = compilation.facts.decisions.condition(Observed)
    return condition is not None and bool(condition.candidates)


def score(graph: fx.Graph, compilation: Compilation) -> None:
    condition = compilation.facts.decisions.condition(Observed)
    assert condition is not None
    measuring = Measuring(graph, condition)
    groups: dict[Any, str] = {}  # the tensor that linears read -> the first of them
    for site in compilation.sites:
        if (reason := _obstacle(site, compilation)) is not None:
            compilation.refuse(_WHAT, site, reason)
            continue
        first = site.gemms[0]
        group = groups.setdefault(value_key(first.a.tensor), site.fqn) if site.op == "linear" else site.fqn
        output_gradient = _output_gradient(site, measuring)
        for gemm in site.gemms:
            reference = output_gradient if gemm.gemm == "fprop" else gemm.node
            if compilation.decisions[gemm.node].recipe is not None and reference is not None:
                _measure(gemm, site, reference, group, measuring, compilation)
    measuring.write(compilation)
    for node, decision in compilation.decisions.items():
        if decision.recipe is not None:
            compilation.decisions[node] = dataclasses.replace(
                decision, recipe=None, execution="high precision", reason="tune() measures it", required=False
            )


def _obstacle(site: Site, compilation: Compilation) -> str | None:
    """Return the reason why a site is left out."""
    if compilation.facts.subgraph:
        return "it is in the body of a higher-order op"
    if any(gemm.node.target in GROUPED for gemm in site.gemms):
        return "experts share one matmul: a rule for all of them decides"
    if not any(is_backward(gemm.node) for gemm in site.gemms):
        return "its backward is not in this graph: a loss needs gradients of its input or of its weight"
    return None


def _output_gradient(site: Site, measuring: Measuring) -> fx.Node | None:
    """Return the gradient of fprop's result, in its shape."""
    for gemm in site.gemms:
        for view, argument, is_b in zip((gemm.a, gemm.b), matmul_arguments(gemm.node), (False, True), strict=True):
            if view.operand == "grad_output":
                is_turned = is_b ^ (view.layout == "columnwise")  # not [..., M, N]
                weight_is_left = site.gemms[0].a.operand == "weight"  # then fprop returns [..., N, M]
                return measuring.transposed(argument) if is_turned ^ weight_is_left else argument
    return None


def _measure(
    gemm: Gemm, site: Site, reference: fx.Node, group: str, measuring: Measuring, compilation: Compilation
) -> None:
    device = compilation.hardware_of(gemm.node)
    a, b = matmul_arguments(gemm.node)
    for index, recipe in enumerate(measuring.condition.candidates):
        quantizers = [device.quantizer(recipe, view.operand) for view in (gemm.a, gemm.b)]
        name = site.fqn, site.index
        measuring.error((a, b, reference), name, gemm.gemm, index, quantizers, group, like=_last(site))


def _last(site: Site) -> fx.Node:
    """Return a GEMM of backward: errors are computed there."""
    return next(gemm.node for gemm in reversed(site.gemms) if is_backward(gemm.node))
