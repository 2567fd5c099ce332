"""From statistics to findings and rules, without a backend."""

from __future__ import annotations

import math
import tomllib
from typing import Any

import pytest

from fp8graph import Policy, Rule
from fp8graph.errors import ConfigError
from fp8graph.passes.observe.findings import Bounds, PolicySite, crossings, proposed, python
from fp8graph.recipes import DelayedScaling, Float8CurrentScaling, resolve_recipe
from fp8graph.recipes.policy import rule_toml
from fp8graph.records import StatisticRecord
from helpers import in_one_test

FQN = "model.layers.3.mlp.down_proj"
COPY = {"underflows%": 0.0, "saturated%": 0.0, "sqnr": 30.0}


def record(operand: str, stat: str, value: float, layout: str = "rowwise", **more: Any) -> StatisticRecord:
    fields: dict[str, Any] = {"step": 300, "site": FQN, "recipe": "tensorwise", "what_if": False, **more}
    return StatisticRecord(operand=operand, layout=layout, stat=stat, value=value, **fields)


def tensor(operand: str, amax: float = 1.0, **more: Any) -> list[StatisticRecord]:
    """The tensor itself and both of its copies, all of them in good order."""
    itself = [record(operand, stat, amax, "", **{"recipe": "", **more}) for stat in ("cur_amax", "l1_norm")]
    copies = [
        record(operand, stat, value, layout, **more)
        for layout in ("rowwise", "columnwise")
        for stat, value in COPY.items()
    ]
    return [*itself, *copies]


def with_value(records: list[StatisticRecord], wanted: StatisticRecord) -> list[StatisticRecord]:
    same = [r for r in records if (r.operand, r.layout, r.stat) == (wanted.operand, wanted.layout, wanted.stat)]
    return [r for r in records if r not in same] + [wanted]


def site(recipe: Any = "tensorwise", *, by_user: bool = True, op: str = "linear", **runs: Any) -> dict[str, PolicySite]:
    recipes: dict[Any, Any] = dict.fromkeys(("fprop", "dgrad", "wgrad"), recipe)
    found = resolve_recipe(recipe)
    running: dict[Any, Any] = {gemm: found.name if found is not None else None for gemm in recipes} | runs
    return {FQN: PolicySite(fqn=FQN, op=op, by_user=by_user, recipes=recipes, runs=running)}


def test_healthy_tensors_are_not_found() -> None:
    records = [*tensor("input"), *tensor("weight"), *tensor("grad_output")]
    assert crossings(records, Bounds(), site()) == []
    assert crossings([], Bounds(), {}) == []


@in_one_test(
    ("operand", "layout", "gemm"),
    [
        ("input", "rowwise", "fprop"),
        ("input", "columnwise", "wgrad"),
        ("weight", "rowwise", "fprop"),
        ("weight", "columnwise", "dgrad"),
        ("grad_output", "rowwise", "dgrad"),
        ("grad_output", "columnwise", "wgrad"),
    ],
)
def test_a_copy_names_the_gemm_that_reads_it(operand: str, layout: str, gemm: str) -> None:
    records = with_value(tensor(operand), record(operand, "underflows%", 11.2, layout))
    (crossing,) = crossings(records, Bounds(), site())
    assert (crossing.layout, crossing.gemms, crossing.value, crossing.bound) == (layout, (gemm,), 11.2, 10.0)
    finding = proposed(crossing, site()[FQN], [None], {})
    changed: Any = {gemm: None}
    assert finding.rule == Rule(FQN, "tensorwise", **changed)
    told = f"step 300: {FQN}: 11.2 % of {operand} became zero (tensorwise, {layout}; more than 10 %). It is read by"
    assert str(finding).startswith(f"{told} {gemm}. ")
    assert f'Rule("{FQN}", "tensorwise", {gemm}=None)' in str(finding)


def test_both_copies_are_one_finding() -> None:
    records = with_value(tensor("grad_output"), record("grad_output", "underflows%", 12.0, "rowwise"))
    records = with_value(records, record("grad_output", "underflows%", 11.0, "columnwise"))
    (crossing,) = crossings(records, Bounds(), site())
    assert (crossing.layout, crossing.value, crossing.gemms) == ("both", 12.0, ("dgrad", "wgrad"))
    assert "both layouts" in str(proposed(crossing, site()[FQN], [None], {}))


def test_one_copy_is_read_by_all_gemms_of_its_operand() -> None:
    """Blackwell stores per-tensor operands once; and a GEMM in high precision reads no copy."""
    records = [r for r in tensor("input") if r.layout != "columnwise"]
    records = with_value(records, record("input", "saturated%", 25.0))
    (crossing,) = crossings(records, Bounds(), site())
    assert crossing.gemms == ("fprop", "wgrad")
    (crossing,) = crossings(records, Bounds(), site(wgrad=None))
    assert crossing.gemms == ("fprop",)
    assert "25 % of input became the largest number" in str(proposed(crossing, site()[FQN], [None], {}))


def test_sqnr() -> None:
    records = with_value(tensor("weight"), record("weight", "sqnr", 8.8))
    (crossing,) = crossings(records, Bounds(), site())
    finding = proposed(crossing, site()[FQN], [None], {})
    assert "weight has an sqnr of 8.8 dB (tensorwise, rowwise; less than 10 dB)" in str(finding)
    assert crossings(records, Bounds(sqnr=None), site()) == []


