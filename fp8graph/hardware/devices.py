"""The low-precision GEMMs that each device multiplies natively. All others are emulated.

Per-tensor FP8 from sm_89 (Ada), rows and blocks from sm_90 (Hopper), MXFP8 and NVFP4 from sm_100 (Blackwell). On CPU
torch has a reference ``_scaled_mm`` for tensors and rows: it gives the right numbers without the speed.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Final

import torch

from fp8graph.compat import torch_build
from fp8graph.errors import ConfigError
from fp8graph.hardware.speed import Speed, of_target
from fp8graph.recipes import Quantizer, Scaling

# What cuBLAS wants sizes to be multiples of: 16; whole tiles along k; 1x128 scales are stored m-major, 16 bytes apart.
_ALIGNMENT: Final[dict[Scaling, tuple[int, int, int]]] = {
    "tensor": (1, 16, 16),
    "delayed": (1, 16, 16),
    "row": (1, 16, 16),
    "block": (4, 16, 128),
    "mxfp8": (1, 16, 32),
    "nvfp4": (1, 16, 32),
}
_NAMES: Final[dict[Scaling, str]] = {
    "tensor": "FP8 GEMM",
    "delayed": "FP8 GEMM",
    "row": "FP8 GEMM with one scale per row",
    "block": "FP8 GEMM with one scale per tile",
    "mxfp8": "MXFP8 GEMM",
    "nvfp4": "NVFP4 GEMM",
}
# cuBLAS: tiles of a and b; not 128x128 with 128x128
_TILES: Final = (((1, 128), (1, 128)), ((1, 128), (128, 128)), ((128, 128), (1, 128)))


def alignment(a: Quantizer, b: Quantizer) -> tuple[int, int, int]:
    """What m, n and k of a native GEMM [m, k] @ [k, n] must be multiples of; operands are padded to them with zeros.

    Where one side has 128x128 tiles, k is a multiple of four of them. cuBLASLt reads the scales [rows / 128, k / 128]
    of that side with rows 16 bytes apart (its documentation, "Scaling factors layouts": L4, k / 128 rounded up to 4);
    ``torch._scaled_mm`` refuses rows that are not ceil(k / 128) apart (``is_blockwise_128x128_scaling`` in
    aten/src/ATen/native/cuda/ScaledBlas.cpp since pytorch#164953; pytorch#166752 rounds up in v2 only). The two agree
    on such a k alone, and where they do not, a GEMM is refused or reads wrong scales.
    """
    m, n, k = _ALIGNMENT[a.scaling]
    return m, n, 4 * k if a.scaling == "block" and max(a.block[0], b.block[0]) > 1 else k


@dataclass(frozen=True, kw_only=True)
class Hardware:
    """One device: what it multiplies in low precision, and how fast it is."""

    name: str  # "cpu", "sm_90", "sm_100", or the device type
    scalings: frozenset[str]  # those that torch._scaled_mm multiplies
    speed: Speed | None = None  # None: not known, or nothing to gain (a CPU)
    grouped: frozenset[str] = frozenset()  # those that torch._scaled_grouped_mm multiplies
    cuda: tuple[int, ...] | None = torch_build.CUDA_VERSION  # torch's; None: not known, or a CPU build

    def obstacle(self, a: Quantizer, b: Quantizer, out_dtype: torch.dtype, *, grouped: bool = False) -> str | None:
        """Why ``a @ b`` cannot be multiplied natively, or None if it can."""
        if grouped:
            return self._grouped_obstacle(a, b, out_dtype)
        if a.scaling not in self.scalings:
            return f"{self.name} has no {_NAMES[a.scaling]}"
        if self.name == "cpu":
            return None
        if a.scaling in ("row", "block") and (problem := self._without_cublas(a.scaling, out_dtype)) is not None:
            return problem
        if a.scaling == "block" and (a.block, b.block) not in _TILES:
            (am, ak), (bm, bk) = a.block, b.block
            return f"no GEMM for tiles of {am}x{ak} and {bm}x{bk}"
        if a.scaling == "mxfp8" and torch.float8_e5m2 in (a.dtype, b.dtype):
            return "MXFP8 GEMMs take E4M3 only"
        return None

    def _without_cublas(self, scaling: Scaling, out_dtype: torch.dtype) -> str | None:
        """Why torch does not multiply rows or tiles (cuBLASLt does on sm_90, from CUDA 12.9 on), or None if it does.

        Source: ``_scaled_mm_out_cuda`` and ``_scaled_rowwise_rowwise`` in aten/src/ATen/native/cuda/ScaledBlas.cpp,
        ``get_scale_mode`` in aten/src/ATen/cuda/CUDABlas.cpp. Where cuBLASLt has none, rows go to a CUTLASS kernel,
        which gives bf16 and fp16 (pytorch#166744) but, in torch 2.11, no FP32 (pytorch#162022).
        """
        old = self.cuda is not None and self.cuda < (12, 9)
        has = f"torch has {'.'.join(map(str, self.cuda))}" if self.cuda is not None and old else f"this is {self.name}"
        if scaling == "block":
            return f"one scale per tile needs CUDA 12.9 or later, {has}" if old else None
        if out_dtype == torch.float32 and (old or self.name.removesuffix("a") != "sm_90"):
            return f"one scale per row gives float32 results only on sm_90 with CUDA 12.9 or later, {has}"
        return None

    def _grouped_obstacle(self, a: Quantizer, b: Quantizer, out_dtype: torch.dtype) -> str | None:
        if a.scaling not in self.grouped:
            return f"{self.name} has no grouped {_NAMES[a.scaling]}"
        if out_dtype != torch.bfloat16:
            return f"grouped FP8 GEMMs only produce bf16 output, not {str(out_dtype).removeprefix('torch.')}"
        if torch.float8_e5m2 in (a.dtype, b.dtype):
            return "grouped FP8 GEMMs take E4M3 only"
        return None


def from_target(target: str, device_name: str = "") -> Hardware:
    """The hardware named by ``target``: "cpu", "sm_XX", or the path of a calibration (``Speed.load``).

    Raises:
        ConfigError: (a ``ValueError``) for anything else.
    """
    if target == "cpu":
        return Hardware(name="cpu", scalings=torch_build.CPU_SCALINGS)
    if isinstance(target, str) and target.endswith(".json"):
        target, speed = Speed.load(target)
        return replace(from_target(target), speed=speed)
    match = re.fullmatch(r"sm_(\d+)(\d)a?", target) if isinstance(target, str) else None
    if match is None:
        raise ConfigError(f"target must be 'cpu', like 'sm_90', or a calibration FILE.json, not {target!r}.")
    major, minor = int(match[1]), int(match[2])
    scalings: set[Scaling] = set()
    if (major, minor) >= (8, 9):
        scalings |= {"tensor", "delayed"}
    if major >= 9:
        scalings |= {"row"}
    if (major, minor) == (9, 0):  # Blackwell's block scaling is MXFP8
        scalings |= {"block"}
    # one scale per row; operands with fewer scales use copies of them
    grouped: set[Scaling] = {"tensor", "delayed", "row"} if (major, minor) == (9, 0) else set()
    if major in (10, 11):  # sm_12x has MXFP8 for some layouts only
        scalings |= {"mxfp8", "nvfp4"}
    return Hardware(
        name=target,
        scalings=frozenset(scalings),
        speed=of_target(target, device_name),
        grouped=frozenset(grouped),
    )


def default_recipe(device: Hardware) -> str:
    """The recipe to use if the user names none: MXFP8 if the device multiplies it, else one scale per tensor."""
    return "mxfp8" if "mxfp8" in device.scalings else "tensorwise"


def of_machine() -> Hardware:
    """The hardware that a model will most likely run on: the current GPU, or the CPU."""
    return of_device(torch.device("cuda") if torch.cuda.is_available() else torch.device("cpu"))


def of_device(device: torch.device) -> Hardware:
    """The hardware behind ``device``."""
    if device.type == "cpu":
        return from_target("cpu")
    if device.type == "cuda" and torch.version.hip is None:
        major, minor = torch.cuda.get_device_capability(device)
        return from_target(f"sm_{major}{minor}", torch.cuda.get_device_name(device))
    return Hardware(name=f"device {device.type!r}", scalings=frozenset())
