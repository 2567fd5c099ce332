"""One power of two in E8M0 per tile, of any size: Float8BlockScaling(scale_format="ue8m0").

The scale is ``amax / fp8_max`` rounded up to a power of two, as in DeepGEMM's ``per_token_cast_to_fp8`` and
``per_block_cast_to_fp8`` (``use_ue8m0``) and in DeepSeek-V3.1's checkpoints (``scale_fmt: "ue8m0"``).
"""

from __future__ import annotations

import torch
from torch import Tensor

from fp8graph.numerics import hints
from fp8graph.numerics.formats import biased_exponent, exp2_biased
from fp8graph.numerics.scalings.base import Asked, Shared
from fp8graph.numerics.scalings.block import Block
from fp8graph.recipes import FP8_MAX


class BlockE8M0(Block):
    name = "block_e8m0"  # ``gemm`` is that of FP32 scales
    scale_dtype = torch.uint8
    takes_scale = False  # FP32

    def scales(self, amax: Tensor, asked: Asked, shared: Shared) -> tuple[Tensor, Tensor]:
        amax = amax.clamp_min(asked.amax_epsilon)  # NaN passes through
        quotient = hints.divide(amax, torch.full_like(amax, FP8_MAX[asked.dtype]))  # one IEEE division
        exponent = biased_exponent(quotient, 1.0)
        scale = exp2_biased(torch.where(exponent == 255, exponent, 254 - exponent))  # 2 ** (127 - e)
        return scale, exponent.to(torch.uint8)

    def scale_values(self, scale_inv: Tensor) -> Tensor:
        return exp2_biased(scale_inv.to(torch.int32))

    def scales_for_gemm(self, scale_inv: Tensor) -> Tensor:
        return self.scale_values(scale_inv)

    def fits_bf16(self, power_2_scale: bool) -> bool:
        return True
