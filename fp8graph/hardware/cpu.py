"""CPUs: torch's reference ``_scaled_mm``, for scales per tensor and per row, is correct but not fast."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import torch

from fp8graph.compat import torch_build
from fp8graph.hardware.device import Hardware
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
