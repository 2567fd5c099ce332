"""The base of kinds with one scale per tensor: both layouts hold the same numbers."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fp8graph.numerics.experts import group_of_rows
from fp8graph.numerics.formats import overflow_as_nan, saturating_cast
from fp8graph.numerics.hints import stored
from fp8graph.numerics.scalings.base import Asked, Scaling, Shared
from fp8graph.numerics.tiles import join, with_padding
from fp8graph.recipes import Layout


class OneScale(Scaling):
    one_scale = True
    gemm = "tensor"
    gemm_title = "FP8 GEMM"
    rate = 1.0

    def outputs(self, layouts: Sequence[Layout], keep_scales: bool) -> list[str]:
        return [*layouts, "scale_inv"]

    def scale_shape(self, rows: int, columns: int, block: Sequence[int], groups: int = 0) -> list[int] | None:
        return None

    def layout(
        self,
        parts: Sequence[Tensor],
        axis: int,
        multiples: Sequence[int],
        asked: Asked,
        shared: Shared,
    ) -> tuple[Tensor, Tensor | None]:
        assert shared.scale is not None
        data: list[Tensor] = []
        for part in parts:
            scaled = overflow_as_nan(part) * shared.scale
            data.append(stored(saturating_cast(scaled, asked.dtype).contiguous()))
        return with_padding(join(data, axis), multiples), None

    def layout_of_groups(
        self,
        rows: Tensor,
        which: Tensor,
        groups: int,
        transposed: bool,
        multiples: Sequence[int],
        asked: Asked,
        shared: Shared,
    ) -> tuple[Tensor, Tensor | None]:
        assert shared.scale is not None
        scaled = overflow_as_nan(rows) * shared.scale[which].unsqueeze(1)
        if transposed:
            scaled, multiples = scaled.t(), (multiples[0], 1)  # the groups are padded
        return with_padding(stored(saturating_cast(scaled, asked.dtype).contiguous()), multiples), None

    def decode(self, data: Tensor, scale_inv: Tensor, block: Sequence[int], global_scale_inv: Tensor | None) -> Tensor:
        return data.to(torch.float32) * scale_inv

    def scale_per_row(self, data: Tensor, scale_inv: Tensor, offs: Tensor, ragged_k: bool) -> Tensor:
        experts = offs.shape[0]
        one_each = scale_inv.expand(experts)
        if data.ndim == 3:  # [experts, n, k]
            return one_each.unsqueeze(1).expand(experts, data.shape[1]).contiguous()
        if ragged_k:  # [m, padded t]
            return one_each.repeat_interleave(data.shape[0])
        return one_each[group_of_rows(offs, data.shape[0]).clamp_max(experts - 1)]  # [t, k]
