"""decisions: one answer per site, and a key that is equal where the answers are."""

from __future__ import annotations

import dataclasses
import itertools
import os
import subprocess
import sys
from typing import Any

import pytest

from fp8graph import Float8CurrentScaling, Policy, Rule, hardware
from fp8graph.errors import UnsupportedRecipeError
from fp8graph.ir.decisions import Decisions, GatheredInFP8, stable_text
from fp8graph.ir.naming import Parameter, Place, names_of, possible_names
from fp8graph.ir.settings import Settings
from fp8graph.ir.sites import Site
from fp8graph.recipes.autocast import DISABLED, POLICY, region_of
from helpers import first_fast, in_one_test

NOWHERE = Place(root="", path="", parameter=None)
TENSORWISE = Policy(default="tensorwise").resolved()
REGIONS: dict[Any, Any] = {name: region_of(name) for name in (POLICY, DISABLED, "rowwise")}


def site(fqn: str, region: str | None = None, **more: Any) -> Site:
    return Site(place=NOWHERE, fqn=fqn, op="linear", region=region, **more)


def test_a_region_in_the_graph_is_within_that_around_the_call() -> None:
    decisions = Decisions(policy=TENSORWISE, region=region_of("blockwise"), regions=REGIONS)
    answers = [decisions.of(site("up", region)).recipes["fprop"] for region in (None, *REGIONS)]
    assert [recipe and recipe.name for recipe in answers] == ["blockwise", "tensorwise", None, "rowwise"]


def test_a_region_whose_recipe_does_not_exist_is_an_error_at_its_layer() -> None:
    error = UnsupportedRecipeError("unknown recipe 'x'")
    decisions = Decisions(policy=TENSORWISE, regions={"x": error})
    assert decisions.of(site("up")).source == "default"
    with pytest.raises(UnsupportedRecipeError, match="up: autocast: unknown recipe 'x'"):
        decisions.of(site("up", "x"))


OTHERS: dict[str, dict[str, Any]] = {
    "recipe": {"policy": Policy(default="rowwise").resolved()},
    "rule": {"policy": Policy([Rule("up", None)], default="tensorwise").resolved()},
    "asked for": {"policy": Policy([Rule("up", "tensorwise")], default="tensorwise").resolved()},
    "one GEMM": {"policy": Policy([Rule("up", "tensorwise", wgrad=None)], default="tensorwise").resolved()},
    "speedup": {"policy": Policy(default="tensorwise", min_speedup=0).resolved()},
    "heads": {"policy": Policy(default="tensorwise", keep_heads=True).resolved()},
    "region": {"region": region_of("rowwise")},
    "disabled": {"region": region_of(DISABLED)},
    "group": {"amax_group": "0"},
    "a recipe that reduces amaxes": {"policy": Policy([Rule("no", "delayed")], default="tensorwise").resolved()},
    "condition": {"conditions": (GatheredInFP8(frozenset({0})),)},
    "target": {"settings": Settings(target="sm_90")},
    "save": {"settings": Settings(save="memory")},
}
SAME: dict[str, dict[str, Any]] = {
    "a rule that matches nothing": {"policy": Policy([Rule("no", None)], default="tensorwise").resolved()},
    "a rule's reason": {
        "policy": Policy([Rule("up", "tensorwise", optional=True, reason="why")], default="rowwise").resolved()
    },
    "a name": {"policy": Policy(default=Float8CurrentScaling()).resolved()},
    "a region that returns to the policy": {"region": region_of(POLICY)},
    "a region in other graphs": {"regions": {POLICY: region_of(POLICY)}},
}


@in_one_test("name", [*OTHERS, *SAME])
def test_the_key_and_its_text_are_equal_where_the_answers_are(name: str) -> None:
    one = Decisions(policy=TENSORWISE)
    other = dataclasses.replace(one, **(OTHERS | SAME)[name])
    assert (one.key([site("up")]) == other.key([site("up")])) is (name in SAME)
    if name != "a rule's reason" and name != "a region in other graphs":  # the sites are not known yet
        assert (one.text(["up"]) == other.text(["up"])) is (name in SAME)


