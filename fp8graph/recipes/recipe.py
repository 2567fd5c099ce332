"""Recipes: how the three operands of a GEMM are quantized. Frozen values, checked at construction.

A recipe answers one question, ``recipe.quantizer(operand)``: which FP8 type, and how the scale is made.
The names and defaults are Transformer Engine's (``transformer_engine.common.recipe``), so that a user
who moves over keeps the numbers.

To add a recipe, write a frozen dataclass with ``quantizer``, and put it into the table at the end, in the order of the
names in ``fp8graph.words``. If its scales are made in a new way, it also needs a ``Scaling`` (``numerics/scalings/``).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, Final, Literal, cast

import torch

from fp8graph.errors import UnsupportedRecipeError, did_you_mean
from fp8graph.recipes.base import (
    E2M1X2,
    HADAMARD_SIGNS,
    AttentionFields,
    ErrorMode,
    Format,
    GemmName,
    OperandName,
    Quantizer,
    Recipe,
)
from fp8graph.words import HIGH_PRECISION, RECIPE_NAMES, why_no_recipe


@dataclass(frozen=True, kw_only=True)
class Float8CurrentScaling(AttentionFields):
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
        hadamard_qk, attention_backward: for rules with ``op="attention"`` alone (docs/attention.md): rotate q and k
            before they are quantized; quantize backward's products, too, in emulation.

    Raises:
        UnsupportedRecipeError: (a ``ValueError``) for E5M2, a negative or non-finite epsilon, or a
            value of the wrong type.
    """

    power_2_scale: bool = False
    amax_epsilon: float = 0.0

    name: ClassVar[str] = "tensorwise"

    def quantizer(self, operand: OperandName) -> Quantizer:
        return Quantizer(
            dtype=self.fp8_format.dtype(operand),
            power_2_scale=self.power_2_scale,
            amax_epsilon=float(self.amax_epsilon),
        )


@dataclass(frozen=True, kw_only=True)
class Float8RowwiseScaling(AttentionFields):
    """One scale per row of each operand as its GEMM contracts it ("rowwise", per token and per output channel).

    fprop: rows of x and w; dgrad: rows of dy, columns of w; wgrad: columns of dy and x. Each scale as in
    :class:`Float8CurrentScaling`. The defaults (E4M3 everywhere, powers of two, epsilon 1e-12) are torchao's.

    Args:
        fp8_format, use_fast_accum: see :class:`Recipe`.
        power_2_scale, amax_epsilon: see :class:`Float8CurrentScaling`.
        high_precision_wgrad: leave wgrad, the GEMM for which rowwise scaling costs most, in high precision (the
            recipe "rowwise_with_gw_hp").
        hadamard_qk, attention_backward: for rules with ``op="attention"`` alone (docs/attention.md): rotate q and k
            before they are quantized; quantize backward's products, too, in emulation.

    Raises:
        UnsupportedRecipeError: (a ``ValueError``) for an invalid value.
    """

    fp8_format: Format = Format.E4M3
    power_2_scale: bool = True
    amax_epsilon: float = 1e-12
    high_precision_wgrad: bool = False

    name: ClassVar[str] = "rowwise"

    def covers(self, gemm: GemmName) -> bool:
        return super().covers(gemm) and not (gemm == "wgrad" and self.high_precision_wgrad)

    def dequantizes(self, gemm: GemmName) -> bool:
        return super().dequantizes(gemm) and not (gemm == "wgrad" and self.high_precision_wgrad)

    def quantizer(self, operand: OperandName) -> Quantizer:
        return Quantizer(
            dtype=self.fp8_format.dtype(operand),
            scaling="row",
            power_2_scale=self.power_2_scale,
            amax_epsilon=float(self.amax_epsilon),
        )


ScaleFormat = Literal["fp32", "ue8m0"]
InitialScale = Literal["auto", "one"]
AmaxAlgorithm = Literal["max", "most_recent"] | Callable[[torch.Tensor], torch.Tensor]
ScaleAlgorithm = Callable[[torch.Tensor, torch.Tensor, float, "DelayedScaling"], torch.Tensor]


