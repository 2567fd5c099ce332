"""passes/smooth: channels of one size before they are quantized; the product is the same, exactly."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn

from fp8graph import DelayedScaling, Float8CurrentScaling, Policy, Rule, numerics
from fp8graph.numerics.transforms import smoothing
from helpers import around, compiled_step, eager_backend, first_fast, mixtral, step

SMOOTH = Float8CurrentScaling(smooth_input=True)


class SwiGLU(nn.Module):
    def __init__(self, bias: bool = False) -> None:
        super().__init__()
        self.gate, self.up = nn.Linear(64, 96, bias=False), nn.Linear(64, 96, bias=False)
        self.down = nn.Linear(96, 64, bias=bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(nn.functional.silu(self.gate(x)) * self.up(x))


def test_the_scales_of_channels() -> None:
    x = torch.tensor([[3.0, 0.0, -0.2, 1.0], [-5.0, 0.0, 0.1, 0.5]])
    scale, inverse = smoothing(x)
    assert scale.tolist() == [0.25, 2.0**14, 8.0, 1.0]  # amaxes 5, 0, 0.2 and 1
    assert (scale * inverse).tolist() == [1.0] * 4
    assert (x * scale).abs().amax(0).tolist() == [1.25, 0.0, pytest.approx(1.6), 1.0]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("amax", [1e-30, 2.0**-14, 1.0, 1.9999, 2.0, 3e4, math.inf, math.nan])
def test_scales_are_powers_of_two_of_any_channel(amax: float, dtype: torch.dtype) -> None:
    x = torch.full((4, 1), amax).to(dtype)
    scale, inverse = (each.item() for each in smoothing(x))
    assert scale * inverse == 1.0
    assert math.frexp(scale)[0] == 0.5
    if 2.0**-14 <= abs(x[0, 0].item()) <= 2.0**14:
        assert 1.0 <= abs(x[0, 0].item()) * scale < 2.0


def rewritten(recipe: Any, module: nn.Module | None = None, shape: tuple[int, ...] = (16, 64)) -> tuple[list[str], Any]:
    """The nodes that the pass inserted in a training graph, as text, and the report."""
    backend = eager_backend(Policy([Rule("down", recipe)], default=None))
    compiled_step(module or SwiGLU(), torch.randn(shape, requires_grad=True), backend)
    before, after = around(backend.report.graphs[0], "smooth")
    return [line for line in after.splitlines() if line not in before.splitlines()], backend.report


def test_input_and_weight_are_scaled_and_the_gradient_is_scaled_back() -> None:
    got, report = rewritten(SMOOTH)
    made = [line.partition(": ")[0] for line in got[:5]]
    assert made == ["smoothing", "smooth_scale", "smooth_scale_inv", "smoothed_input", "smoothed_weight"]
    assert got[3].endswith("= aten.mul.Tensor(mul, smooth_scale)")
    assert got[4].endswith("= aten.mul.Tensor(primals_4, smooth_scale_inv)")
    assert sum(line.startswith("smoothed_back") for line in got) == 1
    assert {g.recipe for g in report.gemms if g.fqn == "down"} == {"tensorwise"}
    after = report.graphs[0].after
    assert "fp8graph.quantize(smoothed_input, " in after
    assert "fp8graph.quantize(smoothed_weight, " in after


@pytest.mark.parametrize("recipe", [Float8CurrentScaling(), "rowwise", None])
def test_recipes_that_do_not_ask_change_nothing(recipe: Any) -> None:
    assert rewritten(recipe)[0] == []


@pytest.mark.parametrize("shape", [(16, 64), (2, 8, 64)])
def test_linears_that_read_one_tensor_share_its_scales(shape: tuple[int, ...]) -> None:
    backend = eager_backend(Policy([Rule("gate", SMOOTH), Rule("up", SMOOTH)], default=None))
    compiled_step(SwiGLU(), torch.randn(shape, requires_grad=True), backend)
    text = backend.report.graphs[0].after
    assert text.count("= fp8graph.smoothing(") == 1
    assert text.count("= fp8graph.quantize(smoothed_input") == 1


def test_wgrad_under_another_recipe_reads_the_input_as_it_is() -> None:
    backend = eager_backend(Policy([Rule("down", SMOOTH, wgrad="rowwise")], default=None))
    compiled_step(SwiGLU(), torch.randn(16, 64, requires_grad=True), backend)
    assert "smoothed_back" not in backend.report.graphs[0].after


class Product(nn.Module):
    def forward(self, a: torch.Tensor) -> torch.Tensor:
        return a @ a.t()


@pytest.mark.parametrize(
    ("module", "rule", "reason"),
    [
        (
            Product(),
            Rule("*", SMOOTH, op="matmul"),
            "only the product of an activation and a parameter can be smoothed",
        ),
        (SwiGLU().half(), Rule("down", SMOOTH), "fp16 has no room for scaled channels and gradients"),
        (SwiGLU(), Rule("down", None, wgrad=SMOOTH), "fprop has another recipe, which does not ask for it"),
    ],
    ids=["matmul", "fp16", "wgrad alone"],
)
def test_refusals(module: nn.Module, rule: Rule, reason: str) -> None:
    backend = eager_backend(Policy([rule], default=None))
    dtype = next((p.dtype for p in module.parameters()), torch.float32)
    compiled_step(module, torch.randn(16, 64).to(dtype).requires_grad_(), backend)
    assert [(r.what, r.reason) for r in backend.report.refusals] == [("smooth input", reason)]
    assert "smoothing" not in backend.report.graphs[0].after


@pytest.mark.slow
def test_experts_are_not_smoothed() -> None:
    module, ids = mixtral(), torch.randint(0, 32, (1, 16))
    backend = eager_backend(Policy([Rule("*", SMOOTH, op="grouped_mm")], default=None))
    torch.compile(module, backend=backend)(input_ids=ids, labels=ids).loss.backward()
    reasons = {r.reason for r in backend.report.refusals if r.what == "smooth input"}
    assert reasons == {"experts share one matmul, and each has tokens of its own"}


def test_statistics_are_of_the_unscaled_tensors() -> None:
    """Not the scaled input and weight, nor the gradient before it is scaled back."""
    module, x = SwiGLU(), torch.randn(16, 64)
    with torch.no_grad():
        module.up.weight[5] *= 3000.0
    backend = eager_backend(Policy([Rule("down", SMOOTH)], default=None))
    statistics = backend.observe(every=1)
    torch.compile(module, backend=backend)(x).square().mean().backward()
    found = {r.operand: r.value for r in statistics if r.site == "down" and r.stat == "cur_amax" and not r.layout}
    inner = nn.functional.silu(module.gate(x)) * module.up(x)
    assert module.down.weight.grad is not None
    assert found["wgrad"] == pytest.approx(module.down.weight.grad.abs().max().item(), rel=1e-5)
    assert found["weight"] == pytest.approx(module.down.weight.abs().max().item(), rel=1e-5)
    assert found["input"] == pytest.approx(inner.abs().max().item(), rel=1e-5)


def test_smoothed_weight_is_not_accumulated() -> None:
    backend = eager_backend(Policy([Rule("down", SMOOTH)], default=None), accumulate_wgrad=True)
    compiled_step(SwiGLU(), torch.randn(16, 64, requires_grad=True), backend)
    assert any("smoothed_back" in refusal.reason for refusal in backend.report.refusals), backend.report.refusals


@first_fast("bias", [False, True])
@first_fast("recipe", [SMOOTH, DelayedScaling(smooth_input=True)], ids=["current", "delayed"])
@first_fast("dtype", [torch.bfloat16, torch.float32])
def test_outputs_and_gradients(recipe: Any, bias: bool, dtype: torch.dtype) -> None:
    module, x = SwiGLU(bias).to(dtype), torch.randn(2, 8, 64).to(dtype).requires_grad_()
    backend = eager_backend(Policy([Rule("down", recipe)], default=None))
    got = compiled_step(module, x, backend, fullgraph=True)
    for a, b in zip(step(module, x, parameters=module.parameters()), got, strict=False):
        assert numerics.sqnr_db(a, b) > 20


def test_an_outlier_that_appears_is_not_clipped() -> None:
    """Delayed scaling has scales from steps without it: 0 dB is left of the product. Smoothed, all of it is."""

    def kept(smooth_input: bool) -> float:
        torch.manual_seed(0)
        torch._dynamo.reset()
        module, x = SwiGLU(), torch.randn(40, 64)
        policy = Policy([Rule("down", DelayedScaling(smooth_input=smooth_input))], default=None)
        compiled = torch.compile(module, backend=eager_backend(policy))
        for _ in range(3):
            compiled(x).square().mean().backward()
        with torch.no_grad():
            module.up.weight[5] *= 3000.0
        return numerics.sqnr_db(module(x), compiled(x))

    assert kept(False) < 1
    assert kept(True) > 24


def test_in_high_precision_the_rewrite_is_exact() -> None:
    """Integers, whose FP32 sums have no error: scaled by powers of two, product and gradient are the same bits."""
    x, w = torch.randint(-8, 9, (32, 48)).float(), torch.randint(-8, 9, (16, 48)).float()
    x[:, 3] *= 2.0**12
    scale, inverse = smoothing(x)
    assert torch.equal((x * scale) @ (w * inverse).t(), x @ w.t())
    dy = torch.randint(-8, 9, (32, 16)).float()
    assert torch.equal((dy.t() @ (x * scale)) * inverse, dy.t() @ x)


def test_an_output_that_the_next_linear_smooths_is_observed_as_it_is() -> None:
    first, x = nn.Linear(64, 48), torch.randn(16, 64) * 300.0
    module = nn.Sequential(first, nn.Linear(48, 32))
    backend = eager_backend(Policy([Rule("1", SMOOTH)], default=None))
    statistics = backend.observe(every=1)
    torch.compile(module, backend=backend)(x).square().mean().backward()
    found = {r.operand: r.value for r in statistics if r.site == "0" and r.stat == "cur_amax" and not r.layout}
    assert found["output"] == pytest.approx(first(x).abs().max().item(), rel=0.01)


@pytest.mark.slow
def test_generated_code_is_the_interpreted_graph() -> None:
    import fp8graph

    module, x = SwiGLU(), torch.randn(40, 64, requires_grad=True)
    policy = Policy([Rule("down", SMOOTH)], default=None)
    eager, inductor = (
        compiled_step(module, x, backend) for backend in (eager_backend(policy), fp8graph.Backend(policy))
    )
    for a, b in zip(eager, inductor, strict=True):
        assert numerics.sqnr_db(a, b) > 40
