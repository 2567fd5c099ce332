"""Trace a function into a graph, and copy a graph into another one."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.node import map_aggregate

from fp8graph.compat import torch_build
from fp8graph.compat.inductor import select_decomp_table
from fp8graph.ir.edit import INHERITED
from fp8graph.ir.keys import PASS_KEY
from fp8graph.ir.nodes import fake_mode_of, value


def trace(function: Callable[..., Any], arguments: Sequence[fx.Node]) -> fx.Graph:
    """``function(*arguments)`` as an aten graph that Inductor fuses; its placeholders are the arguments in order."""
    values = [value(argument) for argument in arguments]
    with fake_mode_of(arguments[0]), torch.no_grad():
        # new ones: make_fx distinguishes its inputs by identity, and two nodes may share one fake tensor
        devices = {torch_build.without_cuda(v.device): v.device for v in values}
        fresh = [v.new_empty_strided(v.size(), v.stride(), device=torch_build.without_cuda(v.device)) for v in values]
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


def inline(graph: fx.Graph, body: fx.Graph, arguments: Sequence[fx.Node], *, like: fx.Node, made_by: str) -> Any:
    """Copy ``body`` to the insertion point with ``like``'s metadata; returns the copied nodes of its results."""
    placeholders = body.find_nodes(op="placeholder")
    copies: dict[fx.Node, fx.Node] = dict(zip(placeholders, arguments, strict=True))
    results: Any = graph.graph_copy(body, copies)
    for copy in copies.values():
        if copy not in arguments:
            copy.meta.update({key: like.meta[key] for key in INHERITED if key in like.meta})
            copy.meta[PASS_KEY] = made_by
    return results
