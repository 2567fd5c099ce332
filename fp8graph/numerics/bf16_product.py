"""Products of FP8 operands by a bf16 GEMM: bf16 holds every FP8 number, so only the accumulation (FP32) rounds.

    y = ((a @ b.T) * scale_inv_a * scale_inv_b + bias) rounded once to bf16

On a CPU with such a GEMM it takes half as long as one in FP32. The op here is fp8graph's own: scales must be applied
before the result is rounded, and ``alpha``, with which aten's GEMM does that, is a number and not a tensor.
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

_library: Final = torch.library.Library("fp8graph_bf16", "DEF")
_library.define(
    "product(Tensor a, Tensor b, Tensor scale_inv_a, Tensor scale_inv_b, Tensor? bias) -> Tensor",
    tags=(torch.Tag.pt2_compliant_tag,),
)


def _product(a: Tensor, b: Tensor, scale_inv_a: Tensor, scale_inv_b: Tensor, bias: Tensor | None) -> Tensor:
    if scale_inv_a.numel() == scale_inv_b.numel() == 1:
        alpha = (scale_inv_a * scale_inv_b).item()
        added = a.new_empty(()) if bias is None else bias
        return torch.addmm(added.expand(a.shape[0], b.shape[0]), a, b.t(), beta=int(bias is not None), alpha=alpha)
    exact = bias is None and _powers_of_two(scale_inv_a) and _powers_of_two(scale_inv_b)
    product = (a @ b.t()).to(torch.float32) if exact else a.to(torch.float32) @ b.to(torch.float32).t()
    # [m, 1] * [1, n]; first, since the sums times one of them, as large as its operand may make it, would overflow
    result = product.mul_(scale_inv_a * scale_inv_b.reshape(1, -1))
    return (result if bias is None else result.add_(bias)).to(torch.bfloat16)


def _powers_of_two(scale_inv: Tensor) -> bool:
    """Whether multiplying by these FP32 scales rounds nothing; inf counts as one of them."""
    return not bool(torch.bitwise_and(scale_inv.contiguous().view(torch.int32), 0x007FFFFF).any())


def _fake(a: Tensor, b: Tensor, _scale_inv_a: Tensor, _scale_inv_b: Tensor, _bias: Tensor | None) -> Tensor:
    return a.new_empty((a.shape[0], b.shape[0]))


_library.impl("product", _product, "CompositeExplicitAutograd")
torch.library.register_fake("fp8graph_bf16::product", _fake, lib=_library)
PRODUCT: Final = torch.ops.fp8graph_bf16.product.default


def product(a: Tensor, b: Tensor, scale_inv_a: Tensor, scale_inv_b: Tensor, bias: Tensor | None) -> Tensor:
    """``((a @ b.T) * scale_inv_a * scale_inv_b + bias)`` in bf16, rounded once.

    Args:
        a: [m, k] FP8.  b: [n, k] FP8.
        scale_inv_a, scale_inv_b: FP32, one number each, or [m, 1] and [n, 1].
        bias: [n] bf16, or None.
    """
    # by way of FP32: Inductor vectorizes both conversions, but not the one from FP8 to bf16
    exact_a, exact_b = (x.to(torch.float32).to(torch.bfloat16) for x in (a, b))
    return PRODUCT(exact_a, exact_b, scale_inv_a, scale_inv_b, bias)
