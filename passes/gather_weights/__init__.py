"""Let FSDP2 gather weights in FP8: a graph takes what was gathered, and names the weights that may be gathered so.

    qw = quantize(w, rowwise, columnwise)               ->      (each rank quantizes its rows before they are gathered)
    y = scaled_mm(qx[0], qw[0], qx[1], qw[2])                   y = scaled_mm(qx[0], w_rowwise, qx[1], w_scale_inv)

A graph is first compiled for weights in high precision. Those that are computed from matrices and casts alone, and that
FP8 GEMMs alone read, are gathered in FP8 after the next step (``sent_weights.py``), for which it is compiled again.

Where dgrad's copy holds other numbers than fprop's (scales of rows, tiles along rows), forward gathers the one and
backward the other, both quantized from the shard.

Refuses (lets FSDP2 gather in high precision, with the reason in the report) weights that are read in high precision,
too, are padded, or joined along their columns; whose shards cut tiles; that have two different copies, if one gather
serves both directions, or backward reads fprop's copy, too; nvfp4; and delayed scaling whose amaxes are not reduced
over all ranks of the gather.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import fx

from fp8graph.analysis.gather_path import scale_may_differ
from fp8graph.compat.fsdp import Shard
from fp8graph.ir import ops
from fp8graph.ir.compilation import Compilation
from fp8graph.ir.decisions import GatheredInFP8
from fp8graph.ir.extra_inputs import ExtraInput
from fp8graph.ir.naming import graph_inputs
from fp8graph.ir.nodes import CONVERT, NOT_KEPT_KEY, OPERAND_KEY, SAME_VALUES, aten, backward_nodes, nodes, value
from fp8graph.ir.quantize_node import QuantizeNode
from fp8graph.ir.weight_graphs import (
    SHARDED,
    WeightGraph,
    WeightInput,
    computed_from,
    hoist,
    quantized_weights,
    weight_graph,
)

_SETTINGS = frozenset({"scaling", "block", "more", "dim"})
_SAME_NUMBERS = frozenset({ops.dequantize, CONVERT, aten.permute.default, aten.t.default, *SAME_VALUES})


@dataclass(frozen=True, kw_only=True, eq=False)
class GatheredWeight(WeightInput):
    """A weight that FSDP2 gathers in FP8: the graph takes what was gathered."""

    store: ClassVar = "gathered"


@dataclass(frozen=True, kw_only=True, eq=False)
class ToGather(WeightGraph):
    """A weight that FSDP2 may gather in FP8 from the next step on; of this graph, nothing is read yet."""

    store: ClassVar = "gathered"


@dataclass(frozen=True, kw_only=True)
class ReadWhole(ExtraInput):
    """Parameters gathered in FP8 that the graph reads in high precision."""

    store: ClassVar = "gathered"
    parameters: tuple[int, ...]  # graph inputs


def are_gathered(graph: fx.Graph, compilation: Compilation) -> bool:
    """Return whether FSDP2 gathers weights around the graph."""
    facts = compilation.facts
    return bool(facts.gathered) and bool(facts.settings.cache_weights) and not facts.subgraph


def gather_weights(graph: fx.Graph, compilation: Compilation) -> None:
    facts = compilation.facts
    gathered = {node: index for node, index in graph_inputs(graph) if index is not None and index in facts.gathered}
    arrived = facts.decisions.condition(GatheredInFP8)
    sent = {node: index for node, index in gathered.items() if arrived is not None and index in arrived.parameters}
    reasons: dict[fx.Node, str | None] = {}
    if len(sent) < len(gathered) and facts.settings.target is None:
        reasons = why_not_sent(graph, gathered, compilation)
        for node in (node for node, reason in reasons.items() if reason is None):
            weight = weight_graph(node, gathered, compilation, ToGather)
            if weight is not None and node.meta.get(OPERAND_KEY) == "weight":
                compilation.extra_inputs.append(dataclasses.replace(weight, outputs=()))
    in_backward = backward_nodes(graph) if sent else set[fx.Node]()
    mixed = [n for n in nodes(graph, (ops.quantize,)) if _backward_reads_rows(QuantizeNode(n), in_backward)]
    whole = {source_of_part(part)[0] for node in mixed for part in QuantizeNode(node).arguments.parts}
    hoist(graph, {node: index for node, index in sent.items() if node not in whole}, compilation, GatheredWeight)
    for node in quantized_weights(graph):
        reason = reasons.get(node)
        how = (
            "FP8 from the first step of its optimizer on" if reason is None else f"high precision: {reason}; {SHARDED}"
        )
        node.meta[NOT_KEPT_KEY] = f"FSDP2 gathers it for each use, in {how}"
    if read := [index for node, index in sent.items() if node.users]:
        compilation.extra_inputs.append(ReadWhole(parameters=tuple(read)))


def source_of_part(part: fx.Node) -> tuple[fx.Node, list[torch.dtype]]:
    """Return the node that ``part`` is, behind casts, and the dtypes of these casts in order."""
    casts: list[torch.dtype] = []
    while part.target is CONVERT:
        casts.insert(0, part.args[1])  # pyright: ignore[reportArgumentType]
        part = part.all_input_nodes[0]
    return part, casts


def why_not_sent(
    graph: fx.Graph, parameters: Mapping[fx.Node, int], compilation: Compilation
) -> dict[fx.Node, str | None]:
    """Reason why the weight of each quantize node is gathered in high precision; None for those that need not be.

    Args:
        parameters: the inputs that FSDP2 gathers, with their positions.
    """
    candidates = [node for node in nodes(graph, (ops.quantize,)) if computed_from(node, parameters) is not None]
    in_backward = backward_nodes(graph)
    return {node: _why_not(node, parameters, compilation, in_backward) for node in candidates}


def _backward_reads_rows(quantized: QuantizeNode, in_backward: Collection[fx.Node]) -> bool:
    """Return whether backward reads fprop's copy beside one of its own, which holds other numbers."""
    pending = [x for name, x in quantized.outputs.items() if name.startswith("rowwise")]
    if not pending or not quantized.columnwise_differs:
        return False
    while pending:
        for reader in pending.pop().users:
            if reader in in_backward or "recompute" in reader.meta:  # activation checkpointing in the graph
                return True
            if reader.target in _SAME_NUMBERS:
                pending.append(reader)
    return False


