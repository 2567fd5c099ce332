"""trace: a function as a graph, on any device, and a graph inside another one."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from fp8graph.ir.edit import inline, insert, trace
from fp8graph.ir.nodes import GEMM_KEY, PASS_KEY, aten, value
from helpers import graph_inputs_for


def inputs(*tensors: Tensor) -> tuple[fx.Graph, list[fx.Node]]:
    graph = fx.Graph()
    return graph, graph_inputs_for(graph, tensors)


def test_arguments_are_placeholders_in_order() -> None:
    """Also of one fake tensor that two nodes share: make_fx would take them for one."""
    graph, (a,) = inputs(torch.empty(4, 6))
    same = insert(graph, aten.detach.default, (a,), like=a)
    same.meta["val"] = value(a)
    body = trace(lambda x, y: x - 2 * y, [a, same])
    run = fx.GraphModule(nn.Module(), body)
    x, y = torch.randn(4, 6), torch.randn(4, 6)
    assert torch.equal(run(x, y), x - 2 * y)


def test_strides_are_those_of_the_arguments() -> None:
    _, (a,) = inputs(torch.empty(6, 4).t())
    body = trace(lambda x: x.sin(), [a])
    (sine,) = [node for node in body.nodes if node.target is aten.sin.default]
    assert value(sine).stride() == (1, 4)


def test_graphs_for_a_device_that_is_not_here() -> None:
    """Traced on stand-ins: fake values and devices that are arguments are the GPU's."""
    graph, mode = fx.Graph(), FakeTensorMode()
    a = graph.placeholder("a")
    with mode:
        a.meta["val"] = torch.empty(4, 6, device="cuda")
    body = trace(lambda x: x + torch.ones(6, device=x.device), [a])
    made = [node for node in body.nodes if node.op == "call_function"]
    assert {value(node).device.type for node in made} == {"cuda"}
    devices = [node.kwargs["device"] for node in made if "device" in node.kwargs]
    assert [device.type for device in devices] == ["cuda"]


def test_a_body_takes_the_metadata_of_what_it_stands_for() -> None:
    graph, (a, b) = inputs(torch.empty(4, 6), torch.empty(4, 6))
    like = insert(graph, aten.add.Tensor, (a, b), like=a)
    like.meta.update({"partitioner_tag": "is_backward", GEMM_KEY: (0, "dgrad")})
    body = trace(lambda x, y: [(x * y).sin(), x], [a, b])
    results: Any = inline(graph, body, [a, b], like=like)
    assert results[1] is a
    for node in graph.nodes:
        if node not in (a, b, like):
            assert (node.meta[PASS_KEY], node.meta[GEMM_KEY]) == ("", (0, "dgrad"))
            assert node.meta["partitioner_tag"] == "is_backward"
    assert PASS_KEY not in a.meta  # what was there stays as it was
    graph.output(results)
    x, y = torch.randn(4, 6), torch.randn(4, 6)
    got, same = fx.GraphModule(nn.Module(), graph)(x, y)
    assert torch.equal(got, (x * y).sin())
    assert same is x
