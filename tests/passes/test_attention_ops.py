"""The product of attention in FP8, against float64."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from fp8graph.numerics import sqnr_db
from fp8graph.passes.attention.ops import (
    attend_in_torch,
    rounded_attention,
    rounded_attention_backward,
    scaled_attention,
)
from helpers import in_one_test


def fp8(*shape: int) -> Tensor:
    return torch.randn(shape).to(torch.float8_e4m3fn)


def exact(q: Tensor, k: Tensor, v: Tensor, scales: tuple[Tensor, ...], causal: bool, scale: float) -> Tensor:
    """float64, head by head; the scales multiply the products, as FlashAttention-3's do."""
    out = torch.zeros(q.shape, dtype=torch.float64)
    for b in range(q.shape[0]):
        for h in range(q.shape[1]):
            kv = h // (q.shape[1] // k.shape[1])
            of_q, of_k, of_v = (s[b, kv].double() for s in scales)
            scores = torch.einsum("qd,kd->qk", q[b, h].double(), k[b, kv].double()) * of_q * of_k * scale
            weights = (scores - scores.amax(-1, keepdim=True)).exp()
            weights = weights.tril() if causal else weights
            out[b, h] = weights @ v[b, kv].double() * of_v / weights.sum(-1, keepdim=True)
    return out


@in_one_test(("heads", "kv_heads"), [(4, 4), (4, 2), (6, 1)])
@in_one_test(("causal", "scale"), [(False, None), (True, 0.3)])
def test_against_float64(heads: int, kv_heads: int, causal: bool, scale: float | None) -> None:
    torch.manual_seed(0)
    q, k, v = fp8(2, heads, 24, 32), fp8(2, kv_heads, 24, 32), fp8(2, kv_heads, 24, 32)
    of_q, of_k, of_v = scales = torch.rand(2, kv_heads) + 0.5, torch.rand(2, kv_heads), torch.rand(2, kv_heads) * 3
    got = attend_in_torch(q, k, v, of_q, of_k, of_v, causal, scale)
    expected = exact(q, k, v, scales, causal, 1 / math.sqrt(32) if scale is None else scale)
    assert got.dtype == torch.bfloat16
    assert sqnr_db(expected, got.double()) > 52  # one rounding to bf16


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (0, 2, 1, 3), (1, 0, 2, 3)])
def test_the_result_has_the_strides_of_q_and_the_fake_says_so(order: tuple[int, ...]) -> None:
    shape = (2, 4, 8, 16)
    q = fp8(*(shape[dim] for dim in order)).permute([order.index(dim) for dim in range(4)])
    k, v, scale = fp8(*shape), fp8(*shape), torch.ones(2, 4)
    args = q, k, v, scale, scale, scale, True, None
    assert scaled_attention(*args).stride() == q.stride()
    torch.library.opcheck(scaled_attention, args, test_utils=("test_faketensor", "test_aot_dispatch_static"))


E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
HOW = True, 0.0, "tensor"


def test_all_operands_are_rounded() -> None:
    """Numbers that FP8 holds pass through: two keys of equal weight, and gradients of a few bits."""
    q, k = torch.zeros(1, 2, 1, 16), torch.zeros(1, 1, 2, 16)
    v = torch.tensor([1.0, 3.0]).reshape(1, 1, 2, 1).expand(1, 1, 2, 16)
    grad = torch.ones(1, 2, 1, 16) * 1.25
    out = rounded_attention(q, k, v, None, False, None, E4M3, *HOW)
    assert out.unique().tolist() == [2.0]
    k[..., 0] = 1.0
    dq, dk, dv = rounded_attention_backward(grad, q, k, v, None, False, 1.0, E4M3, E5M2, *HOW)
    assert dv.unique().tolist() == [1.25]  # half of two heads
    assert not dk.any()  # q is zero
    # the gradient of the scores is (-10, 10), as the mean of 20 and 60 is 40; k is the same for both keys
    assert not dq.any()
    k[0, 0, 1, 0] = 3.0
    dq, _, _ = rounded_attention_backward(grad, q, k, v, None, False, 1.0, E4M3, E5M2, *HOW)
    assert dq[..., 0].unique().tolist() == [10.0 * (3.0 - 1.0)]
    (rounded, *_) = rounded_attention_backward(grad * 1.04, q, k, v, None, False, 1.0, E4M3, E5M2, *HOW)
    assert rounded[..., 0].unique().tolist() == [20.0]  # 1.3 becomes 1.25


@pytest.mark.parametrize("causal", [True, False])
def test_rounded_attention_against_float64(causal: bool) -> None:
    """Without a causal mask, a mask hides the same keys. Probabilities have three bits of mantissa."""
    q, k, v = torch.randn(1, 4, 24, 32), torch.randn(1, 2, 24, 32), torch.randn(1, 2, 24, 32)
    mask = None if causal else torch.full((24, 24), -math.inf).triu(1)
    out = rounded_attention(q, k, v, mask, causal, None, E4M3, *HOW)
    ones = torch.ones(1, 2)
    expected = exact(q, k, v, (ones, ones, ones), True, 1 / math.sqrt(32))
    assert sqnr_db(expected, out.double()) > 25
    assert torch.allclose(out[:, :, 0], v[:, :, 0].repeat_interleave(2, 1), rtol=2**-4)  # the first key alone


def test_a_query_that_sees_nothing_gets_nothing() -> None:
    q, k, v = (torch.randn(1, 2, 4, 16) for _ in range(3))
    mask = torch.zeros(4, 4).index_fill(0, torch.tensor([2]), -math.inf)
    out = rounded_attention(q, k, v, mask, False, None, E4M3, *HOW)
    assert not out[:, :, 2].any()
    assert out[:, :, 1].isfinite().all()
    gradients = rounded_attention_backward(torch.ones_like(q), q, k, v, mask, False, None, E4M3, E5M2, *HOW)
    assert all(gradient.isfinite().all() for gradient in gradients)
    assert not gradients[0][:, :, 2].any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("scaling", ["tensor", "row"])
def test_the_fakes_of_rounded_attention(dtype: torch.dtype, scaling: str) -> None:
    """Also of v with heads of another size, and of transposed tensors."""
    q, k, v = (torch.randn(2, 6, heads, size).to(dtype).transpose(1, 2) for heads, size in ((4, 16), (2, 16), (2, 8)))
    how = E4M3, True, 0.0, scaling
    backward = torch.ones(2, 4, 6, 8).to(dtype), q, k, v, None, True, 0.5, E4M3, E5M2, *how[1:]
    tests = ("test_faketensor", "test_aot_dispatch_static")
    torch.library.opcheck(rounded_attention, (q, k, v, None, True, 0.5, *how), test_utils=tests)
    torch.library.opcheck(rounded_attention_backward, backward, test_utils=tests)
