"""Recipes: how the three operands of a GEMM are quantized. Frozen values, checked at construction.

A recipe answers one question, ``recipe.quantizer(operand)``: which FP8 type, and how the scale is made.
The names and defaults are Transformer Engine's (``transformer_engine.common.recipe``), so that a user
who moves over keeps the numbers.

To add a recipe: a frozen dataclass with ``quantizer``, its name in ``_NAMES`` and its type in ``_TYPES``. If its
scales are made in a new way: a ``Scaling``, its branch in ``numerics.quantize_layouts``, and what multiplies it
natively in ``hardware.py``.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, Final, Literal, cast

import torch

from fp8graph.errors import UnsupportedRecipeError

GemmName = Literal["fprop", "dgrad", "wgrad"]
OperandName = Literal["input", "weight", "grad_output"]
Layout = Literal["rowwise", "columnwise"]

Scaling = Literal["tensor", "delayed", "row", "block", "mxfp8", "nvfp4"]

GEMMS: Final[tuple[GemmName, ...]] = ("fprop", "dgrad", "wgrad")
OPERANDS: Final[tuple[OperandName, ...]] = ("input", "weight", "grad_output")
LAYOUTS: Final[tuple[Layout, ...]] = ("rowwise", "columnwise")

# The largest finite value of each type (OCP 8-bit floating point, table 2).
E2M1X2: Final[torch.dtype] = torch.uint8  # two 4-bit codes a byte, the first one in the low half
FLT_MAX: Final[float] = torch.finfo(torch.float32).max
FP8_MAX: Final[dict[torch.dtype, float]] = {torch.float8_e4m3fn: 448.0, torch.float8_e5m2: 57344.0, E2M1X2: 6.0}


class Format(enum.Enum):
    """Which FP8 type forward operands and gradients get.

    ``E4M3`` everywhere E4M3; ``HYBRID`` E4M3 for input and weight, E5M2 for grad_output; ``E5M2`` is
    refused by every recipe: no hardware multiplies E5M2 by E5M2.
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
    """What one ``fp8graph::quantize`` node does: the part of a recipe that concerns one operand.

    ``scaling`` says what shares one scale:

    ========= ==================================================================================
    tensor    the tensor, scale from its own amax
    delayed   the tensor, scale from the amaxes of earlier steps
    row       a row of the operand as the GEMM contracts it
    block     a ``block`` of (rows, elements along the contraction dim)
    mxfp8     a ``block``; the scale is a power of two in E8M0
    nvfp4     a ``block`` of E2M1 numbers; the scale is E4M3 times one FP32 number per tensor
    ========= ==================================================================================
    """

    dtype: torch.dtype  # torch.float8_e4m3fn, torch.float8_e5m2, or E2M1X2
    scaling: Scaling = "tensor"
    block: tuple[int, int] = (0, 0)  # (0, 0): not a block scaling
    power_2_scale: bool = False
    amax_epsilon: float = 0.0

    @property
    def fp8_max(self) -> float:
        return FP8_MAX[self.dtype]


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """Base of all recipes. Subclasses say how each operand is quantized.

    Args:
        fp8_format: a :class:`Format`, or its name.
        use_fast_accum: for fprop, dgrad, wgrad: accumulate in the tensor core's reduced-precision
            registers (``True``, faster) or promote every few steps to FP32 (``False``). Defaults as in
            Transformer Engine: fast in fprop, split in dgrad and wgrad.

    Raises:
        UnsupportedRecipeError: (a ``ValueError``) for a value that cannot work.
    """

    fp8_format: Format = Format.HYBRID
    use_fast_accum: tuple[bool, bool, bool] = (True, False, False)

    name: ClassVar[str]

    def __post_init__(self) -> None:
        if isinstance(self.fp8_format, str):  # a policy file says "HYBRID"
            try:
                object.__setattr__(self, "fp8_format", Format[self.fp8_format])
            except KeyError:
                raise self._bad("fp8_format", "one of E4M3, HYBRID") from None
        if not isinstance(self.fp8_format, Format):
            raise self._bad("fp8_format", "a Format")
        if self.fp8_format is Format.E5M2:
            raise UnsupportedRecipeError(
                f"{type(self).__name__}(fp8_format=E5M2): no hardware multiplies E5M2 by E5M2. "
                "Use Format.HYBRID (E5M2 for gradients only) or Format.E4M3."
            )
        if isinstance(self.use_fast_accum, list):  # TOML and JSON have no tuples
            object.__setattr__(self, "use_fast_accum", tuple(self.use_fast_accum))
        accum: object = self.use_fast_accum
        if not (isinstance(accum, tuple) and len(accum) == 3 and all(type(a) is bool for a in accum)):
            raise self._bad("use_fast_accum", "three booleans, for fprop, dgrad and wgrad")

    def _check_scale_fields(self) -> None:
        """For the recipes with ``power_2_scale`` and ``amax_epsilon``."""
        values = cast(Any, self)
        if type(values.power_2_scale) is not bool:
            raise self._bad("power_2_scale", "True or False")
        epsilon = values.amax_epsilon
        if type(epsilon) not in (int, float) or not (0.0 <= epsilon <= FLT_MAX):
            raise self._bad("amax_epsilon", "a finite number >= 0 that FP32 holds")

    def _bad(self, field: str, wanted: str) -> UnsupportedRecipeError:
        return UnsupportedRecipeError(
            f"{type(self).__name__}({field}={getattr(self, field)!r}): {field} must be {wanted}."
        )

    def quantizer(self, operand: OperandName) -> Quantizer:
        """How ``operand`` is quantized under this recipe."""
        raise NotImplementedError

    def covers(self, gemm: GemmName) -> bool:
        """Whether this recipe quantizes ``gemm``; if not, that GEMM stays in high precision."""
        return gemm in GEMMS

    def fast_accum(self, gemm: GemmName) -> bool:
        """Whether ``gemm`` accumulates in reduced precision."""
        return self.use_fast_accum[GEMMS.index(gemm)]

    def to_dict(self) -> dict[str, Any]:
        """Plain values: ``{"type": class name, field: value, ...}`` (see :func:`recipe_from_dict`)."""
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
class Float8CurrentScaling(Recipe):
    """One scale per tensor, from the tensor's own amax ("tensorwise", "current scaling").

    ``amax = max(max|x|, amax_epsilon)``; ``scale = fp8_max / amax`` in FP32, one IEEE division;
    amax 0, inf or nan gives scale 1; an infinite scale becomes FLT_MAX; ``power_2_scale`` rounds the
    scale down to a power of two. Source: ``compute_scale_from_amax`` in Transformer Engine's
    ``common/recipe/recipe_common.cuh``.

    Args:
        fp8_format: ``Format.HYBRID`` (default) or ``Format.E4M3``.
        power_2_scale: clear the mantissa of the scale (round down).
        amax_epsilon: lower bound of the amax, in units of the tensor; ``0.0`` or a positive number.
        use_fast_accum: see :class:`Recipe`.

    Raises:
        UnsupportedRecipeError: (a ``ValueError``) for E5M2, a negative or non-finite epsilon, or a
            value of the wrong type.
    """

    power_2_scale: bool = False
    amax_epsilon: float = 0.0

    name: ClassVar[str] = "tensorwise"

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_scale_fields()

    def quantizer(self, operand: OperandName) -> Quantizer:
        return Quantizer(
            dtype=self.fp8_format.dtype(operand),
            power_2_scale=self.power_2_scale,
            amax_epsilon=float(self.amax_epsilon),
        )


