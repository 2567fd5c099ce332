"""Kinds of nodes: a view, a reader, a part of backward."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import fx, nn

from fp8graph.ir.nodes import (
    aten,
    backward_nodes,
    in_order,
    is_view,
    known_contiguous,
    known_equal,
    matmul_arguments,
    module_path,
    nodes,
    readers,
    static_size,
    strides_matter,
)
from helpers import NONE, in_one_test, traced, view_of


def node_of(body: Any, target: Any, *shapes: tuple[int, ...]) -> fx.Node:
    (node,) = nodes(traced(body, *shapes), (target,))
    return node


@in_one_test(
    ("body", "target", "view"),
    [
        (lambda x: x.view(24), aten.view.default, True),
        (lambda x: x.permute(1, 0), aten.permute.default, True),
        (lambda x: x[1:], aten.slice.Tensor, True),
        (lambda x: x.sin(), aten.sin.default, False),
        (lambda x: x.clone(), aten.clone.default, False),
        (lambda x: x.add_(1), aten.add_.Tensor, False),  # an alias that is written
    ],
)
def test_views(body: Any, target: Any, view: bool) -> None:
    assert is_view(node_of(body, target, (4, 6))) == view


def test_readers_are_found_behind_views() -> None:
    graph = traced(lambda x: (lambda y: [y.view(24).cos(), y.t()])(x.sin()), (4, 6))
    (sine,) = nodes(graph, (aten.sin.default,))
    assert {reader.name for reader in readers(sine)} == {"cos", "output"}
    assert strides_matter(sine)  # it leaves the graph
    (cosine_only,) = nodes(traced(lambda x: x.sin().view(24).cos(), (4, 6)), (aten.sin.default,))
    assert not strides_matter(cosine_only)


@pytest.mark.parametrize(
    ("body", "target"),
    [
        (lambda a, b: a @ b, aten.mm.default),
        (lambda a, b: torch.addmm(a.sum(), a, b), aten.addmm.default),
    ],
)
def test_the_bias_is_not_an_operand(body: Any, target: Any) -> None:
    node = node_of(body, target, (4, 6), (6, 8))
    assert [x.name for x in matmul_arguments(node)] == ["a_1", "b_1"]


def test_backward_is_what_is_computed_from_gradients() -> None:
    view = view_of(nn.Linear(32, 48, bias=False), torch.randn(16, 32, requires_grad=True), policy=NONE)
    graph = view.module.graph
    matmuls = [node in backward_nodes(graph) for node in nodes(graph, (aten.mm.default,))]
    assert matmuls == [False, True, True]


def test_sizes_of_every_run() -> None:
    assert (static_size(3), known_equal(3, 3), known_equal(3, 4)) == (3, True, False)
    seen: list[tuple[Any, ...]] = []

    def backend(module: fx.GraphModule, _: Any) -> Any:
        (node,) = [n for n in module.graph.nodes if n.op == "output"]
        rows, columns = node.args[0][0].meta["example_value"].shape
        seen.append((static_size(rows), static_size(columns), known_equal(rows, rows), known_equal(rows, 8)))
        return module.forward

    torch.compile(torch.sin, backend=backend, dynamic=True)(torch.ones(8, 8)[:, :8])
    assert seen[0][2:] == (True, False)
    assert seen[0][0] is None


def test_the_innermost_module_is_where_a_node_is() -> None:
    stack = {"nn_module_stack": {"k": ("L['self'].a", "cls"), "l": ("L['self'].a.b", "c")}}
    node: Any = type("Node", (), {"meta": stack})
    assert module_path(node) == "L['self'].a.b"
    backward: Any = type("Node", (), {"meta": {"fwd_nn_module_stack": stack["nn_module_stack"]}})
    assert module_path(backward) == "L['self'].a.b"
    assert module_path(type("Node", (), {"meta": {}})) == ""  # pyright: ignore[reportArgumentType]


def test_contiguous_tensors_of_known_sizes() -> None:
    cases = [((4, 8), (8, 1)), ((4, 8), (1, 4)), ((1, 8), (3, 1)), ((4, 1), (1, 7)), ((0, 8), (5, 3)), ((), ())]
    found = [known_contiguous(torch.empty_strided(size, stride)) for size, stride in cases]
    assert found == [True, False, True, True, True, True]


def test_nodes_are_put_in_the_order_of_their_graph() -> None:
    graph = fx.Graph()
    first, last = graph.placeholder("first"), graph.placeholder("last")
    with graph.inserting_before(last):
        between = graph.placeholder("between")
    assert in_order({last, between, first}) == [first, between, last]
