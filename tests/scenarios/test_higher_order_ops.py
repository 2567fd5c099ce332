"""Every op of torch that has graphs in it: linears there are rewritten or left alone with a reason; never an error."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn
from torch._higher_order_ops import associative_scan, scan
from torch._higher_order_ops import map as map_rows
from torch._higher_order_ops.while_loop import while_loop
from torch.nn import functional as F
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from torch.utils.checkpoint import checkpoint

import fp8graph
from fp8graph.numerics import sqnr_db
from helpers import first_fast, first_slow

pytestmark = pytest.mark.filterwarnings("ignore:.*flex_attention called without torch.compile")  # the expected result
ELSEWHERE = "the backward of a higher-order op is a graph of its own, without the forward matmul"
UNSEEN = "only F.linear, Linear and addmm with w.t() are known as linears in the body of a higher-order op"


class Body(nn.Module):
    """``body(x, self)`` with two linears of 64 x 64 and one of 192 x 64."""

    def __init__(self, body: Callable[[Tensor, Any], Tensor]) -> None:
        super().__init__()
        self.a, self.b, self.qkv = nn.Linear(64, 64), nn.Linear(64, 64), nn.Linear(64, 192)
        self.region = torch.compiler.nested_compile_region(lambda x, layer: layer(x).relu())
        self.region_of_weight = torch.compiler.nested_compile_region(lambda x, w: F.linear(x, w).relu())
        self.body = body

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x, self)


def attention(x: Tensor, m: Any, **how: Any) -> Tensor:
    # of three buffers, which are no matmul's: torch's own kernel for CPUs refuses slices of one (2.11), and results of
    # matmuls (2.13)
    q, k, v = (y.sin() for y in m.qkv(x).view(2, 128, 3, 4, 16).permute(2, 0, 3, 1, 4))
    y = cast(Tensor, flex_attention(q, k, v, **how))  # pyright: ignore[reportDeprecated]  # no return_lse here
    return m.a(y.transpose(1, 2).reshape(2, 128, 64))


def attention_of_blocks(x: Tensor, m: Any) -> Tensor:
    causal = create_block_mask(lambda b, h, i, j: i >= j, None, None, 128, 128, device="cpu")
    return attention(x, m, block_mask=causal)


def loop(x: Tensor, m: Any) -> Tensor:
    start = torch.zeros((), dtype=torch.int64)
    return while_loop(lambda i, x: i < 3, lambda i, x: (i + 1, m.a(x)), (start, x))[1]


# name -> body, GEMMs in FP8 and all GEMMs of inference, the same of training, the reasons of those left alone
BODIES: dict[str, tuple[Callable[[Tensor, Any], Tensor], tuple[int, int], tuple[int, int] | None, set[str]]] = {
    "flex_attention": (lambda x, m: attention(x, m, score_mod=lambda s, b, h, i, j: s / 2), (2, 2), None, set()),
    "flex_attention, block mask": (attention_of_blocks, (2, 2), None, set()),  # torch trains it on GPUs only
    "cond": (
        lambda x, m: torch.cond(x.sum() > 0, lambda x: m.a(x), lambda x: m.b(x).relu(), (x,)),
        (2, 2), (2, 7), {ELSEWHERE, UNSEEN}),
    "cond between linears": (
        lambda x, m: m.a(torch.cond(x.sum() > 0, torch.sin, torch.cos, (m.b(x),))), (2, 2), (6, 6), set()),
    "while_loop": (loop, (1, 1), (1, 3), {ELSEWHERE}),
    "scan": (
        lambda x, m: scan(lambda c, x: (c + m.a(x), c + x), x[0] * 0, x)[0], (1, 1), (0, 3), {ELSEWHERE, UNSEEN}),
    "associative_scan": (
        lambda x, m: m.a(associative_scan(torch.add, m.b(x), 0, combine_mode="generic")), (2, 2), (6, 6), set()),
    "map": (lambda x, m: map_rows(lambda x, *_: m.a(x), x), (1, 1), (1, 3), {ELSEWHERE}),
    "checkpoint": (
        lambda x, m: checkpoint(lambda x: m.b(m.a(x).relu()), x, use_reentrant=False), (2, 2), (6, 6), set()),
    # one graph for both calls
    "nested_compile_region": (lambda x, m: m.region(m.region(x, m.a), m.b), (1, 1), (3, 3), set()),
    "nested_compile_region of weights": (
        lambda x, m: m.region_of_weight(m.region_of_weight(x, m.a.weight), m.b.weight), (1, 1), (3, 3), set()),
}  # fmt: skip


def run(name: str, training: bool, backend: Any) -> tuple[Tensor, Tensor, Tensor]:
    """The eager result, the compiled one, the compiled gradient."""
    torch.manual_seed(0)
    module = Body(BODIES[name][0]).bfloat16()
    x = torch.randn(2, 128, 64, dtype=torch.bfloat16, requires_grad=training)
    with torch.set_grad_enabled(training):
        expected = module(x)
        result = torch.compile(module, backend=backend, fullgraph=True)(x)
        if training:
            result.float().square().sum().backward()
    return expected, result, x.grad if x.grad is not None else result


def check(name: str, training: bool, backend: Any, wanted: tuple[int, int]) -> None:
    expected, result, grad = run(name, training, backend)
    assert sqnr_db(expected, result) > 22
    assert grad.isfinite().all()
    gemms = backend.report.gemms
    assert (sum(g.recipe is not None for g in gemms), len(gemms)) == wanted


CASES = [
    pytest.param(name, training, id=f"{name}, {'training' if training else 'inference'}")
    for name, (_, _, trained, _) in BODIES.items()
    for training in (False, True)
    if trained is not None or not training
]


@first_fast(("name", "training"), CASES)
def test_linears_in_bodies(name: str, training: bool) -> None:
    _, inferred, trained, reasons = BODIES[name]
    backend = fp8graph.Backend(recipe="tensorwise", compiler="eager")
    check(name, training, backend, trained if training and trained is not None else inferred)
    found = {g.reason.rpartition("; ")[2] for g in backend.report.gemms if g.recipe is None}
    assert found == (reasons if training else set())


@first_fast(("name", "training"), CASES, others=pytest.mark.release)
def test_nothing_changes_where_nothing_is_asked_for(name: str, training: bool) -> None:
    backend = fp8graph.Backend(fp8graph.Policy(default=None), compiler="eager")
    expected, result, _ = run(name, training, backend)
    torch.testing.assert_close(result, expected)
    assert not any(g.recipe for g in backend.report.gemms)


@first_fast(("name", "training"), CASES, others=pytest.mark.release)
def test_delayed_scaling_has_no_state_in_bodies(name: str, training: bool) -> None:
    backend = fp8graph.Backend(recipe="delayed", compiler="eager")
    expected, result, _ = run(name, training, backend)
    assert sqnr_db(expected, result) > 22
    assert backend.report.gemms
    for gemm in backend.report.gemms:
        assert gemm.recipe or ELSEWHERE in gemm.reason or UNSEEN in gemm.reason or "has no state inside" in gemm.reason


@first_slow(("name", "training"), CASES)
def test_bodies_through_inductor(name: str, training: bool) -> None:
    _, inferred, trained, _ = BODIES[name]
    check(name, training, fp8graph.Backend(recipe="tensorwise"), trained if training and trained else inferred)


@pytest.mark.slow
def test_flex_attention_through_inductor() -> None:
    check("flex_attention", False, fp8graph.Backend(recipe="tensorwise"), (2, 2))