@dataclass(frozen=True, kw_only=True)
class Float8RowwiseScaling(Recipe):
    """One scale per row of each operand as its GEMM contracts it ("rowwise", per token and per output channel).

    fprop: rows of x and w; dgrad: rows of dy, columns of w; wgrad: columns of dy and x. Each scale as in
    :class:`Float8CurrentScaling`. The defaults (E4M3 everywhere, powers of two, epsilon 1e-12) are torchao's.

    Args:
        fp8_format, use_fast_accum: see :class:`Recipe`.
        power_2_scale, amax_epsilon: see :class:`Float8CurrentScaling`.
        high_precision_wgrad: leave wgrad, the GEMM that rowwise scaling costs most, in high precision (the
            recipe "rowwise_with_gw_hp").

    Raises:
        UnsupportedRecipeError: (a ``ValueError``) for a value that cannot work.
    """

    fp8_format: Format = Format.E4M3
    power_2_scale: bool = True
    amax_epsilon: float = 1e-12
    high_precision_wgrad: bool = False

    name: ClassVar[str] = "rowwise"

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_scale_fields()
        if type(self.high_precision_wgrad) is not bool:
            raise self._bad("high_precision_wgrad", "True or False")

    def covers(self, gemm: GemmName) -> bool:
        return not (gemm == "wgrad" and self.high_precision_wgrad)

    def quantizer(self, operand: OperandName) -> Quantizer:
        return Quantizer(
            dtype=self.fp8_format.dtype(operand),
            scaling="row",
            power_2_scale=self.power_2_scale,
            amax_epsilon=float(self.amax_epsilon),
        )


