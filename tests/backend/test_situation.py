"""situation: what a call depends on beside its arguments."""

from __future__ import annotations

from typing import Any

import pytest

from fp8graph import DelayedScaling, Float8CurrentScaling, register_recipe
from fp8graph.backend.dynamo_graph import Situation, region_text
from fp8graph.ir.compilation import Arrived
from fp8graph.passes.observe.measuring import Observed
from fp8graph.recipes.autocast import POLICY
from fp8graph.runtime.policies import Policies


def test_situations_are_keys() -> None:
    in_force = Policies(None).now
    one: dict[str, Any] = {"policy": "p", "region": DelayedScaling(), "amax_group": None, "in_force": in_force}
    assert Situation(**one) == Situation(**one)
    others: list[dict[str, Any]] = [
        {"policy": "q"},
        {"region": None},
        {"region": "rowwise"},
        {"amax_group": "0"},
        {"conditions": (Observed(),)},
        {"conditions": (Observed(layers=("up",)),)},
        {"conditions": (Arrived(frozenset({0})),)},
    ]
    assert len({Situation(**{**one, **other}) for other in [{}, *others]}) == 8


def test_conditions_pass_or_last() -> None:
    arrived, observed = Arrived(frozenset({0})), Observed()
    one: dict[str, Any] = {"policy": "p", "region": None, "amax_group": None, "in_force": Policies(None).now}
    both = Situation(**one, conditions=(observed, arrived))
    assert both.passes
    rule = both.without(passing=True)
    assert rule == Situation(**one, conditions=(arrived,))
    assert not rule.passes
    assert both.without(passing=False) == Situation(**one, conditions=(observed,))


@pytest.mark.parametrize(
    ("region", "text"),
    [
        (None, "policy"),
        (POLICY, "policy"),
        ("tensorwise", repr(Float8CurrentScaling())),
        (DelayedScaling(margin=1), repr(DelayedScaling(margin=1))),
        ("nosuch", "unknown"),
    ],
)
def test_region_text(region: Any, text: str) -> None:
    assert region_text(region) == text


def test_a_name_stands_for_what_it_was_registered_as_last() -> None:
    texts: list[str] = []
    for margin in (1, 2):
        register_recipe("of_test_situation", DelayedScaling(margin=margin))
        texts.append(region_text("of_test_situation"))
    assert texts == [repr(DelayedScaling(margin=margin)) for margin in (1, 2)]
