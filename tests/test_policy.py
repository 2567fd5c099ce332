"""Policy: ordered rules, full match, first match wins; files hold data only."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

import fp8graph
from fp8graph import INHERIT, Float8CurrentScaling, Policy, Rule
from fp8graph.models import general_policy
from fp8graph.models.general import HEADS

TENSORWISE = Float8CurrentScaling()


@pytest.mark.parametrize(
    ("pattern", "matching", "others"),
    [
        ("layers.1", ["layers.1"], ["layers.10", "a.layers.1", "layers.1.q", "Layers.1"]),
        ("*.down_proj", ["a.b.down_proj", ".down_proj"], ["down_proj", "a.down_proj2", "a.DOWN_PROJ"]),
        ("layers.[0-3].*", ["layers.2.q"], ["layers.4.q", "layers.12.q"]),
        (re.compile(r"layers\.[0-3]\..*"), ["layers.3.q"], ["model.layers.3.q", "layers.30.q"]),
        ("*", ["", "a", "a.b"], []),
    ],
)
def test_patterns_match_the_whole_name(pattern: Any, matching: list[str], others: list[str]) -> None:
    rule = Rule(pattern, "tensorwise")
    assert [name for name in [*matching, *others] if rule.matches(name, "linear")] == matching


def test_the_first_match_wins() -> None:
    policy = Policy([Rule("a.*", None), Rule("*.b", "tensorwise"), Rule("*", None)])
    sources = {name: policy.resolve(name, "linear").source for name in ("a.b", "c.b", "c")}
    assert sources == {"a.b": 'rule 0 "a.*"', "c.b": 'rule 1 "*.b"', "c": 'rule 2 "*"'}


@pytest.mark.parametrize(
    ("rule_op", "matching"),
    [
        ("linear", {"linear"}),
        ("matmul", {"matmul"}),
        ("grouped_mm", {"grouped_mm"}),
        ("*", {"linear", "matmul", "grouped_mm"}),
    ],
)
def test_op(rule_op: str, matching: set[str]) -> None:
    rule = Rule("*", None, op=rule_op)
    assert {op for op in ("linear", "matmul", "grouped_mm") if rule.matches("x", op)} == matching


def test_the_default_covers_linears_and_grouped_matmuls() -> None:
    policy = Policy()
    for op, recipe in (("linear", TENSORWISE), ("grouped_mm", TENSORWISE), ("matmul", None)):
        assert set(policy.resolve("x", op).recipes.values()) == {recipe}
    assert policy.resolve("x", "matmul").source.endswith("left alone unless a rule asks for it")


@pytest.mark.parametrize(
    ("rule", "expected"),
    [
        (Rule("*", "tensorwise"), (TENSORWISE, TENSORWISE, TENSORWISE)),
        (Rule("*", "tensorwise", wgrad=None), (TENSORWISE, TENSORWISE, None)),
        (Rule("*", None, fprop="tensorwise"), (TENSORWISE, None, None)),
        (Rule("*", "tensorwise", dgrad="high_precision", wgrad=INHERIT), (TENSORWISE, None, TENSORWISE)),
    ],
)
def test_one_gemm_can_have_another_recipe(rule: Rule, expected: tuple[Any, ...]) -> None:
    assert tuple(Policy([rule]).resolve("x", "linear").recipes.values()) == expected


def test_the_general_policy() -> None:
    policy = general_policy()
    kept = [*HEADS, "model.lm_head", "cls.predictions.decoder", "x.mlp.gate", "block.router"]
    assert [n for n in kept if any(policy.resolve(n, "linear").recipes.values())] == []
    assert all(policy.resolve("model.layers.0.mlp.gate_proj", "linear").recipes.values())
    assert all(rule.optional for rule in policy.rules)


FULL = Policy(
    [
        Rule("lm_head", None),
        Rule(re.compile(r"layers\.[0-3]\..*"), TENSORWISE),
        Rule("*.down_proj", "tensorwise", wgrad=None, op="*", optional=True),
    ],
    default=Float8CurrentScaling(power_2_scale=True),
    min_speedup=1.1,
)
TOML = """
default = "tensorwise"
min_speedup = 0

[[rules]]
pattern = "lm_head"
recipe = "high_precision"