AmaxAlgorithm = Literal["max", "most_recent"] | Callable[[torch.Tensor], torch.Tensor]
ScaleAlgorithm = Callable[[torch.Tensor, torch.Tensor, float, "DelayedScaling"], torch.Tensor]


@dataclass(frozen=True, kw_only=True)
class DelayedScaling(Recipe):
    """One scale per tensor, from the amaxes of earlier steps ("delayed"). The only recipe with a state.

    ``scale = fp8_max * 2^-margin / amax(history)``, 1 in the first step; see ``fp8graph/state.py`` for the history.
    A step whose amax is 0, inf or nan changes nothing. Source: ``delayed_scaling.cu`` in Transformer Engine; not
    copied from there: an inf in the history, and amaxes seen without gradients.

    Args:
        fp8_format: ``Format.HYBRID`` (default) or ``Format.E4M3``.
        margin: headroom in powers of two, >= 0.
        amax_history_len: steps that the history holds, >= 1.
        amax_compute_algo: "max" over the history, "most_recent", or a function of the history [length, tensors],
            newest in row 0, that returns the amaxes [tensors].
        scaling_factor_compute_algo: a function ``(amax [tensors], old scale [tensors], fp8_max, recipe)`` that
            returns the new scales [tensors]; None for the formula above. Functions are traced into the graph; code
            compiled with one is not kept in torch's compile cache.
        reduce_amax: take the largest amax of all ranks where a process group is set; nothing on one rank.
        use_fast_accum: see :class:`Recipe`.

    Raises:
        UnsupportedRecipeError: (a ``ValueError``) for a value that cannot work.
    """

    margin: float = 0
    amax_history_len: int = 1024
    amax_compute_algo: AmaxAlgorithm = "max"
    scaling_factor_compute_algo: ScaleAlgorithm | None = None
    reduce_amax: bool = True

    name: ClassVar[str] = "delayed"

    def __post_init__(self) -> None:
        super().__post_init__()
        if type(self.margin) not in (int, float) or not (0 <= self.margin <= 100):
            raise self._bad("margin", "a number from 0 to 100: powers of two of headroom")
        if type(self.amax_history_len) is not int or self.amax_history_len < 1:
            raise self._bad("amax_history_len", "a whole number >= 1")
        if self.amax_compute_algo not in ("max", "most_recent") and not callable(self.amax_compute_algo):
            raise self._bad("amax_compute_algo", '"max", "most_recent" or a function')
        if self.scaling_factor_compute_algo is not None and not callable(self.scaling_factor_compute_algo):
            raise self._bad("scaling_factor_compute_algo", "a function or None")
        if type(self.reduce_amax) is not bool:
            raise self._bad("reduce_amax", "True or False")

    def quantizer(self, operand: OperandName) -> Quantizer:
        return Quantizer(dtype=self.fp8_format.dtype(operand), scaling="delayed")


