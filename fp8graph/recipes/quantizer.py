"""How one operand of a GEMM is quantized: its format, its layouts, and which elements share a scale."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Final, Literal

import torch

GemmName = Literal["fprop", "dgrad", "wgrad"]
OperandName = Literal["input", "weight", "grad_output"]
Layout = Literal["rowwise", "columnwise"]
ErrorMode = Literal["MAE", "MSE"]
Scaling = Literal["tensor", "delayed", "row", "block", "block_e8m0", "mxfp8", "nvfp4"]
GEMMS: Final[tuple[GemmName, ...]] = ("fprop", "dgrad", "wgrad")
# a and b of each: fprop x @ w.T, dgrad dy @ w, wgrad dy.T @ x
GEMM_OPERANDS: Final[dict[GemmName, tuple[OperandName, OperandName]]] = {
    "fprop": ("input", "weight"),
    "dgrad": ("grad_output", "weight"),
    "wgrad": ("grad_output", "input"),
}
# the layout in which it reads each of them: contiguous along its contraction
GEMM_LAYOUTS: Final[dict[GemmName, tuple[Layout, Layout]]] = {
    "fprop": ("rowwise", "rowwise"),
    "dgrad": ("rowwise", "columnwise"),
    "wgrad": ("columnwise", "columnwise"),
}
OPERANDS: Final[tuple[OperandName, ...]] = ("input", "weight", "grad_output")
LAYOUTS: Final[tuple[Layout, ...]] = ("rowwise", "columnwise")
E2M1X2: Final[torch.dtype] = torch.uint8  # two 4-bit codes per byte, the first one in the low half
# the rows of the Hadamard matrix that are negated, as bits: Transformer Engine's vector, 3, 5 to 10, 12, 14 and 15
HADAMARD_SIGNS: Final = 0b1101_0111_1110_1000
FLT_MAX: Final[float] = torch.finfo(torch.float32).max
FNUZ: Final[frozenset[torch.dtype]] = frozenset({torch.float8_e4m3fnuz, torch.float8_e5m2fnuz})
# The largest finite value of each type. Recipes name the standard types (OCP 8-bit floating point, table 2). Some
# devices use fnuz types in their place: they have no -0, no inf, and one NaN, 0x80.
FP8_MAX: Final[dict[torch.dtype, float]] = {
    torch.float8_e4m3fn: 448.0,
    torch.float8_e5m2: 57344.0,
    torch.float8_e4m3fnuz: 240.0,
    torch.float8_e5m2fnuz: 57344.0,
    E2M1X2: 6.0,
}


class Format(enum.Enum):
    """The FP8 types of forward operands and of gradients.

    ``E4M3`` uses E4M3 everywhere; ``HYBRID`` uses E4M3 for input and weight, and E5M2 for grad_output. Every recipe
    refuses ``E5M2``: NVIDIA's GPUs do not multiply E5M2 by E5M2.
    """

    E4M3 = "E4M3"
    E5M2 = "E5M2"
    HYBRID = "HYBRID"

    def dtype(self, operand: OperandName) -> torch.dtype:
        """The FP8 type of ``operand``."""
        if self is Format.HYBRID and operand == "grad_output":
            return torch.float8_e5m2
        return torch.float8_e5m2 if self is Format.E5M2 else torch.float8_e4m3fn


@dataclass(frozen=True, kw_only=True)
class Quantizer:
    """How one ``fp8graph::quantize`` node quantizes: the part of a recipe that concerns one operand.

    ``scaling`` says what shares one scale:

    ========== ==================================================================================
    tensor     the tensor, scale from its own amax
    delayed    the tensor, scale from the amaxes of earlier steps
    row        a row of the operand as the GEMM contracts it
    block      a ``block`` of (rows, elements along the contraction dim)
    block_e8m0 a ``block``; the scale is a power of two in E8M0
    mxfp8      a ``block`` that Blackwell multiplies; the scale is a power of two in E8M0
    nvfp4      a ``block`` of E2M1 numbers; the scale is E4M3 times one FP32 number per tensor
    ========== ==================================================================================

    The last five fields are for nvfp4: a Hadamard transform of the columnwise copy before its amax is taken
    (``rotation``: the rows of its matrix that are negated, as bits; None: no transform), stochastic rounding, for each
    tile the better of two scales ("four over six", by the error in this mode), the largest of the tiles' scales, and
    whether each row of the operand as the GEMM contracts it has an FP32 number of its own, not the tensor.
    """

    dtype: torch.dtype  # one of ``FP8_MAX``
    scaling: Scaling = "tensor"
    block: tuple[int, int] = (0, 0)  # (0, 0): not a block scaling
    power_2_scale: bool = False
    amax_epsilon: float = 0.0
    rotation: int | None = None
    stochastic: bool = False
    four_over_six: ErrorMode | Literal[""] = ""
    largest_scale: float = 448.0
    row_scaled: bool = False

    @property
    def fp8_max(self) -> float:
        return FP8_MAX[self.dtype]
