"""Ways in which real models write a matmul: each is found, is in FP8, and computes what it computed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import fp8graph
from fp8graph import Policy, Rule
from fp8graph.numerics import sqnr_db
from helpers import ALL, compiled_step, eager_backend, first_fast, step

SHAPE = (4, 8, 32)


class Body(nn.Module):
    """``body(x, self)`` with the parameters ``sizes``."""

    def __init__(self, body: Callable[[Tensor, Any], Tensor], **sizes: tuple[int, ...]) -> None:
        super().__init__()
        for name, size in sizes.items():
            self.register_parameter(name, nn.Parameter(torch.randn(size) * 0.1))
        self.body = body

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x, self)


def chunked_head(x: Tensor, m: Any) -> Tensor:
    """The loss of a large head, a chunk of tokens at a time."""
    rows = x.reshape(-1, 32)
    return torch.stack([F.cross_entropy(F.linear(chunk, m.w), chunk.new_zeros(16).long()) for chunk in rows.split(16)])


def tied(x: Tensor, m: Any) -> Tensor:
    """An embedding that is the head too."""
    ids = (x.detach()[..., 0] > 0).long()
    return F.linear(x + F.embedding(ids, m.w), m.w)


# name -> module, FP8 GEMMs of forward and backward
LINEARS: dict[str, tuple[Body, int]] = {
    "matmul": (Body(lambda x, m: torch.matmul(x, m.w), w=(32, 48)), 3),
    "@": (Body(lambda x, m: x @ m.w, w=(32, 48)), 3),
    "weight on the left": (Body(lambda x, m: m.w @ x.reshape(-1, 32).t(), w=(48, 32)), 3),
    "einsum": (Body(lambda x, m: torch.einsum("bsk,nk->bsn", x, m.w), w=(48, 32)), 3),
    "einsum to heads": (Body(lambda x, m: torch.einsum("bsk,khd->bhsd", x, m.w), w=(32, 3, 16)), 3),
    "einsum from heads": (
        Body(lambda x, m: torch.einsum("bshd,hdn->bsn", x.view(4, 8, 2, 16), m.w), w=(2, 16, 48)), 3),
    "addmm of a [k, n] weight": (Body(lambda x, m: torch.addmm(m.b, x.reshape(-1, 32), m.w), w=(32, 48), b=(48,)), 3),
    "bias": (Body(lambda x, m: F.linear(x, m.w, m.b), w=(48, 32), b=(48,)), 3),
    "1x1 convolution as a matmul": (
        Body(lambda x, m: torch.matmul(m.w.view(48, 32), x.transpose(1, 2)[:1]), w=(48, 32, 1)), 3),
    "weight concatenated": (
        Body(lambda x, m: F.linear(x, torch.cat([m.q, m.k, m.v])).sin(), q=(32, 32), k=(16, 32), v=(16, 32)), 3),
    "weight sliced": (Body(lambda x, m: F.linear(x, m.w[:48]).sin() + F.linear(x, m.w[48:]).cos(), w=(96, 32)), 6),
    "weight transposed": (Body(lambda x, m: F.linear(x, m.w.t().contiguous()), w=(32, 48)), 3),
    "weight scaled on the fly": (Body(lambda x, m: F.linear(x, m.w * m.s), w=(48, 32), s=(48, 1)), 3),
    "tied": (Body(tied, w=(48, 32)), 3),
    "chunked head": (Body(chunked_head, w=(48, 32)), 6),
    "one weight twice": (Body(lambda x, m: F.linear(F.linear(x, m.w).tanh(), m.w), w=(32, 32)), 6),
}  # fmt: skip


@first_fast("name", LINEARS)
def test_a_linear_however_it_is_written(name: str) -> None:
    torch.manual_seed(0)
    module, count = LINEARS[name]
    x = torch.randn(SHAPE, requires_grad=True)
    expected = step(module, x, parameters=module.parameters())
    backend = eager_backend(ALL, fuse_linears=False)
    got = compiled_step(module, x, backend, fullgraph=True)
    fp8 = [g for g in backend.report.gemms if g.recipe]
    assert len(fp8) == count == len(backend.report.gemms), backend.report
    assert {g.op for g in fp8} == {"linear"}
    assert len(expected) == len(got)
    assert all(sqnr_db(e, g) > 18 for e, g in zip(expected, got, strict=True))


BATCHED: dict[str, tuple[Callable[[Tensor, Tensor], Tensor], tuple[int, ...]]] = {
    "bmm": (torch.bmm, (4, 32, 16)),
    "@": (lambda a, b: a @ b, (4, 32, 16)),
    "baddbmm": (lambda a, b: torch.baddbmm(torch.ones(4, 8, 16), a, b, beta=0.5, alpha=2.0), (4, 32, 16)),
    "einsum of queries and keys": (lambda a, b: torch.einsum("bqd,bkd->bqk", a, b), (4, 16, 32)),
}


@first_fast("recipe", ["tensorwise", "rowwise", "blockwise", "mxfp8"])
@first_fast("name", BATCHED)
def test_batched_matmuls_are_for_who_names_them(name: str, recipe: str) -> None:
    body, shape = BATCHED[name]
    a, b = torch.randn(SHAPE, requires_grad=True), torch.randn(shape, requires_grad=True)
    expected = step(body, a, b)
    alone = eager_backend(Policy(default=recipe))
    assert all(map(torch.equal, expected, step(torch.compile(body, backend=alone), a, b)))
    assert {g.recipe for g in alone.report.gemms} == {None}
    named = eager_backend(Policy([Rule("*", recipe, op="matmul")], default=None))
    torch._dynamo.reset()
    got = step(torch.compile(body, backend=named), a, b)
    assert [g.recipe for g in named.report.gemms] == [recipe] * 3
    assert all(sqnr_db(e, g) > 20 for e, g in zip(expected, got, strict=True))


@pytest.mark.parametrize("recipe", ["rowwise", "blockwise", "mxfp8"])
def test_scales_of_rows_and_tiles_are_those_of_each_matrix_of_a_batch(recipe: str) -> None:
    """The numbers of one matrix change nothing of the others, forward and backward."""
    policy = Policy([Rule("*", recipe, op="matmul")], default=None)
    results: list[list[Tensor]] = []
    for factor in (1.0, 1e4):
        torch._dynamo.reset()
        torch.manual_seed(0)
        a, b = torch.randn(SHAPE), torch.randn(4, 32, 16)
        a[2] *= factor
        b[2] *= factor
        compiled = torch.compile(torch.bmm, backend=eager_backend(policy))
        results.append(step(compiled, a.requires_grad_(), b.requires_grad_()))
    for one, other in zip(*results, strict=True):
        assert torch.equal(one[[0, 1, 3]], other[[0, 1, 3]])


def test_a_dead_branch_costs_nothing() -> None:
    module = Body(lambda x, m: (F.linear(x, m.w), F.linear(x, m.v))[0], w=(48, 32), v=(48, 32))
    backend = eager_backend(ALL)
    compiled_step(module, torch.randn(SHAPE, requires_grad=True), backend)
    assert len(backend.report.gemms) == 3
    assert isinstance(fp8graph.explain(module, torch.randn(SHAPE)).summary(), str)


def normalized(norm: Callable[[nn.Module], nn.Module]) -> nn.Module:
    return nn.Sequential(norm(nn.Linear(32, 32)), nn.ReLU(), nn.Linear(32, 32))


LAYER = nn.Linear(32, 32)
WEIGHTS: dict[str, tuple[Callable[..., Any], int]] = {
    "F.linear of an argument": (lambda x, w, b: F.linear(x, w), 3),
    "addmm of a transposed argument": (lambda x, w, b: torch.addmm(b, x, w.t()), 3),
    "method addmm of a transposed argument": (lambda x, w, b: b.expand(4, 32).addmm(x, w.t()), 3),
    "functional_call": (
        lambda x, w, b: torch.func.functional_call(LAYER, {"weight": w, "bias": b}, (x,)), 3),
    "weight computed from the input": (lambda x, w, b: F.linear(x, w * x.mean()), 3),
    "matmul of an argument": (lambda x, w, b: x @ w.t(), 0),
    "addmm of two arguments": (lambda x, w, b: torch.addmm(b, x, w), 0),
}  # fmt: skip


@pytest.mark.parametrize("name", WEIGHTS)
def test_a_linear_is_one_wherever_its_weight_comes_from(name: str) -> None:
    body, in_fp8 = WEIGHTS[name]
    torch.manual_seed(0)
    inputs = [torch.randn(size, requires_grad=True) for size in ((4, 32), (32, 32), (32,))]
    expected = step(body, *inputs)
    backend = eager_backend()
    got = step(torch.compile(body, backend=backend, fullgraph=True), *inputs)
    gemms = backend.report.gemms
    assert sum(g.recipe is not None for g in gemms) == in_fp8
    assert len(gemms) == 3
    for wanted, result in zip(expected, got, strict=True):
        assert sqnr_db(wanted, result) > 20


@pytest.mark.parametrize("norm", ["spectral_norm", "weight_norm", "orthogonal"])
def test_parametrized_weights(norm: str) -> None:
    """Of spectral_norm, which reads buffers too, nothing was in FP8."""
    torch.manual_seed(0)
    module = normalized(getattr(nn.utils.parametrizations, norm))
    backend = eager_backend()
    compiled_step(module, torch.randn(8, 32), backend)
    missing = [(g.name, g.gemm, g.reason) for g in backend.report.gemms if g.recipe is None]
    assert not missing
    assert {"0", "2"} <= {g.fqn for g in backend.report.gemms}


def test_gradients_of_torch_func_say_what_they_are() -> None:
    module = normalized(lambda layer: layer)
    parameters = {name: p.detach() for name, p in module.named_parameters()}

    def loss(parameters: dict[str, Tensor], x: Tensor) -> Tensor:
        return torch.func.functional_call(module, parameters, (x,)).square().sum()

    backend = eager_backend()
    torch.compile(torch.func.grad(loss), backend=backend)(parameters, torch.randn(8, 32))
    reasons = {g.op: g.reason for g in backend.report.gemms}
    assert reasons["linear"] == "default"
    assert reasons["matmul"].endswith("; it computes a gradient that torch.func takes inside the graph")


TAKEN: dict[str, Callable[[nn.Module, Tensor], Any]] = {
    "grad": lambda module, x: torch.autograd.grad(module(x).sum(), [x, *module.parameters()]),
    "backward": lambda module, x: module(x).square().sum().backward(),
    "of a step's loss": lambda module, x: torch.autograd.grad(module(x).sum(), x, create_graph=True)[0].square().sum(),
    "func.grad": lambda module, x: torch.func.grad(lambda y: module(y).square().sum())(x),
    "func.vjp": lambda module, x: torch.func.vjp(module, x)[1](torch.ones_like(x)),
}


@pytest.mark.parametrize("case", TAKEN)
def test_a_gradient_inside_the_graph_is_no_linear(case: str) -> None:
    """Not dgrad either, which multiplies by a parameter: dy was quantized in E4M3, as an input with its own row."""
    module = nn.Sequential(nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 32))
    backend = eager_backend(recipe="delayed")
    with torch._dynamo.config.patch(trace_autograd_ops=True):
        taken = torch.compile(TAKEN[case], backend=backend, fullgraph=True)
        result = taken(module, torch.randn(16, 32).requires_grad_())
    if case == "of a step's loss":
        result.backward()
    linears = {gemm.fqn for gemm in backend.report.gemms if gemm.op == "linear"}
    reasons = {gemm.reason for gemm in backend.report.gemms if gemm.op == "matmul"}
    assert linears <= {"0", "2"}
    assert all(reason.endswith(" takes inside the graph") for reason in reasons)
    rows = {key.rpartition(".")[0] for key in backend.state_dict() if key.endswith("|scale")}
    assert rows <= {"0", "2"}
