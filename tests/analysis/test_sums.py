"""sums: terms that reach one tensor by views, casts and additions alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, fx

from fp8graph.analysis.siblings import are_summed, take_out_of_sum
from helpers import in_one_test, traced

SIN = torch.ops.aten.sin.default


def graph_and_terms(body: Any) -> tuple[fx.Graph, list[fx.Node]]:
    """``body`` of the sines of three inputs, which are the terms."""
    graph = traced(lambda *xs: body(*(x.sin() for x in xs)), (4, 6), (4, 6), (4, 6))
    return graph, [node for node in graph.nodes if node.target is SIN]


SUMMED = [
    pytest.param(lambda a, b, c: a + b + c, id="one after the other"),
    pytest.param(lambda a, b, c: a + (c + b), id="in another order"),
    pytest.param(lambda a, b, c: a.view(24) + b.view(24) + c.view(24), id="viewed alike"),
    pytest.param(lambda a, b, c: a.double() + b.double() + c.double(), id="cast alike"),
]
NOT = [
    pytest.param(lambda a, b, c: [a + b, c], id="one is apart"),
    pytest.param(lambda a, b, c: (a + b) * 2 + c, id="something happens on the way"),
    pytest.param(lambda a, b, c: [a + b + c, a], id="one is read by another"),
    pytest.param(lambda a, b, c: a.view(24) + b.view(24) + c.t().reshape(24), id="one is moved"),
    pytest.param(lambda a, b, c: a + b + c.view(2, 2, 6)[0, 0], id="one is broadcast"),
    pytest.param(lambda a, b, c: a + b - c, id="one is taken away"),
]


@in_one_test("body", SUMMED)
def test_terms_of_one_sum(body: Any) -> None:
    assert are_summed(graph_and_terms(body)[1])


@in_one_test("body", NOT)
def test_terms_of_no_one_sum(body: Any) -> None:
    assert not are_summed(graph_and_terms(body)[1])


def test_no_terms_are_a_sum() -> None:
    assert are_summed([])


@pytest.mark.parametrize("which", [0, 1, 2])
def test_the_sum_without_a_term(which: int) -> None:
    graph, terms = graph_and_terms(lambda a, b, c: [a.view(24) + b.view(24) + c.view(24)])
    take_out_of_sum(terms[which])
    graph.lint()
    inputs: list[Tensor] = [torch.randn(4, 6) for _ in range(3)]
    (got,) = fx.GraphModule(torch.nn.Module(), graph)(*inputs)
    first, second = (x.sin().view(24) for i, x in enumerate(inputs) if i != which)
    assert torch.equal(got, first + second)