[[rules]]
regex = 'layers\\.[0-3]\\..*'
recipe = { type = "Float8CurrentScaling", fp8_format = "E4M3", use_fast_accum = [true, true, false] }
wgrad = "high_precision"
"""


def test_round_trip() -> None:
    assert Policy.from_dict(json.loads(json.dumps(FULL.to_dict()))) == FULL
    assert Policy.coerce(FULL.to_dict()) == FULL
    assert Policy.coerce(FULL) is FULL


def test_files(tmp_path: Path) -> None:
    (tmp_path / "p.json").write_text(json.dumps(FULL.to_dict()))
    assert Policy.load(tmp_path / "p.json") == FULL
    (tmp_path / "p.toml").write_text(TOML)
    policy = Policy.coerce(str(tmp_path / "p.toml"))
    assert policy.min_speedup == 0
    recipes = policy.resolve("layers.2.q", "linear").recipes
    assert recipes["wgrad"] is None
    assert recipes["fprop"] == Float8CurrentScaling(fp8_format=fp8graph.Format.E4M3, use_fast_accum=(True, True, False))


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("p.toml", "rules = [", "malformed TOML"),
        ("p.json", "{", "malformed JSON"),
        ("p.json", "[]", "a table of rules is needed"),
        ("p.toml", "rule = 1", "unknown key 'rule'. Known: default, min_speedup, rules"),
        ("p.toml", "rules = 3", "'rules' must be a list"),
        ("p.toml", "rules = [3]", "rule 0: a table is needed"),
        ("p.toml", "[[rules]]\nrecipe = 'tensorwise'", "rule 0: exactly one of 'pattern' .* and 'regex'"),
        ("p.toml", "[[rules]]\npattern = 'a'\nregex = 'a'\nrecipe = 'tensorwise'", "exactly one"),
        ("p.toml", "[[rules]]\npattern = 'a'", "rule 0: 'recipe' is missing"),
        ("p.toml", "[[rules]]\npattern = 'a'\nrecipe = 'x'", "unknown recipe 'x'"),
        ("p.toml", "[[rules]]\npattern = 'a'\nrecipe = 'tensorwise'\nwgard = 1", "unknown key 'wgard'"),
        ("p.toml", "[[rules]]\nregex = '('\nrecipe = 'tensorwise'", r"regex '\(' does not compile"),
        ("p.toml", "[[rules]]\npattern = 3\nrecipe = 'tensorwise'", "must be a glob"),
        ("p.toml", "min_speedup = -1", "min_speedup=-1.*finite number >= 0"),
    ],
)
def test_bad_files_say_which_file_and_what(tmp_path: Path, name: str, text: str, message: str) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(fp8graph.Fp8GraphError, match=f"policy file .*{name}.*{message}") as caught:
        Policy.load(tmp_path / name)
    assert isinstance(caught.value, ValueError)


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(fp8graph.PolicyError, match="cannot be read"):
        Policy.load(tmp_path / "nosuch.toml")


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Rule(3, None), "the pattern must be a glob"),  # pyright: ignore
        (lambda: Rule(re.compile(b"a"), None), "the pattern must be a glob"),  # pyright: ignore
        (lambda: Rule("a", "nosuch"), r"Rule\('a', ...\): unknown recipe 'nosuch'"),
        (lambda: Rule("a", None, op="conv"), "op must be one of linear, matmul"),
        (lambda: Rule("a", None, wgrad="nosuch"), "unknown recipe 'nosuch'"),
        (lambda: Rule("a", None, optional=1), "optional must be True or False"),  # pyright: ignore
        (lambda: Policy(Rule("a", None)), "a list of Rule is needed"),  # pyright: ignore
        (lambda: Policy(["lm_head"]), "'lm_head' is not a Rule"),  # pyright: ignore
        (lambda: Policy(default="nosuch"), "unknown recipe 'nosuch'"),
        (lambda: Policy(min_speedup=float("nan")), "finite number >= 0"),
        (lambda: Policy.coerce(3), "must be a Policy, a dict or a path"),  # pyright: ignore
    ],
)
def test_bad_values(make: Any, message: str) -> None:
    with pytest.raises(fp8graph.Fp8GraphError, match=message):
        make()


def test_settings_are_keyword_only() -> None:
    with pytest.raises(TypeError, match="positional"):
        Rule("a", None, "linear")  # pyright: ignore
    with pytest.raises(TypeError, match="positional"):
        Policy([], "tensorwise")  # pyright: ignore
