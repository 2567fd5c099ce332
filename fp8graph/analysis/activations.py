"""Find elementwise functions between GEMMs (SwiGLU, GELU), which backward may compute again from FP8 copies."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import torch
from torch import fx

from fp8graph.ir import ops
from fp8graph.ir.nodes import aten, is_backward

_VIEWS: Final = (aten.view.default, aten._unsafe_view.default, aten.reshape.default, aten.slice.Tensor)


def activation_functions(gemms: Sequence[fx.Node]) -> list[tuple[list[fx.Node], str]]:
    """The elementwise functions of GEMM results, as ``(nodes, refusal)``: their nodes, inputs first.

    The refusal is "" if all values of a function go into quantize nodes and all its inputs are GEMM results.
    """
    found: list[tuple[list[fx.Node], str]] = []
    taken: set[fx.Node] = set()
    for gemm in gemms:
        if gemm in taken:
            continue
        function, pending, refusal = {gemm}, [gemm], ""
        while pending:
            node = pending.pop()
            read = [] if node in gemms else node.all_input_nodes  # a GEMM's operands are not part of the function
            for other in (*(user for user in node.users if not is_backward(user)), *read):
                if other.target in (ops.quantize, *ops.MEASURES) or other in function:
                    continue
                if other.op != "call_function" or not (_elementwise(other) or other in gemms):
                    refusal = refusal or _refusal(other, is_read=other in read)
                    continue
                function.add(other)
                pending.append(other)
        taken |= function
        if any("recompute" in node.meta for node in function):
            refusal = refusal or "torch.utils.checkpoint runs its forward again anyway"
        if len(function) > 1:
            found.append(([node for node in gemm.graph.nodes if node in function], refusal))
    return found


def _refusal(other: fx.Node, *, is_read: bool) -> str:
    name = str(getattr(other.target, "overloadpacket", other.target))
    if is_read:
        given = "an input of the graph" if other.op == "placeholder" else f"the result of {name}"
        return f"the activation function also reads {given}: backward can only compute it again from results of GEMMs"
    if other.op == "output":
        return "its result, or a function of it, leaves the graph, where FP8 copies do not go"
    return f"{name} reads it or a function of it: only inputs of elementwise functions before an FP8 GEMM can be kept"


def _elementwise(node: fx.Node) -> bool:
    tags = getattr(node.target, "tags", ())
    convert = node.target is torch.ops.prims.convert_element_type.default
    return torch.Tag.pointwise in tags or convert or node.target in _VIEWS
