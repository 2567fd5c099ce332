"""A student learns from a teacher without gradients, both compiled."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import fp8graph
from fp8graph.numerics import sqnr_db
from helpers import ALL, MLP, first_fast


def compiled(model: nn.Module, how: str) -> Any:
    options: dict[str, Any] = {"policy": ALL, "compiler": "eager"}
    return torch.compile(model, backend="fp8graph", options=options) if how == "by name" else compiled_in_place(model)


def compiled_in_place(model: nn.Module) -> nn.Module:
    return fp8graph.compile(model, ALL, compiler="eager")


@pytest.mark.parametrize("how", ["by name", "in place"])
def test_a_teacher_without_gradients(how: str) -> None:
    torch._dynamo.reset()
    originals = MLP(), MLP()
    x = torch.randn(16, 32)
    with torch.no_grad():
        target = originals[0](x)
    functional.mse_loss(originals[1](x), target).backward()
    expected = [p.grad for p in originals[1].parameters()]
    teacher, student = (compiled(copy.deepcopy(model), how) for model in originals)
    student.zero_grad()
    with torch.no_grad():
        target = teacher(x)
    functional.mse_loss(student(x), target).backward()
    for parameter, gradient in zip(student.parameters(), expected, strict=True):
        assert gradient is not None
        assert sqnr_db(parameter.grad, gradient) > 17
    reports = [fp8graph.backend_of(model).report for model in (teacher, student)]
    assert [{gemm.gemm for gemm in report.gemms} for report in reports] == [{"fprop"}, {"fprop", "dgrad", "wgrad"}]


class WithLoss(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mlp = MLP()

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        return functional.mse_loss(self.mlp(x), target)


def test_a_target_made_in_inference_mode() -> None:
    """Autograd keeps no such tensor, in eager either, and says so; its clone is like any other tensor."""
    torch._dynamo.reset()
    teacher, student = compiled_in_place(MLP()), compiled_in_place(MLP())
    x = torch.randn(16, 32)
    with torch.inference_mode():
        target = teacher(x)
    with pytest.raises(RuntimeError, match="Inference tensors cannot be saved for backward"):
        functional.mse_loss(student(x), target)
    functional.mse_loss(student(x), target.clone()).backward()
    whole = WithLoss()
    whole.mlp.load_state_dict(student.state_dict())
    compiled_in_place(whole)(x, target.clone()).backward()
    for parameter, same in zip(student.parameters(), whole.parameters(), strict=True):
        assert parameter.grad is not None
        assert same.grad is not None
        assert sqnr_db(parameter.grad, same.grad) > 40


@first_fast("recipe", ["tensorwise", "rowwise", "blockwise", "mxfp8"])
def test_a_model_and_its_reference_agree_if_both_are_compiled(recipe: str) -> None:
    """The loss of DPO begins at log 2 only if they do; a reference in high precision rounds otherwise."""
    torch._dynamo.reset()
    model, x = MLP(), torch.randn(16, 32)
    reference = copy.deepcopy(model)
    policy = fp8graph.Policy(default=recipe, min_speedup=0)
    fp8graph.compile(model, policy, compiler="eager")
    with torch.no_grad():
        assert not torch.equal(model(x), reference(x))
        fp8graph.compile(reference, policy, compiler="eager")
        target = reference(x)
    assert torch.equal(model(x), target)
