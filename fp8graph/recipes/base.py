"""A recipe's answer for one operand of a GEMM, its :class:`Quantizer`, and the base of all recipes."""

from __future__ import annotations

import dataclasses
import enum
import inspect
from dataclasses import dataclass
from typing import Any, ClassVar, Final, Literal, Self

import torch

from fp8graph.errors import UnsupportedRecipeError, did_you_mean

GemmName = Literal["fprop", "dgrad", "wgrad"]
OperandName = Literal["input", "weight", "grad_output"]
Layout = Literal["rowwise", "columnwise"]
ErrorMode = Literal["MAE", "MSE"]
BackwardOverride = Literal["high_precision", "dequantized"]
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
        """Return the FP8 type of ``operand``."""
        if self is Format.HYBRID and operand == "grad_output":
            return torch.float8_e5m2
        return torch.float8_e5m2 if self is Format.E5M2 else torch.float8_e4m3fn


@dataclass(frozen=True, kw_only=True)
class Quantizer:
    """The arithmetic of one ``fp8graph::quantize`` node: the part of a recipe that concerns one operand.

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

    ``columnwise_from_rowwise``: the columnwise copy is that of the numbers that the rowwise copy holds, decoded.

    The last five fields are for nvfp4: a Hadamard transform of the columnwise copy before its amax is taken
    (``rotation``: the rows of its matrix that are negated, as bits; None: no transform), stochastic rounding, for each
    tile the better of two scales ("four over six", by the error in this mode), the largest of the tiles' scales, and
    whether each row of the operand as the GEMM contracts it has an FP32 number, instead of the tensor.
    """

    dtype: torch.dtype  # one of ``FP8_MAX``
    scaling: Scaling = "tensor"
    block: tuple[int, int] = (0, 0)  # (0, 0): not a block scaling
    power_2_scale: bool = False
    amax_epsilon: float = 0.0
    columnwise_from_rowwise: bool = False
    rotation: int | None = None
    stochastic: bool = False
    four_over_six: ErrorMode | Literal[""] = ""
    largest_scale: float = 448.0
    row_scaled: bool = False

    @property
    def fp8_max(self) -> float:
        return FP8_MAX[self.dtype]


