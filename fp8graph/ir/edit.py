"""Change a graph: insert a node with its metadata, replace one, copy in what was traced of a function."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final, cast

import torch
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.node import map_aggregate

from fp8graph.compat import torch_build
from fp8graph.compat.inductor import select_decomp_table
from fp8graph.compat.ops import schema
from fp8graph.ir import ops
from fp8graph.ir.nodes import (
    GEMM_KEY,
    NAMES_KEY,
    PASS_KEY,
    aten,
    fake_mode_of,
    is_view,
    known_equal,
    strides_matter,
    value,
)

# Metadata that an inserted node takes from the node it replaces. `recompute`, `ac_graph_id`: nodes inside
# torch.utils.checkpoint regions are recomputed together with their region.
_INHERITED: Final = (
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
    name: str | None = None,
    kwargs: dict[str, Any] | None = None,
) -> fx.Node:
    """Insert ``target(*args, **kwargs)`` at the current insertion point, with a fake value and ``like``'s metadata."""
    node = graph.create_node("call_function", target, args, kwargs or {}, name=name)
    node.meta.update({key: like.meta[key] for key in _INHERITED if key in like.meta})
    node.meta[PASS_KEY] = ""
    update_value(node)
    return node


Emit = Callable[..., fx.Node]  # (target, *args, **kwargs): an insertion at a place of its own


def inserted(
    target: Any, *args: Any, like: fx.Node, before: fx.Node | None = None, name: str | None = None, **kwargs: Any
) -> fx.Node:
    """Insert ``target(*args, **kwargs)`` before ``like``, with its metadata, or before another node."""
    with like.graph.inserting_before(before or like):
        return insert(like.graph, target, args, like=like, name=name, kwargs=kwargs)


def sign(graph: fx.Graph, name: str) -> None:
    """Note in the nodes that a pass inserted, which has just run, that it made them."""
    for node in graph.nodes:
        if node.meta.get(PASS_KEY) == "":
            node.meta[PASS_KEY] = name


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


def take_place(result: fx.Node, node: fx.Node) -> fx.Node:
    """Replace ``node`` by ``result``. Returns what its users read: a copy if other strides than ``node``'s matter."""
    graph, strides = node.graph, value(node).stride()
    node.replace_all_uses_with(result)
    graph.erase_node(node)
    of_each_size = zip(value(result).shape, value(result).stride(), strides, strict=True)
    if not all(known_equal(size, 1) or known_equal(new, old) for size, new, old in of_each_size):
        if strides_matter(result):
            with graph.inserting_after(result):
                copy = _copy(result)
            result.replace_all_uses_with(copy, delete_user_cb=lambda user: user is not copy)
            return copy
        update_views(result)
    return result


def update_views(node: fx.Node) -> None:
    """Give the views of ``node`` the strides that follow from its own; an impossible view becomes one of a copy."""
    for user in list(filter(is_view, node.users)):
        try:
            update_value(user)
        except (RuntimeError, ValueError):  # "view size is not compatible"
            with node.graph.inserting_before(user):
                copy = _copy(node)
            user.replace_input_with(node, copy)
            update_value(user)
        update_views(user)


def _copy(node: fx.Node) -> fx.Node:
    contiguous = {"memory_format": torch.contiguous_format}
    return insert(node.graph, aten.clone.default, (node,), like=node, kwargs=contiguous)


def trace(function: Callable[..., Any], arguments: Sequence[fx.Node]) -> fx.Graph:
    """``function(*arguments)`` as an aten graph that Inductor fuses; its placeholders are the arguments in order."""
    values = [value(argument) for argument in arguments]
    with fake_mode_of(arguments[0]), torch.no_grad():
        # new ones: make_fx distinguishes its inputs by identity, and two nodes may share one fake tensor
        devices = {torch_build.traceable(v.device): v.device for v in values}
        fresh = [v.new_empty_strided(v.size(), v.stride(), device=torch_build.traceable(v.device)) for v in values]
        graph = make_fx(function, decomposition_table=select_decomp_table())(*fresh).graph
        if any(stand_in != device for stand_in, device in devices.items()):
            _move(graph, devices)
        return graph


def _move(graph: fx.Graph, devices: Mapping[torch.device, torch.device]) -> None:
    """Move a graph that was traced on stand-ins to the devices that they stand for."""

    def moved(argument: Any) -> Any:
        return devices.get(argument, argument) if isinstance(argument, torch.device) else argument

    for node in graph.nodes:
        node.args, node.kwargs = (map_aggregate(x, moved) for x in (node.args, node.kwargs))
        val = node.meta.get("val")
        if isinstance(val, torch.Tensor):
            node.meta["val"] = val.new_empty_strided(val.size(), val.stride(), device=moved(val.device))


def inline(graph: fx.Graph, body: fx.Graph, arguments: Sequence[fx.Node], *, like: fx.Node) -> Any:
    """Copy ``body`` to the insertion point with ``like``'s metadata; returns the copied nodes of its results."""
    placeholders = body.find_nodes(op="placeholder")
    copies: dict[fx.Node, fx.Node] = dict(zip(placeholders, arguments, strict=True))
    results: Any = graph.graph_copy(body, copies)
    for copy in copies.values():
        if copy not in arguments:
            copy.meta.update({key: like.meta[key] for key in _INHERITED if key in like.meta})
            copy.meta[PASS_KEY] = ""
    return results


def slice_result(graph: fx.Graph, results: Sequence[fx.Node], sizes: Sequence[int], *, dim: int) -> None:
    """Give each linear's users their part of the first result, which now is the result of all linears."""
    users = [list(node.users) for node in results]
    for node, own, part in zip(results, users, parts_of(graph, results[0], results, sizes, dim), strict=True):
        for user in own:
            user.replace_input_with(node, part)
        update_views(part)
    for node in results[1:]:
        graph.erase_node(node)


def parts_of(
    graph: fx.Graph, joined: fx.Node, like: Sequence[fx.Node], sizes: Sequence[int], dim: int
) -> Iterator[fx.Node]:
    """Insert slices of ``joined`` along ``dim``, one for each of ``like``, whose metadata it gets."""
    end = 0
    for node, size in zip(like, sizes, strict=True):
        args = (joined, dim, end, end := end + size)
        with graph.inserting_after(joined):
            yield insert(graph, aten.slice.Tensor, args, like=node, name=f"{node.name}_part")
