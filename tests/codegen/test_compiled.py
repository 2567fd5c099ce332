"""Through Inductor: the generated code computes what the eager reference computes.

Where a quantized tensor is a graph input or a GEMM's result, bytes and scales are bit-identical. Behind a fused
producer Inductor keeps FP32 in registers where eager rounds to bf16, so about 2 % of the bytes differ there; with
``emulate_precision_casts`` they are identical again.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fp8graph
from fp8graph import Float8CurrentScaling, Format, numerics
from fp8graph.compat import inductor, torch_build
from fp8graph.compat.torch_build import CPP_ROUNDS_BETWEEN
from fp8graph.numerics import hints, quantization, sqnr_db
from fp8graph.recipes import FP8_MAX, Quantizer
from helpers import (
    ALL,
    MLP,
    NONE,
    bits,
    compiled_step,
    first_slow,
    same_bits,
)

QUANTIZERS = [
    Quantizer(dtype=torch.float8_e4m3fn),
    Quantizer(dtype=torch.float8_e5m2),
    Quantizer(dtype=torch.float8_e4m3fn, power_2_scale=True, amax_epsilon=1e-6),
    Quantizer(dtype=torch.float8_e4m3fnuz),
    Quantizer(dtype=torch.float8_e5m2fnuz),
]


def quantize(x: Tensor, quantizer: Quantizer) -> list[Tensor]:
    return quantization.quantize_layouts(x, *quantization.quantizer_args(quantizer), [1, 16], [16, 16])


NARROW = inductor.cpu_codegen_patches([torch.ones(1)])
SPECIAL = torch.tensor([0.0, -0.0, 1e-30, 3e38, -3e38, float("inf"), float("-inf"), float("nan")])


@first_slow("quantizer", QUANTIZERS, ids=["e4m3", "e5m2", "power 2", "e4m3fnuz", "e5m2fnuz"])
def test_quantize_of_a_graph_input_is_bit_identical(quantizer: Quantizer) -> None:
    compiled = torch.compile(quantize, dynamic=False, options=NARROW)
    for dtype in (torch.bfloat16, torch.float32):
        normal = torch.randn(48, 72).to(dtype)
        special = normal.clone()
        special[0, : len(SPECIAL)] = SPECIAL.to(dtype)
        for x in (normal, special, torch.zeros(48, 72, dtype=dtype), normal * 1e-30):
            for eager, generated in zip(quantize(x, quantizer), compiled(x, quantizer), strict=True):
                number = ~eager.float().isnan()  # the sign bit of a NaN is free
                assert torch.equal(number, ~generated.float().isnan())
                assert same_bits([eager[number]], [generated[number]])


def test_a_generated_cast_saturates() -> None:
    """As a scale of earlier steps needs it. A CPU's own casts differ from type to type, and from torch to torch."""
    x = torch.tensor([1e30, -1e30, 500.0, -70000.0, torch.inf, 1.0])
    kept: dict[str, Any] = {"fx_graph_cache": False}  # torch's key knows nothing of our lowerings
    compiled = torch.compile(lambda x: {dtype: hints.saturating_cast(x, dtype) for dtype in FP8_MAX}, options=kept)
    for dtype, cast in compiled(x).items():
        assert torch.equal(cast.float(), x.clamp(-FP8_MAX[dtype], FP8_MAX[dtype]).to(dtype).float()), dtype


def gemm_chain() -> nn.Module:
    """Every quantized tensor is a graph input or the result of a GEMM."""
    return nn.Sequential(nn.Linear(32, 64, bias=False), nn.Linear(64, 32, bias=False)).bfloat16()