def test_four_bits_are_judged_by_their_error_alone() -> None:
    records = [record("weight", stat, 1.0, "", recipe="") for stat in ("cur_amax", "l1_norm")]
    numbers: dict[str, float] = {"underflows%": 38.0, "saturated%": 97.0, "sqnr": 18.7}
    records += [record("weight", stat, value, recipe="nvfp4") for stat, value in numbers.items()]
    assert crossings(records, Bounds(), site("nvfp4")) == []
    (crossing,) = crossings(records, Bounds(sqnr=19), site("nvfp4"))
    assert crossing.stat == "sqnr"


@pytest.mark.parametrize("amax", [math.inf, math.nan])
def test_inf_and_nan_are_said_in_words(amax: float) -> None:
    records = with_value(tensor("grad_output", amax), record("grad_output", "underflows%", math.nan))
    records = with_value(records, record("grad_output", "sqnr", -math.inf))
    (crossing,) = crossings(records, Bounds(), site())
    finding = proposed(crossing, site()[FQN], [None], {})
    assert finding.rule is None
    assert str(finding).startswith(f"step 300: {FQN}: grad_output holds inf or NaN before it is quantized. No recipe")
    assert "nan" not in str(finding)


def test_other_recipes_and_results_are_not_judged() -> None:
    bad: dict[str, Any] = {"stat": "underflows%", "value": 99.0}
    assert crossings([record("input", recipe="mxfp8", what_if=True, **bad)], Bounds(), site()) == []
    assert crossings([record("output", **bad)], Bounds(), site()) == []


def _crossing(operand: str, recipe: str = "tensorwise", layout: str = "rowwise") -> Any:
    records = with_value(tensor(operand, recipe=recipe), record(operand, "underflows%", 50.0, layout, recipe=recipe))
    records += [record(operand, stat, 1.0, "", recipe="") for stat in ("cur_amax", "l1_norm")]
    return crossings(records, Bounds(), site(recipe))[0]


def test_recipes_to_fall_back_to() -> None:
    order = ["rowwise", None]
    finding = proposed(_crossing("weight"), site()[FQN], order, {})
    assert finding.rule == Rule(FQN, "tensorwise", fprop="rowwise")
    finding = proposed(_crossing("weight", "rowwise"), site("rowwise")[FQN], order, {})
    assert finding.rule == Rule(FQN, "rowwise", fprop=None)
    finding = proposed(_crossing("weight", "rowwise"), site("rowwise")[FQN], ["tensorwise", "rowwise"], {})
    assert finding.rule is None
    assert "it has the last recipe" in str(finding)


def test_a_second_finding_of_a_layer_repeats_the_first() -> None:
    changes: dict[Any, Any] = {}
    proposed(_crossing("weight"), site()[FQN], [None], changes)
    finding = proposed(_crossing("grad_output", layout="columnwise"), site()[FQN], [None], changes)
    assert finding.rule == Rule(FQN, "tensorwise", fprop=None, wgrad=None)
    finding = proposed(_crossing("grad_output"), site()[FQN], [None], changes)
    assert finding.rule == Rule(FQN, None)


def test_no_rule_is_proposed_where_none_would_help() -> None:
    finding = proposed(_crossing("weight", "mxfp8"), site("tensorwise", fprop="mxfp8")[FQN], [None], {})
    assert finding.rule is None
    assert "the policy of now does not give it mxfp8. An autocast region does, which is stronger" in str(finding)
    assert "its graph is gone" in str(proposed(_crossing("weight"), None, [None], {}))


@in_one_test(
    ("of", "own"),
    [
        (site(), {}),
        (site(by_user=False), {"optional": True}),
        (site(op="matmul"), {"op": "matmul"}),
        (site(Float8CurrentScaling(power_2_scale=True).to_dict()), {}),
        (site(DelayedScaling(amax_history_len=16).to_dict()), {}),
    ],
    ids=["plain", "default", "op", "current", "delayed"],
)
def test_rules_can_be_pasted(of: dict[str, PolicySite], own: dict[str, Any]) -> None:
    recipe = of[FQN].recipes["fprop"]
    crossing = _crossing("grad_output", resolve_recipe(recipe).name)  # pyright: ignore[reportOptionalMemberAccess]
    rule = proposed(crossing, of[FQN], [None], {}).rule
    assert rule is not None
    assert rule == Rule(FQN, recipe, dgrad=None, **own)
    assert eval(python(rule), {"Rule": Rule}) == rule
    assert Policy.from_dict(tomllib.loads(rule_toml(rule))).rules == (rule,)


def test_a_name_is_not_a_glob() -> None:
    odd = PolicySite(fqn='blocks[0]."a"', op="linear", by_user=True, recipes=site()[FQN].recipes, runs={})
    rule = proposed(_crossing("weight"), odd, [None], {}).rule
    assert rule is not None
    assert rule.matches(odd.fqn, "linear")
    assert eval(python(rule), {"Rule": Rule}) == rule
    assert Policy.from_dict(tomllib.loads(rule_toml(rule))).rules == (rule,)


@in_one_test(
    ("bounds", "message"),
    [
        ({"underflows": -1}, r"guard\(underflows=-1\): expected a number of percent from 0 to 100, or None"),
        ({"saturated": 101.0}, r"guard\(saturated=101.0\): expected a number of percent"),
        ({"saturated": "5%"}, r"guard\(saturated='5%'\): expected a number of percent"),
        ({"underflows": True}, r"guard\(underflows=True\): expected"),
        ({"sqnr": math.nan}, r"guard\(sqnr=nan\): expected a finite number of dB"),
    ],
)
def test_wrong_bounds(bounds: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Bounds(**bounds)
