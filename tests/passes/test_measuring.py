"""Where the nodes that measure stand, and which tensors have none."""

from __future__ import annotations

import torch
from torch import Tensor

from fp8graph.ir.nodes import is_backward
from fp8graph.passes.observe.measuring import Measuring, Observed
from helpers import Weight, view_of

NAMES = (("layer", 0),)


def measured() -> tuple[Measuring, torch.fx.Graph]:
    def body(weight: Tensor, x: Tensor) -> Tensor:
        return (x @ weight.t()).relu()

    graph = view_of(Weight(body, 48, 32), torch.zeros(16, 32)).module.graph
    return Measuring(graph, Observed()), graph


def test_a_node_stands_behind_its_input_and_in_its_direction() -> None:
    measuring, graph = measured()
    weight, *_, tangent = graph.find_nodes(op="placeholder")
    relu = next(node for node in graph.nodes if "relu" in node.name)
    for node in (weight, relu, tangent):
        measuring.tensor(node, NAMES, node.name, like=relu)
    graph.lint()
    at = {what.tensor: node for node, what in measuring.tensors.items()}
    assert at[relu.name].prev is relu
    forward, backward = measuring.page(backward=False), measuring.page(backward=True)
    assert forward is not None
    assert backward is not None
    assert [what.tensor for what in forward[0].tensors] == [weight.name, relu.name]
    assert [what.tensor for what in backward[0].tensors] == [tangent.name]
    assert is_backward(backward[1][0])


def test_a_tensor_is_measured_once_for_each_name() -> None:
    measuring, graph = measured()
    relu = next(node for node in graph.nodes if "relu" in node.name)
    measuring.tensor(relu, NAMES, "output", like=relu)
    measuring.tensor(relu, (*NAMES, ("other", 0)), "output", like=relu)
    assert [what.names for what in measuring.tensors.values()] == [NAMES, (("other", 0),)]
    assert measuring.is_measured(("other", 0), "output")
    assert not measuring.is_measured(("other", 0), "input")


def test_vectors_integers_and_empty_tensors_have_no_statistics() -> None:
    """Vectors; whole numbers; tensors without elements."""
    graph = torch.fx.Graph()
    with torch._subclasses.FakeTensorMode():
        for shape, dtype in (((3,), torch.float32), ((3, 3), torch.int64), ((0, 3), torch.float32)):
            graph.placeholder(f"x{len(graph.nodes)}").meta["val"] = torch.empty(shape, dtype=dtype)
    measuring = Measuring(graph, Observed())
    for node in list(graph.nodes):
        measuring.tensor(node, NAMES, node.name, like=node)
    assert measuring.tensors == {}
    assert measuring.page(backward=False) is None