@first_slow("recipe", [Float8CurrentScaling(), Float8CurrentScaling(fp8_format=Format.E4M3, power_2_scale=True)])
def test_compiled_equals_eager_bit_for_bit_without_fused_producers(recipe: Float8CurrentScaling) -> None:
    """On a CPU without a bf16 GEMM the product is rounded in code behind it, which is such a producer."""
    module, x = gemm_chain(), torch.randn(16, 32).bfloat16().requires_grad_()
    policy, rounds = fp8graph.Policy(default=recipe), torch_build.multiplies_bf16_on_cpu()
    eager = compiled_step(module, x, fp8graph.Backend(policy, compiler="eager"))
    options = {} if rounds else {"emulate_precision_casts": True}
    found = compiled_step(module, x, fp8graph.Backend(policy, inductor_options=options))
    assert same_bits(eager, found) == (rounds or CPP_ROUNDS_BETWEEN)


@pytest.mark.slow
def test_behind_fused_producers() -> None:
    """Stated: outputs and gradients agree to 30 dB; identical when precision casts are emulated."""
    module, x = MLP().bfloat16(), torch.randn(16, 32).bfloat16().requires_grad_()
    eager = compiled_step(module, x, fp8graph.Backend(ALL, compiler="eager"))
    fused = compiled_step(module, x, fp8graph.Backend(ALL))
    assert min(sqnr_db(e, f) for e, f in zip(eager, fused, strict=True)) > 30
    emulated = fp8graph.Backend(ALL, inductor_options={"emulate_precision_casts": True})
    identical = same_bits(eager, compiled_step(module, x, emulated))
    assert identical == CPP_ROUNDS_BETWEEN


def producer_and_quantize(x: Tensor, w: Tensor) -> list[Tensor]:
    """RMSNorm as Hugging Face writes it, then quantize: one fused producer."""
    hidden = x.to(torch.float32)
    hidden = hidden * torch.rsqrt(hidden.pow(2).mean(-1, keepdim=True) + 1e-6)
    return quantize(w * hidden.to(x.dtype), QUANTIZERS[0])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("seed", "scale_moves", "fraction", "sqnr"),
    [(1, False, 0.025, 37.0), (0, True, 0.085, 32.0)],  # measured: 2.2 % and 38.2 dB; 7.6 % and 33.0 dB
)
def test_the_fraction_of_bytes_that_a_fused_norm_changes(
    seed: int, scale_moves: bool, fraction: float, sqnr: float
) -> None:
    """About 2 % of the bytes, by one FP8 step; up to 8 % where bf16 would have rounded the largest element."""
    torch.manual_seed(seed)
    x, w = torch.randn(64, 256).bfloat16(), torch.randn(256).bfloat16()
    eager = producer_and_quantize(x, w)
    fused = torch.compile(producer_and_quantize, options=NARROW)(x, w)
    assert same_bits(eager[2:], fused[2:]) != scale_moves
    assert (bits(eager[0]) != bits(fused[0])).float().mean().item() < fraction
    assert sqnr_db(eager[0].float(), fused[0].float()) > sqnr
    options: dict[str, Any] = {**NARROW, "emulate_precision_casts": True}
    torch._dynamo.reset()
    identical = same_bits(eager, torch.compile(producer_and_quantize, options=options)(x, w))
    assert identical == CPP_ROUNDS_BETWEEN


@pytest.mark.slow
def test_none_for_everything_is_plain_inductor() -> None:
    module, x = MLP(bias=True).bfloat16(), torch.randn(16, 32).bfloat16().requires_grad_()
    backend = fp8graph.Backend(NONE)
    ours = compiled_step(module, x, backend)
    torch._dynamo.reset()
    assert same_bits(compiled_step(module, x, "inductor"), ours)
    assert {g.reason for g in backend.report.gemms} == {"default -> high precision"}


