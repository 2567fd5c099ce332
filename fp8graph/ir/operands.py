"""Write the quantization of one operand of a GEMM as dialect nodes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from operator import getitem
from typing import Any

import torch
from torch import fx

from fp8graph.ir import ops
from fp8graph.ir.extra_inputs import StateRow
from fp8graph.ir.keys import OPERAND_KEY, ROWS_KEY
from fp8graph.ir.nodes import aten, is_view, value
from fp8graph.ir.quantize_node import QuantizeNode
from fp8graph.ir.sites import OperandView, Site
from fp8graph.numerics import quantization
from fp8graph.recipes import Quantizer, Recipe

_CASTS = (torch.ops.prims.convert_element_type.default, aten._to_copy.default)


@dataclass(frozen=True, kw_only=True)
class QuantizedOperand:
    """One operand in the layout that the GEMM needs, as nodes."""

    quantizer: Quantizer
    data: fx.Node
    scale_inv: fx.Node
    global_scale_inv: fx.Node | None


def quantize_operand(
    view: OperandView,
    results: Mapping[fx.Node, fx.Node],
    recipe: Recipe,
    quantizer: Quantizer,
    site: Site,
    emit: Callable[..., fx.Node],
    squeeze: bool,
    multiples: list[int],
    **settings: Any,
) -> QuantizedOperand:
    """``view`` as ``quantizer`` of ``recipe`` quantizes it, padded to ``multiples``.

    ``results``: matmul -> its FP8 form. ``emit``: inserts a node. ``squeeze``: [1, r, c] is taken as a matrix.
    ``settings``: further ones of ``fp8graph::quantize``.
    """
    tensor = results.get(view.tensor, view.tensor)
    if squeeze and value(tensor).ndim == 3:
        tensor = emit(aten.squeeze.dim, tensor, 0)  # [1, r, c]: a batch of one
    if view.flipped:
        dims = list(range(value(tensor).ndim))
        tensor = emit(aten.permute.default, tensor, [*dims[:-2], dims[-1], dims[-2]])
    rowwise, columnwise = (multiples, list[int]()) if view.layout == "rowwise" else (list[int](), multiples)
    operand = view.operand
    settings |= quantization.quantizer_kwargs(quantizer)
    args = (tensor, *quantization.quantizer_args(quantizer), rowwise, columnwise)
    outputs = emit(ops.quantize, *args, name=f"quantize_{operand}", **settings)
    quantized = QuantizeNode(outputs)
    outputs.meta[OPERAND_KEY] = operand
    if quantized.kind.has_state:
        whose: dict[str, Any] = {"fqn": site.fqn, "index": site.index, "use": site.use, "parameter": site.parameter}
        whose["direct"] = _is_an_input(view.tensor)
        outputs.meta[ROWS_KEY] = [StateRow(**whose, operand=operand, recipe=recipe)]
    named: dict[str, fx.Node] = {}
    for position, name in enumerate(quantized.names):
        if name != "amax":  # pass `connect_scales` asks for it
            named[name] = emit(getitem, outputs, position, name=f"{operand}_{name}")
    return QuantizedOperand(
        quantizer=quantizer,
        data=named[view.layout],
        scale_inv=named.get("scale_inv") or named[f"{view.layout}_scale_inv"],
        global_scale_inv=named.get(f"{view.layout}_global_scale_inv"),
    )


def _is_an_input(node: fx.Node) -> bool:
    """Whether the numbers of ``node`` are those of a graph input: it is one, behind views and casts."""
    while is_view(node) or node.target in _CASTS:
        node = node.all_input_nodes[0]
    return node.op == "placeholder"
