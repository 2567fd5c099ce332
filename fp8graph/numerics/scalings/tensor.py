"""One scale for the tensor, from its own amax."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor

from fp8graph.numerics.experts import Span, amaxes_of_groups
from fp8graph.numerics.formats import amax_of
from fp8graph.numerics.scalings.base import Asked, Shared
from fp8graph.numerics.scalings.one_scale import OneScale
from fp8graph.numerics.scalings.scales import fp8_scales
from fp8graph.numerics.tiles import largest_of
from fp8graph.recipes import Layout


class Tensorwise(OneScale):
    name = "tensor"
    reads, launches, launches_of_few = (1, 1), (2.5, 2.5), 1.0

    def outputs(self, layouts: Sequence[Layout], keep_scales: bool) -> list[str]:
        return [*super().outputs(layouts, keep_scales), *(["scales"] if keep_scales else [])]

    def shared_shapes(self, rows: Sequence[int], units: int | None, given: bool, keep_scales: bool) -> list[list[int]]:
        one = [units] if units is not None else [1] if given else []
        return [one, [1, 2]] if keep_scales else [one]

    def shared(self, parts: Sequence[Tensor], asked: Asked) -> Shared:
        if asked.scales is not None:
            # [1], a slice of the table: a GEMM reads it where it is (Inductor cannot give it a 0-dim one)
            scale, scale_inv = asked.scales[asked.row, 0], asked.scales[asked.row, 1:2].clone()
            return Shared(scale=scale, scale_inv=scale_inv)
        if asked.per_matrix:  # [experts, n, k]
            amax = amax_of(parts[0], (-2, -1))
            scale, scale_inv = fp8_scales(amax, asked)
            return Shared(scale=scale.unsqueeze(-1).unsqueeze(-1), scale_inv=scale_inv, amax=amax)
        amax = largest_of([amax_of(part) for part in parts])
        scale, scale_inv = fp8_scales(amax, asked)
        return Shared(scale=scale, scale_inv=scale_inv, amax=amax)

    def shared_of_groups(self, group: Tensor, groups: int, asked: Asked) -> Shared:
        amax = amaxes_of_groups(torch.where(group < groups, amax_of(asked.x, -1), 0.0), group, groups)
        scale, scale_inv = fp8_scales(amax, asked)
        return Shared(scale=scale, scale_inv=scale_inv, amax=amax)

    def of_both(self, shared: Shared, asked: Asked) -> list[Tensor]:
        scale, scale_inv = cast(Tensor, shared.scale), cast(Tensor, shared.scale_inv)
        results = [scale_inv]
        if asked.keep_scales:
            results.append(torch.stack([scale, scale_inv.reshape(())]).reshape(1, 2))
        return results

    def scale_of_group(self, scale_inv: Tensor, span: Span, index: int | slice) -> Tensor:
        return scale_inv[span.group]

    def scale_of_columns(self, scale_inv: Tensor, span: Span, block: Sequence[int]) -> Tensor:
        return scale_inv[span.group]
