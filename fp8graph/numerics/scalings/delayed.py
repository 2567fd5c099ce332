"""One scale for the tensor, from the amaxes of earlier steps; this step's amaxes are returned, one per row."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor

from fp8graph.numerics.experts import Span
from fp8graph.numerics.formats import amax_of, narrow_amax_of
from fp8graph.numerics.scalings.base import Asked, Shared
from fp8graph.numerics.scalings.one_scale import OneScale
from fp8graph.numerics.tiles import join, largest_of
from fp8graph.recipes import Layout


class Delayed(OneScale):
    name = "delayed"
    has_state = True
    reads, launches = (0, 0), (0.5, 1.25)

    def outputs(self, layouts: Sequence[Layout], keep_scales: bool) -> list[str]:
        return [*super().outputs(layouts, keep_scales), "amax"]

    def shared_shapes(self, rows: Sequence[int], units: int | None, given: bool, keep_scales: bool) -> list[list[int]]:
        return [[1], [*rows]]

    def shared(self, parts: Sequence[Tensor], asked: Asked) -> Shared:
        amaxes = [narrow_amax_of(part, -1) for part in parts]
        # [..., rows]: one kernel with the cast; the update reduces it
        amax = (largest_of(amaxes) if asked.dim == -1 else join(amaxes, -1)).to(torch.float32)
        scales = _table(asked)
        # [1], a slice of the table: a GEMM reads it where it is (Inductor cannot give it a 0-dim one)
        return Shared(scale=scales[asked.row, 0], scale_inv=scales[asked.row, 1:2].clone(), amax=amax)

    def shared_of_groups(self, group: Tensor, groups: int, asked: Asked) -> Shared:
        amax = torch.where(group < groups, amax_of(asked.x, -1), 0.0)
        scales = _table(asked)
        scale = scales[asked.row, 0].expand(groups)
        return Shared(scale=scale, scale_inv=scales[asked.row, 1:2].clone(), amax=amax)

    def of_both(self, shared: Shared, asked: Asked) -> list[Tensor]:
        return [cast(Tensor, shared.scale_inv), cast(Tensor, shared.amax)]

    def scale_of_group(self, scale_inv: Tensor, span: Span, index: int | slice) -> Tensor:
        return scale_inv

    def scale_of_columns(self, scale_inv: Tensor, span: Span, block: Sequence[int]) -> Tensor:
        return scale_inv


def _table(asked: Asked) -> Tensor:
    """[tensors, 2]: scale and scale_inv; the first step's are 1."""
    if asked.scales is not None:
        return asked.scales
    return torch.ones((1, 2), dtype=torch.float32, device=asked.x.device)
