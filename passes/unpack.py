"""Replace a library's own ops for grouped matmuls by plain grouped matmuls.

    y = grouped_mm_fallback(x, permute(w), offs)                  ->  y = fp8graph.grouped_mm(x, permute(w), offs)
    dx, dv = grouped_mm_fallback_backward(x, v, offs, dy)         ->  dx = fp8graph.grouped_mm(dy, permute(v), offs)
                                                                      dv = fp8graph.grouped_mm(permute(x), dy, offs)

These are Hugging Face's ops for experts in FP32 and FP16 (transformers/integrations/moe.py); in bf16 it calls
``torch.nn.functional.grouped_mm``. The new op computes the same, in a loop over the experts. Results that nothing reads
are no longer computed. Everything else is left unchanged.
"""

from __future__ import annotations

import functools
from operator import getitem
from typing import cast

from torch import fx

from fp8graph.ir import ops
from fp8graph.ir.compilation import Compilation
from fp8graph.ir.edit import insert, inserted
from fp8graph.ir.nodes import aten, value

_FORWARD = "transformers.grouped_mm_fallback.default"  # by name: transformers may not be installed
_BACKWARD = "transformers.grouped_mm_fallback_backward.default"


def has_hidden_matmuls(graph: fx.Graph, compilation: Compilation) -> bool:
    """Return whether some op of the graph is one of that library."""
    return any(str(node.target) in (_FORWARD, _BACKWARD) for node in graph.nodes)


def unpack(graph: fx.Graph, compilation: Compilation) -> None:
    for node in list(graph.nodes):
        if node.op == "call_function" and str(node.target) in (_FORWARD, _BACKWARD):
            (_unpack_forward if str(node.target) == _FORWARD else _unpack_backward)(graph, node)


def _unpack_forward(graph: fx.Graph, node: fx.Node) -> None:
    with graph.inserting_before(node):
        node.replace_all_uses_with(insert(graph, ops.grouped_mm, node.args, like=node))
    graph.erase_node(node)


def _unpack_backward(graph: fx.Graph, node: fx.Node) -> None:
    x, weight, offs, grad_output = cast(tuple[fx.Node, ...], node.args)
    for user in list(node.users):
        assert user.target is getitem
        emit = functools.partial(inserted, like=node, before=user)
        if user.args[1] == 0:
            flipped = emit(aten.permute.default, weight, [0, 2, 1])
            gradient = emit(ops.grouped_mm, grad_output, flipped, offs)
        else:
            flipped = emit(aten.permute.default, x, [1, 0])
            gradient = emit(ops.grouped_mm, flipped, grad_output, offs)
        assert value(gradient).shape == value(user).shape
        user.replace_all_uses_with(gradient)
        graph.erase_node(user)
    graph.erase_node(node)