@dataclass(frozen=True, kw_only=True)
class Float8BlockScaling(Recipe):
    """One FP32 scale per tile: 1x128 for x and dy, 128x128 for w ("blockwise", DeepSeek-V3's).

    A tile is (rows, elements along the contraction dim) of the operand as its GEMM contracts it; both layouts are
    quantized from high precision; a ragged edge is a tile of its own. Each scale as in
    :class:`Float8CurrentScaling`, except that an infinite one becomes the largest number of the input's dtype.
    Accumulation is always split. Source: ``Float8BlockScaling`` in Transformer Engine.

    Args:
        fp8_format: ``Format.E4M3`` (default) or ``Format.HYBRID``.
        x_block, w_block, grad_block: the tiles of input, weight and grad_output, two whole numbers >= 1.
        power_2_scale, amax_epsilon: see :class:`Float8CurrentScaling`.

    Raises:
        UnsupportedRecipeError: (a ``ValueError``) for a value that cannot work.
    """

    fp8_format: Format = Format.E4M3
    use_fast_accum: tuple[bool, bool, bool] = (False, False, False)
    x_block: tuple[int, int] = (1, 128)
    w_block: tuple[int, int] = (128, 128)
    grad_block: tuple[int, int] = (1, 128)
    power_2_scale: bool = True
    amax_epsilon: float = 0.0

    name: ClassVar[str] = "blockwise"

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_scale_fields()
        if any(self.use_fast_accum):
            raise self._bad("use_fast_accum", "(False, False, False): block scaling accumulates in FP32 only")
        for field in ("x_block", "w_block", "grad_block"):
            block: object = getattr(self, field)
            if isinstance(block, list):  # TOML and JSON have no tuples
                object.__setattr__(self, field, block := tuple(cast(list[Any], block)))
            if not (isinstance(block, tuple) and len(cast(Any, block)) == 2):
                raise self._bad(field, "two whole numbers >= 1: (rows, elements along the contraction dim)")
            if not all(type(size) is int and size >= 1 for size in cast(tuple[Any, ...], block)):
                raise self._bad(field, "two whole numbers >= 1: (rows, elements along the contraction dim)")

    def quantizer(self, operand: OperandName) -> Quantizer:
        return Quantizer(
            dtype=self.fp8_format.dtype(operand),
            scaling="block",
            block={"input": self.x_block, "weight": self.w_block, "grad_output": self.grad_block}[operand],
            power_2_scale=self.power_2_scale,
            amax_epsilon=float(self.amax_epsilon),
        )


@dataclass(frozen=True, kw_only=True)
class MXFP8BlockScaling(Recipe):
    """One power-of-two scale (E8M0) per 32 elements along the contraction dim ("mxfp8").

    The exponent is ``amax * (1/448)`` rounded up, so nothing saturates; both layouts are quantized from high
    precision. Source: ``MXFP8BlockScaling`` in Transformer Engine; the OCP reference rounds down instead.

    Args:
        fp8_format: ``Format.E4M3`` (default) or ``Format.HYBRID``.

    Raises:
        UnsupportedRecipeError: (a ``ValueError``) for a value that cannot work.
    """

    fp8_format: Format = Format.E4M3
    use_fast_accum: tuple[bool, bool, bool] = (False, False, False)

    name: ClassVar[str] = "mxfp8"

    def quantizer(self, operand: OperandName) -> Quantizer:
        return Quantizer(dtype=self.fp8_format.dtype(operand), scaling="mxfp8", block=(1, 32))


