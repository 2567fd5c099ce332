"""The arguments of ``fp8graph::quantize``, stated once for the op, its reference and its nodes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Generic, TypeVar

import torch

from fp8graph.recipes import LAYOUTS, Layout

T = TypeVar("T")  # a tensor, or the node that computes one


@dataclass(frozen=True)
class QuantizeArguments(Generic[T]):
    """A request for a quantization.

    Args:
        x: [..., rows, columns], any strides, bf16, fp16 or fp32. rowwise keeps the shape; columnwise is the
            transposed copy [..., columns, rows]. Both results are contiguous.
        dtype, power_2_scale, amax_epsilon, scaling, block: see :class:`fp8graph.recipes.Quantizer`. Each layout has
            scales of its own unless the tensor has one: "row" FP32 [..., rows, 1]; kinds with tiles
            [..., ceil(rows / block[0]), ceil(columns / block[1])] in ``Scaling.scale_dtype``. nvfp4's data are bytes
            [..., rows, columns / 2] with the columns padded to a multiple of 16.
        rowwise, columnwise: empty for "not needed", else two multiples to which the sizes of the *result* are
            padded with zeros (GEMMs need 16).
        scales, row: for "delayed": [tensors, 2], scale and scale_inv, and the row of this tensor; None is 1. Its
            ``scale_inv`` has shape [1], and one amax per row is returned. For other kinds with ``takes_scale``,
            ``scales`` replace those from amaxes: of all rows or tiles, or nvfp4's scale of the whole tensor.
        keep_scales: for "tensor": return ``scales`` as well, so that it can be quantized again without an amax.
        more, dim: the tensor is ``x`` and these, joined along rows (-2) or columns (-1); the sizes of each are
            multiples of the tiles and of the multiples for padding.
            offs, per_matrix: for an operand of a grouped matmul: the rows of ``x`` [t, c] fall into groups that end at
            ``offs`` [experts], int32; or ``x`` is [experts, rows, columns]. Scales of tensors are then one per expert:
            ``scale_inv`` [experts]; columnwise scales of rows in groups are [experts, c], columnwise data of groups
            [c, padded t], each group padded to ``columnwise[1]``.
        rotation, stochastic, four_over_six, largest_scale, row_scaled: see :class:`fp8graph.recipes.Quantizer`.
        matrix: of the transform, [16, 16] in x's dtype; None: it is made from ``rotation``.
        seed, draw: for stochastic rounding, int64 [1] and the number of this tensor among those that share the seed;
            None: a seed of 0.
    """

    x: T
    dtype: torch.dtype
    power_2_scale: bool
    amax_epsilon: float
    rowwise: Sequence[int]
    columnwise: Sequence[int]
    _: KW_ONLY
    scaling: str = "tensor"
    block: Sequence[int] = ()
    scales: T | None = None
    row: int = 0
    keep_scales: bool = False
    more: Sequence[T] | None = None
    dim: int = -1
    offs: T | None = None
    per_matrix: bool = False
    rotation: int | None = None
    stochastic: bool = False
    four_over_six: str = ""
    largest_scale: float = 448.0
    row_scaled: bool = False
    matrix: T | None = None
    seed: T | None = None
    draw: int = 0

    @property
    def parts(self) -> list[T]:
        """The tensors that are joined and quantized as one."""
        return [self.x, *(self.more or ())]

    @property
    def layouts(self) -> dict[Layout, Sequence[int]]:
        """The requested layouts, with the multiples to which their sizes are padded."""
        both = dict(zip(LAYOUTS, (self.rowwise, self.columnwise), strict=True))
        return {layout: multiples for layout, multiples in both.items() if multiples}
