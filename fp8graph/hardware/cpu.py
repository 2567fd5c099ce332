"""CPUs: FP8 operands with scales per tensor and per row are multiplied as bf16 numbers, which is exact.

Results in other types than bf16, and all of a CPU without a bf16 GEMM, are products of the decoded operands in FP32.
torch's ``_scaled_mm`` is never called: on some CPUs it does the same, but on those with AMX it refuses fnuz types, and
computes results in other types than bf16 in a reference loop (48 s for 256 x 1600 x 1024).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Self

import torch

from fp8graph.compat import torch_build
from fp8graph.hardware.device import Hardware, Product
from fp8graph.numerics.matmul import bf16_product
from fp8graph.numerics.scalings import SCALINGS
from fp8graph.recipes import Quantizer

_GEMMS: Final = frozenset({"tensor", "row"})


@dataclass(frozen=True, kw_only=True)
class CPU(Hardware):
    """The CPU. It multiplies OCP and fnuz types."""

    examples = ("cpu",)
    architectures = ("cpu",)

    @classmethod
    def from_target(cls, target: str, device_name: str = "") -> Self | None:
        return cls(name="cpu", scalings=_GEMMS) if target == "cpu" else None

    @classmethod
    def of_device(cls, device: torch.device) -> Self:
        return cls(name="cpu", scalings=_GEMMS)

    @classmethod
    def runs(cls, device: torch.device) -> bool:
        return device.type == "cpu"

    def alignment(self, a: Quantizer, b: Quantizer) -> tuple[int, int, int]:
        return 1, 16, 16  # as GPUs have it

    def emulation_dtype(self, operands: Sequence[Quantizer], out_dtype: torch.dtype) -> torch.dtype:
        exact = out_dtype == torch.bfloat16 and torch_build.multiplies_bf16_on_cpu()
        if exact and all(SCALINGS[q.scaling].fits_bf16(q.power_2_scale) for q in operands):
            return torch.bfloat16  # accumulated in FP32, and half as long as a GEMM in FP32
        return torch.float32

    @classmethod
    def own_product(cls, gemm: str, out_dtype: torch.dtype) -> Product | None:
        exact = gemm in _GEMMS and out_dtype == torch.bfloat16 and torch_build.multiplies_bf16_on_cpu()
        return bf16_product if exact else None