@dataclass(frozen=True, kw_only=True)
class DelayedScaling(Recipe):
    """One scale per tensor, from the amaxes of earlier steps ("delayed"). It is the only recipe with state.

    ``scale = fp8_max * 2^-margin / amax(history)``; ``numerics/history.py`` has the history. A tensor without amaxes
    of earlier steps takes the scale from its own. A step whose amax is 0, inf or nan changes nothing. Source:
    ``delayed_scaling.cu`` in Transformer Engine. Unlike there, no inf enters the history, and no amax of a run without
    gradients.

    Args:
        fp8_format: ``Format.HYBRID`` (default) or ``Format.E4M3``.
        margin: headroom in powers of two, >= 0.
        amax_history_len: the number of steps in the history, from 1 to 2**20.
        initial_scale: of a tensor that has no amax of an earlier step, in training and in inference. "auto": from its
            own amax, by code that is compiled for such steps apart. "one": 1, as in Transformer Engine.
        amax_compute_algo: "max" over the history, "most_recent", or a function of the history [length, tensors],
            newest in row 0, that returns the amaxes [tensors].
        scaling_factor_compute_algo: a function ``(amax [tensors], old scale [tensors], fp8_max, recipe)`` that
            returns the new scales [tensors]; None for the formula above. Functions are traced into the graph; code
            compiled with one is not kept in torch's compile cache.
        reduce_amax: use the largest amax of all ranks if there is a process group; has no effect on one rank.
        use_fast_accum: see :class:`Recipe`.

    Raises:
        UnsupportedRecipeError: (a ``ValueError``) for an invalid value.
    """

    margin: float = 0
    amax_history_len: int = 1024
    initial_scale: InitialScale = "auto"
    amax_compute_algo: AmaxAlgorithm = "max"
    scaling_factor_compute_algo: ScaleAlgorithm | None = None
    reduce_amax: bool = True

    name: ClassVar[str] = "delayed"

    def __post_init__(self) -> None:
        super().__post_init__()
        if type(self.margin) not in (int, float) or not (0 <= self.margin <= 100):
            raise self._bad("margin", "a number from 0 to 100: powers of two of headroom")
        if type(self.amax_history_len) is not int or not 1 <= self.amax_history_len <= 2**20:
            raise self._bad("amax_history_len", "a whole number >= 1, and at most 2**20")
        if self.initial_scale not in ("auto", "one"):
            raise self._bad("initial_scale", '"auto", from the first tensor, or "one", as in Transformer Engine')
        if self.amax_compute_algo not in ("max", "most_recent") and not callable(self.amax_compute_algo):
            raise self._bad("amax_compute_algo", '"max", "most_recent" or a function')
        if self.scaling_factor_compute_algo is not None and not callable(self.scaling_factor_compute_algo):
            raise self._bad("scaling_factor_compute_algo", "a function or None")

    @property
    def has_state(self) -> bool:
        return True

    @property
    def starts_from_own_amax(self) -> bool:
        return self.initial_scale == "auto"

    @property
    def reduces_amax(self) -> bool:
        return self.reduce_amax

    @property
    def without_state(self) -> Recipe:
        return Float8CurrentScaling(fp8_format=self.fp8_format)

    def quantizer(self, operand: OperandName) -> Quantizer:
        return Quantizer(dtype=self.fp8_format.dtype(operand), scaling="delayed")


