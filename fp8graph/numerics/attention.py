"""Attention in FP8, in the words of torch: what a kernel of a device computes, and what backward would read in FP8.

    S = softmax(scale * q @ k.T);  o = S @ v                                    (forward)
    dv = S.T @ do;  dS = do @ v.T;  dP = softmax_backward(S, dS);  dq = scale * dP @ k;  dk = scale * dP.T @ q

q, k, v, S, do and dP are operands of products, and can be quantized.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from fp8graph.numerics.quantization import quantize_layouts
from fp8graph.numerics.scalings import SCALINGS


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


def rounded_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    is_causal: bool,
    scale: float | None,
    dtype: torch.dtype,
    power_2_scale: bool,
    amax_epsilon: float,
    scaling: str,
) -> Tensor:
    """``round(softmax(scale * q @ k.T + mask)) @ v`` in FP32, rounded once to the dtype of ``q``.

    The semantics are those of Transformer Engine's ``UnfusedDotProductAttention``, which emulates its FP8 attention:
    the probabilities are quantized with their own amax.

    Args:
        q: [batch, heads, queries, size]. k, v: [batch, kv_heads, keys, size], decoded numbers; heads of q that share
            one of k and v follow each other.
        mask: added to the scores, broadcast to [batch, heads, queries, keys]. A query that sees no key is 0.
        is_causal: a query sees the keys up to its own position.
        scale: None: ``1 / sqrt(size)``.
        dtype: of the probabilities; ``grad_dtype`` is that of gradients.
        power_2_scale, amax_epsilon, scaling: see :class:`QuantizeArguments`; one scale for the tensor, or "row": one
            per (batch, head of k and v).
    """
    shared = _Sharing(k.shape[1], power_2_scale, amax_epsilon, scaling)
    _, probabilities = _probabilities(q, k, mask, is_causal, scale)
    rounded = shared.round(probabilities, dtype)
    return (rounded @ _repeated(v, q)).to(q.dtype)


def rounded_attention_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    is_causal: bool,
    scale: float | None,
    dtype: torch.dtype,
    grad_dtype: torch.dtype,
    power_2_scale: bool,
    amax_epsilon: float,
    scaling: str,
) -> list[Tensor]:
    """The gradients of q, k and v of :func:`rounded_attention`, in their dtypes.

    ``grad`` [batch, heads, queries, size of v] and the gradient of the scores are quantized; the softmax and its
    gradient read the probabilities as they were before. No product reads an unrounded number.
    """
    shared = _Sharing(k.shape[1], power_2_scale, amax_epsilon, scaling)
    factor, probabilities = _probabilities(q, k, mask, is_causal, scale)
    rounded = shared.round(probabilities, dtype)
    of_result = shared.round(grad.to(torch.float32), grad_dtype)
    of_probabilities = of_result @ _repeated(v, q).transpose(-2, -1)
    of_scores = probabilities * (of_probabilities - (probabilities * of_probabilities).sum(-1, keepdim=True))
    of_scores = shared.round(of_scores, grad_dtype) * factor
    gradients = (
        of_scores @ _repeated(k, q),
        _summed(of_scores.transpose(-2, -1) @ q.to(torch.float32), k),
        _summed(rounded.transpose(-2, -1) @ of_result, v),
    )
    return [gradient.to(x.dtype) for x, gradient in zip((q, k, v), gradients, strict=True)]


@dataclass(frozen=True)
class _Sharing:
    """The quantization of the numbers between the products."""

    kv_heads: int
    power_2_scale: bool
    amax_epsilon: float
    scaling: str

    def round(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        """``x``, FP32 [batch, heads, ...], quantized and decoded."""
        kind = SCALINGS[self.scaling]
        rows = x.reshape(1 if kind.one_scale else x.shape[0] * self.kv_heads, -1)
        how = dtype, self.power_2_scale, self.amax_epsilon, [1, 1], []
        data, scale_inv = quantize_layouts(rows, *how, scaling=self.scaling)
        return kind.decode(data, scale_inv, (), None).reshape(x.shape)


def _probabilities(
    q: Tensor, k: Tensor, mask: Tensor | None, is_causal: bool, scale: float | None
) -> tuple[float, Tensor]:
    """The factor of the scores, and their softmax [batch, heads, queries, keys] in FP32."""
    factor = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
    scores = q.to(torch.float32) @ _repeated(k, q).transpose(-2, -1) * factor
    if mask is not None:
        scores = scores + mask.to(torch.float32)
    if is_causal:
        hidden = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
        scores = scores.masked_fill(hidden, -math.inf)
    sees_nothing = (scores == -math.inf).all(-1, keepdim=True)
    return factor, scores.softmax(-1).masked_fill(sees_nothing, 0.0)


def _repeated(x: Tensor, q: Tensor) -> Tensor:
    """k or v in FP32 with as many heads as ``q``."""
    return x.to(torch.float32).repeat_interleave(q.shape[1] // x.shape[1], 1)


def _summed(gradient: Tensor, x: Tensor) -> Tensor:
    """The gradient of ``x`` from that of its repeated heads."""
    return gradient.unflatten(1, (x.shape[1], -1)).sum(2)
