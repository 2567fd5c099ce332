"""The product of attention in FP8, against float64."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from fp8graph.ir import ops
from fp8graph.numerics import sqnr_db
from fp8graph.numerics.attention import scaled_attention


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


@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (4, 2), (6, 1)])
@pytest.mark.parametrize(("causal", "scale"), [(False, None), (True, 0.3)])
def test_against_float64(heads: int, kv_heads: int, causal: bool, scale: float | None) -> None:
    torch.manual_seed(0)
    q, k, v = fp8(2, heads, 24, 32), fp8(2, kv_heads, 24, 32), fp8(2, kv_heads, 24, 32)
    of_q, of_k, of_v = scales = torch.rand(2, kv_heads) + 0.5, torch.rand(2, kv_heads), torch.rand(2, kv_heads) * 3
    got = scaled_attention(q, k, v, of_q, of_k, of_v, causal, scale)
    expected = exact(q, k, v, scales, causal, 1 / math.sqrt(32) if scale is None else scale)
    assert got.dtype == torch.bfloat16
    assert sqnr_db(expected, got.double()) > 52  # one rounding to bf16


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (0, 2, 1, 3), (1, 0, 2, 3)])
def test_the_result_has_the_strides_of_q_and_the_fake_says_so(order: tuple[int, ...]) -> None:
    shape = (2, 4, 8, 16)
    q = fp8(*(shape[dim] for dim in order)).permute([order.index(dim) for dim in range(4)])
    k, v, scale = fp8(*shape), fp8(*shape), torch.ones(2, 4)
    args = q, k, v, scale, scale, scale, True, None
    assert ops.scaled_attention(*args).stride() == q.stride()
    torch.library.opcheck(ops.scaled_attention, args, test_utils=("test_faketensor", "test_aot_dispatch_static"))
