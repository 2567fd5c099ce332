"""Replace each dialect node by the aten nodes of its reference function, which Inductor fuses.

    q = fp8graph.quantize(x, e4m3, False, 0.0, [1, 16], [])    ->   abs, amax, div, where, mul, clamp, to, ...
    y = fp8graph.scaled_mm(a, b, sa, sb, None, bf16, True)     ->   aten._scaled_mm(a, permute(b), sa, sb, ...)

The aten nodes come from tracing ``ops.REFERENCE`` with Inductor's decompositions, so the arithmetic is written
once. A trace takes 50 ms and more, so it is kept per signature, which no row of a table of scales is part of. The
places of experts' groups, which follow from the offsets, are computed once for all operands. Runs after the
partitioner, on the forward and on the backward graph. Every dialect node except emulated grouped GEMMs
(``ops.stays``) is lowered; a node that cannot be traced is an error.

Each node of the lowered graph carries the names of the nodes that it computes (``NAMES_KEY``): its own, or that of the
dialect node that it was made for, and of the result that it is. The report attributes kernels by these names.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence, Set
from typing import Any, Final, cast

import torch
from torch import fx

from fp8graph import hardware
from fp8graph.compat.inductor import erase_unused
from fp8graph.ir import ops
from fp8graph.ir.edit import inline, insert, trace
from fp8graph.ir.nodes import NAMES_KEY, PASS_KEY, aten, nodes, size_hint, value
from fp8graph.ir.quantize_node import QuantizeNode

FEW: Final = 2**20  # one for each token, or each tile of some tokens


def lower(graph: fx.Graph) -> None:
    _replace(graph, ops.REFERENCE)


def lower_for_torch_alone(graph: fx.Graph) -> None:
    """:func:`lower`, for code that runs without fp8graph: products are torch's own."""
    _replace(graph, ops.REFERENCE | {ops.scaled_mm: functools.partial(hardware.scaled_mm, custom_ops=False)})


def is_rewritten(graph: fx.Graph) -> bool:
    """Return whether fp8graph has changed a graph: another one is left to Inductor as it is."""
    return any(PASS_KEY in node.meta for node in graph.nodes)


def _replace(graph: fx.Graph, references: Mapping[Any, Callable[..., Any]]) -> None:
    traces: dict[Any, fx.Graph] = {}
    originals = set(graph.nodes)
    for node in originals:
        node.meta.setdefault(NAMES_KEY, (node.name,))  # Inductor makes more nodes later: they have none
    for node in list(nodes(graph, references)):
        if ops.stays(node):
            continue
        if node.target is ops.quantize:
            _read_own_row(graph, node)
        key = _signature(node)
        if key not in traces:
            traces[key] = _trace(node, references[node.target])
        _inline(graph, node, traces[key])
    erase_unused(graph)
    _share_integers(graph, originals)


def _read_own_row(graph: fx.Graph, node: fx.Node) -> None:
    """Give a quantize node its row of the table of scales alone: tensors that differ in the row share a trace."""
    arguments = QuantizeNode(node).arguments
    if arguments.scales is not None:
        with graph.inserting_before(node):
            row = insert(graph, aten.slice.Tensor, (arguments.scales, 0, arguments.row, arguments.row + 1), like=node)
        QuantizeNode(node).ask(scales=row, row=0)


def _share_integers(graph: fx.Graph, originals: Set[fx.Node]) -> None:
    """Merge equal nodes, except ``originals``, that compute a few integers from integers: where groups begin and end.

    Many are computed again by each kernel that uses them, such as the counters of random bits: it would have to read
    them otherwise. Two draws of random numbers are not equal.
    """
    by_key: dict[Any, fx.Node] = {}
    results = set(graph.output_node().all_input_nodes)
    for node in list(graph.nodes):
        if node in originals or node in results or not all(map(_holds_few_integers, (node, *node.all_input_nodes))):
            continue
        if torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ()):
            continue
        key = node.target, *map(_merged, (node.args, tuple(sorted(node.kwargs.items()))))
        if (first := by_key.setdefault(key, node)) is not node:
            node.replace_all_uses_with(first)
            graph.erase_node(node)


def _holds_few_integers(node: fx.Node) -> bool:
    x = node.meta.get("val")
    if not isinstance(x, torch.Tensor) or x.is_floating_point() or x.is_complex():
        return False
    return size_hint(x.numel()) <= FEW


def _merged(argument: Any) -> Any:
    """Return an argument of a node as a key: 1, 1.0 and True are three."""
    if isinstance(argument, (list, tuple)):
        return tuple(map(_merged, cast(Sequence[Any], argument)))
    return argument if isinstance(argument, fx.Node) else (type(argument), str(argument))


def _signature(node: fx.Node) -> Any:
    order = {argument: position for position, argument in enumerate(node.all_input_nodes)}  # a node may be used twice

    def describe(argument: Any) -> Any:
        if isinstance(argument, fx.Node):
            x = value(argument)
            return order[argument], *map(str, (*x.shape, "strides", *x.stride(), x.dtype, x.device))
        if isinstance(argument, (list, tuple)):
            return tuple(map(describe, cast(Sequence[Any], argument)))
        return str(argument)

    return node.target, *map(describe, node.args), *((name, describe(x)) for name, x in sorted(node.kwargs.items()))


def _trace(node: fx.Node, reference: Callable[..., Any]) -> fx.Graph:
    """``reference`` as an aten graph; its placeholders are the node's input nodes in order."""

    def compute(*values: torch.Tensor) -> Any:
        given = dict(zip(node.all_input_nodes, values, strict=True))
        args, kwargs = cast(Any, fx.map_arg((node.args, node.kwargs), given.__getitem__))
        return reference(*args, **kwargs)

    return trace(compute, node.all_input_nodes)


def _inline(graph: fx.Graph, node: fx.Node, body: fx.Graph) -> None:
    with graph.inserting_before(node):
        results = inline(graph, body, node.all_input_nodes, like=node)
    if isinstance(results, fx.Node):
        node.replace_all_uses_with(results)
    else:
        for user in list(node.users):  # getitem
            result = cast(Sequence[fx.Node], results)[cast(int, user.args[1])]
            user.replace_all_uses_with(result)
            if result not in node.all_input_nodes:
                result.meta[NAMES_KEY] = (*result.meta[NAMES_KEY], user.name)
            graph.erase_node(user)
    graph.erase_node(node)
