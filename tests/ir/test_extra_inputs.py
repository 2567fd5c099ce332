"""Spare inputs: taken in order, with the shapes that are asked for; too few are all left as they are."""

from __future__ import annotations

import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensorMode

from fp8graph.compat import aot
from fp8graph.ir.extra_inputs import SpareInputs
from fp8graph.ir.nodes import TAKEN_KEY
from fp8graph.passes.accumulate_wgrad import Gradient

MODE = FakeTensorMode()


def graph_with(inputs: int) -> fx.Graph:
    graph = fx.Graph()
    for position in range(inputs):
        node = graph.placeholder(f"p{position}")
        node.meta |= {"val": MODE.from_tensor(torch.empty(0)), "tensor_meta": "of a spare one"}
        aot.set_input_position(node, position)
    return graph


def fake(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return MODE.from_tensor(torch.empty(shape, dtype=dtype))


def test_each_gets_the_value_that_is_asked_for() -> None:
    graph, spares = graph_with(4), SpareInputs(indices=(1, 2, 3))
    values = [fake(2, 3, dtype=torch.float8_e4m3fn), fake()]
    taken = spares.take(graph, values)
    assert taken is not None
    assert [node.name for node in taken] == ["p1", "p2"]
    assert [node.meta["val"] for node in taken] == values
    assert all(node.meta[TAKEN_KEY] and "tensor_meta" not in node.meta for node in taken)
    assert TAKEN_KEY not in graph.find_nodes(op="placeholder")[3].meta


def test_who_asks_next_gets_the_next() -> None:
    graph, spares = graph_with(3), SpareInputs(indices=(0, 2))
    first, second = spares.take(graph, [fake(1)]), spares.take(graph, [fake(2)])
    assert [node.name for node in (first or []) + (second or [])] == ["p0", "p2"]
    assert spares.take(graph, []) == []


def test_too_few_are_left_as_they_are_and_what_is_wanted_is_counted() -> None:
    graph, spares = graph_with(2), SpareInputs(indices=(0, 1))
    assert spares.take(graph, [fake(1)]) is not None
    assert spares.take(graph, [fake(1), fake(1)]) is None
    assert spares.wanted == 3
    assert TAKEN_KEY not in graph.find_nodes(op="placeholder")[1].meta


def test_the_stand_in_of_a_gradient() -> None:
    gradient = Gradient(parameter=3, shape=(4, 8), device=torch.device("cpu"))
    with MODE:
        (made,) = gradient.stand_ins()
    assert (made.shape, made.dtype) == ((4, 8), torch.float32)