def test_the_text_has_the_policy_where_a_region_in_the_graph_returns_to_it() -> None:
    around: dict[str, Any] = {"region": region_of("blockwise"), "regions": {POLICY: region_of(POLICY)}}
    texts = {Decisions(policy=policy.resolved(), **around).text(["up"]) for policy in (Policy(), Policy(default=None))}
    assert len(texts) == 2


def test_the_text_has_the_policy_of_ops_that_no_region_covers() -> None:
    """Within a region that is switched off around the call, one with a recipe leaves activations to the policy."""
    around: dict[str, Any] = {"region": region_of(DISABLED), "regions": {"rowwise": region_of("rowwise")}}
    rules = ([], [Rule("*", "tensorwise", op="matmul")], [Rule("*", "rowwise", op="matmul")])
    assert len({Decisions(policy=Policy(each).resolved(), **around).text(["up"]) for each in rules}) == 3


def test_sites_of_one_module_are_not_those_of_two() -> None:
    decisions = Decisions(policy=TENSORWISE)
    keys = [decisions.key([*map(site, names)]) for names in (("a.up", "a.gate"), ("b.up", "b.gate"), ("a.up", "b.up"))]
    assert keys[0] == keys[1] != keys[2]


@in_one_test("target", ["cpu", "sm_90", "sm_100", "gfx942"])
def test_a_target_has_one_text(target: str) -> None:
    device = hardware.from_target(target)
    turned = dataclasses.replace(device, scalings=frozenset(reversed(sorted(device.scalings))))
    assert stable_text(device) == stable_text(turned)
    assert " at 0x" not in stable_text(device)


def test_a_text_does_not_follow_the_order_of_a_set() -> None:
    one, other = frozenset([0, 8]), frozenset([8, 0])  # both in one place of the table: the first stays there
    assert [*one] != [*other]
    assert stable_text(one) == stable_text(other) == "{0, 8}"


@pytest.mark.slow
def test_texts_are_the_same_in_every_process() -> None:
    """The order of a frozenset of strings follows PYTHONHASHSEED."""
    words = "frozenset('a b c d e f g h i j'.split())"
    code = f"from fp8graph.ir.decisions import stable_text; print(stable_text({words}))"
    texts = {
        subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    }
    assert len(texts) == 1


def test_a_function_has_no_text() -> None:
    with pytest.raises(TypeError, match="a decision depends on <built-in function max>"):
        stable_text({"f": max})


SOURCES = (
    "L['self']._modules['up']._parameters['weight']",
    "L['self']._modules['layers']._modules['3']._modules['mlp']._parameters['experts']",
    "L['other']._parameters['weight']",
)


@first_fast("bound", [*itertools.product(("", "model."), ("", "second."))])
def test_every_name_of_a_site_is_possible(bound: tuple[str, str]) -> None:
    paths = ["up.weight", "layers.3.mlp.experts", "weight"]
    prefixes = [bound[0], bound[0], bound[1]]
    names = [f"{prefix}{path}" if prefix else "" for prefix, path in zip(prefixes, paths, strict=True)]
    parameters = [
        Parameter(source=source, index=index, bound=name)
        for index, (source, name) in enumerate(zip(SOURCES, names, strict=True))
    ]
    modules = [("self", ""), ("self", "up"), ("self", "layers.3"), ("self", "layers.3.mlp"), ("other", "")]
    possible = possible_names(parameters, modules)
    for (root, path), index in itertools.product(modules, (None, 0, 1, 2)):
        for others in ((), (0,), (1, 2)):
            place = Place(root=root, path=path, parameter=index, others=others if index is not None else ())
            elsewhere = Place(root="other", path="x", parameter=None)  # names of several roots begin with these
            for places in ([place], [place, elsewhere]):
                assert names_of(places, parameters)[0][0] in possible
