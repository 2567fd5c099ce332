"""torch's attention ops, with the places of their arguments, and the one that reads FP8."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor
from torch._higher_order_ops.flex_attention import flex_attention, flex_attention_backward

try:
    from torch.nn.attention import varlen  # it defines the ops
except ImportError:
    varlen = None

FLEX: Final[Any] = flex_attention  # (query, key, value, score_mod, block_mask, scale, ...)
FLEX_BACKWARD: Final[Any] = flex_attention_backward  # (query, key, value, out, logsumexp, grad_out, ...)
# varlen_attn's: (query [tokens, heads, size], key, value, cu_seq_q [sequences + 1], cu_seq_k, max_q, max_k, ...), and
# (grad_out, query, key, value, out, logsumexp, ...); None: this torch has none.
VARLEN: Final[Any] = torch.ops.torch_attn._varlen_attn.default if varlen else None
VARLEN_BACKWARD: Final[Any] = torch.ops.torch_attn._varlen_attn_backward.default if varlen else None

_aten: Final[Any] = torch.ops.aten
CPU_FLASH: Final[Any] = _aten._scaled_dot_product_flash_attention_for_cpu.default


@dataclass(frozen=True, kw_only=True)
class Form:
    """One op for attention. q, k and v are its first arguments, [batch, heads, tokens, head size] unless packed."""

    name: str
    backward: Any
    first: int = 1  # the position of q among the arguments of ``backward``
    logsumexp: int = 5  # the position of the logsumexp of forward among them


FORMS: Final[Mapping[Any, Form]] = {
    _aten._scaled_dot_product_flash_attention.default: Form(
        name="flash", backward=_aten._scaled_dot_product_flash_attention_backward.default
    ),
    _aten._scaled_dot_product_efficient_attention.default: Form(
        name="memory-efficient", backward=_aten._scaled_dot_product_efficient_attention_backward.default, logsumexp=6
    ),
    _aten._scaled_dot_product_cudnn_attention.default: Form(
        name="cuDNN", backward=_aten._scaled_dot_product_cudnn_attention_backward.default
    ),
    _aten._scaled_dot_product_fused_attention_overrideable.default: Form(
        name="device's own",
        backward=_aten._scaled_dot_product_fused_attention_overrideable_backward.default,
        logsumexp=7,
    ),
    CPU_FLASH: Form(name="CPU flash", backward=_aten._scaled_dot_product_flash_attention_for_cpu_backward.default),
    FLEX: Form(name="flex", backward=FLEX_BACKWARD, first=0, logsumexp=4),
    **({VARLEN: Form(name="packed", backward=VARLEN_BACKWARD)} if VARLEN is not None else {}),
}

# FlashAttention-3's, whose kernel is not part of torch: the package flash_attn_interface, which
# torch.nn.attention.activate_flash_attention_impl("FA3") registers for the op (torch/nn/attention/_fa3.py).
_FLASH: Final[Any] = torch.ops.aten._scaled_dot_product_flash_attention
HAS_QUANTIZED_ATTENTION: Final = "quantized" in _FLASH.overloads()


def active_implementation() -> str | None:
    """Return the flash attention that replaces torch's own in this process, by name; None: torch's own."""
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