@first_slow("dtype", [torch.float32, torch.float16])
def test_other_dtypes_odd_sizes_and_dynamic_shapes(dtype: torch.dtype) -> None:
    module = MLP(inner=40, bias=True).to(dtype)
    backend = fp8graph.Backend(ALL)
    for tokens in (7, 9):
        x = torch.randn(2, tokens, 32, dtype=dtype, requires_grad=True)
        got = compiled_step(module, x, backend, dynamic=True)
        torch._dynamo.reset()
        eager = compiled_step(module, x, fp8graph.Backend(ALL, compiler="eager"))
        assert min(sqnr_db(e, g) for e, g in zip(eager, got, strict=True)) > 27


@pytest.mark.slow
def test_inductor_options_and_modes_reach_inductor() -> None:
    seen: list[Any] = []

    def look(_graph: Any) -> None:
        from torch._inductor import config

        seen.append((config.max_autotune, config.cpp.threads))

    options: Any = {
        "mode": "max-autotune-no-cudagraphs",
        "inductor": {"cpp.threads": 1, "joint_custom_pre_pass": look},
    }
    with torch.no_grad():
        torch.compile(gemm_chain(), backend="fp8graph", options=options)(torch.randn(16, 32).bfloat16())
    assert seen == [(True, 1)]


# --- against high precision, on normal data


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_sqnr_against_high_precision(dtype: torch.dtype) -> None:
    """>= 28 dB for fprop, >= 24 dB for dgrad and wgrad with HYBRID (E5M2 has one bit less)."""
    linear = nn.Linear(256, 256, bias=False).to(dtype)
    nn.init.normal_(linear.weight)
    x, dy = torch.randn(256, 256, dtype=dtype, requires_grad=True), torch.randn(256, 256, dtype=dtype)
    backend = fp8graph.Backend(ALL, compiler="eager")

    def run(module: Any) -> list[Tensor]:
        x.grad = linear.weight.grad = None
        y = module(x)
        y.backward(dy)
        assert x.grad is not None
        assert linear.weight.grad is not None
        return [y.detach(), x.grad.clone(), linear.weight.grad.clone()]

    y, dx, dw = (sqnr_db(e, g) for e, g in zip(run(linear), run(torch.compile(linear, backend=backend)), strict=True))
    assert (y >= 28, dx >= 24, dw >= 24) == (True, True, True), (y, dx, dw)


def test_every_rewritten_gemm_against_float64_on_the_dequantized_operands() -> None:
    recipe = Float8CurrentScaling()
    linear = nn.Linear(48, 80, bias=False)
    x, dy = torch.randn(33, 48, requires_grad=True), torch.randn(33, 80)
    compiled = torch.compile(linear, backend=fp8graph.Backend(ALL, compiler="eager"))
    y = compiled(x)
    y.backward(dy)

    def exact(tensor: Tensor, operand: Any) -> Tensor:
        q = numerics.quantize(tensor.detach(), recipe, operand, "rowwise")
        return q.data.double() * q.scale_inv.double()

    qx, qw, qdy = exact(x, "input"), exact(linear.weight, "weight"), exact(dy, "grad_output")
    assert x.grad is not None
    assert linear.weight.grad is not None
    for got, expected in ((y, qx @ qw.T), (x.grad, qdy @ qw), (linear.weight.grad, qdy.T @ qx)):
        # FP32 accumulation of at most 80 products, one rounding of each
        assert (got.double() - expected).abs().max() < 80 * 2.0**-24 * expected.abs().max()


def test_representable_inputs_give_the_high_precision_result() -> None:
    """The experiment of Transformer Engine's quickstart: the loss is in the casts, not in the GEMM."""
    recipe = Float8CurrentScaling()
    linear = nn.Linear(768, 768)
    with torch.no_grad():
        linear.weight.copy_(numerics.cast_to_representable(linear.weight, recipe, "weight"))
    x = numerics.cast_to_representable(torch.rand(1024, 768), recipe, "input")
    with torch.no_grad():
        fp32 = linear(x)
        fp8 = torch.compile(linear, backend=fp8graph.Backend(ALL, compiler="eager"))(x)
    assert (fp8 - fp32).abs().max() <= 1e-4 * fp32.abs().max()
