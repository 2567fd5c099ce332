"""Weights that arrive quantized: the recipe that they are stored in, and the GEMMs that can multiply their bytes.

A weight of an FP8 checkpoint reaches the graph as data and scales under ``fp8graph::stored_weight``. Its scales say how
the other operand is quantized: what an engine that loads the checkpoint computes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Final

import torch
from torch import fx

from fp8graph.compat.ops import named_arguments
from fp8graph.ir.nodes import value
from fp8graph.ir.sites import Gemm, OperandView, Site
from fp8graph.numerics.scalings import SCALINGS
from fp8graph.recipes import (
    GEMMS,
    Float8BlockScaling,
    Float8CurrentScaling,
    Float8RowwiseScaling,
    Format,
    GemmName,
    MXFP8BlockScaling,
    NVFP4BlockScaling,
    Recipe,
)
from fp8graph.recipes.rules import Resolution

# By the weight's kind of scaling: the recipe whose weights are stored so. No epsilon, no rounding to powers of two: the
# scale of an activation is its amax / 448, in vLLM, SGLang and transformers' kernels.
_RECIPES: Final[Mapping[str, Recipe]] = {
    "tensor": Float8CurrentScaling(),
    "row": Float8RowwiseScaling(power_2_scale=False, amax_epsilon=0.0),
    "mxfp8": MXFP8BlockScaling(),
    "nvfp4": NVFP4BlockScaling(disable_rht=True, disable_stochastic_rounding=True, disable_2d_quantization=True),
}
_E5M2: Final = (torch.float8_e5m2, torch.float8_e5m2fnuz)
_IT: Final = "it is dequantized"
_STATIC: Final = (
    "the checkpoint has an FP32 scale for activations, and E8M0 scales for the weight: no GEMM takes both; the weight "
    "is dequantized"
)
_STATIC_EXPERTS: Final = (
    "the checkpoint has a static scale for the activations of each expert: no grouped GEMM takes them; the weights are "
    "dequantized"
)


def stored_weight(site: Site) -> fx.Node | None:
    """Return the ``stored_weight`` node that ``site`` multiplies by; None if its weight is in high precision."""
    view = next(filter(None, map(stored_view, site.gemms)), None)
    return view.tensor if view is not None else None


def stored_view(gemm: Gemm) -> OperandView | None:
    """Return the operand of ``gemm`` that arrives quantized; None if it reads none."""
    return next((view for view in (gemm.a, gemm.b) if view.operand == "weight" and view.data is not None), None)


def as_stored(resolution: Resolution, stored: fx.Node, *, flipped: bool = False) -> Resolution | None:
    """Return the answer for a site whose weight is ``stored``, in place of the policy's; None if the policy's holds.

    A user's own rule or region, and a policy without FP8, decide as they do for any weight. Otherwise the weight is
    multiplied as it is, also by layers that the default policy would keep in high precision: it is in FP8 already.

    ``flipped``: it is stored [K, N], see :class:`OperandView`.
    """
    if resolution.by_user or resolution.switches_off:
        return None
    given, rule = named_arguments(stored), resolution.rule
    if given["activations"] == "none":
        source = "the checkpoint quantizes weights only: they are dequantized"
        return Resolution(dict.fromkeys(GEMMS), source=source, rule=rule)
    if given["activations"] == "static" and value(given["data"]).ndim == 3:
        return Resolution(dict.fromkeys(GEMMS), source=_STATIC_EXPERTS, rule=rule)
    if given["activations"] == "static" and not SCALINGS[given["scaling"]].takes_scale:
        return Resolution(dict.fromkeys(GEMMS), source=_STATIC, rule=rule)
    recipe, recipes = recipe_of(stored, flipped=flipped), dict[GemmName, Recipe | None]()
    for gemm, policy_recipe in resolution.recipes.items():
        override = policy_recipe.backward_override if policy_recipe is not None else None
        recipes[gemm] = dataclasses.replace(recipe, backward_override=override) if override is not None else recipe
    return Resolution(recipes, source=f"weight stored in {_described(given)}", rule=rule)


def recipe_of(stored: fx.Node, *, flipped: bool = False) -> Recipe:
    """Return the recipe whose weights are stored as ``stored`` is; ``flipped``: [K, N]."""
    given = named_arguments(stored)
    recipe = recipe_of_kind(given["scaling"], given["block"])
    if value(given["data"]).dtype in _E5M2 and recipe.fp8_format is Format.HYBRID:
        recipe = dataclasses.replace(recipe, fp8_format=Format.E4M3)  # no device multiplies E5M2 by E5M2
    if flipped and isinstance(recipe, Float8BlockScaling):  # fprop contracts the rows
        recipe = dataclasses.replace(recipe, x_block=recipe.grad_block, grad_block=recipe.x_block)
    return recipe


def recipe_of_kind(kind: str, block: Sequence[int]) -> Recipe:
    """Return the recipe whose weights have this kind of scaling, in tiles of ``block`` (rows, columns) where it has
    tiles.
    """
    if kind in _RECIPES:
        return _RECIPES[kind]
    rows, columns = block
    return Float8BlockScaling(
        fp8_format=Format.E4M3,
        x_block=(1, columns),
        w_block=(rows, columns),
        grad_block=(1, rows),
        power_2_scale=kind == "block_e8m0",
        scale_format="ue8m0" if kind == "block_e8m0" else "fp32",
    )


def why_not_as_stored(gemm: Gemm, view: OperandView) -> str | None:
    """Return the reason why ``gemm`` cannot multiply the bytes of ``view``, its weight; None if it can."""
    given = named_arguments(view.tensor)
    if not view.turned:
        packed = SCALINGS[given["scaling"]].packed > 1
        return f"{gemm.gemm} would have its gradient in E2M1: {_IT}" if packed and gemm.gemm != "fprop" else None
    if value(given["data"]).ndim == 3:
        return f"{gemm.gemm} of experts would need a transposed copy of each: they are dequantized"
    if transposes(given):
        return None
    if given["scaling"] != Float8RowwiseScaling().quantizer("weight").scaling:
        rows, columns = given["block"]
        part = "one row" if rows == 1 else f"{rows}x{columns} numbers"
        return f"{gemm.gemm} contracts the weight's rows, and each of its scales is for {part}: {_IT}"
    if gemm.gemm == "fprop" and given["activations"] == "static":  # else the rows' scales multiply what it contracts
        return f"fprop contracts the weight's rows, whose scales the static scale of the activations leaves out: {_IT}"
    return None


def transposes(given: Mapping[str, Any]) -> bool:
    """Say whether the transposed data of a stored weight are what the columnwise layout needs, with the same scales."""
    kind, block = SCALINGS[given["scaling"]], given["block"]
    return kind.one_scale or (kind.tiled and kind.packed == 1 and block[0] == block[1])


def _described(given: Mapping[str, Any]) -> str:
    kind, block = SCALINGS[given["scaling"]], given["block"]
    scales = f"{block[0]}x{block[1]} scales" if kind.tiled else "one scale" if kind.one_scale else "a scale per row"
    dtype = "E2M1" if kind.packed > 1 else str(value(given["data"]).dtype).removeprefix("torch.float8_").upper()
    return f"{dtype} with {scales}"
