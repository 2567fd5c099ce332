"""Take the quantization of weights out of the graph: their FP8 copies become graph inputs.

    qw = quantize(w, rowwise, columnwise)               ->      (runs when w has changed, ``weight_cache.py``)
    y = scaled_mm(qx[0], qw[0], qx[1], qw[2])                   y = scaled_mm(qx[0], w_rowwise, qx[1], w_scale_inv)

    wt = columnwise(w)                                  ->      (a weight that arrives quantized: made once)
    w = join([wq, wk])                                  ->      (weights that arrive quantized become its rows)

A weight is whatever is computed from parameters alone (``ir/weight_graphs.py``). With delayed scaling its amax is
recorded when it is quantized.

Leaves alone a graph with a backward, unless ``cache_weights="update"``: an optimizer's step follows, so a copy would
serve once, and no write to the weights can be missed.

Refuses (quantizes in the graph) weights whose computation also reads a buffer or an input, draws random numbers, or has
a dynamic size; and weights that are gathered from several ranks, in the graph or by FSDP2 around it: a copy of the
whole weight would take the memory that sharding saves. A shard that is quantized before it is gathered is kept.

For weights that stay in the graph, :func:`note_weights` notes their quantization, for an export of what fprop
multiplies. It leaves out weights that read anything but parameters, those that are gathered in the graph, and the
bodies of higher-order ops.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Final

import torch
from torch import fx

from fp8graph.analysis.siblings import fits_in_group
from fp8graph.ir import collectives, ops
from fp8graph.ir.compilation import Compilation, GraphFacts
from fp8graph.ir.naming import graph_inputs, split_source
from fp8graph.ir.nodes import CACHED_KEY, NOT_KEPT_KEY, OPERAND_KEY, SITES, nodes, static_size, value
from fp8graph.ir.quantize_node import QuantizeNode
from fp8graph.ir.sites import Foreseen
from fp8graph.ir.weight_graphs import SHARDED, WeightGraph, WeightInput, hoist, quantized_weights, weight_graph
from fp8graph.libraries.products import decodes
from fp8graph.numerics import quantization
from fp8graph.recipes import LAYOUTS

_GEMMS: Final = (*SITES, ops.scaled_mm, ops.scaled_grouped_mm)
_DECODED: Final = "it is decoded from 4 bits per number: a copy in FP8 would take twice the memory of these"


@dataclass(frozen=True, kw_only=True, eq=False)
class CachedWeight(WeightInput):
    """A weight whose FP8 copy is kept between calls (``weight_cache.py``)."""

    store: ClassVar = "weights"

    @functools.cached_property
    def is_join(self) -> bool:
        """Whether it is its parameters as they are, below each other: its rows can be their memory."""
        *inputs, last, _ = self.quantizing.nodes
        return last.target is ops.join and [*last.args[0]] == inputs


def may_keep_weights(graph: fx.Graph, compilation: Compilation) -> bool:
    """Return whether copies of weights are kept beside this graph, or why they are not is to be said: FSDP2 gathers
    some.
    """
    facts = compilation.facts
    return bool(facts.keeps_weights or facts.gathered) and bool(facts.settings.cache_weights) and not facts.subgraph


def wanted_copies(foreseen: Callable[[], Sequence[Foreseen]], facts: GraphFacts) -> int:
    """Return the tensors of the copies: data and scales for each layout. Linears that are fused have one copy."""
    if not facts.keeps_weights:
        return 0
    copies: dict[Any, int] = {}  # by the linears that one copy serves, and its recipe
    for each in (each for each in foreseen() if each.site.parameter is not None):
        recipes = each.used("fprop", "dgrad") if facts.training else each.used("fprop")
        both = facts.training and len(recipes) == 1 and None not in (each.recipes["fprop"], each.recipes["dgrad"])
        for recipe in recipes:
            weight, gradient = (recipe.quantizer(operand) for operand in ("weight", "grad_output"))
            fits = fits_in_group(each.rows, (weight.block, gradient.block))
            fused = facts.settings.fuses_linears and each.hardware.multiplies(weight.scaling) and fits
            names = quantization.output_names(weight.scaling, LAYOUTS if both else LAYOUTS[:1])
            copies[each.sibling_key if fused else each, recipe] = sum(name != "amax" for name in names)
    return sum(copies.values())


def hoist_weights(graph: fx.Graph, compilation: Compilation) -> None:
    facts = compilation.facts
    whole = facts.parameters.keys() - facts.gathered if facts.keeps_weights else ()
    parameters = {node: index for node, index in graph_inputs(graph) if index is not None and index in whole}
    buffers = {node: index for node, index in graph_inputs(graph) if index in facts.buffers}
    hoist(graph, parameters, compilation, CachedWeight, buffers)
    for node in quantized_weights(graph) if facts.keeps_weights or facts.gathered else ():
        if CACHED_KEY not in node.meta and node.meta.get(OPERAND_KEY) == "weight":
            reason, site = why_not_kept(node, compilation), compilation.site_of(node)
            if reason and site is not None:
                compilation.refuse("kept weight", site, reason)


def why_not_kept(quantized: fx.Node, compilation: Compilation) -> str:
    """Reason why the copy of a weight is not kept; "" for tensors that are not weights (results of GEMMs, ...).

    It is not called for weights that could be kept.
    """
    arguments = QuantizeNode(quantized).arguments
    inputs = dict(graph_inputs(quantized.graph))
    pending, seen, reasons, is_weight = [arguments.x, *(arguments.more or ())], set[fx.Node](), list[str](), False
    while pending:
        node = pending.pop()
        if node in seen:
            continue
        seen.add(node)
        if node.op == "placeholder":
            index = inputs.get(node)
            is_weight |= index in compilation.facts.parameters and value(node).ndim > 1
            reasons.append(_why_not_input(node, index, quantized, compilation))
        elif node.target in _GEMMS:
            return ""
        elif decodes(node):
            return _DECODED
        else:
            if node.target is collectives.ALL_GATHER:
                reasons.append(f"it is gathered from several ranks in the graph: {SHARDED}")
            if torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ()):
                reasons.append("it is computed with random numbers, which change with each call")
            pending.extend(node.all_input_nodes)
    if any(static_size(size) is None for size in value(arguments.x).shape):
        reasons.insert(0, "its size is dynamic: compile with dynamic=False, or mark that size static")
    return next(filter(None, reasons), "") if is_weight else ""


def _why_not_input(node: fx.Node, index: int | None, quantized: fx.Node, compilation: Compilation) -> str:
    if index in compilation.facts.gathered:
        return quantized.meta.get(NOT_KEPT_KEY, f"it is whole while the graph runs, and no longer: {SHARDED}")
    if index in compilation.facts.parameters:
        return ""
    facts = index is not None and index < len(compilation.facts.sources)
    name = split_source(compilation.facts.sources[index])[1] if facts and index is not None else node.name
    return (
        f"it is also computed from {name or node.name!r}, which is not a parameter and may change with each call; if "
        "it does not change, make it a parameter (requires_grad=False)"
    )


def may_be_exported(graph: fx.Graph, compilation: Compilation) -> bool:
    """Return whether this is the last trace of a whole graph: with too few spare inputs it is traced again."""
    facts = compilation.facts
    return not facts.subgraph and facts.spares.wanted <= len(facts.spares.indices)


def note_weights(graph: fx.Graph, compilation: Compilation) -> None:
    facts = compilation.facts
    parameters = {
        node: index for node, index in graph_inputs(graph) if index in facts.parameters.keys() | facts.gathered
    }
    weights = (weight_graph(node, parameters, compilation, WeightGraph) for node in nodes(graph, (ops.quantize,)))
    compilation.extra_inputs += [weight for weight in weights if weight is not None]
