"""match: which matmuls are sites, what they are called, which GEMM each one is, which layout each needs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fp8graph
from fp8graph.ir.compilation import Compilation
from fp8graph.ir.sites import Site
from fp8graph.passes.match import match
from fp8graph.recipes.policy import Policy
from helpers import MLP, NONE, Weight, facts_of, view_of


def sites_of(module: Any, *args: Tensor) -> list[Site]:
    """The sites that match finds in the joint graph of ``module(*args)``."""
    graph = view_of(module, *args, policy=NONE).module.graph
    compilation = Compilation(facts=facts_of(Policy(default=None)))
    match(graph, compilation)
    return compilation.sites


def describe(site: Site) -> list[str]:
    """Each GEMM with its operands and their layouts, in the order of the alphabet: a matmul may be written
    as the transpose of another."""
    return [
        f"{gemm.gemm}: " + ", ".join(sorted(f"{view.operand} {view.layout}" for view in (gemm.a, gemm.b)))
        for gemm in site.gemms
    ]


LINEAR = [
    "fprop: input rowwise, weight rowwise",
    "dgrad: grad_output rowwise, weight columnwise",
    "wgrad: grad_output columnwise, input columnwise",
]


def x(*shape: int) -> Tensor:
    return torch.randn(shape, requires_grad=True)


@pytest.mark.parametrize(
    ("module", "args"),
    [
        pytest.param(nn.Linear(32, 48, bias=False), (x(16, 32),), id="mm"),
        pytest.param(nn.Linear(32, 48), (x(16, 32),), id="addmm"),
        pytest.param(nn.Linear(32, 48), (x(2, 3, 16, 32),), id="views"),
        pytest.param(Weight(lambda w, a: a.t() @ w.t(), 48, 32), (x(32, 16),), id="transposed input"),
        pytest.param(Weight(lambda w, a: torch.einsum("bk,nk->bn", a, w), 48, 32), (x(16, 32),), id="einsum"),
    ],
)
def test_a_linear_has_three_gemms(module: nn.Module, args: tuple[Tensor, ...]) -> None:
    (site,) = sites_of(module, *args)
    assert describe(site) == LINEAR


def test_gradients_of_a_tensor_times_itself_are_distinguished() -> None:
    """x @ x: dgrad is dy @ x.T, wgrad is x.T @ dy; both have the same operands."""
    (site,) = sites_of(Weight(lambda w, a: (a @ a) @ w.sin(), 32, 32), x(32, 32))[:1]
    dy = [[view.operand for view in (gemm.a, gemm.b)].index("grad_output") for gemm in site.gemms[1:]]
    assert ([gemm.gemm for gemm in site.gemms], dy) == (["fprop", "dgrad", "wgrad"], [0, 1])


def test_a_weight_stored_transposed_is_flipped() -> None:
    (site,) = sites_of(Weight(lambda w, a: a @ w, 32, 48), x(16, 32))  # GPT-2: [K, N]
    assert describe(site) == LINEAR
    assert [gemm.b.flipped for gemm in site.gemms if gemm.b.operand == "weight"] == [True, True]


def test_the_roles_of_w_at_x() -> None:
    report = fp8graph.explain(Weight(lambda w, a: w @ a, 48, 32), x(32, 16))
    assert [(g.gemm, g.op, g.dtypes[:2]) for g in report.gemms] == [
        ("fprop", "linear", ("e4m3", "e4m3")),
        ("dgrad", "linear", ("e4m3", "e5m2")),  # dx = w.T @ dy
        ("wgrad", "linear", ("e5m2", "e4m3")),  # dw = dy @ x.T
    ]


def test_attention_is_two_matmul_sites() -> None:
    class Attention(nn.Module):
        def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return torch.softmax(q @ k.transpose(-1, -2), -1) @ v

    report = fp8graph.explain(Attention(), *(x(2, 16, 32) for _ in range(3)), training=True)
    assert [(g.op, g.index, g.gemm) for g in report.gemms] == [
        ("matmul", index, gemm) for index in (0, 1) for gemm in ("fprop", "dgrad", "wgrad")
    ]
    assert {g.recipe for g in report.gemms} == {None}


def test_sites_of_one_module_are_numbered() -> None:
    def body(w: Tensor, a: Tensor) -> Tensor:
        return (a @ w).relu() @ w

    report = fp8graph.explain(Weight(body, 32, 32), x(16, 32))
    assert [g.name for g in report.gemms if g.gemm == "fprop"] == ["w", "w[1]"]  # code at the root: the parameter


@pytest.mark.parametrize(
    ("weight", "op"),
    [
        (lambda w: w.t(), "linear"),
        (lambda w: w[:32].t(), "linear"),
        (lambda w: torch.cat([w, w]).t(), "linear"),
        (lambda w: (w * 2).to(torch.float32).t(), "linear"),
    ],
)
def test_weights_reshaped_on_the_fly_are_weights(weight: Any, op: str) -> None:
    report = fp8graph.explain(Weight(lambda w, a: a @ weight(w), 48, 32), x(16, 32))
    assert {g.op for g in report.gemms} == {op}


def test_a_product_of_an_input_with_itself_is_split_once_each() -> None:
    class Gram(nn.Module):
        def forward(self, a: Tensor) -> Tensor:
            return a @ a.t()

    report = fp8graph.explain(Gram(), x(16, 32), training=True)
    assert [g.gemm for g in report.gemms] == ["fprop", "dgrad", "wgrad"]


def test_no_site_without_a_matmul() -> None:
    assert sites_of(nn.LayerNorm(32), x(4, 32)) == []


def test_a_matmul_takes_one_of_several_outputs() -> None:
    """Its argument is a getitem of a node whose value is a list, not a tensor."""
    (site,) = sites_of(Weight(lambda w, a: a.split(16)[1] @ w.t(), 48, 32), x(32, 32))
    assert describe(site) == LINEAR


def test_both_gradients_of_a_model() -> None:
    sites = sites_of(MLP(), x(16, 32))
    assert [describe(site) for site in sites] == [LINEAR] * 3


def test_a_backward_matmul_without_a_forward_one_is_reported() -> None:
    class Surrogate(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, a: Tensor, w: Tensor) -> Tensor:
            ctx.save_for_backward(w)
            return a.cumsum(0)

        @staticmethod
        def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
            return grads[0] @ ctx.saved_tensors[0], None

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.randn(32, 32), requires_grad=False)

        def forward(self, a: Tensor) -> Tensor:
            out = Surrogate.apply(a, self.w)
            assert isinstance(out, Tensor)
            return out

    (gemm,) = fp8graph.explain(Model(), x(16, 32), policy=fp8graph.Policy(), training=True).gemms
    assert (gemm.op, gemm.gemm, gemm.recipe) == ("matmul", "dgrad", None)
    assert gemm.reason == "a backward matmul; no forward one of its operands was found"
