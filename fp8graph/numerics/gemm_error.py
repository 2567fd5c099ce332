"""The error that quantization makes in the result of one GEMM, as a few sums: for ``passes/score.py``.

With ``q`` for the quantized and decoded operand, ``a @ b`` becomes ``q(a) @ q(b)``. Their difference is computed as
``(q(a) - a) @ q(b) + a @ (q(b) - b)``, so that nothing cancels and the operands' own dtype is precise enough.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import torch
from torch import Tensor

from fp8graph.numerics.quantization import quantized_copy
from fp8graph.numerics.scalings import SCALINGS

# sums over the elements of the result: of (a difference * the reference)^2, of difference^2, of reference^2
ERROR_PARTS: Final = ("weighted_error", "square_error", "square_reference")
_ROWS: Final = 2048  # of the result at a time: it never takes more memory than they do


def gemm_error(
    a: Tensor,
    b: Tensor,
    reference: Tensor,
    dtypes: Sequence[torch.dtype],
    power_2_scales: Sequence[bool],
    amax_epsilons: Sequence[float],
    scalings: Sequence[str],
    block_a: Sequence[int],
    block_b: Sequence[int],
) -> Tensor:
    """[3]: ``ERROR_PARTS`` in FP32.

    Args:
        a: [..., m, k].  b: [..., k, n]: the operands in high precision.
        reference: [..., m, n]: the gradient of the result (fprop), or the result (dgrad and wgrad).
        dtypes, power_2_scales, amax_epsilons, scalings: of the quantizers of a and b.
        block_a, block_b: their tiles, see :class:`fp8graph.recipes.Quantizer`.
    """
    settings = zip(dtypes, power_2_scales, amax_epsilons, scalings, (block_a, block_b), strict=True)
    rows = (a, b.transpose(-2, -1))  # as the GEMM contracts them
    lost_a, lost_b = (_rounded(x, *own) - x for x, own in zip(rows, settings, strict=True))
    rounded_b = b + lost_b.transpose(-2, -1)
    sums = torch.zeros(len(ERROR_PARTS), dtype=torch.float32, device=a.device)
    sizes = a.shape[-2]
    for start in range(0, int(sizes), _ROWS):
        some = slice(start, start + _ROWS)
        change = lost_a[..., some, :] @ rounded_b + a[..., some, :] @ lost_b.transpose(-2, -1)
        change, there = change.to(torch.float32), reference[..., some, :].to(torch.float32)
        sums += torch.stack([(change * there).square().sum(), change.square().sum(), there.square().sum()])
    return sums


def _rounded(
    x: Tensor,
    dtype: torch.dtype,
    power_2_scale: bool,
    amax_epsilon: float,
    scaling: str,
    block: Sequence[int],
) -> Tensor:
    """``x`` [..., rows, elements along the contraction dim], quantized and decoded, in its own dtype."""
    settings: dict[str, Any] = {"scaling": scaling, "block": list(block)}
    data, scale_inv, scalar = quantized_copy(x, dtype, power_2_scale, amax_epsilon, "rowwise", **settings)
    decoded = SCALINGS[scaling].decode(data, scale_inv, block, scalar)
    return decoded[..., : x.shape[-2], : x.shape[-1]].to(x.dtype)
