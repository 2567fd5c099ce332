"""Take the quantization of weights out of the graph: their FP8 copies become graph inputs.

    qw = quantize(w, rowwise, columnwise)               ->      (runs when w has changed, ``runtime/weight_cache.py``)
    y = scaled_mm(qx[0], qw[0], qx[1], qw[2])                   y = scaled_mm(qx[0], w_rowwise, qx[1], w_scale_inv)

    wt = columnwise(w)                                  ->      (a weight that arrives quantized: made once)

Any tensor that is computed from parameters alone is a weight: a parameter behind views and casts, several
concatenated, a parametrization. With too few spare inputs the graph is not changed; it is traced again with enough of
them. With delayed scaling a weight's amax is recorded when the weight is quantized.

Leaves alone a graph with a backward, unless ``cache_weights="update"``: an update follows, so that no copy would be
used twice, and whoever writes the weights, by whatever means, the next forward reads what he wrote.

Refuses (quantizes in the graph) weights whose computation also reads a buffer or an input, draws random numbers, or has
a dynamic size; and weights that are gathered from several ranks, in the graph or by FSDP2 around it: a copy of the
whole weight would take the memory that sharding saves. A shard that is quantized before it is gathered is kept; what
FSDP2 has gathered in FP8 is taken as it is (``runtime/sent_weights.py``).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from operator import getitem

from torch import fx

from fp8graph.analysis.refusals import site_of, why_not_cached
from fp8graph.analysis.sent_weights import why_not_sent
from fp8graph.analysis.weight_graphs import computed_from, copy_of, placeholder, signature_of, sources_of
from fp8graph.ir import ops
from fp8graph.ir.compilation import Compilation
from fp8graph.ir.edit import insert
from fp8graph.ir.extra_inputs import GatheredWeight, PageLayout, QuantizedWeight, ReadWhole, SpareInputs, ToGather
from fp8graph.ir.naming import graph_inputs
from fp8graph.ir.nodes import (
    CACHED_KEY,
    OPERAND_KEY,
    ROWS_KEY,
    fake_mode_of,
    module_path,
    nodes,
    runs_without_gradients,
    value,
)
from fp8graph.ir.quantize_node import QuantizeNode
from fp8graph.numerics import history
from fp8graph.passes.connect_scales import connect_scales

_NAME = "hoist_weights"
_TRANSPOSED = "columnwise"


def may_keep_weights(graph: fx.Graph, compilation: Compilation) -> bool:
    """Whether copies of weights are kept beside this graph, or gathered in FP8 for it."""
    known = compilation.known
    kept = known.keeps_weights or known.gathered or known.sent
    return bool(kept) and bool(known.settings.cache_weights) and not known.subgraph


def hoist_weights(graph: fx.Graph, compilation: Compilation) -> None:
    known = compilation.known
    inputs = {node: index for node, index in graph_inputs(graph) if index is not None}
    parameters = {
        node: index
        for node, index in inputs.items()
        if index in known.sent or (known.keeps_weights and index in known.parameters and index not in known.gathered)
    }
    sent = _sendable(graph, inputs, compilation)
    found: dict[fx.Node, QuantizedWeight] = {}
    for node in nodes(graph, (ops.quantize, ops.columnwise)):
        if all(user.target is ops.columnwise for user in node.users):
            continue  # a part of another copy
        body = computed_from(node, parameters)
        if body is not None:
            gathered = any(parameters[x] in known.sent for x in sources_of(body, parameters))
            made = extract if node.target is ops.quantize else _transposed
            found[node] = made(node, body, parameters, compilation, GatheredWeight if gathered else QuantizedWeight)
            node.meta[CACHED_KEY] = True
        elif (
            (known.keeps_weights or known.gathered)
            and node.meta.get(OPERAND_KEY) == "weight"
            and (reason := why_not_cached(node, compilation, sent.get(node)))
        ):
            if (site := site_of(node, compilation)) is not None:
                compilation.refuse("kept weight", site, reason)
    taken = compilation.take(graph, [*found.values()])
    if taken is None:
        return
    for node, weight in found.items():
        placeholders = {name: taken.pop(0) for name in weight.outputs}
        outputs = QuantizeNode(node).outputs if node.target is ops.quantize else {_TRANSPOSED: node}
        for name, user in outputs.items():
            user.replace_all_uses_with(placeholders[name])
            graph.erase_node(user)
        if node.target is ops.quantize:
            graph.erase_node(node)
    if found:
        graph.eliminate_dead_code()
    if read := [index for node, index in inputs.items() if index in known.sent and node.users]:
        compilation.extra_inputs.append(ReadWhole(parameters=tuple(read)))


def _sendable(graph: fx.Graph, inputs: Mapping[fx.Node, int], compilation: Compilation) -> dict[fx.Node, str | None]:
    """Find the weights that FSDP2 may gather in FP8 from now on; why it does not the others, by quantize node."""
    gathered = {node: index for node, index in inputs.items() if index in compilation.known.gathered}
    waiting = {node: index for node, index in gathered.items() if index not in compilation.known.sent}
    if not waiting or compilation.known.settings.target is not None:
        return {}
    found = why_not_sent(graph, gathered, compilation)
    sendable = [node for node, reason in found.items() if reason is None and node.meta.get(OPERAND_KEY) == "weight"]
    bodies = {node: computed_from(node, gathered) or [] for node in sendable}
    compilation.extra_inputs += [
        ToGather(weight=extract(node, body, gathered, compilation)) for node, body in bodies.items()
    ]
    return found


def extract(
    node: fx.Node,
    body: Sequence[fx.Node],
    parameters: Mapping[fx.Node, int],
    compilation: Compilation,
    kind: type[QuantizedWeight] = QuantizedWeight,
) -> QuantizedWeight:
    """``node`` and the nodes that compute it, as a graph of their own."""
    sources = sources_of(body, parameters)
    quantized = QuantizeNode(node)
    asked, names = quantized.asked, quantized.names

    def copy() -> fx.Graph:
        graph, copied = copy_of(node, body, sources)
        positions = [position for position, name in enumerate(names) if name != "amax"]
        graph.output([insert(graph, getitem, (copied, i), like=node, made_by=_NAME) for i in positions])
        return graph

    quantizing = recording = copy()
    signature = signature_of(quantizing)
    page = None
    if ROWS_KEY in node.meta:  # delayed scaling: a page of its own
        known = dataclasses.replace(compilation.known, spares=SpareInputs(), records_amaxes=False)
        alone = Compilation(known=known)
        connect_scales(quantizing, alone)
        (page,) = alone.extra_inputs
        assert isinstance(page, PageLayout)
        graphs: list[fx.Graph] = []
        for records in (False, True):
            graphs.append(graph := copy())
            with graph.inserting_after(graph.find_nodes(op="placeholder")[-1]), fake_mode_of(node):
                new_page = history.new_page(page.recipe.amax_history_len, 1, page.device)
                placeholder(graph, len(sources), new_page)
            spares = SpareInputs(indices=(len(sources),))
            known = dataclasses.replace(known, spares=spares, records_amaxes=records)
            connect_scales(graph, Compilation(known=known))
        quantizing, recording = graphs
    return kind(
        name=module_path(node),
        parameters=tuple(parameters[source] for source in sources),
        quantizing=quantizing,
        recording=recording,
        signature=signature,
        linears=len(asked.parts),
        outputs=tuple(quantized.outputs),
        layouts=(tuple(asked.rowwise), tuple(asked.columnwise)),
        made=tuple(name for name in names if name != "amax"),
        page=page,
        records=compilation.known.records_amaxes and page is not None and not runs_without_gradients(node),
    )


def _transposed(
    node: fx.Node,
    body: Sequence[fx.Node],
    parameters: Mapping[fx.Node, int],
    _compilation: Compilation,
    kind: type[QuantizedWeight],
) -> QuantizedWeight:
    """The same for a transposed copy of a weight that arrives quantized."""
    sources = sources_of(body, parameters)
    graph, copied = copy_of(node, body, sources)
    graph.output([copied])
    return kind(
        name=module_path(node),
        parameters=tuple(parameters[source] for source in sources),
        quantizing=graph,
        recording=graph,
        signature=signature_of(graph),
        linears=1,
        outputs=(_TRANSPOSED,),
        layouts=((), tuple(value(node).shape)),
        made=(_TRANSPOSED,),
        page=None,
        records=False,
    )
