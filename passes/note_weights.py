"""Note how the graph quantizes those weights that stay in it, for an export of what fprop multiplies.

    qw = quantize(w, rowwise, columnwise)               ->      the same
    y = scaled_mm(qx[0], qw[0], qx[1], qw[2])                   the same

Refuses (leaves out) weights whose computation reads anything but parameters, or draws random numbers; those that are
gathered from several ranks; and the bodies of higher-order ops.
"""

from __future__ import annotations

from torch import fx

from fp8graph.analysis.weight_graphs import computed_from
from fp8graph.ir import ops
from fp8graph.ir.compilation import Compilation
from fp8graph.ir.extra_inputs import QuantizedInGraph
from fp8graph.ir.naming import graph_inputs
from fp8graph.ir.nodes import nodes
from fp8graph.passes.hoist_weights import extract


def may_be_exported(graph: fx.Graph, compilation: Compilation) -> bool:
    """Whether this is the last trace of a whole graph: with too few spare inputs it is traced again."""
    known = compilation.known
    return not known.subgraph and known.spares.wanted <= len(known.spares.indices)


def note_weights(graph: fx.Graph, compilation: Compilation) -> None:
    known = compilation.known
    whole = known.parameters.keys() - known.gathered.keys()
    parameters = {node: index for node, index in graph_inputs(graph) if index is not None and index in whole}
    found = ((node, computed_from(node, parameters)) for node in nodes(graph, (ops.quantize,)))
    compilation.extra_inputs += [
        QuantizedInGraph(weight=extract(node, body, parameters, compilation))
        for node, body in found
        if body is not None
    ]
