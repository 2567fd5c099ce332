"""One FP32 scale per tile: 1x128 and 128x128 of Float8BlockScaling, or other sizes."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fp8graph.numerics.scalings.base import Asked, Shared
from fp8graph.numerics.scalings.scales import fp8_scales
from fp8graph.numerics.scalings.tiled import Tiled


class Block(Tiled):
    name = gemm = "block"
    gemm_title = "FP8 GEMM with one scale per tile"
    reads, launches, rate = (0, 1), (1.0, 2.1), 0.8

    def scales(self, amax: Tensor, asked: Asked, shared: Shared) -> tuple[Tensor, Tensor]:
        return fp8_scales(amax, asked, largest=torch.finfo(asked.x.dtype).max)

    def more_tiles(self, multiple: int, block: Sequence[int]) -> int:
        return multiple // block[1] if multiple % block[1] == 0 else 1
