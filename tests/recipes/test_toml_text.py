"""Policies written as TOML are read back as they were."""

from __future__ import annotations

import re
import tomllib

import pytest

from fp8graph import DelayedScaling, Float8BlockScaling, Policy, Rule, UnsupportedRecipeError
from fp8graph.recipes.toml_text import policy_toml, rule_toml

RULES = [
    Rule('a "quoted"\\ name\n', "rowwise", wgrad=None),
    Rule(re.compile(r"layers\.(0|1)\.up"), None, steps=(0, 5)),
    Rule("*", Float8BlockScaling(power_2_scale=False), op="matmul", optional=True),
    Rule("späte*", "tensorwise", steps=(100, None)),
]


@pytest.mark.parametrize("settings", [{}, {"default": None}, {"extends": "default"}, {"keep_heads": True}])
def test_it_is_read_back(settings: dict[str, object]) -> None:
    policy = Policy(RULES, **settings)  # pyright: ignore[reportArgumentType]
    assert Policy.from_dict(tomllib.loads(policy_toml(policy))).identity() == policy.identity()


def test_one_rule() -> None:
    assert rule_toml(Rule("up", None)) == '[[rules]]\npattern = "up"\nrecipe = "high_precision"'


def test_a_recipe_with_a_function_cannot_be_written() -> None:
    recipe = DelayedScaling(amax_compute_algo=lambda history: history.amax(-1))  # pyright: ignore
    with pytest.raises(UnsupportedRecipeError):
        policy_toml(Policy([Rule("up", recipe)]))
