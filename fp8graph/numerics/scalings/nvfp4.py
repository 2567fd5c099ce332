"""E2M1 numbers, two per byte; one E4M3 scale per tile, and one FP32 scale per tensor, group or row."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import cast

import torch
from torch import Tensor

from fp8graph.numerics.experts import amaxes_of_groups
from fp8graph.numerics.formats import (
    SCALE,
    SCALE_INV,
    amax_of,
    cast_to_e2m1,
    cast_to_e2m1_stochastically,
    inverse,
    nvfp4_global_scale,
    overflow_as_nan,
    pack_e2m1,
    unpack_e2m1,
)
from fp8graph.numerics.hints import materialize, saturating_cast
from fp8graph.numerics.random_bits import random_halves
from fp8graph.numerics.scalings.base import Arguments, Groups, LayoutRequest, Shared
from fp8graph.numerics.scalings.tiled import Tiled
from fp8graph.numerics.tiles import join, largest_of, pad_to_multiple, untile
from fp8graph.recipes import FLT_MAX, Layout


class NVFP4(Tiled):
    name = gemm = "nvfp4"
    gemm_title = "NVFP4 GEMM"
    scale_dtype = torch.float8_e4m3fn
    packed = 2
    scale_of_layout = True
    not_sent = "NVFP4 tensors are never sent quantized: two numbers per byte, and a scale of the whole tensor"
    # the launches of both the amax of the whole tensor and tiles: not counted
    reads, launches, gemm_launches, rate = (1, 2), (3.0, 4.0), 2, 1.0
    reads_apart = 0

    def outputs(self, layouts: Sequence[Layout], keep_scales: bool) -> list[str]:
        return [*super().outputs(layouts, keep_scales), *(f"{layout}_global_scale_inv" for layout in layouts)]

    def data_shape(self, rows: int, columns: int, block: Sequence[int]) -> list[int]:
        return [rows, (columns + -columns % block[1]) // self.packed]

    def shared(self, parts: Sequence[Tensor], arguments: Arguments) -> Shared:
        if arguments.scales is not None:
            return _given(arguments.scales[arguments.row], [parts[0].shape[0]] if arguments.per_matrix else [])
        if arguments.row_scaled:
            (whole,) = parts
            return _shared(amax_of(whole, -1, keepdim=True), arguments)
        if arguments.per_matrix:
            return _shared(amax_of(parts[0], (-2, -1)), arguments)
        return _shared(largest_of([amax_of(part) for part in parts]), arguments)

    def shared_of_groups(self, group: Tensor, groups: int, arguments: Arguments) -> Shared:
        if arguments.scales is not None:
            return _given(arguments.scales[arguments.row], [groups])
        amaxes = torch.where(group < groups, amax_of(arguments.x, -1), 0.0)
        return _shared(
            amaxes.unsqueeze(1) if arguments.row_scaled else amaxes_of_groups(amaxes, group, groups), arguments
        )

    def layout(self, request: LayoutRequest) -> tuple[Tensor, Tensor | None]:
        shared = _padded(request.shared, request.multiples[0], request.arguments)
        if request.arguments.per_matrix and not request.arguments.row_scaled:
            shared = _at_tiles(shared, lambda of_matrix: of_matrix.reshape(-1, 1, 1))
        return super().layout(replace(request, shared=shared))

    def layout_of_groups(self, request: LayoutRequest, groups: Groups) -> tuple[Tensor, Tensor | None]:
        arguments = request.arguments
        if not arguments.row_scaled:
            # [t, 1], or [1, tiles]: groups of columns are whole tiles
            group = (
                groups.of_rows[:: arguments.block[1]].unsqueeze(0) if groups.transposed else groups.of_rows.unsqueeze(1)
            )
            request = replace(request, shared=_at_tiles(request.shared, lambda of_group: of_group[group]))
        return super().layout_of_groups(request, groups)

    def scales(self, amax: Tensor, request: LayoutRequest) -> tuple[Tensor, Tensor]:
        # The rounded reciprocal of E2M1's maximum, as Transformer Engine's core_nvfp4.cuh: not a division by 6.
        global_scale = cast(Tensor, request.shared.global_scale)
        return _of_tiles(overflow_as_nan(amax) * (global_scale * (1.0 / 6.0)), request.shared)

    def scales_of(self, tiles: Tensor, amax: Tensor, request: LayoutRequest) -> tuple[Tensor, Tensor]:
        arguments, shared = request.arguments, request.shared
        if not arguments.four_over_six:
            return self.scales(amax, request)
        # Divided by 6, as Transformer Engine's quantize_4over6_nvfp4.cuh: the amax becomes 6, or 4.
        base = overflow_as_nan(amax) / torch.full_like(amax, 6.0) * cast(Tensor, shared.global_scale)
        six, four = (_of_tiles(scaled, shared) for scaled in (base, base * 1.5))
        errors = [_error(tiles, *scales, arguments, shared) for scales in (six, four)]
        better = errors[1] < errors[0]
        scale, scale_inv = (
            torch.where(better, b.to(torch.float32), a.to(torch.float32)) for a, b in zip(six, four, strict=True)
        )
        return scale, scale_inv.to(torch.float8_e4m3fn)  # exact: it was one

    def _data(self, request: LayoutRequest, scaled: Sequence[Tensor], per_multiple: int, padding: int | None) -> Tensor:
        rows = request.parts[0].shape[-2]
        codes = [_codes(tiles, index, request.arguments) for index, tiles in enumerate(scaled)]
        return join([materialize(pack_e2m1(untile(x))[..., :rows, :].contiguous()) for x in codes], request.axis)

    def layout_scales(self, shared: Sequence[Shared], arguments: Arguments) -> list[Tensor]:
        padded = (_padded(each, m[0], arguments) for each, m in zip(shared, arguments.layouts.values(), strict=True))
        return [cast(Tensor, each.scale_inv).clone() for each in padded]  # neither an argument nor another result

    def fits_bf16(self, power_2_scale: bool) -> bool:
        return False  # the scale of the tensor is any FP32 number

    def values(self, data: Tensor) -> Tensor:
        return unpack_e2m1(data)

    def decode(self, data: Tensor, scale_inv: Tensor, block: Sequence[int], global_scale_inv: Tensor | None) -> Tensor:
        if data.ndim == 3 and global_scale_inv is not None and global_scale_inv.ndim == 1:  # one per matrix
            global_scale_inv = global_scale_inv.reshape(-1, 1, 1)
        return super().decode(data, scale_inv, block, global_scale_inv)


def _given(row: Tensor, units: Sequence[int]) -> Shared:
    """Return the scales of a row of a table, the same for all groups or matrices."""
    return Shared(global_scale=row[SCALE].expand(units), scale_inv=row[SCALE_INV].expand(units))


def _at_tiles(shared: Shared, where: Callable[[Tensor], Tensor]) -> Shared:
    """Return the scales of units in a shape that broadcasts with those of tiles, which only the casts read."""
    amax = None if shared.amax is None else where(shared.amax)
    return replace(shared, amax=amax, global_scale=where(cast(Tensor, shared.global_scale)))


def _shared(amax: Tensor, arguments: Arguments) -> Shared:
    global_scale = nvfp4_global_scale(amax, arguments.largest_scale)
    return Shared(scale_inv=inverse(global_scale), amax=amax, global_scale=global_scale)


def _padded(shared: Shared, multiple: int, arguments: Arguments) -> Shared:
    """With as many rows as the data have, where each row has a scale."""
    if not arguments.row_scaled or multiple == 1:
        return shared
    return _shared(pad_to_multiple(cast(Tensor, shared.amax), multiple, 1), arguments)


def _of_tiles(scaled_amax: Tensor, shared: Shared) -> tuple[Tensor, Tensor]:
    """``(scale, scale_inv)`` of tiles: scale_inv in E4M3 in units of the whole tensor's."""
    # else the cast would read the amax again
    scale_inv = materialize(saturating_cast(scaled_amax, torch.float8_e4m3fn))
    global_scale_inv = inverse(cast(Tensor, shared.global_scale))
    return inverse(scale_inv.to(torch.float32) * global_scale_inv).clamp_max(FLT_MAX), scale_inv


