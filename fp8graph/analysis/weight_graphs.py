"""The part of a graph that computes a weight from parameters alone, as a graph of its own."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from operator import getitem

import torch
from torch import fx

from fp8graph.compat import aot
from fp8graph.ir import collectives, ops
from fp8graph.ir.nodes import static_size, value
from fp8graph.ir.quantize_node import QuantizeNode, call


def computed_from(node: fx.Node, parameters: Mapping[fx.Node, int]) -> list[fx.Node] | None:
    """The nodes between parameters and ``node``, in order; None if they read or do anything else."""
    found: set[fx.Node] = set()
    pending = [node]
    reads_parameter = False
    while pending:
        current = pending.pop()
        if current in parameters:
            reads_parameter = True
        elif current.op != "call_function" or torch.Tag.nondeterministic_seeded in getattr(current.target, "tags", ()):
            return None
        elif current.target is collectives.ALL_GATHER:
            return None
        elif current not in found:
            found.add(current)
            pending.extend(current.all_input_nodes)
    source = QuantizeNode(node).asked.x if node.target is ops.quantize else node
    if not reads_parameter or any(static_size(size) is None for size in value(source).shape):
        return None
    return [n for n in node.graph.nodes if n in found]


def sources_of(body: Sequence[fx.Node], parameters: Mapping[fx.Node, int]) -> list[fx.Node]:
    return list(dict.fromkeys(n for inner in body for n in inner.all_input_nodes if n in parameters))


def copy_of(node: fx.Node, body: Sequence[fx.Node], sources: Sequence[fx.Node]) -> tuple[fx.Graph, fx.Node]:
    """A graph of ``sources`` and ``body``, and ``node`` in it."""
    graph, copies = fx.Graph(), dict[fx.Node, fx.Node]()
    for position, source in enumerate(sources):
        copies[source] = placeholder(graph, position, value(source))
    for inner in body:
        copies[inner] = graph.node_copy(inner, lambda n: copies[n])
    return graph, copies[node]


def placeholder(graph: fx.Graph, position: int, val: torch.Tensor) -> fx.Node:
    node = graph.placeholder(f"input{position}")
    node.meta["val"] = val
    aot.set_input_position(node, position)
    return node


def signature_of(graph: fx.Graph) -> str:
    """The arithmetic of a weight as text, the same for all names of nodes and all layouts that are asked for."""
    order = {node: f"%{position}" for position, node in enumerate(graph.nodes)}
    lines: list[str] = []
    for node in graph.nodes:
        if node.op == "placeholder":
            x = value(node)
            lines.append(f"{x.dtype} {tuple(x.shape)} {x.stride()} {x.device}")
        elif node.op == "call_function" and not _takes_layout(node):
            args, kwargs = node.args, node.kwargs
            if node.target is ops.quantize:
                args, kwargs = call(dataclasses.replace(QuantizeNode(node).asked, rowwise=[], columnwise=[]))
            lines.append(f"{node.target} {fx.map_arg((args, kwargs), lambda n: order[n])}")
    return "\n".join(lines)


def _takes_layout(node: fx.Node) -> bool:
    """Whether ``node`` is an output of quantize; other getitems take parts (of a packed weight that is split)."""
    return node.target is getitem and node.all_input_nodes[0].target is ops.quantize
