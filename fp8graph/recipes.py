"""Recipes: how the three operands of a GEMM are quantized. Frozen values, checked at construction.

A recipe answers one question, ``recipe.quantizer(operand)``: which FP8 type, and how the scale is made.
The names and defaults are Transformer Engine's (``transformer_engine.common.recipe``), so that a user
who moves over keeps the numbers.

To add a recipe: a frozen dataclass with ``quantizer`` and ``use_fast_accum``, a name in ``_NAMES``,
and, if its scales are made in a new way, one function in ``numerics.py``.
"""

from __future__ import annotations

import dataclasses
import enum
from dataclasses import dataclass
from typing import Any, ClassVar, Final, Literal

import torch

from fp8graph.errors import UnsupportedRecipeError

GemmName = Literal["fprop", "dgrad", "wgrad"]
OperandName = Literal["input", "weight", "grad_output"]
Layout = Literal["rowwise", "columnwise"]

GEMMS: Final[tuple[GemmName, ...]] = ("fprop", "dgrad", "wgrad")
OPERANDS: Final[tuple[OperandName, ...]] = ("input", "weight", "grad_output")
LAYOUTS: Final[tuple[Layout, ...]] = ("rowwise", "columnwise")

# The largest finite value of each type (OCP 8-bit floating point, table 2).
FLT_MAX: Final[float] = torch.finfo(torch.float32).max
FP8_MAX: Final[dict[torch.dtype, float]] = {torch.float8_e4m3fn: 448.0, torch.float8_e5m2: 57344.0}


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
    """What one ``fp8graph::quantize`` node does: the part of a recipe that concerns one operand."""

    dtype: torch.dtype  # torch.float8_e4m3fn or torch.float8_e5m2
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

    def _bad(self, field: str, wanted: str) -> UnsupportedRecipeError:
        return UnsupportedRecipeError(
            f"{type(self).__name__}({field}={getattr(self, field)!r}): {field} must be {wanted}."
        )

    def quantizer(self, operand: OperandName) -> Quantizer:
        """How ``operand`` is quantized under this recipe."""
        raise NotImplementedError

    def fast_accum(self, gemm: GemmName) -> bool:
        """Whether ``gemm`` accumulates in reduced precision."""
        return self.use_fast_accum[GEMMS.index(gemm)]

    def to_dict(self) -> dict[str, Any]:
        """Plain values: ``{"type": class name, field: value, ...}`` (see :func:`recipe_from_dict`)."""
        values: dict[str, Any] = {"type": type(self).__name__}
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
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
        if type(self.power_2_scale) is not bool:
            raise self._bad("power_2_scale", "True or False")
        epsilon: object = self.amax_epsilon
        if type(epsilon) not in (int, float) or not (0.0 <= self.amax_epsilon <= FLT_MAX):
            raise self._bad("amax_epsilon", "a finite number >= 0 that FP32 holds")

    def quantizer(self, operand: OperandName) -> Quantizer:
        return Quantizer(
            dtype=self.fp8_format.dtype(operand),
            power_2_scale=self.power_2_scale,
            amax_epsilon=float(self.amax_epsilon),
        )


HIGH_PRECISION: Final = "high_precision"
# Names that users type (NeMo's where it has one).
_NAMES: dict[str, Recipe] = {"tensorwise": Float8CurrentScaling()}
# In the design, not in this version: a better message than "unknown".
_PLANNED: Final = ("rowwise", "rowwise_with_gw_hp", "delayed", "blockwise", "mxfp8", "nvfp4")
_BUILT_IN: Final = frozenset([*_NAMES, *_PLANNED])
_TYPES: Final[dict[str, type[Recipe]]] = {"Float8CurrentScaling": Float8CurrentScaling}

RecipeLike = Recipe | str | dict[str, Any] | None


def register_recipe(name: str, recipe: Recipe) -> None:
    """Give ``recipe`` a name that policies, policy files and ``autocast`` in compiled code can use.

    Raises:
        UnsupportedRecipeError: for a built-in name, an empty name, or something that is not a recipe.
    """
    if not isinstance(name, str) or not name or name == HIGH_PRECISION or name in _BUILT_IN:
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
    if value in _PLANNED:
        raise UnsupportedRecipeError(
            f"recipe {value!r} is not available in this version of fp8graph. Available: {names}."
        )
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