def _error(tiles: Tensor, scale: Tensor, scale_inv: Tensor, arguments: Arguments, shared: Shared) -> Tensor:
    """[..., R, C]: the error of tiles [..., R, rows, C, 16] with these scales, summed in Transformer Engine's order."""
    numbers = tiles.to(torch.float32)
    decoded = unpack_e2m1(pack_e2m1(cast_to_e2m1(numbers * scale.unsqueeze(-2).unsqueeze(-1))))
    amax = cast(Tensor, shared.amax)
    amax = amax.unsqueeze(-2).unsqueeze(-1) if amax.ndim else amax  # [..., R or 1, 1, C or 1, 1]
    decoded = decoded * scale_inv.to(torch.float32).unsqueeze(-2).unsqueeze(-1) * amax
    lost = decoded / torch.full_like(decoded, 6.0 * arguments.largest_scale) - numbers
    lost = materialize(lost.square() if arguments.four_over_six == "MSE" else lost.abs())  # 16 sums read it
    of_rows = functools.reduce(torch.add, lost.unbind(-1))  # [..., R, rows, C], one column after the other
    while (rows := of_rows.shape[-2]) > 1:  # then halves of the rows
        of_rows = of_rows[..., : rows // 2, :] + of_rows[..., rows // 2 :, :]
    return of_rows.squeeze(-2)


def _codes(scaled: Tensor, part: int, arguments: Arguments) -> Tensor:
    """Return the 4-bit codes of scaled tiles [..., R, rows, C, 16]; ``part``: of those that are joined."""
    if not arguments.stochastic:
        return cast_to_e2m1(scaled)
    groups = scaled.numel() // 16
    return cast_to_e2m1_stochastically(
        scaled, random_halves(arguments.seed, arguments.draw, part, groups, scaled.device).reshape(scaled.shape)
    )
