"""Policies written as TOML are read back as they were."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

from fp8graph import DelayedScaling, Float8BlockScaling, Policy, PolicyError, Rule, UnsupportedRecipeError
from fp8graph.recipes.policy import policy_toml, rule_toml
from helpers import in_one_test

RULES = [
    Rule('a "quoted"\\ name\n', "rowwise", wgrad=None),
    Rule(re.compile(r"layers\.(0|1)\.up"), None, steps=(0, 5)),
    Rule("*", Float8BlockScaling(power_2_scale=False), op="matmul", optional=True),
    Rule("späte*", "tensorwise", steps=(100, None)),
    Rule("*.gate", None, reason='a router, of "my" model'),
]


@in_one_test("settings", [{}, {"default": None}, {"extends": "default"}, {"keep_heads": True}])
def test_written_policy_is_read_back(settings: dict[str, object]) -> None:
    policy = Policy(RULES, **settings)  # pyright: ignore[reportArgumentType]
    assert Policy.from_dict(tomllib.loads(policy_toml(policy))).identity() == policy.identity()


def test_one_rule() -> None:
    assert rule_toml(Rule("up", None)) == '[[rules]]\npattern = "up"\nrecipe = "high_precision"'


def test_a_recipe_with_a_function_cannot_be_written() -> None:
    recipe = DelayedScaling(amax_compute_algo=lambda history: history.amax(-1))  # pyright: ignore
    with pytest.raises(UnsupportedRecipeError):
        policy_toml(Policy([Rule("up", recipe)]))


def test_every_string_is_read_back(tmp_path: Path) -> None:
    for start in range(0, 0x11000, 0x400):  # the first plane, and some of the second
        text = "".join(chr(code) for code in range(start, start + 0x400) if not 0xD800 <= code <= 0xDFFF)
        (tmp_path / "p.toml").write_text(policy_toml(Policy([Rule(f"x{text}", None)])), encoding="utf-8")
        assert Policy.load(tmp_path / "p.toml").rules[0].pattern == f"x{text}"


def test_half_of_a_surrogate_pair() -> None:
    with pytest.raises(PolicyError, match=r"'a\\ud800' cannot be written to a file") as caught:
        policy_toml(Policy([Rule("a\ud800", None)]))
    str(caught.value).encode()
