"""situation: what a call depends on beside its arguments."""

from __future__ import annotations

from typing import Any

from fp8graph import DelayedScaling, Float8CurrentScaling, Policy, register_recipe
from fp8graph.backend.dynamo_graph import Situation
from fp8graph.ir.decisions import GatheredInFP8
from fp8graph.passes.observe.measuring import Observed
from fp8graph.recipes.autocast import DISABLED, POLICY, Region, region_of
from fp8graph.recipes.rules import INHERIT
from fp8graph.runtime.policies import Policies
from helpers import in_one_test


def test_situations_are_keys() -> None:
    policies = Policies(None)
    one: dict[str, Any] = {"policy": policies.now, "region": None, "amax_group": None, "conditions": ()}
    assert Situation(**one) == Situation(**one)
    policies.set(Policy(default="rowwise"))
    others: list[dict[str, Any]] = [
        {"policy": policies.now},
        {"region": region_of("tensorwise")},
        {"region": region_of("rowwise")},
        {"amax_group": "0"},
        {"conditions": (Observed(),)},
        {"conditions": (Observed(layers=("up",)),)},
        {"conditions": (GatheredInFP8(frozenset({0})),)},
    ]
    assert len({Situation(**{**one, **other}) for other in [{}, *others]}) == 8


def test_conditions_pass_or_last() -> None:
    arrived, observed = GatheredInFP8(frozenset({0})), Observed()
    one: dict[str, Any] = {"policy": Policies(None).now, "region": None, "amax_group": None}
    both = Situation(**one, conditions=(observed, arrived))
    assert both.passes
    rule = both.without(passing=True)
    assert rule == Situation(**one, conditions=(arrived,))
    assert not rule.passes
    assert both.without(passing=False) == Situation(**one, conditions=(observed,))


@in_one_test(
    ("given", "recipe"),
    [
        (POLICY, INHERIT),
        (DISABLED, None),
        ("high_precision", None),
        ("tensorwise", Float8CurrentScaling()),
        (DelayedScaling(margin=1), DelayedScaling(margin=1)),
    ],
)
def test_a_region_has_a_recipe_and_is_one_object(given: Any, recipe: Any) -> None:
    assert region_of(given).recipe == recipe
    assert region_of(given) is region_of(given)


def test_a_name_stands_for_what_it_was_registered_as_when_it_is_looked_up() -> None:
    regions: list[Region] = []
    for margin in (1, 2):
        register_recipe("of_test_situation", DelayedScaling(margin=margin))
        regions.append(region_of("of_test_situation"))
    assert [region.recipe for region in regions] == [DelayedScaling(margin=margin) for margin in (1, 2)]
