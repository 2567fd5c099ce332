"""linears: which quantized linears can be one, and the text of every reason why not."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fp8graph
from fp8graph import Backend, Policy, Rule
from fp8graph.passes.fuse_linears import FusableSite, fusion_key, linears_of, why_not_fused
from gathers import gather, report_of, two_ranks
from helpers import ALL, Two, Weight, passed, view_of


def x(*shape: int) -> Tensor:
    return torch.randn(shape or (16, 32), requires_grad=True)


def linears(module: nn.Module, *args: Tensor, **known: Any) -> list[FusableSite]:
    graph, compilation = passed(module, *(args or (x(),)), last="gather_in_fp8", **known)
    return list(linears_of(graph, compilation))


@pytest.mark.slow
def test_linears_of_one_kind_have_equal_keys_and_one_input() -> None:
    gate, up = linears(Two(48))
    found = [(linear.site.fqn, linear.size, linear.refusal) for linear in (gate, up)]
    assert found == [("gate", 64, ""), ("up", 48, "")]
    assert list(gate.gemms) == list(up.gemms)
    assert set(gate.gemms) == {"fprop", "dgrad", "wgrad"}
    assert gate.x == up.x
    assert fusion_key(gate) == fusion_key(up)
    assert set(gate.quantized()) == {("fprop", "b"), ("dgrad", "a"), ("dgrad", "b"), ("wgrad", "a")}  # all but x


def test_a_product_of_activations_is_not_a_linear() -> None:
    everything = Policy([Rule("*", "tensorwise", op="*")])
    assert linears(Weight(lambda w, a: w.sum() * (a @ a.t()), 48, 32), policy=everything) == []


@pytest.mark.skipif(not torch.distributed.is_available(), reason="torch without torch.distributed")
def test_weights_that_are_gathered_in_fp8() -> None:
    """Each comes from the ranks' shards as it is: there is no quantize node to join."""

    class Gathered(nn.Linear):
        def forward(self, input: Tensor) -> Tensor:
            return nn.functional.linear(input, gather(self.weight, 0))

    module = Two()
    module.gate, module.up = Gathered(32, 64, bias=False), Gathered(32, 64, bias=False)
    with two_ranks():
        refusals = report_of(module, x()).refusals
    assert [(refusal.what, refusal.reason) for refusal in refusals] == [
        ("one GEMM", "its weight or gradient is gathered in FP8")
    ] * 2


def test_gemms_in_another_order() -> None:
    """Of a module whose backward somebody wrote by hand."""
    gate, up = linears(Two())
    turned = dataclasses.replace(up, gemms=dict(reversed(up.gemms.items())))
    assert why_not_fused(turned, [gate, turned]) == "it differs from gate in the order in which backward runs its GEMMs"


def test_nothing_is_said_of_linears_that_are_refused_themselves() -> None:
    gate, up = linears(Two(72))
    assert up.refusal == "its output size 72 is not a multiple of 16: pad it"
    assert why_not_fused(gate, [gate, up]) == "the others that read its input cannot be joined with it"


def frozen() -> nn.Module:
    module = Two()
    module.up.requires_grad_(False)
    return module


class Left(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up = nn.Parameter(torch.randn(64, 32)), nn.Parameter(torch.randn(64, 32))

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([x @ self.gate.t(), (self.up @ x.t()).t()], dim=-1)


class Region(Two):
    def forward(self, x: Tensor) -> Tensor:
        gate = self.gate(x)
        with fp8graph.autocast(recipe="tensorwise"):
            return torch.cat([gate, self.up(x)], dim=-1)


class Tied(Two):
    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        return y + nn.functional.linear(x * 2, self.up.weight).sum()


class Multiplied(Two):
    """dx of ``up`` is scaled before it is added."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([self.gate(x), self.up(Third.apply(x))], dim=-1)


class NoGrad(Two):
    def forward(self, x: Tensor) -> Tensor:
        gate = self.gate(x)
        with torch.no_grad():
            return torch.cat([gate, self.up(x)], dim=-1)


class Third(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return grads[0] * 3


APART = [
    pytest.param(Two(72), ALL, "its output size 72 is not a multiple of 16: pad it", id="size"),
    pytest.param(Two(bias=True).bfloat16(), ALL, "it differs from gate in having a bias", id="bias"),
    pytest.param(
        frozen(),
        ALL,
        "it differs from gate in which GEMMs run in FP8, or at all (a frozen weight has no wgrad)",
        id="frozen",
    ),
    pytest.param(
        Two(),
        Policy([Rule("up", "delayed")], default="tensorwise", min_speedup=0),
        "it differs from gate in recipe, dtype or layouts",
        id="recipe",
    ),
    pytest.param(Region(), ALL, "it differs from gate in autocast region", id="region"),
    pytest.param(Left(), ALL, "its weight is on the left: write x @ w.T in place of w @ x", id="weight on the left"),
    pytest.param(
        Tied(), ALL, "another matmul reads its quantized weight or gradient, too (tied weights?)", id="tied weights"
    ),
    pytest.param(
        NoGrad(),
        ALL,
        "it differs from gate in where it runs (torch.no_grad, checkpoint)",
        id="no_grad",
    ),
    pytest.param(
        Multiplied(),
        ALL,
        "backward does more with the gradients that it and gate give their input than add them up",
        id="gradients",
    ),
]


@pytest.mark.parametrize(("module", "policy", "reason"), APART)
def test_linears_that_are_not_joined(module: nn.Module, policy: Policy, reason: str) -> None:
    dtype = next(module.parameters()).dtype
    view = view_of(module, torch.randn(16, 32, dtype=dtype, requires_grad=True), policy=policy)
    found = {refusal.fqn: refusal.reason for refusal in view.refusals if refusal.what == "one GEMM"}
    assert found["up"] == reason
    assert "gate" in found
    assert not any("one GEMM with" in gemm.reason for gemm in view.gemms)


def test_results_that_cannot_be_slices() -> None:
    class Results(Two):
        def forward(self, x: Tensor) -> Any:
            return self.gate(x), self.up(x)

    backend = Backend(ALL, compiler="eager")
    torch.compile(Results(), backend=backend)(x())[0].sum().backward()
    assert {(r.what, r.fqn) for r in backend.report.refusals} == {("one GEMM", "gate"), ("one GEMM", "up")}
    assert "in forward: slices of one result would be copied" in str(backend.report)
