"""The product of attention in FP8: what a kernel of a device computes, in the words of torch."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def scaled_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale_inv_q: Tensor,
    scale_inv_k: Tensor,
    scale_inv_v: Tensor,
    is_causal: bool,
    scale: float | None,
) -> Tensor:
    """``softmax(scale * q @ k.T) @ v`` in FP32, rounded once to bf16, with the strides of ``q``.

    FlashAttention-3, whose numbers these are but for one thing, also rounds the probabilities to E4M3 before the second
    product (``Max_offset`` in hopper/flash_fwd_kernel_sm90.h of flash-attention).

    Args:
        q: [batch, heads, queries, size] E4M3.  k, v: [batch, kv_heads, keys, size] E4M3; heads of q that share one of k
            and v follow each other.
        scale_inv_q, scale_inv_k, scale_inv_v: FP32 [batch, kv_heads].
        is_causal: a query sees the keys up to its own position; there are as many queries as keys.
        scale: None: ``1 / sqrt(size)``.
    """
    groups = q.shape[1] // k.shape[1]
    decoded = [
        x.to(torch.float32) * scale_inv.repeat_interleave(x.shape[1] // k.shape[1], 1)[:, :, None, None]
        for x, scale_inv in ((q, scale_inv_q), (k, scale_inv_k), (v, scale_inv_v))
    ]
    queries, keys, values = (decoded[0], *(x.repeat_interleave(groups, 1) for x in decoded[1:]))
    scores = queries @ keys.transpose(-2, -1) * (1 / math.sqrt(q.shape[-1]) if scale is None else scale)
    if is_causal:
        hidden = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
        scores = scores.masked_fill(hidden, -math.inf)
    result = (scores.softmax(-1) @ values).to(torch.bfloat16)
    order = sorted(range(q.ndim), key=lambda dim: -q.stride(dim))
    return result.permute(order).contiguous().permute([order.index(dim) for dim in range(q.ndim)])
