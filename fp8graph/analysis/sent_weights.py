"""Which weights that FSDP2 gathers around the graph can be quantized before they are sent, and why others cannot."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import fx

from fp8graph.analysis.gather_legality import scale_may_differ
from fp8graph.analysis.weight_graphs import computed_from
from fp8graph.ir import ops
from fp8graph.ir.compilation import Compilation
from fp8graph.ir.nodes import nodes, value
from fp8graph.ir.quantize_node import QuantizeNode

_CONVERT = torch.ops.prims.convert_element_type.default
_SETTINGS = frozenset({"scaling", "block", "more", "dim"})


def source_of_part(part: fx.Node) -> tuple[fx.Node, list[torch.dtype]]:
    """The node that ``part`` is, behind casts, and the dtypes of these casts in order."""
    casts: list[torch.dtype] = []
    while part.target is _CONVERT:
        casts.insert(0, part.args[1])  # pyright: ignore[reportArgumentType]
        part = part.all_input_nodes[0]
    return part, casts


def why_not_sent(
    graph: fx.Graph, parameters: Mapping[fx.Node, int], compilation: Compilation
) -> dict[fx.Node, str | None]:
    """Why the weight of each quantize node is gathered in high precision; None for those that need not be.

    Args:
        parameters: the inputs that FSDP2 gathers, with their positions.
    """
    found = [node for node in nodes(graph, (ops.quantize,)) if computed_from(node, parameters) is not None]
    return {node: _why_not(node, parameters, compilation) for node in found}


def _why_not(node: fx.Node, parameters: Mapping[fx.Node, int], compilation: Compilation) -> str | None:
    quantized = QuantizeNode(node)
    asked, kind = quantized.asked, quantized.kind
    sources = [source_of_part(part)[0] for part in asked.parts]
    if any(source not in parameters or value(source).ndim != 2 for source in sources) or len({*sources}) < len(sources):
        return "it is computed from more than matrices and casts"
    for shard in (compilation.known.gathered[parameters[source]] for source in sources):
        if shard.reason is not None:
            return shard.reason
        if asked.block and shard.rows % asked.block[0]:
            return f"shards of {shard.rows} rows are not a multiple of the {asked.block[0]}-row tile"
        if kind.has_state and scale_may_differ(node, shard.group, compilation):
            return "its amaxes are not reduced over the ranks that gather: their scales may differ"
    if unknown := sorted(set(node.kwargs) - _SETTINGS):
        return f"it is quantized with {', '.join(unknown)}"
    if asked.more and asked.dim != -2:
        return "it is joined with others along its columns"
    body = computed_from(node, parameters) or []
    if reader := next((user for source in sources for user in source.users if user not in body), None):
        again = "quantized in another way" if reader.target is ops.quantize else "read in high precision"
        return f"it is {again} too, by {reader.name}"
    square = bool(asked.block) and asked.block[0] > 1
    if not kind.one_scale and not square:
        return "its two layouts in FP8 are as many bytes" if asked.columnwise else "it has scales of rows"
    rows, columns = sum(value(source).shape[0] for source in sources), value(sources[0]).shape[1]
    shapes = {"rowwise": (rows, columns), "columnwise": (columns, rows)}
    if any(tuple(x.shape) != shapes[name] for name, x in quantized.values.items() if name in shapes):
        return "it is padded"
    return None
