"""share_sigmoid: SiLU and its backward share a function; numbers differ by one unit in the last place."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

from fp8graph.ir.nodes import NAMES_KEY, PASS_KEY, aten, nodes
from fp8graph.numerics.hints import LOGISTIC
from fp8graph.passes.share_sigmoid import share_sigmoid
from helpers import brief, graph_text, in_one_test, traced


def silu(x: Tensor) -> Tensor:
    return x / (torch.exp(-x) + 1)


def silu_and_backward(x: Tensor, dy: Tensor) -> tuple[Tensor, Tensor]:
    s = torch.sigmoid(x)
    return silu(x), dy * s * (1 + x * (1 - s))


def shared(function: Any, *shapes: tuple[int, ...], rewritten: bool = True) -> fx.Graph:
    graph = traced(function, *shapes)
    if rewritten:
        next(iter(nodes(graph, [node.target for node in graph.nodes]))).meta[PASS_KEY] = "quantize"
    share_sigmoid(graph)
    return graph


def count(graph: fx.Graph, *targets: Any) -> list[int]:
    return [len(list(nodes(graph, (target,)))) for target in targets]


FUNCTIONS = (aten.exp.default, aten.sigmoid.default, aten.div.Tensor, LOGISTIC)


@pytest.mark.parametrize(("function", "inputs"), [(silu, 1), (silu_and_backward, 2)])
def test_one_function_is_computed(function: Any, inputs: int) -> None:
    graph = shared(function, *[(8, 16)] * inputs)
    assert count(graph, *FUNCTIONS) == [0, 0, 0, 1]
    (node,) = nodes(graph, (LOGISTIC,))
    assert set(node.meta[NAMES_KEY]) == {"neg", "exp", "add", *(["sigmoid"] if inputs == 2 else [])}


def test_forward_and_backward_compute_the_same_bits() -> None:
    """Backward computes SwiGLU again, from a graph that has the sigmoid, too."""
    x, dy = torch.randn(256, 256) * 8, torch.randn(256, 256)
    forward = fx.GraphModule(nn.Module(), shared(silu, (256, 256)))(x)
    backward, _ = fx.GraphModule(nn.Module(), shared(silu_and_backward, (256, 256), (256, 256)))(x, dy)
    assert torch.equal(forward, backward)


def test_numbers_differ_by_a_unit_in_the_last_place() -> None:
    """Where the sigmoid is no subnormal number: for x > -87."""
    x = torch.cat([torch.linspace(-120, 120, 2**16), torch.tensor([0.0, torch.inf, -torch.inf, torch.nan])])
    product = fx.GraphModule(nn.Module(), shared(silu, (len(x),)))(x)
    quotient = silu(x)
    assert torch.equal(product.isnan(), quotient.isnan())
    distance = (product.view(torch.int32) - quotient.view(torch.int32)).abs()
    assert distance[quotient.isfinite() & (x > -87)].max() == 1
    assert (product - quotient).abs()[x <= -87].nan_to_num().max() < 2.0**-140


@in_one_test(
    "function",
    [
        pytest.param(lambda x: x / (torch.exp(-x) + 2), id="another sum"),
        pytest.param(lambda x: x / (torch.exp(-(x * 2)) + 1), id="another exponent"),
        pytest.param(lambda x: (x * 2) / (torch.exp(-x) + 1), id="another numerator"),
        pytest.param(lambda x: 1 / (torch.exp(-x) + 1), id="a sigmoid"),
        pytest.param(lambda x: silu(x.double()), id="in FP64"),
        pytest.param(lambda x: silu(x.int()), id="of integers"),
        pytest.param(lambda x: torch.sigmoid(x), id="Inductor's sigmoid"),
    ],
)
def test_other_functions_stay(function: Any) -> None:
    graph = traced(function, (8, 16))
    before = brief(graph_text(graph))
    next(iter(nodes(graph, [node.target for node in graph.nodes]))).meta[PASS_KEY] = "quantize"
    share_sigmoid(graph)
    assert brief(graph_text(graph)) == before


def test_a_graph_without_fp8_is_left_as_it_is() -> None:
    assert count(shared(silu, (8, 16), rewritten=False), *FUNCTIONS) == [1, 0, 1, 0]
