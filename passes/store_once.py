"""Store results of functions that take many instructions, where much larger tensors read them.

    angles [S, D]; q [B, H, S, D]

    y = q * cos(angles)      ->      c = materialize(cos(angles))
                                     y = q * c

Inductor computes a broadcast operand again for each element that reads it. A sine or a cosine takes a GPU some hundred
instructions: in the rotary embedding of Llama-3-8B with 8192 tokens they are computed 42 million times in each
direction, for 1 million angles, and backward's kernel takes six times as long as its traffic. No number changes.

Refuses (leaves as they are) results that no loop over ``LARGE`` elements, and ``TIMES`` as many, reads, those of other
types than FP32, and graphs without FP8, whose code is plain Inductor's.
"""

from __future__ import annotations

from typing import Final

import torch
from torch import fx

from fp8graph.compat.inductor import LARGE
from fp8graph.ir.edit import insert
from fp8graph.ir.nodes import CONVERT, NAMES_KEY, aten, is_view, nodes, size_hint, value
from fp8graph.numerics.hints import MATERIALIZE
from fp8graph.passes.lower import is_rewritten

TIMES: Final = 8
_EXPENSIVE: Final = (
    aten.sin.default, aten.cos.default, aten.tan.default, aten.pow.Scalar, aten.pow.Tensor_Tensor,
    aten.special_i0.default, aten.lgamma.default, aten.digamma.default, aten.erfinv.default,
)  # fmt: skip
# Inductor computes their operands in the loops of what reads them, too.
_COPIES: Final = (aten.cat.default, aten.slice_scatter.default, aten.select_scatter.default, aten.clone.default)


def store_once(graph: fx.Graph) -> None:
    if not is_rewritten(graph):
        return
    widest = _widest_readers(graph)
    for node in list(nodes(graph, _EXPENSIVE)):
        # FP32: Inductor rounds to no narrower type before the last product, and a stored result would be rounded
        if value(node).dtype == torch.float32 and widest[node] >= max(LARGE, TIMES * _numel(node)):
            with graph.inserting_after(node):
                stored = insert(graph, MATERIALIZE, (node,), like=node)
            stored.meta[NAMES_KEY] = node.meta.get(NAMES_KEY, (node.name,))
            node.replace_all_uses_with(stored, delete_user_cb=lambda user, stored=stored: user is not stored)


def _widest_readers(graph: fx.Graph) -> dict[fx.Node, int]:
    """By node: the elements of the largest loop that computes it, if it is not stored."""
    widest: dict[fx.Node, int] = {}
    for node in reversed(graph.nodes):
        readers = [user for user in node.users if _computes_its_operands(user)]
        widest[node] = max((max(widest[user], 0 if is_view(user) else _numel(user)) for user in readers), default=0)
    return widest


def _computes_its_operands(node: fx.Node) -> bool:
    if not isinstance(node.meta.get("val"), torch.Tensor):
        return False
    convert = node.target is CONVERT
    pointwise = torch.Tag.pointwise in getattr(node.target, "tags", ())
    return pointwise or convert or is_view(node) or node.target in _COPIES


def _numel(node: fx.Node) -> int:
    return size_hint(value(node).numel())
