"""Replace each dialect node by the aten nodes of its reference function, which Inductor fuses.

    q = fp8graph.quantize(x, e4m3, False, 0.0, [1, 16], [])    ->   abs, amax, div, where, mul, clamp, to, ...
    y = fp8graph.scaled_mm(a, b, sa, sb, None, bf16, True)     ->   aten._scaled_mm(a, permute(b), sa, sb, ...)

The aten nodes come from tracing ``ops.REFERENCE`` with Inductor's decompositions, so the arithmetic is written
once. A trace costs some ten milliseconds: it is kept per signature. Runs after the partitioner, on the forward
and on the backward graph. Every dialect node is lowered; a node that cannot be traced is an error.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import fx
from torch._inductor.decomposition import select_decomp_table
from torch.fx.experimental.proxy_tensor import make_fx

from fp8graph import ops
from fp8graph.graph import fake_mode_of, nodes, value


def lower(graph: fx.Graph) -> None:
    traces: dict[Any, fx.Graph] = {}
    for node in list(nodes(graph, ops.DIALECT)):
        key = _signature(node)
        if key not in traces:
            traces[key] = _trace(node)
        _inline(graph, node, traces[key])
    graph.eliminate_dead_code()


def _signature(node: fx.Node) -> Any:
    def describe(argument: Any) -> Any:
        if isinstance(argument, fx.Node):
            x = value(argument)
            return tuple(map(str, x.shape)), tuple(map(str, x.stride())), x.dtype, str(x.device)
        return str(argument)

    return node.target, *map(describe, node.args), *((name, describe(x)) for name, x in sorted(node.kwargs.items()))


def _trace(node: fx.Node) -> fx.Graph:
    """The reference function as an aten graph; its placeholders are the node's input nodes in order."""
    values = [value(a) for a in node.all_input_nodes]

    def reference(*values: torch.Tensor) -> Any:
        given = dict(zip(node.all_input_nodes, values, strict=True))
        args, kwargs = cast(Any, fx.map_arg((node.args, node.kwargs), given.__getitem__))
        return ops.REFERENCE[node.target](*args, **kwargs)

    with fake_mode_of(node), torch.no_grad():
        # fresh ones: make_fx tells its inputs apart by identity, and two nodes may share one fake tensor
        fresh = [v.new_empty_strided(v.size(), v.stride()) for v in values]
        return make_fx(reference, decomposition_table=select_decomp_table())(*fresh).graph


def _inline(graph: fx.Graph, node: fx.Node, body: fx.Graph) -> None:
    placeholders = body.find_nodes(op="placeholder")
    arguments = node.all_input_nodes
    copies: dict[fx.Node, fx.Node] = dict(zip(placeholders, arguments, strict=True))
    with graph.inserting_before(node):
        results: Any = graph.graph_copy(body, copies)
    for copy in copies.values():
        if copy in arguments:
            continue
        for key in ("partitioner_tag", "nn_module_stack", "fwd_nn_module_stack", "seq_nr", "stack_trace"):
            if key in node.meta:
                copy.meta[key] = node.meta[key]
        copy.meta["fp8graph_pass"] = "lower"
    if isinstance(results, fx.Node):
        node.replace_all_uses_with(results)
    else:
        for user in list(node.users):  # getitem
            user.replace_all_uses_with(cast(Sequence[fx.Node], results)[cast(int, user.args[1])])
            graph.erase_node(user)
    graph.erase_node(node)
