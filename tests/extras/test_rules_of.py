"""Few rules for many decisions, which decide as the decisions say."""

from __future__ import annotations

import random

from fp8graph import INHERIT, Float8CurrentScaling, Policy
from fp8graph.extras.planning.choose import Decided, policy_of
from fp8graph.recipes import GEMMS, resolve_recipe
from fp8graph.recipes.rules import GemmRecipe
from helpers import in_one_test

T: Decided = ("tensorwise",) * 3
R: Decided = ("rowwise",) * 3
HIGH: Decided = (None,) * 3
LAYERS = range(6)


def decisions(**of: Decided) -> dict[tuple[str, str], Decided]:
    return {(name.replace("__", "."), "linear"): decided for name, decided in of.items()}


def resolved(policy: Policy, fqn: str, op: str) -> list[GemmRecipe]:
    found = policy.over(Policy()) if policy.extends else policy
    return [found.resolve(fqn, op).recipes[gemm] for gemm in GEMMS]


def test_equal_recipes_become_the_default() -> None:
    policy = policy_of({(f"layers.{i}.up", "linear"): T for i in LAYERS})
    assert (policy.rules, policy.default, policy.extends) == ((), "tensorwise", "default")


def test_a_family_is_a_glob() -> None:
    found = {(f"layers.{i}.up", "linear"): T for i in LAYERS} | {(f"layers.{i}.down", "linear"): R for i in range(4)}
    policy = policy_of(found)
    assert [str(rule) for rule in policy.rules] == ['"layers.*.down" -> rowwise']


def test_some_layers_are_one_expression() -> None:
    found = {(f"layers.{i}.up", "linear"): HIGH if i in (0, 5) else T for i in LAYERS}
    (rule,) = policy_of(found).rules
    assert rule.text == r"layers\.(0|5)\.up"


def test_gemms_that_differ_are_named() -> None:
    policy = policy_of(decisions(up=T, down=("tensorwise", "tensorwise", None), out=T))
    assert [str(rule) for rule in policy.rules] == ['"down" -> tensorwise, wgrad: high precision']


def test_a_gemm_that_a_site_lacks_is_not_named() -> None:
    policy = policy_of(decisions(up=(None, INHERIT, None), down=T, out=T))
    assert [str(rule) for rule in policy.rules] == ['"up" -> high precision']


def test_names_with_characters_of_globs() -> None:
    policy = policy_of(decisions(up=T, out=T) | {("blocks[0]", "linear"): HIGH})
    assert resolved(policy, "blocks[0]", "linear") == [None] * 3
    assert resolved(policy, "blocks0", "linear") == [resolve_recipe("tensorwise")] * 3


@in_one_test("seed", range(30))
def test_the_policy_decides_as_the_decisions_say(seed: int) -> None:
    numbers = random.Random(seed)
    recipes: list[GemmRecipe] = ["tensorwise", "rowwise", None, Float8CurrentScaling(fp8_format="E4M3")]  # pyright: ignore
    names = [f"model.layers.{i}.{part}" for i in LAYERS for part in ("attn.q", "attn.o", "mlp.up")] + ["proj", "0.1.fc"]
    found: dict[tuple[str, str], Decided] = {}
    for name in names:
        op = "matmul" if name == "proj" else "linear"
        alike = numbers.choice(recipes)
        found[name, op] = tuple(alike if numbers.random() < 0.8 else numbers.choice(recipes) for _ in GEMMS)
    policy = policy_of(found, extends=None)
    for one in (policy, Policy.from_dict(policy.to_dict())):
        for (name, op), decided in found.items():
            assert resolved(one, name, op) == [resolve_recipe(recipe) for recipe in decided], name  # pyright: ignore
