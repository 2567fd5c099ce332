"""Recipes: Transformer Engine's defaults, frozen, checked at construction."""

from __future__ import annotations

import dataclasses
import inspect
from typing import Any

import pytest
import torch

import fp8graph
from fp8graph import Float8CurrentScaling, Format
from fp8graph.recipes import Recipe, recipe_from_dict, resolve_recipe


def test_defaults_are_transformer_engines() -> None:
    recipe = Float8CurrentScaling()
    assert dataclasses.asdict(recipe) == {
        "fp8_format": Format.HYBRID,
        "use_fast_accum": (True, False, False),  # fast in fprop, split in dgrad and wgrad
        "power_2_scale": False,
        "amax_epsilon": 0.0,
    }
    assert [recipe.fast_accum(gemm) for gemm in ("fprop", "dgrad", "wgrad")] == [True, False, False]
    assert recipe.quantizer("input").dtype == recipe.quantizer("weight").dtype == torch.float8_e4m3fn
    assert recipe.quantizer("grad_output").dtype == torch.float8_e5m2


def test_frozen_and_keyword_only() -> None:
    recipe = Float8CurrentScaling()
    with pytest.raises(dataclasses.FrozenInstanceError):
        recipe.power_2_scale = True  # pyright: ignore[reportAttributeAccessIssue]
    kinds = {p.kind for p in inspect.signature(Float8CurrentScaling).parameters.values()}
    assert kinds == {inspect.Parameter.KEYWORD_ONLY}
    assert hash(recipe) == hash(Float8CurrentScaling())


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"fp8_format": Format.E5M2}, "no hardware multiplies E5M2 by E5M2. Use Format.HYBRID"),
        ({"fp8_format": "E5M2"}, "no hardware multiplies E5M2 by E5M2"),
        ({"fp8_format": "E3M4"}, "'E3M4'.*must be one of E4M3, HYBRID"),
        ({"fp8_format": 3}, "fp8_format must be a Format"),
        ({"power_2_scale": 1}, "power_2_scale=1.*must be True or False"),
        ({"amax_epsilon": -1e-6}, "amax_epsilon=-1e-06.*a finite number >= 0"),
        ({"amax_epsilon": float("inf")}, "a finite number >= 0"),
        ({"amax_epsilon": float("nan")}, "a finite number >= 0"),
        ({"amax_epsilon": "0"}, "a finite number >= 0"),
        ({"use_fast_accum": True}, "three booleans, for fprop, dgrad and wgrad"),
        ({"use_fast_accum": (True, False)}, "three booleans"),
        ({"use_fast_accum": (1, 0, 0)}, "three booleans"),
    ],
)
def test_bad_fields(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(fp8graph.UnsupportedRecipeError, match=message) as caught:
        Float8CurrentScaling(**fields)
    assert isinstance(caught.value, ValueError)


@pytest.mark.parametrize(
    "recipe",
    [Float8CurrentScaling(), Float8CurrentScaling(fp8_format=Format.E4M3, power_2_scale=True, amax_epsilon=1e-6)],
)
def test_dict_round_trip(recipe: Recipe) -> None:
    assert recipe_from_dict(recipe.to_dict()) == recipe
    assert resolve_recipe(recipe.to_dict()) == recipe


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("nosuch", "unknown recipe 'nosuch'. Available: 'tensorwise'"),
        ("mxfp8", "'mxfp8' is not available in this version"),
        (7, "7 is not a recipe"),
        ({"type": "Nope"}, "recipe type 'Nope' is unknown"),
        ({"type": "Float8CurrentScaling", "typo": 1}, "has no field 'typo'. Fields: amax_epsilon"),
    ],
)
def test_recipes_that_do_not_exist(value: Any, message: str) -> None:
    with pytest.raises(fp8graph.UnsupportedRecipeError, match=message):
        resolve_recipe(value)


@pytest.mark.parametrize("value", [None, "high_precision"])
def test_no_recipe(value: Any) -> None:
    assert resolve_recipe(value) is None


def test_a_registered_name() -> None:
    mine = Float8CurrentScaling(power_2_scale=True)
    fp8graph.register_recipe("test_recipes_mine", mine)
    assert resolve_recipe("test_recipes_mine") is mine
    assert fp8graph.Rule("*", "test_recipes_mine").recipe_for("wgrad") is mine


@pytest.mark.parametrize(
    ("name", "recipe", "message"),
    [
        ("tensorwise", Float8CurrentScaling(), "taken or empty"),
        ("high_precision", Float8CurrentScaling(), "taken or empty"),
        ("", Float8CurrentScaling(), "taken or empty"),
        ("fine", "tensorwise", "must be a recipe object"),
    ],
)
def test_names_that_cannot_be_registered(name: str, recipe: Any, message: str) -> None:
    with pytest.raises(fp8graph.UnsupportedRecipeError, match=message):
        fp8graph.register_recipe(name, recipe)
