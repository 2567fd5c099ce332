"""Change a graph: insert a node with its metadata, or replace a node by another one."""

from __future__ import annotations

import operator
from typing import Any, Final, cast

import torch
from torch import fx

from fp8graph.compat.ops import schema
from fp8graph.ir import ops
from fp8graph.ir.keys import GEMM_KEY, NAMES_KEY, PASS_KEY
from fp8graph.ir.nodes import aten, fake_mode_of, is_view, known_equal, strides_matter, value

# Metadata that an inserted node takes from the node it replaces. `recompute`, `ac_graph_id`: nodes inside
# torch.utils.checkpoint regions are recomputed together with their region.
INHERITED: Final = (
    "partitioner_tag",
    "nn_module_stack",
    "fwd_nn_module_stack",
    "seq_nr",
    "custom",
    "recompute",
    "ac_graph_id",
    "stack_trace",
    "fwd_stack_trace",
    GEMM_KEY,
    NAMES_KEY,
)


def insert(
    graph: fx.Graph,
    target: Any,
    args: tuple[Any, ...],
    *,
    like: fx.Node,
    made_by: str,
    name: str | None = None,
    kwargs: dict[str, Any] | None = None,
) -> fx.Node:
    """Insert ``target(*args, **kwargs)`` at the current insertion point, with a fake value and ``like``'s metadata."""
    node = graph.create_node("call_function", target, args, kwargs or {}, name=name)
    node.meta.update({key: like.meta[key] for key in INHERITED if key in like.meta})
    node.meta[PASS_KEY] = made_by
    update_value(node)
    return node


def set_direction(node: fx.Node, tag: str | None) -> None:
    """Put an inserted node into forward or backward, outside any activation checkpointing region."""
    for key in ("recompute", "ac_graph_id", "partitioner_tag"):
        node.meta.pop(key, None)
    if tag is not None:
        node.meta["partitioner_tag"] = tag


def set_argument(node: fx.Node, name: str, value: Any) -> None:
    """Give an op's node another value for one of its arguments."""
    names = [argument.name for argument in schema(node.target).arguments]
    if (position := names.index(name)) < len(node.args):
        node.update_arg(position, value)
    else:
        node.update_kwarg(name, value)


def update_value(node: fx.Node) -> None:
    """Compute the fake value of ``node`` from those of its arguments."""
    if node.target is operator.getitem:
        source, position = cast("tuple[fx.Node, int]", node.args)
        node.meta["val"] = source.meta["val"][position]
        return
    args, kwargs = cast(Any, fx.map_arg((node.args, node.kwargs), lambda x: x.meta["val"]))
    if node.target in ops.SHAPES and (made := ops.fake_results(node.target, args, kwargs)) is not None:
        node.meta["val"] = made
        return
    like = node.all_input_nodes or node.graph.find_nodes(op="placeholder")
    with fake_mode_of(like[0]):
        node.meta["val"] = cast(Any, node.target)(*args, **kwargs)


def take_place(result: fx.Node, node: fx.Node, made_by: str) -> fx.Node:
    """Replace ``node`` by ``result``. Returns what its users read: a copy if other strides than ``node``'s matter."""
    graph, strides = node.graph, value(node).stride()
    node.replace_all_uses_with(result)
    graph.erase_node(node)
    of_each_size = zip(value(result).shape, value(result).stride(), strides, strict=True)
    if not all(known_equal(size, 1) or known_equal(new, old) for size, new, old in of_each_size):
        if strides_matter(result):
            with graph.inserting_after(result):
                copy = _copy(result, made_by)
            result.replace_all_uses_with(copy, delete_user_cb=lambda user: user is not copy)
            return copy
        update_views(result, made_by)
    return result


def update_views(node: fx.Node, made_by: str) -> None:
    """Give the views of ``node`` the strides that follow from its own; an impossible view becomes one of a copy."""
    for user in list(filter(is_view, node.users)):
        try:
            update_value(user)
        except (RuntimeError, ValueError):  # "view size is not compatible"
            with node.graph.inserting_before(user):
                copy = _copy(node, made_by)
            user.replace_input_with(node, copy)
            update_value(user)
        update_views(user, made_by)


def _copy(node: fx.Node, made_by: str) -> fx.Node:
    contiguous = {"memory_format": torch.contiguous_format}
    return insert(node.graph, aten.clone.default, (node,), like=node, made_by=made_by, kwargs=contiguous)
