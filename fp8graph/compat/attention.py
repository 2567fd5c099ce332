"""torch's attention ops: those of flex_attention and of packed sequences, and the one that reads FP8."""

from __future__ import annotations

from typing import Any, Final

import torch
from torch import Tensor
from torch._higher_order_ops.flex_attention import flex_attention, flex_attention_backward

try:
    from torch.nn.attention import varlen  # it defines the ops
except ImportError:
    varlen = None

__all__ = [
    "FLEX",
    "FLEX_BACKWARD",
    "HAS_QUANTIZED_ATTENTION",
    "VARLEN",
    "VARLEN_BACKWARD",
    "active_implementation",
    "quantized_attention",
    "varlen",
]

FLEX: Final[Any] = flex_attention  # (query, key, value, score_mod, block_mask, scale, ...)
FLEX_BACKWARD: Final[Any] = flex_attention_backward  # (query, key, value, out, logsumexp, grad_out, ...)
# varlen_attn's: (query [tokens, heads, size], key, value, cu_seq_q [sequences + 1], cu_seq_k, max_q, max_k, ...), and
# (grad_out, query, key, value, out, logsumexp, ...); None: this torch has none.
VARLEN: Final[Any] = torch.ops.torch_attn._varlen_attn.default if varlen else None
VARLEN_BACKWARD: Final[Any] = torch.ops.torch_attn._varlen_attn_backward.default if varlen else None

# FlashAttention-3's, whose kernel is not part of torch: the package flash_attn_interface, which
# torch.nn.attention.activate_flash_attention_impl("FA3") registers for the op (torch/nn/attention/_fa3.py).
_FLASH: Final[Any] = torch.ops.aten._scaled_dot_product_flash_attention
HAS_QUANTIZED_ATTENTION: Final = "quantized" in _FLASH.overloads()


def active_implementation() -> str | None:
    """The flash attention that replaces torch's own in this process, by name; None: torch's own."""
    ask: Any = getattr(torch.nn.attention, "current_flash_attention_impl", None)
    return None if ask is None else ask()


def quantized_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale_inv_q: Tensor,
    scale_inv_k: Tensor,
    scale_inv_v: Tensor,
    is_causal: bool,
    scale: float | None,
) -> Tensor:
    """softmax(q @ k.T) @ v in bf16: q [batch, heads, tokens, size] E4M3, scales FP32 [batch, heads of k and v]."""
    arguments = q, k, v, scale_inv_q, scale_inv_k, scale_inv_v, 0.0, is_causal, False
    return _FLASH.quantized(*arguments, scale=scale)[0]