@dataclass(frozen=True, kw_only=True)
class NVFP4BlockScaling(Recipe):
    """FP4 (E2M1), one E4M3 scale per 16 elements along the contraction dim and one FP32 scale per tensor ("nvfp4").

    Weights get one scale per 16x16 tile, so that both layouts hold the same numbers. Source:
    ``NVFP4BlockScaling`` in Transformer Engine, without its random Hadamard transform and stochastic rounding.

    Args:
        square_weight_blocks: 16x16 tiles for weights (default); False: 1x16.

    Raises:
        UnsupportedRecipeError: (a ``ValueError``) for a value that cannot work.
    """

    fp8_format: Format = Format.E4M3  # of the block scales
    use_fast_accum: tuple[bool, bool, bool] = (False, False, False)
    square_weight_blocks: bool = True

    name: ClassVar[str] = "nvfp4"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.fp8_format is not Format.E4M3:
            raise self._bad("fp8_format", "Format.E4M3: the type of the block scales; the data is E2M1")
        if type(self.square_weight_blocks) is not bool:
            raise self._bad("square_weight_blocks", "True or False")

    def quantizer(self, operand: OperandName) -> Quantizer:
        square = operand == "weight" and self.square_weight_blocks
        return Quantizer(dtype=E2M1X2, scaling="nvfp4", block=(16, 16) if square else (1, 16))


def has_code(recipe: Recipe) -> bool:
    """Whether a field is a function: nothing that a cache key could name."""
    return any(callable(getattr(recipe, field.name)) for field in dataclasses.fields(recipe))


HIGH_PRECISION: Final = "high_precision"
# Names that users type (NeMo's where it has one).
_NAMES: dict[str, Recipe] = {
    "tensorwise": Float8CurrentScaling(),
    "rowwise": Float8RowwiseScaling(),
    "rowwise_with_gw_hp": Float8RowwiseScaling(high_precision_wgrad=True),
    "delayed": DelayedScaling(),
    "blockwise": Float8BlockScaling(),
    "mxfp8": MXFP8BlockScaling(),
    "nvfp4": NVFP4BlockScaling(),
}
RECIPE_NAMES: Final = tuple(_NAMES)
_TYPES: Final[dict[str, type[Recipe]]] = {type(recipe).__name__: type(recipe) for recipe in _NAMES.values()}

RecipeLike = Recipe | str | dict[str, Any] | None


def register_recipe(name: str, recipe: Recipe) -> None:
    """Give ``recipe`` a name that policies, policy files and ``autocast`` in compiled code can use.

    Raises:
        UnsupportedRecipeError: for a built-in name, an empty name, or something that is not a recipe.
    """
    if not isinstance(name, str) or not name or name == HIGH_PRECISION or name in RECIPE_NAMES:
        raise UnsupportedRecipeError(f"register_recipe({name!r}, ...): the name is taken or empty.")
    if not isinstance(recipe, Recipe):
        raise UnsupportedRecipeError(
            f"register_recipe({name!r}, {recipe!r}): the second argument must be a recipe object."
        )
    _NAMES[name] = recipe


def resolve_recipe(value: RecipeLike) -> Recipe | None:
    """A recipe object, a recipe's name, its dict form, or ``None``/"high_precision" for no FP8.

    Raises:
        UnsupportedRecipeError: for anything else, with the names that exist.
    """
    if value is None or value == HIGH_PRECISION:
        return None
    if isinstance(value, Recipe):
        return value
    if isinstance(value, dict):
        return recipe_from_dict(value)
    names = ", ".join(repr(n) for n in [*_NAMES, HIGH_PRECISION])
    if not isinstance(value, str):
        raise UnsupportedRecipeError(f"{value!r} is not a recipe. Give a recipe object, one of {names}, or None.")
    if value in _NAMES:
        return _NAMES[value]
    raise UnsupportedRecipeError(f"unknown recipe {value!r}. Available: {names}.")


def recipe_from_dict(values: dict[str, Any]) -> Recipe:
    """The inverse of :meth:`Recipe.to_dict`.

    Raises:
        UnsupportedRecipeError: for an unknown ``type`` or field.
    """
    fields = dict(values)
    kind = fields.pop("type", None)
    if not isinstance(kind, str) or kind not in _TYPES:
        raise UnsupportedRecipeError(f"recipe type {kind!r} is unknown. Known: {', '.join(_TYPES)}.")
    recipe_type = _TYPES[kind]
    known = {field.name for field in dataclasses.fields(recipe_type)}
    if unknown := sorted(str(name) for name in fields.keys() - known):
        raise UnsupportedRecipeError(f"{kind} has no field {unknown[0]!r}. Fields: {', '.join(sorted(known))}.")
    return recipe_type(**fields)