class _Signature:
    """The arguments of ``__init__``, for ``help`` and the documentation, which look at ``__new__`` first."""

    def __get__(self, _: object, owner: type) -> inspect.Signature:
        _, *fields = inspect.signature(owner.__init__).parameters.values()
        return inspect.Signature(fields)


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """The base of all recipes. Subclasses say how each operand is quantized.

    Args:
        fp8_format: a :class:`Format`, or its name.
        use_fast_accum: for fprop, dgrad, wgrad: accumulate in the tensor core's reduced-precision
            registers (``True``, faster) or promote every few steps to FP32 (``False``). Defaults as in
            Transformer Engine: fast in fprop, split in dgrad and wgrad.
        backward_override: run dgrad and wgrad in high precision, with the program's gradient: "high_precision" from the
            program's input and weight, "dequantized" from the numbers that fprop multiplied, decoded:
            ``dx = dy @ dequantize(q(w))`` and ``dw = dy.T @ dequantize(q(x))``. FP8 is then saved for backward. None:
            this recipe quantizes them.

    Raises:
        UnsupportedRecipeError: (a ``ValueError``) for an invalid value.
    """

    fp8_format: Format = Format.HYBRID
    use_fast_accum: tuple[bool, bool, bool] = (True, False, False)
    backward_override: BackwardOverride | None = None

    __signature__: ClassVar = _Signature()
    name: ClassVar[str]
    # the share of a model's blocks, the last ones, that the default policy leaves in high precision under this recipe
    last_blocks: ClassVar[float] = 0.0

    def __new__(cls, *_: Any, **fields: Any) -> Self:
        """Name the field that was probably meant.

        Raises:
            TypeError: a field does not exist.
        """
        names = [field.name for field in dataclasses.fields(cls)]
        if unknown := [name for name in fields if name not in names]:
            meant = did_you_mean(unknown[0], names)
            raise TypeError(f"{cls.__name__} has no field {unknown[0]!r}.{meant} Fields: {', '.join(sorted(names))}.")
        return super().__new__(cls)

    def __post_init__(self) -> None:
        if isinstance(self.fp8_format, str):  # a policy file says "HYBRID"
            try:
                object.__setattr__(self, "fp8_format", Format[self.fp8_format])
            except KeyError:
                raise self._bad("fp8_format", "one of E4M3, HYBRID") from None
        if not isinstance(self.fp8_format, Format):
            raise self._bad("fp8_format", "a Format, or its name: E4M3 or HYBRID")
        if self.fp8_format is Format.E5M2:
            raise UnsupportedRecipeError(
                f"{type(self).__name__}(fp8_format=E5M2): no NVIDIA GPU multiplies E5M2 by E5M2. "
                "Use Format.HYBRID (E5M2 for gradients only) or Format.E4M3."
            )
        if isinstance(self.use_fast_accum, list):  # TOML and JSON have no tuples
            object.__setattr__(self, "use_fast_accum", tuple(self.use_fast_accum))
        accum: object = self.use_fast_accum
        if not (isinstance(accum, tuple) and len(accum) == 3 and all(type(a) is bool for a in accum)):
            raise self._bad("use_fast_accum", "three booleans, for fprop, dgrad and wgrad")
        for field in dataclasses.fields(self):
            if type(field.default) is bool and type(getattr(self, field.name)) is not bool:
                raise self._bad(field.name, "True or False")
        if self.backward_override not in (None, "high_precision", "dequantized"):
            raise self._bad("backward_override", 'None, "high_precision" or "dequantized"')
        if self.backward_override is not None and self.quantizes_attention_backward:
            raise self._bad("backward_override", "None with attention_backward=True, which quantizes backward")
        epsilon = getattr(self, "amax_epsilon", 0.0)
        if type(epsilon) not in (int, float) or not (0.0 <= epsilon <= FLT_MAX):
            raise self._bad("amax_epsilon", "a finite number >= 0 that fits in FP32")

    def _bad(self, field: str, wanted: str) -> UnsupportedRecipeError:
        return UnsupportedRecipeError(
            f"{type(self).__name__}({field}={getattr(self, field)!r}): {field} must be {wanted}."
        )

    @property
    def has_state(self) -> bool:
        """Whether its scales come from amaxes of earlier steps, which are kept between calls."""
        return False

    @property
    def starts_from_own_amax(self) -> bool:
        """Whether a tensor that has no such amax yet takes its scale from its own."""
        return False

    @property
    def reduces_amax(self) -> bool:
        """Whether all ranks have one such scale for a tensor."""
        return False

    @property
    def without_state(self) -> Recipe:
        """The recipe of these FP8 types whose scales come from the tensor itself."""
        return self

    @property
    def rotates_qk(self) -> bool:
        """Whether q and k of an attention are transformed before they are quantized."""
        return getattr(self, "hadamard_qk", False)

    @property
    def quantizes_attention_backward(self) -> bool:
        """Whether all products of an attention read FP8 numbers, those of backward too."""
        return getattr(self, "attention_backward", False)

    @property
    def only_for_attention(self) -> str:
        """The name of a field that is set, and that only attention has; "": there is none."""
        return next((name for name in ("hadamard_qk", "attention_backward") if getattr(self, name, False)), "")

    @property
    def why_not_for_gemms(self) -> str:
        """The reason why no GEMM can have this recipe; "": some can."""
        return f"{self.only_for_attention}=True is for attention alone" if self.only_for_attention else ""

    def quantizer(self, operand: OperandName) -> Quantizer:
        """Return the quantizer of ``operand`` under this recipe."""
        raise NotImplementedError

    def covers(self, gemm: GemmName) -> bool:
        """Return whether this recipe quantizes ``gemm``; if not, that GEMM stays in high precision."""
        return gemm == "fprop" or self.backward_override is None

    def dequantizes(self, gemm: GemmName) -> bool:
        """Return whether ``gemm`` reads, in high precision, the numbers that fprop multiplied in FP8."""
        return gemm != "fprop" and self.backward_override == "dequantized"

    def fast_accum(self, gemm: GemmName) -> bool:
        """Return whether ``gemm`` accumulates in reduced precision."""
        return self.use_fast_accum[GEMMS.index(gemm)]

    def to_dict(self) -> dict[str, Any]:
        """Return the recipe as plain values: ``{"type": class name, field: value, ...}`` as in a policy file."""
        values: dict[str, Any] = {"type": type(self).__name__}
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if callable(value):
                raise UnsupportedRecipeError(
                    f"{type(self).__name__}({field.name}={value!r}): code cannot be written to a file. "
                    "Register the recipe under a name (fp8graph.register_recipe) and write the name."
                )
            if isinstance(value, Format):
                value = value.name
            values[field.name] = list(value) if isinstance(value, tuple) else value
        return values


@dataclass(frozen=True, kw_only=True)
class AttentionFields(Recipe):
    """The fields of recipes that also quantize attention, for rules with ``op="attention"`` alone.

    Args:
        hadamard_qk: multiply 16 elements of each head of q and k at a time with one orthogonal Hadamard matrix before
            they are quantized. It cancels in ``q @ k.T``, and spreads outliers over 16 elements.
        attention_backward: quantize all that the products of attention read, in forward and backward, as Transformer
            Engine's ``fp8_dpa`` does: the probabilities too, the gradient of the result, and that of the scores, in
            the recipe's type for gradients. It is emulated. Otherwise backward runs in high precision.

    Raises:
        UnsupportedRecipeError: (a ``ValueError``) for an invalid value.
    """

    hadamard_qk: bool = False
    attention_backward: bool = False