def _why_not(
    node: fx.Node, parameters: Mapping[fx.Node, int], compilation: Compilation, in_backward: Collection[fx.Node]
) -> str | None:
    quantized = QuantizeNode(node)
    arguments, kind = quantized.arguments, quantized.kind
    sources = [source_of_part(part)[0] for part in arguments.parts]
    if any(source not in parameters or value(source).ndim != 2 for source in sources) or len({*sources}) < len(sources):
        return "it is computed from more than matrices and casts"
    facts: Mapping[int, Shard] = compilation.facts.parameter_facts[GatheredWeight.store]
    for shard in (facts[parameters[source]] for source in sources):
        if shard.reason is not None:
            return shard.reason
        tile_rows = max(arguments.block[: 1 + quantized.columnwise_differs], default=1)
        if shard.rows % tile_rows:
            return f"shards of {shard.rows} rows are not a multiple of the {tile_rows}-row tile"
        if quantized.columnwise_differs and shard.kept:
            return "one gather serves both directions, and its two layouts in FP8 are as many bytes"
        if kind.has_state and scale_may_differ(node, shard.group, compilation):
            return "its amaxes are not reduced over the ranks that gather: their scales may differ"
    if unknown := sorted(set(node.kwargs) - _SETTINGS):
        return f"it is quantized with {', '.join(unknown)}"
    if arguments.more and arguments.dim != -2:
        return "it is joined with others along its columns"
    body = computed_from(node, parameters) or []
    if reader := next((user for source in sources for user in source.users if user not in body), None):
        again = "quantized in another way" if reader.target is ops.quantize else "read in high precision"
        return f"it is {again} too, by {reader.name}"
    if kind.not_sent is not None:
        return kind.not_sent
    if not compilation.facts.training and not kind.one_scale and max(arguments.block[:1], default=1) == 1:
        return "it may have two layouts of different numbers, about which a graph with a backward decides"
    if _backward_reads_rows(quantized, in_backward):
        return "backward reads fprop's copy of it, too, beside one of other numbers"
    rows, columns = sum(value(source).shape[0] for source in sources), value(sources[0]).shape[1]
    shapes = {"rowwise": (rows, columns), "columnwise": (columns, rows)}
    if any(tuple(x.shape) != shapes[name] for name, x in quantized.values.items() if name in shapes):
        return "it is padded"
    return None
