"""torch's attention ops: flex_attention's, which are higher-order."""

from __future__ import annotations

from typing import Any, Final

from torch._higher_order_ops.flex_attention import flex_attention, flex_attention_backward

__all__ = ["FLEX", "FLEX_BACKWARD"]

FLEX: Final[Any] = flex_attention  # (query, key, value, score_mod, block_mask, scale, ...)
FLEX_BACKWARD: Final[Any] = flex_attention_backward  # (query, key, value, out, logsumexp, grad_out, ...)
