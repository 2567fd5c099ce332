"""Code that runs outside graphs, in eager and in high precision: the report says so."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fp8graph
from helpers import ALL, MLP, eager_backend, first_fast


class Model(nn.Module):
    """Two linears around an MLP, and what no GEMM reads."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.first, self.mlp, self.last = nn.Embedding(4, 32), nn.Linear(32, 32), MLP(), nn.Linear(32, 32)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.middle(self.first(x)))

    def middle(self, x: Tensor) -> Tensor:
        return self.mlp(x)


class Disabled(Model):
    @torch.compiler.disable
    def middle(self, x: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return self.mlp(x)


class Routed(Model):
    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(32, 1)

    def middle(self, x: Tensor) -> Tensor:
        for _ in range(2):
            if self.router(x).sum() > -1e9:  # a branch on data in a loop: Dynamo gives the frame up
                x = self.mlp(x)
        return x


class Hooked(Model):
    """A full backward hook on one layer makes a graph break at its call."""

    def __init__(self) -> None:
        super().__init__()
        self.mlp.up.register_full_backward_hook(lambda *_: None)


@first_fast(
    ("model", "regions", "layers"),
    [
        pytest.param(Model, None, [], id="none"),
        pytest.param(Model, ["MLP"], [], id="block by block"),
        pytest.param(Disabled, None, ["mlp.gate", "mlp.up", "mlp.down"], id="disabled"),
        pytest.param(Hooked, None, ["mlp.up"], id="hook"),
        pytest.param(Routed, None, ["router"], id="branch"),
    ],
)
@pytest.mark.filterwarnings("ignore:Full backward hook is firing:UserWarning")
def test_layers_that_are_in_no_graph(model: type[Model], regions: list[str] | None, layers: list[str]) -> None:
    compiled = fp8graph.compile(model(), ALL, regions=regions, compiler="eager")
    backend = fp8graph.backend_of(compiled)
    assert "in no graph" not in str(backend.report)  # nothing was called yet
    compiled(torch.randn(16, 32)).sum().backward()
    report = backend.report
    assert report.in_no_graph == layers
    assert report.to_dict()["in_no_graph"] == layers
    assert (f"in no graph (not called yet, or run in eager): {', '.join(layers)}" in str(report)) == bool(layers)
    torch._dynamo.reset()
    assert backend.report.in_no_graph == layers


def test_nothing_is_said_of_a_model_that_was_bound_after_its_graphs_were_made() -> None:
    model, backend = Disabled(), eager_backend()
    model.compile(backend=backend)
    model(torch.randn(16, 32))
    backend.bind(model)
    assert backend.report.in_no_graph == []


def test_fp8_weights_in_no_graph_are_named() -> None:
    class Stored(Model):
        def __init__(self) -> None:
            super().__init__()
            self.first.weight = nn.Parameter(self.first.weight.detach().to(torch.float8_e4m3fn), requires_grad=False)

        @torch.compiler.disable
        def project(self, x: Tensor) -> Tensor:  # a kernel of a library
            return nn.functional.linear(x, self.first.weight.to(x.dtype))

        def forward(self, x: Tensor) -> Tensor:
            return self.last(self.mlp(self.project(x)))  # pyright: ignore

    model: Any = Stored()
    backend = eager_backend(ALL)
    backend.bind(model)
    torch.compile(model, backend=backend)(torch.randn(4, 32))
    assert backend.report.fp8_in_no_graph == backend.report.to_dict()["fp8_in_no_graph"] == ["first"]
    line = "of these, with FP8 weights: first. Were they called, compile the model with fp8graph.compile, or call"
    assert line in str(backend.report)
