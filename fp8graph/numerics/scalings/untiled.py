"""One FP32 scale per tensor or per row.

The scale of a tensor comes from its own amax or from those of earlier steps, and both layouts hold the same numbers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor

from fp8graph.numerics.experts import Span, amaxes_of_columns, amaxes_of_groups, group_of_rows
from fp8graph.numerics.formats import SCALE, SCALE_INV, amax_of, narrow_amax_of, overflow_as_nan, table_of
from fp8graph.numerics.hints import materialize, saturating_cast
from fp8graph.numerics.scalings.base import Arguments, Groups, LayoutRequest, Scaling, Shared, fp8_scales
from fp8graph.numerics.tiles import join, largest_of, padding_needed, with_padding
from fp8graph.recipes import Layout


class _OneScale(Scaling):
    """One scale per tensor, or per expert's matrix."""

    one_scale = True
    gemm = "tensor"
    gemm_title = "FP8 GEMM"
    rate = 1.0

    def outputs(self, layouts: Sequence[Layout], keep_scales: bool) -> list[str]:
        return [*layouts, "scale_inv"]

    def scale_shape(self, rows: int, columns: int, block: Sequence[int], groups: int = 0) -> list[int] | None:
        return None

    def layout(self, request: LayoutRequest) -> tuple[Tensor, Tensor | None]:
        scale, dtype = cast(Tensor, request.shared.scale), request.arguments.dtype
        data = [materialize(saturating_cast(overflow_as_nan(x) * scale, dtype).contiguous()) for x in request.parts]
        return with_padding(join(data, request.axis), request.multiples), None

    def layout_of_groups(self, request: LayoutRequest, groups: Groups) -> tuple[Tensor, Tensor | None]:
        (rows,), multiples = request.parts, request.multiples
        scaled = overflow_as_nan(rows) * cast(Tensor, request.shared.scale)[groups.of_rows].unsqueeze(1)
        if groups.transposed:
            scaled, multiples = scaled.t(), (multiples[0], 1)  # the groups are padded
        return with_padding(materialize(saturating_cast(scaled, request.arguments.dtype).contiguous()), multiples), None

    def scale_of_columns(self, scale_inv: Tensor, span: Span, block: Sequence[int]) -> Tensor:
        return self.scale_of_group(scale_inv, span, span.group)

    def scale_per_row(self, data: Tensor, scale_inv: Tensor, offs: Tensor, ragged_k: bool) -> Tensor:
        experts = offs.shape[0]
        one_each = scale_inv.expand(experts)
        if data.ndim == 3:  # [experts, n, k]
            return one_each.unsqueeze(1).expand(experts, data.shape[1]).contiguous()
        if ragged_k:  # [m, padded t]
            return one_each.repeat_interleave(data.shape[0])
        return one_each[group_of_rows(offs, data.shape[0]).clamp_max(experts - 1)]  # [t, k]


class Tensorwise(_OneScale):
    """The scale comes from the tensor's own amax."""

    name = "tensor"
    reads, launches, launches_of_few = (1, 1), (2.5, 2.5), 1.0

    def outputs(self, layouts: Sequence[Layout], keep_scales: bool) -> list[str]:
        return [*super().outputs(layouts, keep_scales), *(["scales"] if keep_scales else [])]

    def shared_shapes(self, rows: Sequence[int], units: int | None, given: bool, keep_scales: bool) -> list[list[int]]:
        one = [units] if units is not None else [1] if given else []
        return [one, [1, 2]] if keep_scales else [one]

    def shared(self, parts: Sequence[Tensor], arguments: Arguments) -> Shared:
        if arguments.scales is not None:
            scale, scale_inv = _of_table(arguments.scales, arguments.row)
            return Shared(scale=scale, scale_inv=scale_inv)
        # [experts, n, k] has one scale per matrix
        amax = amax_of(parts[0], (-2, -1)) if arguments.per_matrix else largest_of([amax_of(part) for part in parts])
        scale, scale_inv = fp8_scales(amax, arguments)
        scale = scale.unsqueeze(-1).unsqueeze(-1) if arguments.per_matrix else scale
        return Shared(scale=scale, scale_inv=scale_inv, amax=amax)

    def shared_of_groups(self, group: Tensor, groups: int, arguments: Arguments) -> Shared:
        amax = amaxes_of_groups(torch.where(group < groups, amax_of(arguments.x, -1), 0.0), group, groups)
        scale, scale_inv = fp8_scales(amax, arguments)
        return Shared(scale=scale, scale_inv=scale_inv, amax=amax)

    def shared_outputs(self, shared: Shared, arguments: Arguments) -> list[Tensor]:
        scale, scale_inv = cast(Tensor, shared.scale), cast(Tensor, shared.scale_inv)
        kept = [table_of(scale, scale_inv.reshape(())).reshape(1, 2)] if arguments.keep_scales else []
        return [scale_inv, *kept]

    def scale_of_group(self, scale_inv: Tensor, span: Span, index: int | slice) -> Tensor:
        return scale_inv[span.group]


