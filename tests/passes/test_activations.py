"""activations: functions between GEMMs that backward can compute again, and the text of every reason why not."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch.utils.checkpoint import checkpoint

from fp8graph.ir import ops
from fp8graph.ir.nodes import aten, nodes
from fp8graph.passes.observe.measuring import tensor_statistics
from fp8graph.passes.save_for_backward import activation_functions
from helpers import traced, view_of


def functions(body: Any) -> list[tuple[list[str], str]]:
    """Names of the nodes of each function, and its refusal, in ``body`` of two GEMM results [16, 64]."""
    graph = traced(lambda x, w, v: body(x @ w, x @ v), (16, 32), (32, 64), (32, 64))
    return [([node.name for node in found], why) for found, why in activation_functions(gemms_of(graph))]


def gemms_of(graph: fx.Graph) -> list[fx.Node]:
    return list(nodes(graph, (aten.mm.default,)))


def quantized(x: Tensor) -> Any:
    return ops.quantize(x, torch.float8_e4m3fn, False, 0.0, [1, 16], [])


def test_a_function_of_two_results() -> None:
    """Casts and views are parts of it; the GEMMs come first."""
    found = functions(lambda g, u: quantized((g.double().sigmoid().float() * u).view(32, 32)))
    assert found == [(["mm", "mm_1", "convert_element_type", "sigmoid", "convert_element_type_1", "mul", "view"], "")]


def test_functions_of_each_result_are_two() -> None:
    found = functions(lambda g, u: [*quantized(g.relu()), *quantized(u.sin())])
    assert found == [(["mm", "relu"], ""), (["mm_1", "sin"], "")]


def test_a_result_that_is_quantized_unchanged_is_not_a_function() -> None:
    assert functions(lambda g, u: [*quantized(g), *quantized(u)]) == []


def test_statistics_do_not_count_as_readers() -> None:
    """On observed steps, statistics of a function's values change nothing about it."""
    found = functions(lambda g, u: [*quantized(g.relu()), tensor_statistics(g, 32), tensor_statistics(u, 32)])
    assert found == [(["mm", "relu"], "")]


def test_one_reader_that_is_not_elementwise_refuses_all() -> None:
    ((names, refusal),) = functions(lambda g, u: [*quantized(g * u), u.sum()])
    assert names == ["mm", "mm_1", "mul"]
    assert refusal.startswith("aten.sum reads it or a function of it")


def x() -> Tensor:
    return torch.randn(16, 32, requires_grad=True)


FP8: dict[str, Any] = {"save": "memory", "save_activations_in_fp8": True}


class Activated(nn.Module):
    def __init__(self, body: Any) -> None:
        super().__init__()
        self.up, self.down, self.body = nn.Linear(32, 64, bias=False), nn.Linear(64, 32, bias=False), body

    def forward(self, x: Tensor) -> Tensor:
        return self.body(self, x)


ACTIVATIONS = [
    pytest.param(
        lambda m, x: m.down(nn.functional.silu(m.up(x)) * x.cumsum(-1)[:, :1]),
        r"the activation function also reads the result of aten\.cumsum: backward can only compute it again",
        id="reads something else",
    ),
    pytest.param(
        lambda m, x: m.down(nn.functional.silu(m.up(x)) * x[:, :1]),
        "the activation function also reads an input of the graph: backward can only compute it again from results",
        id="reads an input",
    ),
    pytest.param(
        lambda m, x: m.down(nn.functional.silu(m.up(x)).softmax(-1)),
        r"aten\.\w+ reads it or a function of it: only inputs of elementwise functions before an FP8 GEMM",
        id="not elementwise",
    ),
    pytest.param(
        lambda m, x: nn.functional.silu(m.up(x)), "its result, or a function of it, leaves the graph", id="leaves"
    ),
    pytest.param(
        lambda m, x: checkpoint(lambda y: m.down(nn.functional.silu(m.up(y))), x, use_reentrant=False),
        "torch.utils.checkpoint runs its forward again anyway",
        id="checkpoint",
    ),
]


@pytest.mark.parametrize(("body", "reason"), ACTIVATIONS)
def test_activations_that_are_not_saved_in_fp8(body: Any, reason: str) -> None:
    view = view_of(Activated(body), x(), **FP8)
    (found,) = [refusal for refusal in view.refusals if refusal.what == "FP8 activation"]
    assert found.fqn == "up"
    assert re.search(reason, found.reason)
