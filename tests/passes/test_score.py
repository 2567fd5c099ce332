"""The pass that measures the error of each GEMM: what it inserts, and that the numbers are those of the program."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fp8graph.extras.planning.scoring import Scoring
from fp8graph.numerics import cast_to_representable
from fp8graph.recipes import resolve_recipe
from fp8graph.report import Report
from helpers import around

BF16 = torch.bfloat16


class Attention(nn.Module):
    """Two linears that read one tensor, a third that reads another, and a product of activations."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.o = (nn.Linear(64, 64, bias=False) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        return self.o((self.q(x) @ self.k(x).transpose(-2, -1)) @ x)


def scored(module: nn.Module, x: Tensor, *recipes: str) -> tuple[Report, list[dict[str, Any]]]:
    candidates = [recipe for name in recipes if (recipe := resolve_recipe(name)) is not None]
    backend = Scoring(candidates, None)
    backend.bind(module)
    compiled = torch.compile(module, backend=backend)
    compiled(x).square().sum().backward()
    return backend.report, backend.scores.batch(0)


def test_every_gemm_of_a_linear_with_every_candidate() -> None:
    report, found = scored(Attention(), torch.randn(2, 16, 64, requires_grad=True), "tensorwise", "mxfp8")
    assert {(row["site"], row["gemm"], row["candidate"]) for row in found} == {
        (site, gemm, candidate) for site in "qko" for gemm in ("fprop", "dgrad", "wgrad") for candidate in (0, 1)
    }
    assert {row["site"]: row["group"] for row in found} == {"q": "q", "k": "q", "o": "o"}  # q and k read one tensor
    after = report.graphs[0].after
    assert after.count("= fp8graph.gemm_error") == 18
    assert "fp8graph.quantize" not in after  # it runs in high precision


def test_the_numbers() -> None:
    """One linear: fprop's error is weighted by dy, those of dgrad and wgrad are compared with the gradients."""
    torch.manual_seed(0)
    linear = nn.Linear(64, 48, bias=False)
    x = torch.randn(32, 64, requires_grad=True)
    _, found = scored(linear, x, "tensorwise")
    recipe = resolve_recipe("tensorwise")
    assert recipe is not None
    y = (x @ linear.weight.t()).detach()
    dy, exact_x, w = 2 * y, x.detach(), linear.weight.detach()

    def change(a: Tensor, b: Tensor, of_a: Any, of_b: Any) -> Tensor:  # a [m, k], b [n, k]
        qa, qb = (cast_to_representable(t.contiguous(), recipe, of).double() for t, of in ((a, of_a), (b, of_b)))
        return qa @ qb.t() - a.double() @ b.double().t()

    changes = {
        "fprop": change(exact_x, w, "input", "weight"),
        "dgrad": change(dy, w.t(), "grad_output", "weight"),
        "wgrad": change(dy.t(), exact_x.t(), "grad_output", "input"),
    }
    references = {"fprop": dy, "dgrad": dy @ w, "wgrad": dy.t() @ exact_x}
    assert len(found) == 3
    for row in found:
        off, there = changes[row["gemm"]], references[row["gemm"]].double()
        expected = {
            "weighted_error": (off * there).square().sum(),
            "square_error": off.square().sum(),
            "square_reference": there.square().sum(),
        }
        for part, value in expected.items():
            assert row[part] == pytest.approx(value.item(), rel=1e-3), (row["gemm"], part)


@pytest.mark.parametrize("left", [False, True])
def test_a_weight_on_the_left_and_one_that_is_transposed(left: bool) -> None:
    class Left(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.randn(48, 64))

        def forward(self, x: Tensor) -> Tensor:
            return self.w @ x if left else x.t() @ self.w.t()

    _, found = scored(Left(), torch.randn(64, 32, requires_grad=True), "tensorwise")
    assert sorted(row["gemm"] for row in found) == ["dgrad", "fprop", "wgrad"]
    assert all(0 < row["square_error"] / row["square_reference"] < 0.01 for row in found if row["gemm"] != "fprop")


def test_the_gradients_are_those_of_high_precision() -> None:
    torch.manual_seed(0)
    module, x = Attention(), torch.randn(2, 16, 64)
    module(x).square().sum().backward()
    plain = [p.grad.clone() for p in module.parameters() if p.grad is not None]
    module.zero_grad()
    scored(module, x, "tensorwise")
    for got, wanted in zip([p.grad for p in module.parameters()], plain, strict=True):
        torch.testing.assert_close(got, wanted)


def test_unscored_site_has_a_reason() -> None:
    class Frozen(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.frozen = nn.Linear(64, 64), nn.Linear(64, 64).requires_grad_(False)

        def forward(self, x: Tensor) -> Tensor:
            return self.up(self.frozen(x))

    report, found = scored(Frozen(), torch.randn(16, 64), "tensorwise")
    assert {row["site"] for row in found} == {"up"}
    (refusal,) = [r for r in report.refusals if r.what == "score"]
    assert refusal.fqn == "frozen"
    assert refusal.reason.startswith("its backward is not in this graph")


def test_without_candidates_the_graph_is_not_changed() -> None:
    import fp8graph

    backend = fp8graph.Backend(compiler="eager")
    torch.compile(nn.Linear(64, 64), backend=backend)(torch.randn(16, 64)).sum().backward()
    before, after = around(backend.report.graphs[0], "score")
    assert before == after
