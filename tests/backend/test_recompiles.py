"""Dynamo compiles again as often as without us. (The recompile limit: tests/report/test_report.py.)"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters

import fp8graph
from helpers import ALL, NONE, eager_backend, first_slow, step
from tiny_models import causal_lm

LENGTHS = (2, 3, 4, 5, 7, 8, 9, 11, 13, 16, 17, 23, 31, 32, 33, 47, 48, 64, 65, 100)


@first_slow("dynamic", [None, True])
@first_slow("training", [True, False])
def test_twenty_sequence_lengths_compile_twice(dynamic: bool | None, training: bool) -> None:
    """Once for the first and once for all others; Dynamo alone does the same."""
    torch.manual_seed(0)
    model = causal_lm("Llama")(1).bfloat16().train(training)
    backend = eager_backend(None, cache_weights="update")
    compiled: Any = torch.compile(model, backend=backend, dynamic=dynamic)
    counters.clear()
    compiled_so_far: list[int] = []
    for length in LENGTHS:
        ids = torch.randint(0, 256, (2, length))
        with torch.set_grad_enabled(training):
            loss = compiled(input_ids=ids, labels=ids).loss
            if training:
                loss.backward()
        with torch.no_grad():
            expected = model(input_ids=ids, labels=ids).loss
        assert abs(loss.item() / expected.item() - 1) < 0.002, length  # 0.0005 measured
        compiled_so_far.append(counters["stats"]["unique_graphs"])
    assert compiled_so_far == [1] + [2] * 19
    assert len(backend.report.graphs) == 2
    assert len(counters["graph_break"]) == 0
    assert backend.weights.quantized == 7  # a changed length makes no weight stale


class Scaled(nn.Module):
    """Reads two floats that are attributes: with ``dynamic=True`` they are inputs of the graph."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(32, 32)
        self.factor, self.rate = 0.5, 0.1

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.dropout(self.linear(x) * self.factor, self.rate, training=False)


@pytest.mark.parametrize("cache_weights", [True, False])
def test_dynamic_floats(cache_weights: bool) -> None:
    """dropout looks at its rate while it is traced: a graph that is traced twice must know it twice."""
    model, x = Scaled(), torch.randn(4, 32, requires_grad=True)
    backend = eager_backend(ALL, cache_weights=cache_weights)
    compiled = torch.compile(model, backend=backend, dynamic=True, fullgraph=True)
    for factor in (0.5, 0.25, 3.0):
        model.factor = factor
        expected = step(model, x, parameters=model.parameters())
        got = step(compiled, x, parameters=model.parameters())
        assert all(fp8graph.numerics.sqnr_db(e, g) > 20 for e, g in zip(expected, got, strict=True)), factor
    assert len(backend.report.graphs) == 1
    backend.set_policy(NONE)  # a variant of the graph, compiled at call time
    model.factor = 7.0
    assert torch.allclose(model(x), compiled(x))
    assert len(backend.report.graphs) == 2
