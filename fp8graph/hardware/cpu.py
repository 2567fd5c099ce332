"""CPUs: FP8 operands with scales per tensor and per row are multiplied as bf16 numbers, which is exact.

Results in other types than bf16, and all of a CPU without a bf16 GEMM, come from torch's reference ``_scaled_mm``,
which is correct but not fast.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import torch

from fp8graph.compat import torch_build
from fp8graph.hardware.device import Hardware, Product
from fp8graph.numerics import bf16_product
from fp8graph.numerics.scalings import SCALINGS
from fp8graph.recipes import Quantizer


@dataclass(frozen=True, kw_only=True)
class CPU(Hardware):
    """The CPU. Its kernel takes OCP and fnuz types."""

    examples = ("cpu",)
    architectures = ("cpu",)

    @classmethod
    def from_target(cls, target: str, device_name: str = "") -> Self | None:
        return cls(name="cpu", scalings=torch_build.CPU_SCALINGS) if target == "cpu" else None

    @classmethod
    def of_device(cls, device: torch.device) -> Self:
        return cls(name="cpu", scalings=torch_build.CPU_SCALINGS)

    @classmethod
    def runs(cls, device: torch.device) -> bool:
        return device.type == "cpu"

    @classmethod
    def has_kernel(cls, gemm: str) -> bool:
        return gemm in torch_build.CPU_SCALINGS

    def alignment(self, a: Quantizer, b: Quantizer) -> tuple[int, int, int]:
        return 1, 16, 16

    def emulation_dtype(self, operands: Sequence[Quantizer], out_dtype: torch.dtype) -> torch.dtype:
        exact = out_dtype == torch.bfloat16 and torch_build.multiplies_bf16_on_cpu()
        if exact and all(SCALINGS[q.scaling].fits_bf16(q.power_2_scale) for q in operands):
            return torch.bfloat16  # accumulated in FP32, and half as long as a GEMM in FP32
        return torch.float32

    @classmethod
    def own_product(cls, out_dtype: torch.dtype) -> Product | None:
        exact = out_dtype == torch.bfloat16 and torch_build.multiplies_bf16_on_cpu()
        return bf16_product.product if exact else None
