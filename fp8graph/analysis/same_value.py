"""Recognize nodes that hold the same tensor, through views, repeated casts and transposes."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any, Final, cast

import torch
from torch import fx

from fp8graph.ir import collectives
from fp8graph.ir.nodes import SAME_VALUES, aten, value

_TRANSPOSES: Final = (aten.permute.default, aten.transpose.int, aten.t.default)
# The ops with which DTensor gathers shards. If the dim is not the first, it moves the parts there afterwards.
_GATHERS: Final = (collectives.ALL_GATHER, collectives.WAIT, aten.split.Tensor, operator.getitem, aten.cat.default)
_PURE_VIEWS: Final = (  # the same elements in the same order
    *SAME_VALUES,
    aten.squeeze.dim,
    aten.squeeze.dims,
    aten.unsqueeze.default,
    aten.alias.default,
    aten.detach.default,
)


def swaps_last_dims(node: fx.Node) -> bool:
    """Whether ``node`` is a transpose of the last two dims: t, transpose or permute."""
    if node.target not in _TRANSPOSES:
        return False
    ndim = value(cast(fx.Node, node.args[0])).ndim
    swapped = [*range(ndim - 2), ndim - 1, ndim - 2]
    if node.target is aten.permute.default:
        return [d % ndim for d in cast(Sequence[int], node.args[1])] == swapped
    if node.target is aten.transpose.int:
        return {cast(int, d) % ndim for d in node.args[1:3]} == {ndim - 1, ndim - 2}
    return node.target is aten.t.default and ndim == 2


def look_through_transposes(node: fx.Node) -> tuple[fx.Node, bool]:
    """The tensor under any number of transposes of the last two dims, and whether it arrives transposed.

    The weight of a linear is ``permute(w)`` in forward and ``permute(permute(w))`` in dgrad.
    """
    transposed = False
    while True:
        if node.op == "call_function" and node.target in (aten.alias.default, aten.detach.default):
            node = cast(fx.Node, node.args[0])
        elif swaps_last_dims(node):
            node, transposed = cast(fx.Node, node.args[0]), not transposed
        else:
            return node, transposed


def value_key(node: fx.Node) -> Any:
    """A key equal for nodes that certainly hold the same tensor, seen through views and repeated casts.

    ``view(h, [M, K])``, made once each for q, k and v, is one tensor; so is ``h.to(bf16)``, which torch.autocast makes
    for each of them.
    """
    shape = tuple(str(size) for size in value(node).shape)
    return shape, _origin(node)


def _key(node: fx.Node) -> Any:
    return value_key(node) if isinstance(node.meta["val"], torch.Tensor) else _origin(node)  # split: several outputs


def _origin(node: fx.Node) -> Any:
    while node.op == "call_function" and node.target in _PURE_VIEWS:
        node = cast(fx.Node, node.args[0])
    if node.op == "call_function" and node.target is torch.ops.prims.convert_element_type.default:
        return "cast", node.args[1], _origin(cast(fx.Node, node.args[0]))
    if node.op == "call_function" and node.target is aten.permute.default:
        source = cast(fx.Node, node.args[0])
        return "permute", str(node.args[1]), value_key(source)
    if node.op == "call_function" and node.target in _GATHERS:  # q, k and v each gather the same shards
        return str((node.target, fx.map_arg(node.args, lambda n: repr(_key(n)))))
    return node
