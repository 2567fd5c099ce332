"""model_backends: models compiled by name with equal options have a backend each, and share compiled code."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import fp8graph
from fp8graph.backend import compiled_graph
from helpers import MLP, first_fast, same_bits

OPTIONS: dict[str, Any] = {"compiler": "eager", "recipe": "delayed"}


def by_name(model: nn.Module, **options: Any) -> Any:
    return torch.compile(model, backend="fp8graph", options={**OPTIONS, **options})


def train(compiled: Any, x: torch.Tensor, steps: int = 2) -> None:
    for _ in range(steps):
        compiled(x).square().mean().backward()


def state_of(compiled: Any) -> dict[str, torch.Tensor]:
    return dict(fp8graph.backend_of(compiled).state_dict())


@first_fast("asked", ["first", "between", "last"])
def test_two_models_of_one_class_have_states_of_their_own(asked: str) -> None:
    torch.manual_seed(0)
    x, models = torch.randn(16, 32), [MLP(), MLP()]
    expected = list[dict[str, torch.Tensor]]()
    for model in copy.deepcopy(models):
        backend = fp8graph.Backend(**OPTIONS)
        train(torch.compile(model, backend=backend), x)
        expected.append(dict(backend.state_dict()))
    torch._dynamo.reset()
    compiled = [by_name(model) for model in models]
    if asked == "first":
        assert len({fp8graph.backend_of(one) for one in compiled}) == 2
    for one in compiled:
        train(one, x)
        if asked == "between":
            assert len(state_of(one)) == len(expected[0])
    for one, state in zip(compiled, expected, strict=True):
        found = state_of(one)
        assert found.keys() == state.keys()
        assert same_bits(found.values(), state.values())
        assert [gemm.fqn for gemm in fp8graph.backend_of(one).report.gemms if gemm.gemm == "fprop"] == [
            "gate", "up", "down",
        ]  # fmt: skip


def test_models_share_compiled_code(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled = list[object]()
    compile_variant = compiled_graph.compile_variant
    monkeypatch.setattr(
        compiled_graph, "compile_variant", lambda *args: compiled.append(args[0]) or compile_variant(*args)
    )
    x = torch.randn(16, 32)
    for model in (MLP(), MLP()):
        train(by_name(model), x)
    assert len(compiled) == 2  # for the first step, and for all others


def test_a_generator_and_a_discriminator_have_reports_of_their_own() -> None:
    generator, discriminator = nn.Sequential(nn.Linear(32, 64), nn.ReLU()), nn.Sequential(nn.Linear(64, 16))
    fake = by_name(generator)
    judge = by_name(discriminator)
    judge(fake(torch.randn(16, 32))).sum().backward()
    for one, names in ((fake, {"0"}), (judge, {"0"})):
        report = fp8graph.backend_of(one).report
        assert {gemm.fqn for gemm in report.gemms} == names
        assert len(report.graphs) == 1
    fp8graph.backend_of(judge).set_policy(fp8graph.Policy(default=None))
    judge(fake(torch.randn(16, 32)))
    assert fp8graph.backend_of(fake).policy.default == "delayed"


def test_layers_compiled_one_by_one_are_one_model() -> None:
    model = nn.Sequential(*(MLP(32, 64) for _ in range(4)))
    for layer in model:
        layer.compile(backend="fp8graph", options=OPTIONS)
    model(torch.randn(16, 32)).sum().backward()
    backend = fp8graph.backend_of(model)
    assert len({fp8graph.backend_of(layer) for layer in model} | {backend}) == 1
    backend.bind(model)
    model(torch.randn(16, 32)).sum().backward()
    assert {key.partition(".")[0] for key in backend.state_dict() if "|" in key} == {"0", "1", "2", "3"}


def test_layers_called_one_by_one_are_models() -> None:
    layers = nn.ModuleList(MLP() for _ in range(2))
    for layer in layers:
        layer.compile(backend="fp8graph", options=OPTIONS)
    for layer in layers:
        layer(torch.randn(16, 32))
    with pytest.raises(fp8graph.ConfigError, match="ModuleList holds 2 models that were compiled by name and called"):
        fp8graph.backend_of(layers)


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointed_layers_belong_to_their_model(reentrant: bool) -> None:
    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(MLP(32, 64) for _ in range(2))

        def forward(self, x: torch.Tensor) -> Any:
            for layer in self.layers:
                x = checkpoint(layer, x, use_reentrant=reentrant)
            return x

    model = Checkpointed()
    for layer in model.layers:
        layer.compile(backend="fp8graph", options=OPTIONS)
    x = torch.randn(16, 32, requires_grad=True)
    model(x).sum().backward()
    backend = fp8graph.backend_of(model)
    assert all(fp8graph.backend_of(layer) is backend for layer in model.layers)
    assert any(gemm.gemm == "wgrad" and gemm.recipe for gemm in backend.report.gemms)


def test_functions_share_one() -> None:
    weight = nn.Parameter(torch.randn(32, 32))

    def product(x: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(x, weight)

    compiled = torch.compile(product, backend="fp8graph", options=OPTIONS)
    compiled(torch.randn(16, 32))
    assert len(fp8graph.backend_of(compiled).report.gemms) > 0
    other = torch.compile(lambda x: product(x) + 1, backend="fp8graph", options=OPTIONS)
    assert fp8graph.backend_of(other) is fp8graph.backend_of(compiled)
