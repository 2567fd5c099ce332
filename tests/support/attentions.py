"""Modules with attention, in each form in which torch traces it."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

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
