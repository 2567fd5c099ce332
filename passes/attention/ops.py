"""The dialect's attention in FP8: its ops, in the words of torch, and the kernel that computes one of them.

    scaled_attention(q, k, v, scale_inv_q, scale_inv_k, scale_inv_v, is_causal, scale) -> softmax(q @ k.T) @ v
    rounded_attention(q, k, v, mask, is_causal, scale, dtype, ...) -> round(softmax(q @ k.T)) @ v
    rounded_attention_backward(grad, q, k, v, ...) -> [dq, dk, dv]

With

    S = softmax(scale * q @ k.T);  o = S @ v                                    (forward)
    dv = S.T @ do;  dS = do @ v.T;  dP = softmax_backward(S, dS);  dq = scale * dP @ k;  dk = scale * dP.T @ q

q, k, v, S, do and dP are operands of products, and can be quantized. The kernel is FlashAttention-3's, for Hopper. A
user's program activates it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor, fx

from fp8graph.compat import attention
from fp8graph.compat.ops import named_arguments
from fp8graph.hardware import Hardware, vendor_of
from fp8graph.ir.nodes import known_equal, value
from fp8graph.ir.ops import define
from fp8graph.numerics.quantization import quantize_layouts
from fp8graph.numerics.scalings import SCALINGS
from fp8graph.recipes import FP8_MAX

_DEVICE: Final = "sm_90"  # that the kernel is for


def active_implementation() -> str | None:
    """Return the flash attention of this process, which decides whether a kernel reads FP8."""
    return attention.active_implementation()


def why_no_kernel(device: Hardware, head_size: int | None) -> str | None:
    """Return the reason why no kernel of ``device`` reads FP8 heads of ``head_size`` (None: dynamic); None if one does.

    Source: ``_fa3_common_support_error`` in torch/nn/attention/_fa3.py; ``mha_fwd`` in hopper/flash_api.cpp of
    flash-attention: heads of a multiple of 16 elements, at most 256.
    """
    if device.from_target(_DEVICE) is None:
        return f"{device.name} has no FP8 attention in torch"
    if device.name.removesuffix("a") != _DEVICE:
        return f"torch's FP8 attention is FlashAttention-3, for {_DEVICE} only; this is {device.name}"
    if not attention.HAS_QUANTIZED_ATTENTION:
        return f"torch {torch.__version__} has no op for FP8 attention"
    if (active := active_implementation()) != "FA3":
        now = f"{active} is" if active else "it is not"
        return f'FlashAttention-3 must be active: torch.nn.attention.activate_flash_attention_impl("FA3"); {now}'
    if head_size is None or head_size % 16 or head_size > 256:
        return f"FlashAttention-3 takes heads of 16, 32, ..., 256 elements, not {head_size or 'a dynamic size'}"
    return None


def attend(q: Tensor, *args: Any) -> Tensor:
    """:func:`attend_in_torch`, on the kernel where the device of ``q`` may have it."""
    if vendor_of(q.device).from_target(_DEVICE) is not None:
        return attention.quantized_attention(q, *args)
    return attend_in_torch(q, *args)


def attend_in_torch(
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
        scores = _without_later_keys(scores)
    result = (scores.softmax(-1) @ values).to(torch.bfloat16)
    order = sorted(range(q.ndim), key=lambda dim: -q.stride(dim))
    return result.permute(order).contiguous().permute([order.index(dim) for dim in range(q.ndim)])


def attend_rounded(
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


def gradients_rounded(
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
    """Return the gradients of q, k and v of :func:`attend_rounded`, in their dtypes.

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
    """Return the factor of the scores, and their softmax [batch, heads, queries, keys] in FP32."""
    factor = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
    scores = q.to(torch.float32) @ _repeated(k, q).transpose(-2, -1) * factor
    if mask is not None:
        scores = scores + mask.to(torch.float32)
    if is_causal:
        scores = _without_later_keys(scores)
    sees_nothing = (scores == -math.inf).all(-1, keepdim=True)
    return factor, scores.softmax(-1).masked_fill(sees_nothing, 0.0)


def _without_later_keys(scores: Tensor) -> Tensor:
    """Return ``scores`` [..., queries, keys], with -inf where a key comes after the query."""
    hidden = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
    return scores.masked_fill(hidden, -math.inf)


def _repeated(x: Tensor, q: Tensor) -> Tensor:
    """k or v in FP32 with as many heads as ``q``."""
    return x.to(torch.float32).repeat_interleave(q.shape[1] // x.shape[1], 1)


def _summed(gradient: Tensor, x: Tensor) -> Tensor:
    """Return the gradient of ``x`` from that of its repeated heads."""
    return gradient.unflatten(1, (x.shape[1], -1)).sum(2)


def _check(node: fx.Node) -> str | None:
    given = named_arguments(node)
    q, k, v, *scales = (value(given[name]) for name in "q k v scale_inv_q scale_inv_k scale_inv_v".split())
    if any(x.dtype not in FP8_MAX or x.ndim != 4 or x.stride(-1) != 1 for x in (q, k, v)):
        return f"attention of {q.dtype} {tuple(q.shape)} with strides {q.stride()}, {k.stride()} and {v.stride()}"
    wanted = k.shape[:2]  # one scale for each head of k and v, of q as well
    if any(s.dtype != torch.float32 or s.ndim != 2 or not all(map(known_equal, s.shape, wanted)) for s in scales):
        return f"scales {[tuple(scale.shape) for scale in scales]} for {tuple(wanted)} heads"
    return None


# Fakes, see ``ir/ops.py``.


def _shape_of_scaled(q: Tensor, *_arguments: Any) -> Tensor:
    return torch.empty_like(q, dtype=torch.bfloat16)


def _shape_of_rounded(q: Tensor, _k: Tensor, v: Tensor, *_arguments: Any) -> Tensor:
    return q.new_empty([*q.shape[:3], v.shape[3]])


def _shape_of_gradients(_grad: Tensor, q: Tensor, k: Tensor, v: Tensor, *_arguments: Any) -> list[Tensor]:
    return [x.new_empty(x.shape) for x in (q, k, v)]


scaled_attention = define(
    "scaled_attention",
    "(Tensor q, Tensor k, Tensor v, Tensor scale_inv_q, Tensor scale_inv_k, Tensor scale_inv_v, bool is_causal,"
    " float? scale) -> Tensor",
    reference=attend,
    fake=_shape_of_scaled,
    check=_check,
    contiguous=False,
)
rounded_attention = define("rounded_attention", reference=attend_rounded, fake=_shape_of_rounded)
rounded_attention_backward = define("rounded_attention_backward", reference=gradients_rounded, fake=_shape_of_gradients)