class Delayed(_OneScale):
    """The scale comes from the amaxes of earlier steps; this step's amaxes are returned, one per row."""

    name = "delayed"
    has_state = True
    reads, launches = (0, 0), (0.5, 1.25)

    def outputs(self, layouts: Sequence[Layout], keep_scales: bool) -> list[str]:
        return [*super().outputs(layouts, keep_scales), "amax"]

    def shared_shapes(self, rows: Sequence[int], units: int | None, given: bool, keep_scales: bool) -> list[list[int]]:
        return [[1], [*rows]]

    def shared(self, parts: Sequence[Tensor], arguments: Arguments) -> Shared:
        amaxes = [narrow_amax_of(part, -1) for part in parts]
        # [..., rows]: one kernel with the cast; the update reduces it
        amax = (largest_of(amaxes) if arguments.dim == -1 else join(amaxes, -1)).to(torch.float32)
        scale, scale_inv = _earlier(arguments)
        return Shared(scale=scale, scale_inv=scale_inv, amax=amax)

    def shared_of_groups(self, group: Tensor, groups: int, arguments: Arguments) -> Shared:
        amax = torch.where(group < groups, amax_of(arguments.x, -1), 0.0)
        scale, scale_inv = _earlier(arguments)
        return Shared(scale=scale.expand(groups), scale_inv=scale_inv, amax=amax)

    def shared_outputs(self, shared: Shared, arguments: Arguments) -> list[Tensor]:
        return [cast(Tensor, shared.scale_inv), cast(Tensor, shared.amax)]

    def scale_of_group(self, scale_inv: Tensor, span: Span, index: int | slice) -> Tensor:
        return scale_inv


class Rowwise(Scaling):
    """One scale per row of the operand as its GEMM contracts it."""

    name = "row"
    gemm = "row"
    gemm_title = "FP8 GEMM with one scale per row"
    columns_again = True
    columns_not_sent = "a scale per column spans all ranks, so both layouts would have to be sent"
    reads, launches, rate = (0, 1), (1.0, 2.1), 0.95

    def scale_shape(self, rows: int, columns: int, block: Sequence[int], groups: int = 0) -> list[int] | None:
        return [groups, rows] if groups else [rows, 1]

    def layout(self, request: LayoutRequest) -> tuple[Tensor, Tensor | None]:
        parts, multiples, arguments = request.parts, request.multiples, request.arguments
        amaxes = [amax_of(x, -1, keepdim=True) for x in parts]  # [..., rows, 1]
        if request.axis == -1:
            amaxes = [largest_of(amaxes)]
        scales = [fp8_scales(amax, arguments) for amax in amaxes]
        data = [
            materialize(saturating_cast(overflow_as_nan(x) * scales[i % len(scales)][0], arguments.dtype).contiguous())
            for i, x in enumerate(parts)
        ]
        # in memory, as the scales: else a separate kernel would divide and join them
        scale_inv = join([materialize(inverse) for _, inverse in scales], -2)
        if (rows := padding_needed(scale_inv.shape[-2], multiples[0])) is not None:  # of zeros
            zeros = scale_inv.new_zeros([*scale_inv.shape[:-2], rows, 1])
            scale_inv = torch.cat([scale_inv, fp8_scales(zeros, arguments)[1]], -2)
        return with_padding(join(data, request.axis), multiples), scale_inv

    def layout_of_groups(self, request: LayoutRequest, groups: Groups) -> tuple[Tensor, Tensor | None]:
        if not groups.transposed:
            return super().layout_of_groups(request, groups)
        (rows,), multiples, arguments = request.parts, request.multiples, request.arguments
        # one scale for each column of each group
        amaxes = amaxes_of_columns(rows, groups.of_rows, groups.count, multiples[1])
        amaxes = torch.cat([amaxes, amaxes.new_zeros((groups.count, -rows.shape[1] % multiples[0]))], 1)
        scale, scale_inv = fp8_scales(amaxes, arguments)  # [groups, c]
        scaled = overflow_as_nan(rows) * scale[groups.of_rows][:, : rows.shape[1]]
        data = materialize(saturating_cast(scaled.t(), arguments.dtype).contiguous())
        return with_padding(data, (multiples[0], 1)), scale_inv  # the groups are padded

    def scale_of_columns(self, scale_inv: Tensor, span: Span, block: Sequence[int]) -> Tensor:
        return scale_inv[span.group].unsqueeze(1)

    def scale_per_row(self, data: Tensor, scale_inv: Tensor, offs: Tensor, ragged_k: bool) -> Tensor:
        # [t, 1], [experts, n, 1] or [experts, m]
        return scale_inv.reshape(data.shape[:-1] if scale_inv.shape[-1] == 1 else -1)


def _earlier(arguments: Arguments) -> tuple[Tensor, Tensor]:
    """Return the scales that earlier steps left; the first step's are 1."""
    first = (
        torch.ones((1, 2), dtype=torch.float32, device=arguments.x.device)
        if arguments.scales is None
        else arguments.scales
    )
    return _of_table(first, arguments.row)


def _of_table(scales: Tensor, row: int) -> tuple[Tensor, Tensor]:
    """``(scale, scale_inv)`` of a row of a table, [] and [1].

    ``scale_inv`` is a slice of the table: a GEMM reads it where it is (Inductor cannot give it a 0-dim one).
    """
    return scales[row, SCALE], scales[row, SCALE_INV : SCALE_INV + 1].clone()
