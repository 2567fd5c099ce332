"""Modules with attention, in each form in which torch traces it, and what they compute on rounded tensors."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import oracle
from fp8graph import Policy, Rule
from helpers import eager_backend

aten = torch.ops.aten


class Attention(nn.Module):
    """``body(q, k, v)``."""

    def __init__(self, body: Any) -> None:
        super().__init__()
        self.body = body

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return self.body(q, k, v)


def sdpa(**how: Any) -> Attention:
    return Attention(lambda q, k, v: functional.scaled_dot_product_attention(q, k, v, **how))


def written_out(
    scale: Any = lambda s: s / math.sqrt(64), between: Any = lambda s: s, after: Any = lambda p: p
) -> Attention:
    """``after(softmax(between(scale(q @ k.T)))) @ v``."""

    def body(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scores = between(scale(q @ k.transpose(-1, -2)))
        return after(functional.softmax(scores, dim=-1, dtype=torch.float32).to(q.dtype)) @ v

    return Attention(body)


# The ops of other devices run on fake tensors of a CPU. name -> body, causal, masked, dropout
OPS: dict[str, tuple[Any, bool, bool, bool]] = {
    "flash": (lambda q, k, v: aten._scaled_dot_product_flash_attention(q, k, v, 0.1, True)[0], True, False, True),
    "memory-efficient": (
        lambda q, k, v: aten._scaled_dot_product_efficient_attention(q, k, v, None, True, 0.0, True)[0],
        True,
        False,
        False,
    ),
    "cuDNN": (
        lambda q, k, v: aten._scaled_dot_product_cudnn_attention(q, k, v, None, True, 0.0, False)[0],
        False,
        False,
        False,
    ),
    "device's own": (
        lambda q, k, v: aten._scaled_dot_product_fused_attention_overrideable(q, k, v, None, 0.0, True)[0],
        True,
        False,
        False,
    ),
    "CPU flash": (
        lambda q, k, v: functional.scaled_dot_product_attention(q, k, v, attn_mask=torch.zeros(16, 16)),
        False,
        True,
        False,
    ),
}


# the names of OPS, as parameters of tests that trace their backwards
FORMS_IN_TRAINING = [
    pytest.param(
        form,
        marks=pytest.mark.skipif(
            form == "device's own" and torch.__version__ < "2.13",
            reason="before 2.13 torch describes the backward of this op only on the devices that have it",
        ),
    )
    for form in OPS
]


def qkv(
    batch: int = 2,
    heads: int = 4,
    kv_heads: int | None = None,
    queries: int = 16,
    keys: int | None = None,
    size: int = 64,
    dtype: torch.dtype = torch.float32,
    gradients: bool = True,
) -> tuple[Tensor, Tensor, Tensor]:
    """Random q, k and v, [batch, heads, tokens, size]."""
    keys, kv_heads = keys or queries, kv_heads or heads
    shapes = (batch, heads, queries, size), (batch, kv_heads, keys, size), (batch, kv_heads, keys, size)
    q, k, v = (torch.randn(shape).to(dtype).requires_grad_(gradients) for shape in shapes)
    return q, k, v


def asking(recipe: Any) -> Policy:
    return Policy([Rule("*", recipe, op="attention")], default=None)


def rounded(
    x: Tensor,
    heads: int | None = None,
    *,
    power_2: bool = False,
    epsilon: float = 0.0,
    dtype: torch.dtype = torch.float8_e4m3fn,
) -> Tensor:
    """``x`` [batch, heads, tokens, size] rounded to FP8, with one scale, or one per (batch, ``heads``)."""
    parts = [x.detach()] if heads is None else list(x.detach().reshape(x.shape[0] * heads, -1))
    made: list[Tensor] = []
    for part in parts:
        codes, scale_inv = oracle.quantize(part, dtype, power_2_scale=power_2, epsilon=epsilon)
        values = oracle.dequantize(codes, scale_inv, dtype, x.dtype)
        made.append(torch.from_numpy(np.asarray(values, dtype=np.float64)).reshape(part.shape))
    return torch.stack(made).reshape(x.shape).to(x.dtype)


def results(module: nn.Module, q: Tensor, k: Tensor, v: Tensor, policy: Policy) -> list[Tensor]:
    """The output and the three gradients; with dropout, of one seed."""
    torch._dynamo.reset()
    inputs = [x.detach().clone().requires_grad_() for x in (q, k, v)]
    compiled = torch.compile(module, backend=eager_backend(policy), fullgraph=True)
    torch.manual_seed(0)
    out = compiled(*inputs)
    (out.float() * torch.linspace(-1, 1, out.numel()).reshape(out.shape)).sum().backward()
    return [out.detach(), *(x.grad for x in inputs if x.grad is not None)]


def exact(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> list[Tensor]:
    """Attention and its gradients in float64, row by row and head by head."""
    inputs = [x.detach().double().requires_grad_() for x in (q, k, v)]
    out = torch.zeros(*q.shape[:3], v.shape[3], dtype=torch.float64)
    for b in range(q.shape[0]):
        for h in range(q.shape[1]):
            kv = h * k.shape[1] // q.shape[1]
            for i in range(q.shape[2]):
                until = i + 1 if causal else k.shape[2]
                keys, values = inputs[1][b, kv, :until], inputs[2][b, kv, :until]
                weights = ((keys * inputs[0][b, h, i]).sum(-1) / math.sqrt(q.shape[3])).exp()
                out[b, h, i] = (weights[:, None] * values).sum(0) / weights.sum()
    (out * torch.linspace(-1, 1, out.numel(), dtype=torch.float64).reshape(out.shape)).sum().backward()
    return [out.detach(), *(x.grad for x in inputs if x.grad is not None)]


def exact_rounding_all(
    tensors: list[Tensor], seen: Tensor, dtypes: tuple[torch.dtype, torch.dtype], **how: Any
) -> list[Tensor]:
    """Attention of rounded q, k and v and its gradients, head by head in float64, with all other operands rounded.

    ``tensors``: q, k and v. ``seen`` [batch, heads, queries, keys]: which keys a query sees. ``dtypes``: of
    probabilities and of gradients.
    ``how``: of :func:`rounded`.
    """
    q, k, v = tensors
    groups, rows = q.shape[1] // k.shape[1], range(q.shape[0])
    pairs = [(b, h, h // groups) for b in rows for h in range(q.shape[1])]
    shape = *q.shape[:3], k.shape[2]
    shares, slopes = torch.zeros(shape, dtype=torch.float64), torch.zeros(shape, dtype=torch.float64)
    for b, h, kv in pairs:
        weights = torch.einsum("id,jd->ij", q[b, h].double(), k[b, kv].double()) / math.sqrt(q.shape[3])
        weights = torch.where(seen[b, h], weights.exp(), 0.0)
        shares[b, h] = weights / weights.sum(1, keepdim=True).clamp_min(1e-300)
    kept = rounded(shares.float(), dtype=dtypes[0], **how).double()
    out, dq, dk, dv = (torch.zeros(*x.shape[:3], v.shape[3], dtype=torch.float64) for x in (q, q, k, v))
    slope = torch.linspace(-1, 1, out.numel()).reshape(out.shape).to(q.dtype).float()
    given = rounded(slope, dtype=dtypes[1], **how).double()
    for b, h, kv in pairs:
        out[b, h] = kept[b, h] @ v[b, kv].double()
        dv[b, kv] += torch.einsum("ij,id->jd", kept[b, h], given[b, h])
        of_shares = torch.einsum("id,jd->ij", given[b, h], v[b, kv].double())
        mean = (shares[b, h] * of_shares).sum(1, keepdim=True)
        slopes[b, h] = shares[b, h] * (of_shares - mean)
    slopes = rounded(slopes.float(), dtype=dtypes[1], **how).double() / math.sqrt(q.shape[3])
    for b, h, kv in pairs:
        dq[b, h] = slopes[b, h] @ k[b, kv].double()
        dk[b, kv] += slopes[b, h].T @ q[b, h].double()
    return [out, dq, dk, dv]