@dataclass(frozen=True, kw_only=True)
class Float8BlockScaling(Recipe):
    """One FP32 scale per tile: 1x128 for x and dy, 128x128 for w ("blockwise", DeepSeek-V3's).

    A tile is (rows, elements along the contraction dim) of the operand as its GEMM contracts it; both layouts are
    quantized from high precision; a ragged edge is a separate tile. Each scale as in
    :class:`Float8CurrentScaling`, except that an infinite one becomes the largest number of the input's dtype.
    Accumulation is always split. Source: ``Float8BlockScaling`` in Transformer Engine.

    Args:
        fp8_format: ``Format.E4M3`` (default) or ``Format.HYBRID``.
        x_block, w_block, grad_block: the tiles of input, weight and grad_output, two whole numbers >= 1.
        power_2_scale, amax_epsilon: see :class:`Float8CurrentScaling`.
        scale_format: "fp32", or "ue8m0" for powers of two in E8M0, ``amax / fp8_max`` rounded up: DeepSeek-V3.1's
            ``scale_fmt``, DeepGEMM's ``use_ue8m0`` (whose epsilon is 1e-4).

    Raises:
        UnsupportedRecipeError: (a ``ValueError``) for an invalid value.
    """

    fp8_format: Format = Format.E4M3
    use_fast_accum: tuple[bool, bool, bool] = (False, False, False)
    x_block: tuple[int, int] = (1, 128)
    w_block: tuple[int, int] = (128, 128)
    grad_block: tuple[int, int] = (1, 128)
    power_2_scale: bool = True
    amax_epsilon: float = 0.0
    scale_format: ScaleFormat = "fp32"

    name: ClassVar[str] = "blockwise"

    def __post_init__(self) -> None:
        super().__post_init__()
        if any(self.use_fast_accum):
            raise self._bad("use_fast_accum", "(False, False, False): block scaling accumulates in FP32 only")
        if self.scale_format not in ("fp32", "ue8m0"):
            raise self._bad("scale_format", '"fp32" or "ue8m0"')
        if self.scale_format == "ue8m0" and not self.power_2_scale:
            raise self._bad("power_2_scale", 'True with scale_format="ue8m0", whose scales are powers of two')
        for field in ("x_block", "w_block", "grad_block"):
            block: object = getattr(self, field)
            if isinstance(block, list):  # TOML and JSON have no tuples
                object.__setattr__(self, field, block := tuple(cast(list[Any], block)))
            sizes = cast(tuple[Any, ...], block) if isinstance(block, tuple) else ()
            if len(sizes) != 2 or not all(type(size) is int and size >= 1 for size in sizes):
                raise self._bad(field, "two whole numbers >= 1: (rows, elements along the contraction dim)")

    def quantizer(self, operand: OperandName) -> Quantizer:
        return Quantizer(
            dtype=self.fp8_format.dtype(operand),
            scaling="block_e8m0" if self.scale_format == "ue8m0" else "block",
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
        enable_2d_quantization: one scale per 32x32 tile of a weight, so that forward and backward multiply by the same
            numbers: both layouts of a weight then hold them.
        columnwise_from_rowwise: wgrad's copies of input and grad_output are quantized from the rowwise copies, decoded:
            rounded twice, so that tokens on their way to experts on other ranks are sent in MXFP8 in training, too.

    Raises:
        UnsupportedRecipeError: (a ``ValueError``) for an invalid value.
    """

    fp8_format: Format = Format.E4M3
    use_fast_accum: tuple[bool, bool, bool] = (False, False, False)
    enable_2d_quantization: bool = False
    columnwise_from_rowwise: bool = False

    name: ClassVar[str] = "mxfp8"

    def quantizer(self, operand: OperandName) -> Quantizer:
        square = operand == "weight" and self.enable_2d_quantization
        return Quantizer(
            dtype=self.fp8_format.dtype(operand),
            scaling="mxfp8",
            block=(32, 32) if square else (1, 32),
            columnwise_from_rowwise=operand != "weight" and self.columnwise_from_rowwise,
        )


Scope = Literal["none", "weights", "activations", "all"]
_SCOPES: Final = ("none", "weights", "activations", "all")


@dataclass(frozen=True, kw_only=True)
class NVFP4BlockScaling(Recipe):
    """FP4 (E2M1), one E4M3 scale per 16 elements along the contraction dim and one FP32 scale per tensor ("nvfp4").

    Three ingredients make it train: weights get one scale per 16x16 tile, so that both layouts hold the same numbers;
    a random Hadamard transform spreads outliers of the columnwise copies of input and grad_output, 16 elements along
    wgrad's contraction at a time, and cancels in the product; gradients are rounded stochastically, so that the
    expectation of a rounded number is the number itself. A transformed copy has separate scales.

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
        nvfp4_4over6_err_mode: "MAE" or "MSE": the loss, as a sum of absolute values or of squares of errors.
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


def has_code(recipe: Recipe) -> bool:
    """Return whether a field is a function, which no cache key can name."""
    return any(callable(getattr(recipe, field.name)) for field in dataclasses.fields(recipe))


_RECIPES: Final[tuple[Recipe, ...]] = (  # in the order of their names
    Float8CurrentScaling(),
    Float8RowwiseScaling(),
    Float8RowwiseScaling(high_precision_wgrad=True),
    DelayedScaling(),
    Float8BlockScaling(),
    MXFP8BlockScaling(),
    NVFP4BlockScaling(),
)
_NAMES: dict[str, Recipe] = dict(zip(RECIPE_NAMES, _RECIPES, strict=True))
_TYPES: Final[dict[str, type[Recipe]]] = {type(recipe).__name__: type(recipe) for recipe in _NAMES.values()}
RecipeLike = Recipe | str | dict[str, Any] | None


def register_recipe(name: str, recipe: Recipe) -> None:
    """Give ``recipe`` a name that policies, policy files and ``autocast`` in compiled code can use.

    They look it up once: a policy when it is given, a region when it is entered, a region inside compiled code when its
    graph is first compiled. If the name is registered again, these keep the recipe that they have.

    Raises:
        UnsupportedRecipeError: for a built-in name, an empty name, or something that is not a recipe.
    """
    if not isinstance(name, str) or not name or name == HIGH_PRECISION or name in RECIPE_NAMES:
        raise UnsupportedRecipeError(f"register_recipe({name!r}, ...): the name is empty or already taken.")
    if not isinstance(recipe, Recipe):
        raise UnsupportedRecipeError(
            f"register_recipe({name!r}, {recipe!r}): the second argument must be a recipe object."
        )
    _NAMES[name] = recipe


def name_of(recipe: Recipe) -> str | None:
    """Return a name under which :func:`resolve_recipe` finds a recipe; None: it has none."""
    return next((name for name, other in _NAMES.items() if other == recipe), None)


def known_recipe(value: object) -> bool:
    """Return whether ``value`` is the name of a recipe."""
    return isinstance(value, str) and value in _NAMES


def resolve_recipe(value: RecipeLike) -> Recipe | None:
    """Return a recipe object, a recipe's name, its dict form, or ``None``/"high_precision" for no FP8.

    Raises:
        UnsupportedRecipeError: for anything else, with the names that exist.
    """
    if value is None or value == HIGH_PRECISION:
        return None
    if isinstance(value, Recipe):
        return value
    if isinstance(value, dict):
        return recipe_from_dict(value)
    if not isinstance(value, str):
        names = ", ".join(repr(n) for n in [*_NAMES, HIGH_PRECISION])
        hint = f" Did you mean {value.__name__}()?" if isinstance(value, type) and issubclass(value, Recipe) else ""
        raise UnsupportedRecipeError(f"{value!r} is not a recipe. Give a recipe object, one of {names}, or None.{hint}")
    if why := why_no_recipe(value, _NAMES):
        raise UnsupportedRecipeError(why)
    return _NAMES[value]


def recipe_from_dict(values: dict[str, Any]) -> Recipe:
    """Return the inverse of :meth:`Recipe.to_dict`.

    Raises:
        UnsupportedRecipeError: for an unknown ``type`` or field.
    """
    fields = dict(values)
    kind = fields.pop("type", None)
    if not isinstance(kind, str) or kind not in _TYPES:
        raise UnsupportedRecipeError(f"unknown recipe type {kind!r}. Available: {', '.join(_TYPES)}.")
    recipe_type = _TYPES[kind]
    names = {field.name for field in dataclasses.fields(recipe_type)}
    if unknown := sorted(str(name) for name in fields.keys() - names):
        meant = did_you_mean(unknown[0], names)
        raise UnsupportedRecipeError(f"{kind} has no field {unknown[0]!r}.{meant} Fields: {', '.join(sorted(names))}.")
    return recipe_type(**fields)
