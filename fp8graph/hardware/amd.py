"""AMD's GPUs: hipBLASLt's GEMMs behind ``torch._scaled_mm``, fnuz on gfx942, the order of MX scales on gfx950.

This file is based on torch's source and AMD's data sheets: nothing in it has run on an AMD GPU, and the speeds are the
data sheets' peaks times the share that GEMMs reach on NVIDIA's. ``fp8graph bench --calibrate`` measures a machine.

Sources: ``_scaled_mm_out_cuda`` in aten/src/ATen/native/cuda/ScaledBlas.cpp and ``scaled_mm_arch_allowed`` in
ScaledBlasDeviceUtils.cpp, where ``USE_ROCM`` is defined; torch 2.11 and later are built with ROCm 7. Only builds with
MSLK have grouped FP8 GEMMs (``GroupedBlas.cpp``), and torch's own wheels for ROCm are built without it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Self

import torch
from torch import Tensor

from fp8graph import words
from fp8graph.compat import torch_build
from fp8graph.hardware.device import Hardware, Rule
from fp8graph.hardware.speed import Speed, of_data_sheet, of_device_name
from fp8graph.numerics.tiles import pad_to_multiple
from fp8graph.recipes import Quantizer

_GEMMS: Final[Mapping[str, frozenset[str]]] = {
    "gfx942": frozenset({"tensor", "row"}),  # MI300A, MI300X, MI325X
    "gfx950": frozenset({"tensor", "row", "mxfp8"}),  # MI350X, MI355X
    "gfx1200": frozenset({"tensor", "row"}),  # Radeon RX 9060
    "gfx1201": frozenset({"tensor", "row"}),  # Radeon RX 9070, AI PRO R9700
}
_FNUZ: Final[Mapping[torch.dtype, torch.dtype]] = {
    torch.float8_e4m3fn: torch.float8_e4m3fnuz,
    torch.float8_e5m2: torch.float8_e5m2fnuz,
}

# As nvidia.BOARDS: dense TFLOPS in bf16, FP8, FP4 (that of FP8: torch has no NVFP4 GEMM here) and FP32 vectors; TB/s.
BOARDS: Final[Mapping[str, Speed]] = {
    name: of_data_sheet(name, *numbers)
    for name, *numbers in (
        ("MI300A", 981, 1961, 1961, 123, 5.3),
        ("MI300X", 1307, 2615, 2615, 163, 5.3),
        ("MI325X", 1307, 2615, 2615, 163, 6.0),
        ("MI350X", 2307, 4614, 4614, 144, 8.0),
        ("MI355X", 2517, 5033, 5033, 157, 8.0),
        ("RX 9070 XT", 195, 389, 389, 49, 0.645),
    )
}
_TYPICAL: Final = {"gfx942": "MI300X", "gfx950": "MI355X", "gfx1201": "RX 9070 XT"}


@dataclass(frozen=True, kw_only=True)
class AMD(Hardware):
    """An AMD GPU. Its default is one scale per tensor, since MX GEMMs are still slow on gfx950 (pytorch/ao#4290)."""

    rocm: tuple[int, ...] | None = torch_build.ROCM_VERSION  # torch's; None: not known, or another build

    # MX: torch checks that sizes are multiples of 32 (v2), M and N of 16 and K of 128 (v1). These satisfy both.
    alignments = {"tensor": (1, 16, 16), "row": (1, 16, 16), "mxfp8": (32, 32, 128)}
    examples = ("gfx942", "gfx950")
    is_gpu = True

    @classmethod
    def from_target(cls, target: str, device_name: str = "") -> Self | None:
        if not re.fullmatch(words.AMD.form, target):
            return None
        speed = of_device_name(device_name, BOARDS, _TYPICAL.get(target))
        return cls(name=target, scalings=_GEMMS.get(target, frozenset()), speed=speed)

    @classmethod
    def of_device(cls, device: torch.device) -> Self:
        properties: Any = torch.cuda.get_device_properties(device)
        name = str(properties.gcnArchName).partition(":")[0]  # "gfx942:sramecc+:xnack-"
        hardware = cls.from_target(name, torch.cuda.get_device_name(device))
        return hardware if hardware is not None else cls(name=name)

    @classmethod
    def runs(cls, device: torch.device) -> bool:
        return device.type in ("cuda", "meta") and torch.version.hip is not None

    def device_dtype(self, dtype: torch.dtype) -> torch.dtype:
        return _FNUZ.get(dtype, dtype) if self.name == "gfx942" else dtype

    @property
    def rules(self) -> Mapping[str, Rule]:
        return {"row": self._rows, "mxfp8": self._mx}

    def _rows(self, a: Quantizer, b: Quantizer, out_dtype: torch.dtype) -> str | None:
        if out_dtype != torch.bfloat16:
            result = str(out_dtype).removeprefix("torch.")
            return f"GEMMs with one scale per row only produce bfloat16 results on AMD's GPUs, not {result}"
        if b.dtype != self.device_dtype(torch.float8_e4m3fn):
            return "GEMMs with one scale per row only take E4M3 as the second operand on AMD's GPUs"
        return None

    def _mx(self, a: Quantizer, b: Quantizer, out_dtype: torch.dtype) -> str | None:
        if self.rocm is not None and not (7, 0) <= self.rocm < (7, 14):  # from 7.14 on: swizzled (32 x 8)
            return f"MXFP8 GEMMs need ROCm 7.0 to 7.13, but torch has {'.'.join(map(str, self.rocm))}"
        if out_dtype not in (torch.bfloat16, torch.float16):
            return "MXFP8 GEMMs only produce bfloat16 or float16 results on AMD's GPUs"
        return "MXFP8 GEMMs only take E4M3" if torch.float8_e5m2 in (a.dtype, b.dtype) else None

    @classmethod
    def operand(cls, data: Tensor, scale_inv: Tensor, gemm: str, block: Sequence[int]) -> tuple[Tensor, Tensor]:
        """MX scales stay [rows, k / 32], k a multiple of 128. torch expects scales for at least 128 rows: zeros follow.

        This is v1 of the op: in v2 torch's fake confuses the rows of the two operands (2.11 to 2.15), and refuses.
        """
        if scale_inv.dtype != torch.uint8:
            return data, scale_inv
        return data, pad_to_multiple(scale_inv, 128, 1).reshape(-1).view(torch.float8_e8m0fnu)
