"""The recipe with four-bit numbers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Final, Literal

from fp8graph.recipes.base import Recipe
from fp8graph.recipes.quantizer import E2M1X2, HADAMARD_SIGNS, ErrorMode, Format, OperandName, Quantizer

Scope = Literal["none", "weights", "activations", "all"]
_SCOPES: Final = ("none", "weights", "activations", "all")


@dataclass(frozen=True, kw_only=True)
class NVFP4BlockScaling(Recipe):
    """FP4 (E2M1), one E4M3 scale per 16 elements along the contraction dim and one FP32 scale per tensor ("nvfp4").

    Three ingredients make it train: weights get one scale per 16x16 tile, so that both layouts hold the same numbers;
    a random Hadamard transform spreads outliers of the columnwise copies of input and grad_output, 16 elements along
    wgrad's contraction at a time, and cancels in the product; gradients are rounded stochastically, so that the
    expectation of what is rounded is the number itself. The scales of a transformed copy are its own.

    Stochastic rounding draws one seed from torch's generator of the device in each backward graph, so that
    ``torch.manual_seed`` and a saved generator state repeat a run; ranks draw different numbers from one seed.

    Under the default policy the last blocks of a model, 15 % of them, stay in high precision.

    Source: ``NVFP4BlockScaling`` in Transformer Engine, whose field names and defaults these are; the method is that of
    "Pretraining Large Language Models with NVFP4", arXiv 2509.25149.

    Args:
        disable_rht: no Hadamard transform.
        disable_stochastic_rounding: gradients are rounded to nearest even.
        disable_2d_quantization: one scale per 16 elements of a weight, as of the other operands.
        nvfp4_4over6: "none", "weights", "activations" or "all": for each tile of these operands, the scale that makes
            its amax 6 or the one that makes it 4, whichever loses less. Gradients are never among them.
        nvfp4_4over6_e4m3_use_256: which of those use 256 as the largest scale of a tile instead of 448, so that the
            scale for 4, which is 1.5 times as large, still fits.
        nvfp4_4over6_err_mode: "MAE" or "MSE": what is lost, as a sum of absolute values or of squares.
        row_scaled_activation: inputs have one FP32 scale per row of what the GEMM contracts, in place of one for the
            tensor: per token in fprop, per channel in wgrad. A token then does not depend on the others of its batch.
            It needs ``disable_rht=True``, as in Transformer Engine.
        hadamard_signs: the rows of the Hadamard matrix that are negated, as 16 bits: Transformer Engine's, which are
            the same for all layers and steps. ``random.Random(seed).getrandbits(16)`` draws others.

    Raises:
        UnsupportedRecipeError: (a ``ValueError``) for an invalid value.
    """

    fp8_format: Format = Format.E4M3  # of the block scales
    use_fast_accum: tuple[bool, bool, bool] = (False, False, False)
    disable_rht: bool = False
    disable_stochastic_rounding: bool = False
    disable_2d_quantization: bool = False
    row_scaled_activation: bool = False
    nvfp4_4over6: Scope = "none"
    nvfp4_4over6_e4m3_use_256: Scope = "all"
    nvfp4_4over6_err_mode: ErrorMode = "MAE"
    hadamard_signs: int = HADAMARD_SIGNS

    name: ClassVar[str] = "nvfp4"
    last_blocks: ClassVar[float] = 0.15  # the paper above leaves about 15 % of the linears in bf16

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.fp8_format is not Format.E4M3:
            raise self._bad("fp8_format", "Format.E4M3: the type of the block scales; the data is E2M1")
        switches = ("disable_rht", "disable_stochastic_rounding", "disable_2d_quantization", "row_scaled_activation")
        for field in switches:
            if type(getattr(self, field)) is not bool:
                raise self._bad(field, "True or False")
        if self.row_scaled_activation and not self.disable_rht:
            raise self._bad("disable_rht", "True with row_scaled_activation=True: rows have scales, and no transform")
        for field in ("nvfp4_4over6", "nvfp4_4over6_e4m3_use_256"):
            if getattr(self, field) not in _SCOPES:
                raise self._bad(field, f"one of {', '.join(_SCOPES)}")
        if self.nvfp4_4over6_err_mode not in ("MAE", "MSE"):
            raise self._bad("nvfp4_4over6_err_mode", '"MAE" or "MSE"')
        if type(self.hadamard_signs) is not int or not 0 <= self.hadamard_signs < 2**16:
            raise self._bad("hadamard_signs", "16 bits: a whole number from 0 to 65535")

    def quantizer(self, operand: OperandName) -> Quantizer:
        square = operand == "weight" and not self.disable_2d_quantization
        four_over_six = _covers(self.nvfp4_4over6, operand)
        return Quantizer(
            dtype=E2M1X2,
            scaling="nvfp4",
            block=(16, 16) if square else (1, 16),
            rotation=None if self.disable_rht or operand == "weight" else self.hadamard_signs,
            stochastic=operand == "grad_output" and not self.disable_stochastic_rounding,
            four_over_six=self.nvfp4_4over6_err_mode if four_over_six else "",
            row_scaled=operand == "input" and self.row_scaled_activation,
            largest_scale=256.0 if four_over_six and _covers(self.nvfp4_4over6_e4m3_use_256, operand) else 448.0,
        )


def _covers(scope: Scope, operand: OperandName) -> bool:
    scopes: dict[OperandName, tuple[Scope, ...]] = {"weight": ("weights", "all"), "input": ("activations", "all")}
    return scope in scopes.get(operand, ())
