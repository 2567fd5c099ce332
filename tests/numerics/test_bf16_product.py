"""FP8 operands multiplied as bf16 numbers: exact products, FP32 accumulation, one rounding."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from fp8graph.numerics.matmul import BF16_PRODUCT, bf16_product
from helpers import in_one_test

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
SIZES = [(64, 96, 48), (1, 32, 16), (17, 48, 33), (128, 1024, 64)]  # m, k, n; of the first, rounding twice is seen


def operands(m: int, k: int, n: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    torch.manual_seed(m + k + n)
    return torch.randn(m, k).to(dtype), (3 * torch.randn(n, k)).to(E4M3)


def rounded_once(exact: Tensor, accumulation: Tensor) -> tuple[Tensor, Tensor]:
    """The bf16 numbers between which a result may be that was accumulated with errors up to ``accumulation``."""
    return (exact - accumulation).float().bfloat16(), (exact + accumulation).float().bfloat16()


@in_one_test("dtype", [E4M3, E5M2])
@in_one_test("sizes", SIZES)
@in_one_test("scales", ["one", "rows of powers of two", "rows"])
@in_one_test("with_bias", [False, True])
def test_results_are_rounded_once(
    dtype: torch.dtype, sizes: tuple[int, int, int], scales: str, with_bias: bool
) -> None:
    a, b = operands(*sizes, dtype)
    m, k, n = sizes
    scale_a, scale_b = torch.tensor(0.0037123), torch.tensor([1.7])
    if scales != "one":
        scale_a, scale_b = torch.rand(m, 1) + 0.5, torch.rand(n, 1) + 0.5
        if scales == "rows of powers of two":
            scale_a, scale_b = (torch.exp2(8 * x.log2().round()) for x in (scale_a, scale_b))
    bias = torch.randn(n).bfloat16() if with_bias else None
    scale = scale_a.double() * scale_b.double().reshape(1, -1)
    added = torch.zeros(n).double() if bias is None else bias.double()
    exact = (a.double() @ b.double().t()) * scale + added
    # FP32: k additions, the scales and the bias; torch's sums of products have fewer roundings than this
    accumulation = (k + 3) * 2.0**-24 * ((a.double().abs() @ b.double().abs().t()) * scale + added.abs())
    low, high = rounded_once(exact, accumulation)
    got = bf16_product(a, b, scale_a, scale_b, bias)
    assert got.dtype == torch.bfloat16
    assert (low <= got).all()
    assert (got <= high).all()
    twice = (((a.double() @ b.double().t()).float().bfloat16().double() * scale) + added).float().bfloat16()
    if m * n > 1000 and scales != "rows of powers of two" and k < 1000:  # else the bound above would let this pass
        assert not ((low <= twice) & (twice <= high)).all()


@in_one_test("dtype", [E4M3, E5M2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz])
def test_every_fp8_number_is_multiplied_as_it_is(dtype: torch.dtype) -> None:
    numbers = torch.arange(256, dtype=torch.uint8).view(dtype)
    one = torch.ones(())
    rows = numbers.reshape(256, 1)
    got = bf16_product(rows, torch.ones(1, 1).to(E4M3), one, one, None).squeeze(1)
    torch.testing.assert_close(got, numbers.bfloat16(), rtol=0, atol=0, equal_nan=True)
    strided = numbers.repeat_interleave(2).reshape(256, 2)[:, ::2]  # not contiguous
    assert torch.equal(
        bf16_product(strided, torch.ones(1, 1).to(E4M3), one, one, None).nan_to_num(9), got[:, None].nan_to_num(9)
    )


def test_generated_code_does_not_convert_operands() -> None:
    """A conversion is a loop to compile, and in backward a kernel of its own."""
    a, b = operands(16, 32, 16, E4M3)
    one = torch.ones(())
    traced = make_fx(bf16_product)(a, b, one, one, None)
    assert [node.target for node in traced.graph.nodes if node.op == "call_function"] == [BF16_PRODUCT]


def test_every_fp8_number_is_exact_in_bf16() -> None:
    for dtype in (E4M3, E5M2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz):
        numbers = torch.arange(256, dtype=torch.uint8).view(dtype)
        assert torch.equal(numbers.float().nan_to_num(9e9), numbers.bfloat16().float().nan_to_num(9e9))


def test_not_finite_scales_and_numbers_reach_the_result() -> None:
    a, b = operands(16, 32, 16, E4M3)
    one = torch.ones(())
    assert not bf16_product(a, b, one * math.inf, one, None).isfinite().any()
    assert bf16_product(a, b, one * math.nan, one, None).isnan().all()
    rows = torch.ones(16, 1)
    rows[3] = math.inf
    finite = bf16_product(a, b, rows, torch.ones(16, 1), None).isfinite()
    assert not finite[3].any()
    assert finite[[i for i in range(16) if i != 3]].all()
    numbers = a.float()
    numbers[5, 7] = math.nan
    assert bf16_product(numbers.to(E4M3), b, one, one, None)[5].isnan().all()
