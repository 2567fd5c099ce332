"""The ops of other libraries that multiply matrices, whose sizes say how many FLOPs that takes, or decode weights."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from torch import fx

from fp8graph.compat.products import Operation, by_first

# bitsandbytes 0.50 (``bitsandbytes/_ops.py``): x [..., k] @ w [n, k].T, with w in 4 bits, two in a byte, or in int8.
_FOUR_BITS: Final = Operation("matmul of 4-bit weights", (0, 1), by_first)
_INT8: Final = Operation("integer matmul", (0, 1), by_first)

LIBRARIES: Final[Mapping[str, Operation]] = {
    "bitsandbytes.gemm_4bit": _FOUR_BITS,
    "bitsandbytes.gemv_4bit": _FOUR_BITS,
    "bitsandbytes.int8_linear_matmul": _INT8,
    "bitsandbytes.int8_scaled_mm": _INT8,
}

_DECODES: Final = ("bitsandbytes.dequantize_4bit.default",)


def decodes(node: fx.Node) -> bool:
    """Return whether ``node`` decodes its first argument, the codes of a weight [n, k]."""
    return str(node.target) in _DECODES
