"""The text of every reason why fuse_linears, hoist_weights and save_for_backward refuse."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import fp8graph
from fp8graph import Backend, Policy, RefusalRecord, Rule
from fp8graph.backend import stored
from fp8graph.backend.stored import Stored
from fp8graph.compat import inductor
from fp8graph.report import GraphView
from helpers import ALL, MLP, Weight, view_of


class Two(nn.Module):
    """Two linears that read one input."""

    def __init__(self, up: int = 64, *, bias: bool = False) -> None:
        super().__init__()
        self.gate, self.up = nn.Linear(32, 64, bias=False), nn.Linear(32, up, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([self.gate(x), self.up(x)], dim=-1)


def x(*shape: int) -> Tensor:
    return torch.randn(shape or (16, 32), requires_grad=True)


def refused(module: nn.Module, *args: Tensor, **settings: Any) -> dict[str, str]:
    """The reasons by site, all of one kind."""
    view = view_of(module, *args, **settings)
    assert len({refusal.what for refusal in view.refusals}) < 2
    return {refusal.fqn: refusal.reason for refusal in view.refusals}


def test_what_passes_do_has_no_reason() -> None:
    every: dict[str, Any] = {"cache_weights": True, "save": "memory", "save_activations_in_fp8": True}
    assert refused(MLP(), x(), **every) == {}
    assert refused(nn.Linear(32, 48), x(), cache_weights=True) == {}


# ---- one GEMM


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


# ---- kept weight

PARTS = [
    pytest.param(
        lambda w, a: a @ nn.functional.dropout(w, 0.5).t(),
        "computed with random numbers, which change with each call",
        id="random",
    ),
    pytest.param(
        lambda w, a: a @ (w + a[0]).t(),
        r"also computed from .*, which is not a parameter and may change with each call; .* make it a parameter",
        id="an input",
    ),
]


@pytest.mark.parametrize(("body", "reason"), PARTS)
def test_weights_that_are_not_kept(body: Any, reason: str) -> None:
    policy = Policy([Rule("*", "tensorwise", op="*")])
    (found,) = view_of(Weight(body, 48, 32), x(), policy=policy, cache_weights=True).refusals
    assert found.what == "kept weight"
    assert re.search(reason, found.reason)


def test_a_weight_of_dynamic_size_is_not_kept() -> None:
    backend = Backend(Policy([Rule("*", "tensorwise", op="*")]), compiler="eager")
    module = Weight(lambda w, a: a @ w[: a.shape[0]].t(), 48, 32)
    torch.compile(module, backend=backend, dynamic=True)(x())
    (found,) = backend.report.refusals
    assert (found.what, found.reason) == (
        "kept weight",
        "its size is dynamic: compile with dynamic=False, or mark that size static",
    )


def test_activations_are_no_weights() -> None:
    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.q, self.k = nn.Linear(32, 32), nn.Linear(32, 32)

        def forward(self, x: Tensor) -> Tensor:
            return self.q(x) @ (self.k(x) * 2).t()

    view = view_of(Attention(), x(), policy=Policy([Rule("*", "tensorwise", op="*")]), cache_weights=True)
    assert [refusal for refusal in view.refusals if refusal.what == "kept weight"] == []


# ---- saved in FP8

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


def test_what_checkpoint_recomputes_is_not_quantized_again() -> None:
    body = ACTIVATIONS[-1].values[0]
    view = view_of(Activated(body), x(), save="memory")
    found = {(refusal.what, refusal.fqn): refusal.reason for refusal in view.refusals}
    assert found["quantized again", "down"] == "torch.utils.checkpoint runs its forward again anyway"


# ---- the report


def test_reasons_are_folded_in_the_report(tmp_path: Path) -> None:
    backend = Backend(ALL, compiler="eager")
    model = nn.Sequential(*(nn.Sequential(Two(72), nn.Linear(136, 32)) for _ in range(3)))
    torch.compile(model, backend=backend)(x())
    report = backend.report
    assert len(report.refusals) == 6
    lines = [re.split("  +", line) for line in str(report).splitlines() if line.startswith("one GEMM")]
    assert lines == [
        ["one GEMM", "*.*.gate", "3", "the others that read its input cannot be joined with it"],
        ["one GEMM", "*.*.up", "3", "its output size 72 is not a multiple of 16: pad it"],
    ]
    report.to_html(tmp_path / "page.html")
    assert "its output size 72" in (tmp_path / "page.html").read_text(encoding="utf-8")
    (view,) = report.graphs
    assert GraphView.from_dict(view.to_dict()).refusals == view.refusals
    assert "not done" not in str(fp8graph.explain(MLP(), x()))


def test_reasons_are_kept_beside_compiled_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inductor, "inductor_cache_folder", lambda: tmp_path)
    backend = Backend(ALL, compiler="eager")
    torch.compile(Two(72), backend=backend)(x())
    ((program,),) = [list(backend._programs)]
    ((_, variant),) = program._variants.items()
    assert len(variant.decided.view.refusals) == 2
    Stored(view=variant.decided.view, findings=variant.findings).write("key")
    again = stored.read("key")
    assert again is not None
    assert again.view.refusals == variant.decided.view.refusals


def test_layers_that_share_code_have_reasons_of_their_own() -> None:
    backend = Backend(ALL, compiler="eager")
    model = nn.ModuleList([Two(72), Two(72)])
    backend.bind(model)
    for layer in model:
        layer.compile(backend=backend)
        layer(x())
    reason = "its output size 72 is not a multiple of 16: pad it"
    assert [r for r in backend.report.refusals if r.fqn.endswith("up")] == [
        RefusalRecord(what="one GEMM", fqn=f"{i}.up", index=0, reason=reason) for i in range(2)
    ]
