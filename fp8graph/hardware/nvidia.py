"""NVIDIA's GPUs: cuBLASLt's and CUTLASS's GEMMs behind ``torch._scaled_mm``, and the order of their scales.

FP8 with one scale per tensor or row needs sm_89 (Ada) or later, tiles sm_90 (Hopper), MXFP8 and NVFP4 sm_100 or later
(Blackwell, in data centers or not).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Self

import torch
from torch import Tensor

from fp8graph import words
from fp8graph.compat import torch_build
from fp8graph.compat.ops import HAS_SCALED_ADDMM
from fp8graph.hardware.device import Hardware, Rule
from fp8graph.hardware.speed import Speed, of_data_sheet, of_device_name
from fp8graph.numerics.scalings import SCALINGS
from fp8graph.numerics.tiles import BLOCKS, TRANSPOSED
from fp8graph.recipes import Quantizer

# cuBLAS: tiles of a and b; not 128x128 with 128x128
_TILES: Final = (((1, 128), (1, 128)), ((1, 128), (128, 128)), ((128, 128), (1, 128)))

_IN_BLOCKS: Final = ("mxfp8", "nvfp4")  # Blackwell's GEMMs, whose scales are in blocks of 128 rows x 4 tiles

# Blackwell's GPUs that are not for data centers, and the CUDA from which on torch's wheels have their kernels for one
# scale per row (pytorch#155991; for sm_121 pytorch#167734, which CUDA 12.8 does not compile).
_SM_12X: Final = {"sm_120": (12, 8), "sm_121": (13, 0)}

# By the name that torch.cuda.get_device_name returns, more specific names first: dense TFLOPS in bf16 (accumulated in
# FP32, which GeForce does at half its FP16 rate), FP8, FP4 (that of FP8 if there is none) and FP32; TB/s; TFLOPS in
# MXFP8 where these are not those of FP8: GeForce halves plain FP8, too, but not block-scaled products. An RTX 5060 Ti
# issued 51 TFLOPS in bf16, 102 in FP8 and 202 in MXFP8, an RTX 5090 253, 506 and 993 (flashinfer#3628, #4149; measured
# there). From the RTX 5090 on: NVIDIA's "AI TOPS" are sparse FP4, twice the dense ones; MXFP8 is half of those, bf16 of
# FP8. That GB10 halves nothing is assumed, as for cards that are not GeForce.
BOARDS: Final[Mapping[str, Speed]] = {
    name: of_data_sheet(name, *numbers)
    for name, *numbers in (
        ("L4", 121, 242, 242, 30, 0.300),
        ("L40S", 362, 733, 733, 91, 0.864),
        ("L40", 181, 362, 362, 90, 0.864),
        ("RTX 4090", 165, 330, 330, 82, 1.008),
        ("H20", 148, 296, 296, 44, 4.0),
        ("H100 PCIe", 756, 1513, 1513, 51, 2.0),
        ("H100 NVL", 835, 1671, 1671, 60, 3.9),
        ("H100", 989, 1979, 1979, 67, 3.35),
        ("H800", 989, 1979, 1979, 67, 3.35),
        ("H200 NVL", 835, 1671, 1671, 60, 4.8),
        ("H200", 989, 1979, 1979, 67, 4.8),
        ("GH200", 989, 1979, 1979, 67, 4.0),
        ("B200", 2250, 4500, 9000, 80, 8.0),
        ("GB200", 2500, 5000, 10000, 80, 8.0),
        ("B300", 2250, 4500, 13500, 75, 8.0),
        ("GB300", 2500, 5000, 15000, 80, 8.0),
        ("RTX 5090", 209, 419, 1676, 105, 1.792, 838),
        ("RTX 5080", 113, 225, 900, 56, 0.960, 450),
        ("RTX 5070 Ti", 88, 176, 703, 44, 0.896, 352),
        ("RTX 5070", 62, 123, 494, 31, 0.672, 247),
        ("RTX 5060 Ti", 47, 95, 380, 24, 0.448, 190),
        ("RTX 5060", 38, 77, 307, 19, 0.448, 154),
        ("RTX PRO 6000 Blackwell Max-Q", 439, 878, 1756, 110, 1.792),
        ("RTX PRO 6000 Blackwell", 504, 1008, 2015, 126, 1.792),
        ("RTX PRO 5000 Blackwell", 258, 516, 1032, 65, 1.344),
        ("GB10", 125, 250, 500, 31, 0.273),
    )
}
# An unknown name, or a laptop's GPU, gets a typical speed of its architecture: sm_90 gets that of an H100 SXM.
_TYPICAL: Final = {
    **{"sm_89": "L40S", "sm_90": "H100", "sm_100": "B200", "sm_103": "B300"},
    **{"sm_120": "RTX 5090", "sm_121": "GB10"},
}


def _dotted(version: Sequence[int]) -> str:
    return ".".join(map(str, version))


@dataclass(frozen=True, kw_only=True)
class NVIDIA(Hardware):
    """An NVIDIA GPU."""

    cuda: tuple[int, ...] | None = torch_build.CUDA_VERSION  # torch's; None: not known, or a CPU build

    # cuBLAS needs multiples of 16, and whole tiles along k; 1x128 scales are stored m-major, 16 bytes apart
    alignments = {
        **{"tensor": (1, 16, 16), "row": (1, 16, 16), "block": (4, 16, 128)},
        **{"mxfp8": (1, 16, 32), "nvfp4": (1, 16, 32)},
    }
    examples = ("sm_89", "sm_90", "sm_100", "sm_120")
    is_gpu = True
    multiplies_groups = True

    @classmethod
    def from_target(cls, target: str, device_name: str = "") -> Self | None:
        match = re.fullmatch(words.NVIDIA.form, target)
        if match is None:
            return None
        major, minor = int(match[1]), int(match[2])
        scalings: set[str] = set()
        if (major, minor) >= (8, 9):
            scalings |= {"tensor", "row"}
        if (major, minor) == (9, 0):  # Blackwell's block scaling is MXFP8
            scalings |= {"block"}
        # one scale per row; operands with fewer scales use copies of them
        grouped = {"tensor", "row"} if (major, minor) == (9, 0) else set[str]()
        if major >= 10:  # sm_12x in the layout "TN" alone, which is that of all GEMMs here
            scalings |= {*_IN_BLOCKS}
        if major == 10:
            grouped |= {*_IN_BLOCKS}
        return cls(
            name=target,
            scalings=frozenset(scalings),
            grouped=frozenset(grouped),
            speed=of_device_name(device_name, BOARDS, _TYPICAL.get(target.removesuffix("a"))),
        )

    @classmethod
    def of_device(cls, device: torch.device) -> Self:
        major, minor = torch.cuda.get_device_capability(device)
        hardware = cls.from_target(f"sm_{major}{minor}", torch.cuda.get_device_name(device))
        assert hardware is not None
        return hardware

    @property
    def fixes_order(self) -> bool:
        return "row" in self.scalings  # Triton multiplies FP8 there

    @classmethod
    def runs(cls, device: torch.device) -> bool:
        return device.type in ("cuda", "meta") and torch.version.hip is None

    @property
    def default_recipe(self) -> str:
        return "mxfp8" if "mxfp8" in self.scalings else "tensorwise"

    def alignment(self, a: Quantizer, b: Quantizer) -> tuple[int, int, int]:
        """Return the multiples that m, n and k must be padded to.

        If one side has 128x128 tiles, k is a multiple of four of them. cuBLASLt reads the scales [rows / 128,
        k / 128] of that side with rows 16 bytes apart (its documentation, "Scaling factors layouts": L4, k / 128
        rounded up to 4); ``torch._scaled_mm`` refuses rows that are not ceil(k / 128) apart
        (``is_blockwise_128x128_scaling`` in aten/src/ATen/native/cuda/ScaledBlas.cpp since pytorch#164953;
        pytorch#166752 rounds up in v2 only). The two agree only on such a k; with any other, a GEMM is refused or reads
        wrong scales.
        """
        m, n, k = super().alignment(a, b)
        return m, n, 4 * k if (128, 128) in (a.block, b.block) else k

    def most_rows_of_small_tiles(self, scaling: str) -> int:
        """cuBLASLt has tiles of 64x8 for one scale per tensor and for 1x128 with 1x128: 0.539 ms in place of 0.746 for
        the GEMMs of eight Llama-3-8B layers and 16 rows on an H200. From 256 rows on, 128x128 scales are faster.
        """
        return 128 if self.name.removesuffix("a") == "sm_90" and scaling in ("row", "block") else 0

    @property
    def rules(self) -> Mapping[str, Rule]:
        return {"row": self._rows, "block": self._tiles, "mxfp8": self._mx, "nvfp4": self._blocks}

    def _rows(self, a: Quantizer, b: Quantizer, out_dtype: torch.dtype) -> str | None:
        """With one scale per row, cuBLASLt has a GEMM on sm_90 from CUDA 12.9 on.

        Source: ``_scaled_mm_out_cuda`` and ``_scaled_rowwise_rowwise`` in aten/src/ATen/native/cuda/ScaledBlas.cpp.
        Otherwise a CUTLASS kernel runs (RowwiseScaledMM.cu), whose second operand is E4M3 (``check_inputs``), and whose
        results are bf16 alone before torch 2.15 (``torch_build.ROWS_IN_ALL_DTYPES``). Its
        ``dispatch_fp8_rowwise_kernel_on_sm`` has a kernel for sm_89, 9.x, 10.x, 11.x and 12.x. The libraries of torch
        2.11 (CUDA 13.0) and 2.15 (13.2) contain those for sm_89, sm_120 and sm_121, and go to them before compute
        capability 9 and from 10 on; with ``major == 10`` in its place, 12.x went to cuBLASLt, which has none
        (pytorch#192707, torch 2.10, which fp8graph does not allow).
        """
        if (needed := _SM_12X.get(self.name.removesuffix("a"))) and self.cuda is not None and self.cuda < needed:
            return f"one scale per row on {self.name} needs CUDA {_dotted(needed)} or later, but {self._has}"
        if not self._is_old and self.name.removesuffix("a") == "sm_90":
            return None
        where = "only on sm_90 with CUDA 12.9 or later"
        if not torch_build.HAS_ROWS:
            return f"torch for Windows multiplies rows {where}, but {self._shortfall}"
        if out_dtype != torch.bfloat16 and not torch_build.ROWS_IN_ALL_DTYPES:
            result = str(out_dtype).removeprefix("torch.")
            return f"one scale per row produces {result} results {where}, or with torch 2.15, but {self._shortfall}"
        if b.dtype == torch.float8_e5m2:
            return f"one scale per row goes with E5M2 as the second operand {where}, but {self._shortfall}"
        return None

    def _tiles(self, a: Quantizer, b: Quantizer, out_dtype: torch.dtype) -> str | None:
        """Source: ``get_scale_mode`` in aten/src/ATen/cuda/CUDABlas.cpp."""
        if self._is_old:
            return f"one scale per tile needs CUDA 12.9 or later, but {self._shortfall}"
        if (a.block, b.block) not in _TILES:
            (am, ak), (bm, bk) = a.block, b.block
            return f"no GEMM for tiles of {am}x{ak} and {bm}x{bk}"
        return None

    def _mx(self, a: Quantizer, b: Quantizer, out_dtype: torch.dtype) -> str | None:
        reason = "MXFP8 GEMMs only take E4M3" if torch.float8_e5m2 in (a.dtype, b.dtype) else None
        return reason or self._blocks(a, b, out_dtype)

    def _blocks(self, a: Quantizer, b: Quantizer, out_dtype: torch.dtype) -> str | None:
        """Block-scaled GEMMs: ``get_scale_mode`` in CUDABlas.cpp has their scales from CUDA 12.8 on.

        On 12.x cuBLASLt takes only "TN" (its documentation of ``cublasLtMatmul``: "on Ada, Hopper, and Blackwell
        GeForce (compute capability 12.x)"), and the others from 13.6 on (pytorch#198126, #198188). The names of its
        kernels for sm_120 (``cutlass3x_sm120_bstensorop_..._block_scaled_..._tnn_``) are the same in 12.8.4, 13.1 (of
        torch 2.11) and 13.4 (of 2.15): E4M3 with E4M3, or with E5M2, and E2M1, with results in bf16, fp16 and FP32.
        """
        if self.cuda is None or self.cuda >= (12, 8):
            return None
        return f"{SCALINGS[a.scaling].gemm.upper()} GEMMs need CUDA 12.8 or later, but {self._has}"

    @property
    def _is_old(self) -> bool:
        return self.cuda is not None and self.cuda < (12, 9)

    @property
    def _shortfall(self) -> str:
        return self._has if self._is_old else f"this is {self.name}"

    @property
    def _has(self) -> str:
        return f"torch has {_dotted(self.cuda or ())}"

    @property
    def grouped_rules(self) -> Mapping[str, Rule]:
        return {**dict.fromkeys(self.grouped, self._groups), "mxfp8": self._mslk_groups, "nvfp4": self._fp4_groups}

    def why_not_grouped(self, gemm: str) -> str | None:
        """Source: ``_scaled_grouped_mm_cuda`` in GroupedBlas.cpp. cuBLAS has some for 11.0, but not for 12.x."""
        if self.grouped or not self.scalings:
            return torch_build.WHY_NOT_GROUPED.get(gemm)
        return "torch's are for compute capability 9.0 and 10.x"

    def evidence_without_device(self, gemm: str, *, grouped: bool = False) -> str:
        if not grouped:
            name = self.name.removesuffix("a")
            if name in _SM_12X and gemm in _IN_BLOCKS:
                return "others' measurement and the sources, not by our run"
            is_cutlass = gemm == "row" and name in ("sm_89", *_SM_12X)
            return "torch's sources and libraries, not by our run" if is_cutlass else ""
        # torch checks the shapes of FP4 on a GPU alone
        checks = {
            "mxfp8": "the sources of torch and MSLK, torch's checks of shapes",
            "nvfp4": "the sources of torch and MSLK",
        }
        return f"{checks[gemm]} and Triton's interpreter, not by a run on a GPU" if gemm in checks else ""

    def _groups(self, a: Quantizer, b: Quantizer, out_dtype: torch.dtype) -> str | None:
        if out_dtype != torch.bfloat16:
            kind = "NVFP4" if SCALINGS[a.scaling].packed > 1 else "FP8"
            return f"grouped {kind} GEMMs only produce bf16 output, not {str(out_dtype).removeprefix('torch.')}"
        if torch.float8_e5m2 in (a.dtype, b.dtype):
            return "grouped FP8 GEMMs only take E4M3"
        return None

    def _mslk_groups(self, a: Quantizer, b: Quantizer, out_dtype: torch.dtype) -> str | None:
        """Source: ``_scaled_grouped_mm_cuda`` and ``_scaled_grouped_mm_cuda_v2`` in
        aten/src/ATen/native/cuda/GroupedBlas.cpp and, behind them, MSLK's ``mx8mx8bf16_grouped_mm`` and
        ``f4f4bf16_grouped_mm``, which official builds of torch for CUDA 12.8 and later contain.
        """
        if self.cuda is not None and self.cuda < (12, 8):
            kind = SCALINGS[a.scaling].gemm.upper()
            return f"grouped {kind} GEMMs need CUDA 12.8 or later, but {self._has}"
        return self._groups(a, b, out_dtype)

    def _fp4_groups(self, a: Quantizer, b: Quantizer, out_dtype: torch.dtype) -> str | None:
        if a.row_scaled or b.row_scaled:
            return "grouped NVFP4 GEMMs take one FP32 scale per group, not one per row"
        return self._mslk_groups(a, b, out_dtype)

    @classmethod
    def order_of_groups(cls, gemm: str) -> str:
        return BLOCKS if gemm in _IN_BLOCKS else ""

    @classmethod
    def adds(cls, gemm: str) -> bool:
        return gemm == "tensor" and HAS_SCALED_ADDMM

    @classmethod
    def scale_order(cls, gemm: str, block: Sequence[int]) -> str:
        if gemm in _IN_BLOCKS:
            return BLOCKS
        return TRANSPOSED if gemm == "block" and block[0] == 1 else ""

    @classmethod
    def operand(cls, data: Tensor, scale_inv: Tensor, gemm: str, block: Sequence[int]) -> tuple[Tensor, Tensor]:
        if gemm == "block" and block[0] == 1:
            return data, scale_inv.t()  # [rows, k / 128], outer-dim-major
        if gemm == "nvfp4":
            return data.view(torch.float4_e2m1fn_x2), scale_inv.reshape(-1)
        if gemm == "mxfp8":
            return data, scale_inv.reshape(-1).view(torch.float8_e8m0fnu)
        return data, scale_inv  # of 128x128 tiles: [rows / 128, k / 128], rows 16 bytes apart by ``alignment``
