"""store_once: expensive results that large loops read are stored, and no number changes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, fx

from fp8graph.ir.nodes import NAMES_KEY, PASS_KEY, nodes
from fp8graph.numerics.hints import MATERIALIZE
from fp8graph.passes.store_once import store_once
from helpers import in_one_test, same_bits, traced

Q, ANGLES = (64, 1024, 128), (1024, 128)  # 8 million numbers, and 131 thousand


def stored(function: Any, *shapes: tuple[int, ...], rewritten: bool = True) -> tuple[list[str], fx.Graph]:
    """The names of the results that are stored in the graph of ``function``."""
    graph = traced(function, *shapes)
    if rewritten:
        next(iter(nodes(graph, [node.target for node in graph.nodes]))).meta[PASS_KEY] = "quantize"
    store_once(graph)
    return [str(node.args[0]) for node in nodes(graph, (MATERIALIZE,))], graph


@pytest.mark.parametrize(
    "function",
    [
        pytest.param(lambda q, angles: q * angles.cos(), id="broadcast"),
        pytest.param(lambda q, angles: q * (angles.cos() * 2).bfloat16().unsqueeze(0), id="scaled, cast and viewed"),
        pytest.param(lambda q, angles: q * torch.cat([angles[:, :64].cos(), angles[:, 64:]], -1), id="in a part"),
    ],
)
def test_a_cosine_that_a_large_product_reads_is_stored(function: Any) -> None:
    names, graph = stored(function, Q, ANGLES)
    assert names == ["cos"]
    (node,) = nodes(graph, (MATERIALIZE,))
    assert node.meta["val"].dtype == torch.float32  # before it is rounded, which Inductor would not do
    assert node.meta[NAMES_KEY] == ("cos",)


def test_no_number_changes() -> None:
    def rotated(q: Tensor, angles: Tensor) -> Tensor:
        return q * angles.cos() + q.flip(-1) * angles.sin()

    names, graph = stored(rotated, Q, ANGLES)
    assert names == ["cos", "sin"]
    args = torch.randn(Q), torch.randn(ANGLES)
    results: Any = fx.GraphModule(torch.nn.Module(), graph)(*args)
    assert same_bits([results[0] if isinstance(results, tuple) else results], [rotated(*args)])


@in_one_test(
    ("function", "shapes"),
    [
        pytest.param(lambda q, angles: q * angles.cos(), (Q[1:], ANGLES), id="read once by each"),
        pytest.param(lambda q, angles: q * angles.cos(), ((64, 1, 128), (1, 128)), id="a decoding step"),
        pytest.param(lambda q, angles: q * angles.cos(), ((4, 8192, 128), (8192, 128)), id="read four times"),
        pytest.param(lambda q, angles: q + (angles.cos() @ angles.t()).sum(), (Q, ANGLES), id="stored by a GEMM"),
        pytest.param(lambda q, angles: q * angles.exp(), (Q, ANGLES), id="a few instructions"),
        pytest.param(lambda q, angles: q * angles.bfloat16().cos(), (Q, ANGLES), id="it would be rounded"),
    ],
)
def test_results_that_are_not_stored(function: Any, shapes: Any) -> None:
    assert stored(function, *shapes)[0] == []


def test_a_graph_without_fp8_is_left_as_it_is() -> None:
    assert stored(lambda q, angles: q * angles.cos(), Q, ANGLES, rewritten=False)[0] == []
