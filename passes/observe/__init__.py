"""Measure tensors and their quantized copies beside the GEMMs, in a variant of the graph for observed steps.

    q = quantize(x)                                     ->      q = quantize(x)
    y = scaled_mm(q[0], ...)                                    y = scaled_mm(q[0], ...)
                                                                a = tensor_statistics(x, 32)
                                                                b = quantization_statistics(x, q[0], q[2])
                                                                c = what_if_statistics(x, another recipe)
                                                                d = tensor_statistics(y, 32)
                                                                copy_(statistics, cat([a, b, c, d]))

The statistics are a tensor that the graph takes as an input; backward fills another one. The GEMMs and what they read
are not changed.

Refuses (leaves out) tensors without elements or of a size that the data decide, those on another device than the rest,
quantized copies of experts' operands, the bodies of higher-order ops, and with ``accumulate_wgrad`` what wgrad returns.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from operator import getitem
from typing import Any, Final

from torch import fx

from fp8graph.ir import ops
from fp8graph.ir.compilation import Compilation, GraphFacts
from fp8graph.ir.nodes import GEMM_KEY, GROUPED, OPERAND_KEY, gemms_behind, matmul_arguments, nodes
from fp8graph.ir.quantize_node import QuantizeNode
from fp8graph.ir.sites import Foreseen
from fp8graph.numerics.quantization import measuring_kwargs
from fp8graph.passes.observe.measuring import Measuring, Names, Observed
from fp8graph.recipes import GemmName

_RESULTS: Final = {"fprop": "output", "dgrad": "dgrad", "wgrad": "wgrad"}


def is_observed(graph: fx.Graph, compilation: Compilation) -> bool:
    """Return whether this variant of the graph is for observed steps."""
    condition = compilation.facts.decisions.condition(Observed)
    return condition is not None and not condition.candidates and not compilation.facts.subgraph


def wanted_statistics(foreseen: Callable[[], Sequence[Foreseen]], facts: GraphFacts) -> int:
    """Return one tensor for forward, and one for backward."""
    return 0 if facts.decisions.condition(Observed) is None else 1 + facts.training


def observe(graph: fx.Graph, compilation: Compilation) -> None:
    condition = compilation.facts.decisions.condition(Observed)
    assert condition is not None
    measuring = Measuring(graph, condition)
    results = _results(graph, compilation)
    for node in list(nodes(graph, (ops.quantize,))):
        _quantized(node, measuring, compilation)
    _left_alone(measuring, compilation)
    if compilation.facts.settings.accumulate_wgrad:  # what wgrad returns is then a sum
        results = {(position, gemm): node for (position, gemm), node in results.items() if gemm != "wgrad"}
    for (position, gemm), node in results.items():
        sites = sites_of_gemm(position, gemm, compilation)
        shared = [other for other in sites if other == position or (other, gemm) not in results]
        measuring.tensor(node, _names(shared, compilation), _RESULTS[gemm], like=node)
    measuring.write(compilation)


def _results(graph: fx.Graph, compilation: Compilation) -> dict[tuple[int, GemmName], fx.Node]:
    """Return the result of each GEMM: the last of its nodes, which adds a bias or cuts padding off."""
    results: dict[tuple[int, GemmName], fx.Node] = {
        (position, gemm.gemm): gemm.node
        for position, site in enumerate(compilation.sites)
        for gemm in site.gemms
        if compilation.decisions[gemm.node].recipe is None
    }
    for node in graph.nodes:
        if GEMM_KEY in node.meta and node.target not in (ops.quantize, getitem):
            results[node.meta[GEMM_KEY]] = node
    return results


def _quantized(node: fx.Node, measuring: Measuring, compilation: Compilation) -> None:
    """Observe the tensor and the copies of a quantize node."""
    gemms = gemms_behind(node)
    names = _names((i for gemm in gemms for i in sites_of_gemm(*gemm, compilation)), compilation)
    if not names:
        return
    quantized = QuantizeNode(node)
    arguments, operand = quantized.arguments, node.meta[OPERAND_KEY]
    joined: dict[str, Any] = {"more": list(arguments.more), "dim": arguments.dim} if arguments.more is not None else {}
    measuring.tensor(arguments.x, names, operand, like=node, **joined)
    if arguments.offs is not None or arguments.per_matrix:
        return
    recipe, device = _recipe_of(*gemms[0], compilation), compilation.hardware_of(arguments.x)
    settings = {**measuring_kwargs(arguments), **joined}
    for layout in arguments.layouts:
        measuring.copy(arguments.x, quantized.outputs, names, operand, layout, recipe, like=node, **settings)
        measuring.what_if(arguments.x, names, operand, layout, recipe, device, like=node, **joined)


def _left_alone(measuring: Measuring, compilation: Compilation) -> None:
    """Observe the operands of GEMMs that stay in high precision."""
    for position, site in enumerate(compilation.sites):
        names = _names([position], compilation)
        for gemm in site.gemms:
            node = gemm.node
            if not names or compilation.decisions[node].recipe is not None:
                continue
            device, grouped = compilation.hardware_of(node), node.target in GROUPED
            for view, argument, is_b in zip((gemm.a, gemm.b), matmul_arguments(node), (False, True), strict=True):
                if not measuring.is_measured(names[0], view.operand):
                    columnwise = is_b ^ (view.layout == "columnwise")  # a [..., m, k], b [..., k, n]
                    x = measuring.transposed(argument) if columnwise and not grouped else argument
                    measuring.tensor(x, names, view.operand, like=node)
                    if not grouped:
                        measuring.what_if(x, names, view.operand, "rowwise", "", device, like=node)


def _names(positions: Iterable[int], compilation: Compilation) -> Names:
    sites = [compilation.sites[position] for position in dict.fromkeys(positions)]
    condition = compilation.facts.decisions.condition(Observed)
    return tuple((site.fqn, site.index) for site in sites if condition is not None and condition.takes(site.fqn))


def _recipe_of(position: int, gemm: GemmName, compilation: Compilation) -> str:
    node = next(each.node for each in compilation.sites[position].gemms if each.gemm == gemm)
    recipe = compilation.decisions[node].recipe
    return recipe.name if recipe is not None else ""


def sites_of_gemm(position: int, gemm: str, compilation: Compilation) -> list[int]:
    """Return the position of a site, and of the sites whose GEMM is one with its."""
    site = compilation.sites[position]
    parent, dot, _ = site.fqn.rpartition(".")
    others = {(parent + dot + name, site.index) for name in compilation.fused.get((site.fqn, site.index, gemm), ())}
    return [position, *(i for i, x in enumerate(compilation.sites) if (x.fqn, x.index) in others)]
