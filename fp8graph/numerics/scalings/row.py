"""One scale per row of the operand as its GEMM contracts it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fp8graph.numerics.experts import Span, amaxes_of_columns
from fp8graph.numerics.formats import amax_of, overflow_as_nan, saturating_cast
from fp8graph.numerics.hints import stored
from fp8graph.numerics.scalings.base import Groups, LayoutRequest, Scaling, fp8_scales
from fp8graph.numerics.tiles import join, largest_of, missing, with_padding


class Rowwise(Scaling):
    name = "row"
    gemm = "row"
    gemm_title = "FP8 GEMM with one scale per row"
    columns_again = True
    columns_not_sent = "a scale per column spans all ranks, so both layouts would have to be sent"
    reads, launches, rate = (0, 1), (1.0, 2.1), 0.95

    def scale_shape(self, rows: int, columns: int, block: Sequence[int], groups: int = 0) -> list[int] | None:
        return [groups, rows] if groups else [rows, 1]

    def layout(self, request: LayoutRequest) -> tuple[Tensor, Tensor | None]:
        parts, multiples, asked = request.parts, request.multiples, request.asked
        amaxes = [amax_of(x, -1, keepdim=True) for x in parts]  # [..., rows, 1]
        if request.axis == -1:
            amaxes = [largest_of(amaxes)]
        made = [fp8_scales(amax, asked) for amax in amaxes]
        data = [
            stored(saturating_cast(overflow_as_nan(x) * made[i % len(made)][0], asked.dtype).contiguous())
            for i, x in enumerate(parts)
        ]
        # stored, as the scales: else a kernel of its own would divide and join them
        scale_inv = join([stored(inverse) for _, inverse in made], -2)
        if (rows := missing(scale_inv.shape[-2], multiples[0])) is not None:  # of zeros
            zeros = scale_inv.new_zeros([*scale_inv.shape[:-2], rows, 1])
            scale_inv = torch.cat([scale_inv, fp8_scales(zeros, asked)[1]], -2)
        return with_padding(join(data, request.axis), multiples), scale_inv

    def layout_of_groups(self, request: LayoutRequest, groups: Groups) -> tuple[Tensor, Tensor | None]:
        if not groups.transposed:
            return super().layout_of_groups(request, groups)
        (rows,), multiples, asked = request.parts, request.multiples, request.asked
        # one scale for each column of each group
        amaxes = amaxes_of_columns(rows, groups.of_rows, groups.count, multiples[1])
        amaxes = torch.cat([amaxes, amaxes.new_zeros((groups.count, -rows.shape[1] % multiples[0]))], 1)
        scale, scale_inv = fp8_scales(amaxes, asked)  # [groups, c]
        scaled = overflow_as_nan(rows) * scale[groups.of_rows][:, : rows.shape[1]]
        data = stored(saturating_cast(scaled.t(), asked.dtype).contiguous())
        return with_padding(data, (multiples[0], 1)), scale_inv  # the groups are padded

    def scale_of_columns(self, scale_inv: Tensor, span: Span, block: Sequence[int]) -> Tensor:
        return scale_inv[span.group].unsqueeze(1)

    def scale_per_row(self, data: Tensor, scale_inv: Tensor, offs: Tensor, ragged_k: bool) -> Tensor:
        # [t, 1], [experts, n, 1] or [experts, m]
        return scale_inv.reshape(data.shape[:-1] if scale_inv.shape[-1] == 1 else -1)
