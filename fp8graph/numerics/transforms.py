"""Hadamard's transform of a tensor before it is quantized, which its GEMM undoes.

With random signs: 16 numbers that one product contracts become 16 sums of all of them. Outliers are spread
over their group, so that 4 bits hold the group better. Both operands of a GEMM are transformed along its contraction
dim, with the same orthogonal matrix, which cancels in the product: ``(a h) (b h)^T = a b^T``. Source: "Pretraining
Large Language Models with NVFP4", arXiv 2509.25149; the matrix and its signs are those of Transformer Engine's
``custom_recipes/reference_nvfp4.py``.
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from fp8graph.numerics.tiles import pad_to_multiple

SIZE: Final = 16  # numbers that are transformed together


def hadamard(like: Tensor, signs: int) -> Tensor:
    """[16, 16] in the dtype and on the device of ``like``: ``diag(signs) H / 4``, orthogonal, exact in bf16 and fp16.

    ``H[i, j]`` is -1 where ``i & j`` has an odd number of bits, else 1 (Sylvester's construction).
    """
    row = torch.arange(SIZE, device=like.device).unsqueeze(1)
    both = torch.bitwise_and(row, torch.arange(SIZE, device=like.device))
    odd = torch.bitwise_and(torch.bitwise_right_shift(torch.full_like(row, signs), row), 1)
    for bit in range(4):
        odd = torch.bitwise_xor(odd, torch.bitwise_and(torch.bitwise_right_shift(both, bit), 1))
    return torch.where(odd == 1, -0.25, 0.25).to(like.dtype)


def transform_rows(x: Tensor, matrix: Tensor) -> Tensor:
    """[..., rows, columns] -> [..., rows', columns]: each column, 16 rows at a time, times ``matrix`` [16, 16].

    ``rows'`` is ``rows`` rounded up to a multiple of 16; rows that are missing are zeros. The sums are FP32, rounded
    once to the dtype of ``x``; those of fp16 stay FP32, since they are up to four times as large.
    """
    if x.dtype == torch.float16:
        x, matrix = x.to(torch.float32), matrix.to(torch.float32)
    padded = pad_to_multiple(x, SIZE, 1)
    *batch, rows, columns = padded.shape
    groups = padded.reshape(-1, SIZE, columns)
    return torch.bmm(matrix.t().expand(groups.shape[0], SIZE, SIZE), groups).reshape(*batch, rows, columns)


def transformed(x: Tensor, signs: int, matrix: Tensor | None = None) -> Tensor:
    """``x`` [..., rows, columns] with transformed columns, as many rows as whole groups have."""
    return transform_rows(x, hadamard(x, signs) if matrix is None else matrix)


def rotate(x: Tensor, matrix: Tensor, dim: int) -> Tensor:
    """``x``, bf16 or fp32, with 16 elements along ``dim``, which has a multiple of 16, at a time times ``matrix``.

    The transpose of ``matrix`` undoes it. The sums are FP32, rounded once to the dtype of ``x``. Contiguous.
    """
    last = x.movedim(dim, -1)
    result = (last.reshape(-1, SIZE) @ matrix).reshape(last.shape)
    if dim in (-1, x.ndim - 1):
        return result
    return result.movedim(-1, dim).clone(memory_format=torch.contiguous_format)
