"""Let quantize write the scales of tiles in the order in which the GEMM reads them.

    q = quantize(x, rowwise)                    ->      q = quantize(x, rowwise, rowwise_order="128x4")
    y = scaled_mm(q.rowwise, .., q.scale, ..)           y = scaled_mm(q.rowwise, .., q.scale, .., order_a="128x4")
    d = dequantize(q.rowwise, q.scale)                  d = dequantize(q.rowwise, scales_in_rows(q.rowwise, q.scale))

Otherwise each GEMM would put them in order for itself: in a kernel of its own, in forward for the scales of weights, in
backward for those that forward saved and for those of joined gradients. The device names the order
(``Hardware.scale_order``); whoever else reads the scales puts them back.

Refuses (leaves alone) operands of grouped GEMMs, scales that no GEMM of the device reads as a whole or in slices of
whole blocks, and those that arrive as inputs, of which the GEMM makes a copy.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import cast

import torch
from torch import Tensor, fx

from fp8graph.compat.ops import named_arguments
from fp8graph.ir import ops
from fp8graph.ir.compilation import Compilation
from fp8graph.ir.edit import insert, set_argument, update_value
from fp8graph.ir.nodes import aten, nodes
from fp8graph.ir.quantize_node import QuantizeNode
from fp8graph.numerics.scalings import SCALINGS
from fp8graph.numerics.tiles import BLOCKS, ROWS
from fp8graph.recipes import Layout


def has_tiles(graph: fx.Graph, compilation: Compilation) -> bool:
    """Return whether some tensor has a scale per tile."""
    return any(QuantizeNode(node).kind.tiled for node in nodes(graph, (ops.quantize,)))


def order_scales(graph: fx.Graph, compilation: Compilation) -> None:
    for node in list(nodes(graph, (ops.quantize,))):
        quantized = QuantizeNode(node)
        if quantized.kind.tiled and quantized.arguments.offs is None and not quantized.arguments.per_matrix:
            orders: dict[Layout, str] = {
                layout: _order(quantized, layout, compilation) for layout in quantized.arguments.layouts
            }
            if any(orders.values()):
                _write_in_order(graph, quantized, orders)


def _order(quantized: QuantizeNode, layout: Layout, compilation: Compilation) -> str:
    """Return the order that the GEMMs want which read the scales of a layout; "" if there is none."""
    scales = quantized.outputs.get(f"{layout}_scale_inv")
    orders: set[str] = set()
    for user in scales.users if scales is not None else ():
        for reader, read in [(user, scales), *((after, user) for after in user.users if _is_slice(user))]:
            if reader.target is ops.scaled_mm and any(read is named_arguments(reader)[f"scale_inv_{s}"] for s in "ab"):
                order = compilation.hardware_of(reader).scale_order(quantized.kind.gemm, quantized.arguments.block)
                orders.add(order if read is scales or (order == BLOCKS and _are_blocks(user, quantized)) else "")
    return orders.pop() if len(orders) == 1 else ""


def _is_slice(node: fx.Node) -> bool:
    return node.target is aten.slice.Tensor and len(node.args) == 4 and bool(node.args[1] == 0)


def _are_blocks(part: fx.Node, quantized: QuantizeNode) -> bool:
    """Give whether a slice of scales begins and ends with whole blocks, and its readers know the rows of their part."""
    if any(user.target not in (ops.scaled_mm, ops.dequantize) for user in part.users):
        return False
    return all(isinstance(bound, int) and bound % _rows_of_block(quantized) == 0 for bound in part.args[2:])


def _rows_of_block(quantized: QuantizeNode) -> int:
    """Return the rows of tiles in a block."""
    return max(ROWS // quantized.arguments.block[0], 1)


def _write_in_order(graph: fx.Graph, quantized: QuantizeNode, orders: Mapping[Layout, str]) -> None:
    node, outputs, first = quantized.node, quantized.outputs, next(iter(orders.values()))
    # the same for a layout that is not made: the copies of a weight serve graphs with other layouts
    quantized.ask(rowwise_order=orders.get("rowwise", first), columnwise_order=orders.get("columnwise", first))
    for changed in (node, *node.users):
        update_value(changed)
    for layout, order in orders.items():
        scales = outputs[f"{layout}_scale_inv"]
        for user in list(scales.users) if order else ():
            _read_in_order(graph, user, scales, order, quantized, outputs[layout])


def _read_in_order(
    graph: fx.Graph, user: fx.Node, scales: fx.Node, order: str, quantized: QuantizeNode, data: fx.Node
) -> None:
    if _is_slice(user) and order == BLOCKS and _are_blocks(user, quantized):
        per_block = _rows_of_block(quantized)
        user.args = (scales, 0, *(cast(int, bound) // per_block for bound in user.args[2:]))
        update_value(user)
        for reader in list(user.users):
            own = named_arguments(reader).get("data", data)  # of a decoded part
            _read_in_order(graph, reader, user, order, quantized, own)
        return
    given = named_arguments(user) if user.target is ops.scaled_mm else {}
    sides = [side for side in "ab" if given.get(f"scale_inv_{side}") is scales]
    for side in sides:
        set_argument(user, f"order_{side}", order)
    if not sides:
        with graph.inserting_before(user):
            settings = {
                "scaling": quantized.arguments.scaling,
                "block": list(quantized.arguments.block),
                "order": order,
            }
            rows = insert(graph, scales_in_rows, (data, scales), like=user, kwargs=settings)
        user.replace_input_with(scales, rows)


def _in_rows(data: Tensor, scale_inv: Tensor, *, scaling: str, block: Sequence[int], order: str) -> Tensor:
    scales = SCALINGS[scaling].in_rows(data, scale_inv, order, block)
    return scales.clone(memory_format=torch.contiguous_format)


def _shape_in_rows(data: Tensor, scale_inv: Tensor, *, scaling: str, block: Sequence[int], order: str) -> Tensor:
    kind = SCALINGS[scaling]
    rows, columns = data.shape
    return scale_inv.new_empty(kind.scale_shape(rows, columns * kind.packed, block) or [])


scales_in_rows = ops.define("scales_in_rows", reference=_in_rows, fake=_shape_in_rows)
