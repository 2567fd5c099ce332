"""The inputs that a graph takes beside Dynamo's are foreseen, and it is traced once."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from fp8graph import DelayedScaling, Float8CurrentScaling, Policy, UnsupportedRecipeError
from fp8graph.backend import compiling
from fp8graph.recipes import OperandName, Quantizer
from helpers import MLP, Counting, counted_passes, eager_backend, first_fast, same_bits, step


@first_fast("recipe", ["tensorwise", "delayed", "rowwise", "blockwise", "nvfp4"])
@first_fast("training", [True, False])
def test_a_graph_is_traced_once(recipe: str, training: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The inputs beside Dynamo's are foreseen, to the tensor."""
    runs = counted_passes(monkeypatch)
    model, x = MLP(128, 256), torch.randn(16, 128, requires_grad=training)
    backend = Counting(Policy(default=recipe, min_speedup=0))
    with torch.set_grad_enabled(training):
        torch.compile(model, backend=backend)(x)
    assert len(runs) == 1
    assert all(t.numel() for t in backend.generated[0]["inputs"] if isinstance(t, Tensor))


@pytest.mark.parametrize("module", [MLP(128, 256), nn.Linear(128, 256)])
def test_gradients_are_foreseen(module: nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    """One FP32 gradient for each weight, whatever it is multiplied as one with; none without gradients."""
    runs = counted_passes(monkeypatch)
    backend = Counting(Policy(default=DelayedScaling(initial_scale="one"), min_speedup=0), accumulate_wgrad=True)
    for training in (True, False):
        with torch.set_grad_enabled(training):
            torch.compile(module, backend=backend)(torch.randn(16, 128, requires_grad=training))
    assert len(runs) == 2
    assert all(t.numel() for graph in backend.generated for t in graph["inputs"] if isinstance(t, Tensor))
    assert "addend" in backend.report.graphs[0].after


@first_fast("foreseen", [0, 1, 40])
@first_fast("recipe", ["tensorwise", "delayed"])
def test_foreseeing_wrongly_changes_no_number(recipe: str, foreseen: int, monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = MLP(), torch.randn(16, 32, requires_grad=True)
    results: list[list[Tensor]] = []
    for guess in (None, foreseen):
        torch._dynamo.reset()
        if guess is not None:
            monkeypatch.setattr(compiling, "spare_inputs", lambda *_, guess=guess, **__: guess)
        runs = counted_passes(monkeypatch)
        run = torch.compile(model, backend=eager_backend(Policy(default=recipe), cache_weights="update"))
        results.append([t for _ in range(3) for t in step(run, x, parameters=model.parameters())])
        assert len(runs) >= 1 + (guess is not None and guess < 5)
    assert same_bits(*results)


class _Named(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(64, 64))

    def forward(self, x: Tensor) -> Tensor:
        return functional.linear(input=x, weight=self.weight)


@pytest.mark.parametrize("recipe", ["tensorwise", "high_precision"])
def test_arguments_may_be_given_by_name(recipe: str, monkeypatch: pytest.MonkeyPatch) -> None:
    runs = counted_passes(monkeypatch)
    model, backend = _Named(), eager_backend(Policy(default=recipe, min_speedup=0), cache_weights=True)
    with torch.no_grad():
        torch.compile(model, backend=backend)(torch.randn(16, 64))
    assert len(runs) == 1
    assert backend.weights.bytes == (64 * 64 + 4 if recipe == "tensorwise" else 0)


@dataclass(frozen=True, kw_only=True)
class _ForInference(Float8CurrentScaling):
    name: ClassVar[str] = "inference"

    def quantizer(self, operand: OperandName) -> Quantizer:
        if operand == "grad_output":
            raise UnsupportedRecipeError("it quantizes no gradients")
        return super().quantizer(operand)


def test_a_recipe_may_refuse_operands_that_no_pass_quantizes() -> None:
    """An estimate asks for all of them."""
    backend = eager_backend(Policy(default=_ForInference(), min_speedup=0), cache_weights=True)
    with torch.no_grad():
        torch.compile(MLP(), backend=backend)(torch.randn(16, 32))
    assert {gemm.recipe for gemm in backend.report.gemms} == {"inference"}
