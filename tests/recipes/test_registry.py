"""Recipes by name: the built-in ones, those that users register, what is refused."""

from __future__ import annotations

import re
from typing import Any

import pytest

import fp8graph
from fp8graph import (
    Float8CurrentScaling,
    Format,
    recipes,
    words,
)
from fp8graph.recipes import RECIPE_NAMES, Recipe, resolve_recipe
from fp8graph.recipes import recipe as named
from helpers import in_one_test


@in_one_test(
    ("value", "message"),
    [
        ("nosuch", "unknown recipe 'nosuch'. Available: 'tensorwise'"),
        ("Tensorwise", "unknown recipe 'Tensorwise'. Did you mean 'tensorwise'\\? Available"),
        ("", "unknown recipe ''"),
        ("bf16", "unknown recipe 'bf16'. For no FP8: 'high_precision', or None. Available"),
        ("FP8", "unknown recipe 'FP8'. Leave the recipe out: the device decides. Available"),
        ("current", "unknown recipe 'current'. Did you mean 'tensorwise'\\? Available"),
        ("e5m2", "unknown recipe 'e5m2'. 'tensorwise' and 'delayed' have gradients in E5M2, as HYBRID does. Available"),
        ("mx", "unknown recipe 'mx'. Did you mean 'mxfp8'\\? Available"),
        (7, "7 is not a recipe. Give a recipe object, one of 'tensorwise'"),
        (Float8CurrentScaling, r"is not a recipe. Give a recipe object.* Did you mean Float8CurrentScaling\(\)\?"),
        ([], r"\[\] is not a recipe"),
        ({}, "unknown recipe type None. Available: Float8CurrentScaling"),
        ({"type": ["Float8CurrentScaling"]}, r"unknown recipe type \['Float8CurrentScaling'\]"),
        ({"type": "Float8CurrentScaling", 1: 2, "typo": 1}, "has no field"),
        ({"type": "Float8CurrentScaling", "fp8_format": "E5M2"}, "no NVIDIA GPU multiplies E5M2 by E5M2"),
        ({"type": "Nope"}, "unknown recipe type 'Nope'"),
        ({"type": "Float8CurrentScaling", "typo": 1}, "has no field 'typo'. Fields: amax_epsilon"),
    ],
)
def test_recipes_that_do_not_exist(value: Any, message: str) -> None:
    with pytest.raises(fp8graph.UnsupportedRecipeError, match=message):
        resolve_recipe(value)


@in_one_test("name", sorted({*RECIPE_NAMES} - {"rowwise_with_gw_hp"}))
def test_the_name_of_a_class_leads_to_its_recipe(name: str) -> None:
    with pytest.raises(fp8graph.UnsupportedRecipeError, match=f"Did you mean '{name}'"):
        resolve_recipe(type(resolve_recipe(name)).__name__)


@in_one_test("name", recipes.RECIPE_NAMES)
def test_a_built_in_name_cannot_be_given_another_meaning(name: str) -> None:
    with pytest.raises(fp8graph.UnsupportedRecipeError, match=name):
        fp8graph.register_recipe(name, Float8CurrentScaling())


@pytest.mark.parametrize("value", [None, "high_precision"])
def test_no_recipe(value: Any) -> None:
    assert resolve_recipe(value) is None


def test_a_registered_name() -> None:
    mine = Float8CurrentScaling(power_2_scale=True)
    fp8graph.register_recipe("test_recipes_mine", mine)
    assert resolve_recipe("test_recipes_mine") is mine
    assert fp8graph.Rule("*", "test_recipes_mine").recipe_for("wgrad") is mine
    values = {"default": "test_recipes_mine", "rules": [{"pattern": "a", "recipe": None, "dgrad": "test_recipes_mine"}]}
    policy = fp8graph.Policy.from_dict(values)
    assert policy.resolve("a", "linear").recipes == {"fprop": None, "dgrad": mine, "wgrad": None}
    assert set(policy.resolve("b", "linear").recipes.values()) == {mine}
    with pytest.raises(fp8graph.UnsupportedRecipeError, match="Available: .*'test_recipes_mine'"):
        resolve_recipe("test_recipes_yours")


@in_one_test(
    ("name", "recipe", "message"),
    [
        ("tensorwise", Float8CurrentScaling(), "empty or already taken"),
        ("high_precision", Float8CurrentScaling(), "empty or already taken"),
        ("", Float8CurrentScaling(), "empty or already taken"),
        (3, Float8CurrentScaling(), "empty or already taken"),
        ("test_recipes_text", "tensorwise", "must be a recipe object"),
        ("test_recipes_none", None, "must be a recipe object"),
    ],
)
def test_names_that_cannot_be_registered(name: str, recipe: Any, message: str) -> None:
    with pytest.raises(fp8graph.UnsupportedRecipeError, match=message):
        fp8graph.register_recipe(name, recipe)


def test_a_recipe_type_of_the_design_is_known_to_policy_files() -> None:
    """Every recipe class that is public can be written in a policy file."""
    public = {name for name, value in vars(fp8graph).items() if isinstance(value, type) and issubclass(value, Recipe)}
    assert public - {"Recipe"} == set(named._TYPES)  # the base of all


def test_the_name_of_a_recipe() -> None:
    assert named.name_of(fp8graph.Float8CurrentScaling()) == "tensorwise"
    assert named.name_of(fp8graph.Float8CurrentScaling(amax_epsilon=0.3)) is None


def test_other_words_lead_to_recipes_that_exist() -> None:
    meant = [name for text in words._HINTS.values() for name in re.findall("'(\\w+)'", text)]
    assert {*meant} <= {*RECIPE_NAMES, "high_precision"}
    for name in ("tensorwise", "delayed"):
        assert getattr(resolve_recipe(name), "fp8_format", None) is Format.HYBRID
