"""The error that quantization makes in the result of one GEMM, as a few sums: for ``passes/observe/score.py``.

With ``q`` for the quantized and decoded operand, ``a @ b`` becomes ``q(a) @ q(b)``. Their difference is computed as
``(q(a) - a) @ q(b) + a @ (q(b) - b)``, so that nothing cancels and the operands' own dtype is precise enough.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, cast

import torch
from torch import Tensor

from fp8graph.numerics.quantization import quantized_copy, quantizer_args, quantizer_kwargs
from fp8graph.numerics.scalings import SCALINGS
from fp8graph.numerics.transforms import hadamard, transform_rows
from fp8graph.recipes import GEMM_LAYOUTS, GemmName, Quantizer

# sums over the elements of the result: of (a difference * the reference)^2, of difference^2, of reference^2
ERROR_PARTS: Final = ("weighted_error", "square_error", "square_reference")
_NO_ROTATION: Final = -1
_ROWS: Final = 2048  # of the result at a time: it never takes more memory than they do


def quantizers_of(gemm: GemmName, quantizers: Sequence[Quantizer]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments of :func:`gemm_error` behind ``reference``, and those by name: the quantizers of a and b."""
    settings = ([getattr(q, of) for q in quantizers] for of in ("power_2_scale", "amax_epsilon", "scaling"))
    # not a list of dtypes: torch 2.11 hands an op their numbers
    args = (*(q.dtype for q in quantizers), *settings, *(list(q.block) for q in quantizers))
    rotations = [
        _NO_ROTATION if q.rotation is None or layout != "columnwise" else q.rotation
        for q, layout in zip(quantizers, GEMM_LAYOUTS[gemm], strict=True)
    ]
    return args, {
        "rotations": rotations,
        "stochastic": [q.stochastic for q in quantizers],
        "four_over_six": [q.four_over_six for q in quantizers],
        "largest_scales": [q.largest_scale for q in quantizers],
        "row_scaled": [q.row_scaled for q in quantizers],
    }


def gemm_error(
    a: Tensor,
    b: Tensor,
    reference: Tensor,
    dtype_a: torch.dtype,
    dtype_b: torch.dtype,
    power_2_scales: Sequence[bool],
    amax_epsilons: Sequence[float],
    scalings: Sequence[str],
    block_a: Sequence[int],
    block_b: Sequence[int],
    *,
    rotations: Sequence[int] = (_NO_ROTATION, _NO_ROTATION),
    stochastic: Sequence[bool] = (False, False),
    four_over_six: Sequence[str] = ("", ""),
    largest_scales: Sequence[float] = (448.0, 448.0),
    row_scaled: Sequence[bool] = (False, False),
) -> Tensor:
    """[3]: ``ERROR_PARTS`` in FP32.

    Args:
        a: [..., m, k].  b: [..., k, n]: the operands in high precision.
        reference: [..., m, n]: the gradient of the result (fprop), or the result (dgrad and wgrad).
        dtype_a, dtype_b, power_2_scales, amax_epsilons, scalings: of the quantizers of a and b.
        block_a, block_b: their tiles, see :class:`fp8graph.recipes.Quantizer`.
        rotations: the signs of the transform of each in this GEMM, -1 for none.
        stochastic, four_over_six, largest_scales, row_scaled: of the quantizers. Random numbers are those of seed 0.
    """
    quantizers = [
        Quantizer(
            dtype=(dtype_a, dtype_b)[i],
            power_2_scale=power_2_scales[i],
            amax_epsilon=amax_epsilons[i],
            scaling=cast(Any, scalings[i]),
            block=cast(Any, tuple((block_a, block_b)[i]) or Quantizer.block),
            rotation=None if rotations[i] == _NO_ROTATION else rotations[i],
            stochastic=stochastic[i],
            four_over_six=cast(Any, four_over_six[i]),
            largest_scale=largest_scales[i],
            row_scaled=row_scaled[i],
        )
        for i in range(2)
    ]
    rows = (a, b.transpose(-2, -1))  # as the GEMM contracts them
    lost_a, lost_b = (_rounded(x, quantizer) - x for x, quantizer in zip(rows, quantizers, strict=True))
    rounded_b = b + lost_b.transpose(-2, -1)
    sums = torch.zeros(len(ERROR_PARTS), dtype=torch.float32, device=a.device)
    sizes = a.shape[-2]
    for start in range(0, int(sizes), _ROWS):
        some = slice(start, start + _ROWS)
        change = lost_a[..., some, :] @ rounded_b + a[..., some, :] @ lost_b.transpose(-2, -1)
        change, there = change.to(torch.float32), reference[..., some, :].to(torch.float32)
        sums += torch.stack([(change * there).square().sum(), change.square().sum(), there.square().sum()])
    return sums


def _rounded(x: Tensor, quantizer: Quantizer) -> Tensor:
    """``x`` [..., rows, elements along the contraction dim], quantized and decoded, in its own dtype."""
    matrix = None if quantizer.rotation is None else hadamard(x, quantizer.rotation)
    source = x if matrix is None else _transformed(x, matrix)
    layout_settings = quantizer_kwargs(quantizer)
    layout_settings.pop("rotation", None)  # done, and along another dim
    data, scale_inv, scalar = quantized_copy(source, *quantizer_args(quantizer), "rowwise", **layout_settings)
    decoded = SCALINGS[quantizer.scaling].decode(data, scale_inv, quantizer.block, scalar)
    decoded = decoded if matrix is None else _transformed(decoded, matrix.t().to(decoded.dtype))
    return decoded[..., : x.shape[-2], : x.shape[-1]].to(x.dtype)


def _transformed(rows: Tensor, matrix: Tensor) -> Tensor:
    """[..., rows, k]: 16 numbers along k at a time, times ``matrix``."""
    return transform_rows(rows.transpose(-2, -1), matrix).transpose(-2, -1)
