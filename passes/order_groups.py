"""Let quantize write the scales of experts' tiles in the order in which the grouped GEMM reads them.

    q = quantize(x, rowwise, offs)                    ->      q = quantize(x, rowwise, offs, rowwise_order="128x4")
    y = scaled_grouped_mm(q.rowwise, q.scale, ..)             y = scaled_grouped_mm(q.rowwise, q.scale, order_a="128x4")

Every group begins with a block of scales of its own (``numerics.group_blocks``). The kernel that quantizes computes
where that is, so that no kernel of its own puts scales in order, neither in forward nor, of what forward saved, in
backward. The device names the order (``Hardware.order_of_groups``).

Refuses (leaves alone; the GEMM puts them in order) scales that something else reads too, and those that were moved or
arrive as inputs: tokens that are quantized before they are routed, and weights of FP8 checkpoints.
"""

from __future__ import annotations

from torch import fx

from fp8graph.compat.ops import named_arguments
from fp8graph.ir import ops
from fp8graph.ir.compilation import Compilation
from fp8graph.ir.edit import set_argument, update_value
from fp8graph.ir.nodes import nodes
from fp8graph.ir.quantize_node import QuantizeNode


def has_groups(graph: fx.Graph, compilation: Compilation) -> bool:
    """Return whether some grouped GEMM multiplies in low precision, by a kernel of the device's library."""
    return not compilation.facts.settings.batch_invariant and any(nodes(graph, (ops.scaled_grouped_mm,)))


def order_groups(graph: fx.Graph, compilation: Compilation) -> None:
    for node in nodes(graph, (ops.quantize,)):
        quantized = QuantizeNode(node)
        if not quantized.kind.tiled or (quantized.arguments.offs is None and not quantized.arguments.per_matrix):
            continue
        read = {layout: _sides(quantized, layout, compilation) for layout in quantized.arguments.layouts}
        orders = {layout: order for layout, (order, _) in read.items() if order}
        if not orders:
            continue
        made = {layout: order for layout, (order, _) in read.items()}
        first = next(iter(orders.values()))  # also of a layout that is not made: copies of a weight serve other graphs
        quantized.ask(rowwise_order=made.get("rowwise", first), columnwise_order=made.get("columnwise", first))
        for changed in (node, *node.users):
            update_value(changed)
        for layout, order in orders.items():
            for gemm, side in read[layout][1]:
                set_argument(gemm, f"order_{side}", order)


def _sides(quantized: QuantizeNode, layout: str, compilation: Compilation) -> tuple[str, list[tuple[fx.Node, str]]]:
    """Return the order that all readers of the scales of a layout want, "" if there is none, and the readers with the
    side.
    """
    scales = quantized.outputs.get(f"{layout}_scale_inv")
    readers: list[tuple[fx.Node, str]] = []
    orders: set[str] = set()
    for reader in scales.users if scales is not None else ():
        given = named_arguments(reader) if reader.target is ops.scaled_grouped_mm else {}
        sides = [side for side in "ab" if given.get(f"scale_inv_{side}") is scales]
        native = bool(sides) and given["native"]
        orders.add(compilation.hardware_of(reader).order_of_groups(quantized.kind.gemm) if native else "")
        readers += [(reader, side) for side in sides]
    return (orders.pop() if len(orders) == 1 else ""), readers
