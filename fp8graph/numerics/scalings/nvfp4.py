"""E2M1 numbers, two per byte; one E4M3 scale per tile, and one FP32 scale for the tensor."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor

from fp8graph.numerics.formats import (
    amax_of,
    cast_to_e2m1,
    inverse,
    nvfp4_global_scale,
    pack_e2m1,
    saturating_cast,
    unpack_e2m1,
)
from fp8graph.numerics.scalings.base import Asked, Shared
from fp8graph.numerics.scalings.scales import with_overflow
from fp8graph.numerics.scalings.tiled import Tiled
from fp8graph.numerics.tiles import join, largest_of, untile
from fp8graph.recipes import FLT_MAX, Layout


class NVFP4(Tiled):
    name = gemm = "nvfp4"
    gemm_title = "NVFP4 GEMM"
    scale_dtype = torch.float8_e4m3fn
    packed = 2
    not_sent = "NVFP4 tensors are never sent quantized: two numbers per byte, and a scale of the whole tensor"
    # the launches of both the amax of the whole tensor and tiles: not counted
    reads, launches, gemm_launches, rate = (1, 2), (3.0, 4.0), 3, 1.0

    def outputs(self, layouts: Sequence[Layout], keep_scales: bool) -> list[str]:
        return [*super().outputs(layouts, keep_scales), "global_scale_inv"]

    def data_shape(self, rows: int, columns: int, block: Sequence[int]) -> list[int]:
        return [rows, (columns + -columns % block[1]) // self.packed]

    def shared_shapes(self, rows: Sequence[int], units: int | None, given: bool, keep_scales: bool) -> list[list[int]]:
        return [[]]

    def shared(self, parts: Sequence[Tensor], asked: Asked) -> Shared:
        if asked.scales is not None:
            return Shared(global_scale=asked.scales[asked.row, 0], scale_inv=asked.scales[asked.row, 1].clone())
        return _shared(largest_of([amax_of(part) for part in parts]))

    def shared_of_groups(self, group: Tensor, groups: int, asked: Asked) -> Shared:
        return _shared(torch.where(group < groups, amax_of(asked.x, -1), 0.0).amax())

    def scales(self, amax: Tensor, asked: Asked, shared: Shared) -> tuple[Tensor, Tensor]:
        global_scale = cast(Tensor, shared.global_scale)
        # The rounded reciprocal of E2M1's maximum, as Transformer Engine's core_nvfp4.cuh: not a division by 6.
        scale_inv = saturating_cast(amax * (global_scale * (1.0 / 6.0)), torch.float8_e4m3fn)
        return inverse(scale_inv.to(torch.float32) * inverse(global_scale)).clamp_max(FLT_MAX), scale_inv

    def _data(
        self,
        parts: Sequence[Tensor],
        scaled: Sequence[Tensor],
        axis: int,
        asked: Asked,
        whole: int,
        lacks: int | None,
    ) -> Tensor:
        rows = parts[0].shape[-2]
        return join([pack_e2m1(cast_to_e2m1(untile(x)))[..., :rows, :].contiguous() for x in scaled], axis)

    def of_both(self, shared: Shared, asked: Asked) -> list[Tensor]:
        scale_inv = cast(Tensor, shared.scale_inv)
        carried = asked.carry_overflow and shared.amax is not None
        return [with_overflow(scale_inv, cast(Tensor, shared.amax)) if carried else scale_inv]

    def fits_bf16(self, power_2_scale: bool) -> bool:
        return False  # the scale of the tensor is any FP32 number

    def values(self, data: Tensor) -> Tensor:
        return unpack_e2m1(data)


def _shared(amax: Tensor) -> Shared:
    global_scale = nvfp4_global_scale(amax)
    return Shared(scale_inv=inverse(global_scale), amax=amax, global_scale=global_scale)
