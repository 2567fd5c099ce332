"""Policy: ordered rules, full match, first match wins; files hold data only."""

from __future__ import annotations

import copy
import dataclasses
import json
import os
import pickle
import re
import time
from pathlib import Path
from typing import Any

import pytest
import torch

import fp8graph
from fp8graph import INHERIT, Float8CurrentScaling, Policy, Rule
from fp8graph.models import extended, general_policy, policy_of
from fp8graph.models.general import HEADS
from helpers import MLP, eager_backend, in_one_test

TENSORWISE = Float8CurrentScaling()


def test_the_first_match_wins() -> None:
    policy = Policy([Rule("a.*", None), Rule("*.b", "tensorwise"), Rule("*", None)])
    sources = {name: policy.resolve(name, "linear").source for name in ("a.b", "c.b", "c")}
    assert sources == {"a.b": 'rule "a.*"', "c.b": 'rule "*.b"', "c": 'rule "*"'}
    assert [policy.resolve(name, "linear").rule for name in ("a.b", "c.b", "c")] == [0, 1, 2]
    assert Policy().resolve("c", "linear").rule is None


def test_a_rule_for_another_op_is_passed_over() -> None:
    policy = Policy([Rule("a", None, op="matmul"), Rule("a", "tensorwise")])
    assert policy.resolve("a", "linear").rule == 1
    assert policy.resolve("a", "matmul").rule == 0


@pytest.mark.parametrize(
    ("policy", "by_user"),
    [(Policy([Rule("a", "tensorwise")]), True), (Policy([Rule("a", None, optional=True)]), False), (Policy(), False)],
)
def test_who_asked(policy: Policy, by_user: bool) -> None:
    """Strict mode holds us to what a rule of the user asks; neither the default nor an optional rule is one."""
    assert policy.resolve("a", "linear").by_user is by_user


def test_the_default_covers_linears_and_grouped_matmuls() -> None:
    policy = Policy()
    for op, recipe in (("linear", TENSORWISE), ("grouped_mm", TENSORWISE), ("matmul", None)):
        assert set(policy.resolve("x", op).recipes.values()) == {recipe}
        assert set(Policy(default=None).resolve("x", op).recipes.values()) == {None}
    asked = Policy([Rule("*", "tensorwise", op="matmul")]).resolve("x", "matmul").recipes
    assert set(asked.values()) == {TENSORWISE}
    assert policy.resolve("x", "matmul").source.endswith("left alone unless a rule asks for it")


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


# FULL, as one writes it by hand
FULL_TOML = """
default = { type = "Float8CurrentScaling", power_2_scale = true }
min_speedup = 1.1
rules = [
    { pattern = "lm_head", recipe = "high_precision" },
    { regex = 'layers\\.[0-3]\\..*', recipe = { type = "Float8CurrentScaling" } },
    { pattern = "*.down_proj", recipe = "tensorwise", wgrad = "high_precision", op = "*", optional = true },
]
"""


def test_round_trip() -> None:
    assert Policy.from_dict(json.loads(json.dumps(FULL.to_dict()))) == FULL
    assert Policy.coerce(FULL.to_dict()) == FULL
    assert Policy.coerce(FULL) is FULL
    assert Policy.from_dict({}) == Policy()
    assert Policy.from_dict(Policy().to_dict()) == Policy()


def test_a_rules_dict_holds_what_differs_from_the_defaults() -> None:
    assert [rule.to_dict() for rule in FULL.rules] == [
        {"pattern": "lm_head", "recipe": "high_precision"},
        {"regex": r"layers\.[0-3]\..*", "recipe": TENSORWISE.to_dict()},
        {"pattern": "*.down_proj", "recipe": "tensorwise", "op": "*", "wgrad": "high_precision", "optional": True},
    ]


@pytest.mark.parametrize("flags", [re.IGNORECASE, re.VERBOSE, re.IGNORECASE | re.DOTALL])
def test_a_round_trip_keeps_the_flags_of_a_regular_expression(flags: re.RegexFlag) -> None:
    """The text in a policy file or a report must decide as the policy did."""
    policy = Policy([Rule(re.compile(r"Layers\.\d+ \. q  # the query", flags), None), Rule("*q*", "tensorwise")])
    again = Policy.from_dict(json.loads(json.dumps(policy.to_dict())))
    for name in ("layers.3.q", "Layers.3.q", "Layers.3 . q  # the query", "layers.3 . q  # the query"):
        assert again.resolve(name, "linear").rule == policy.resolve(name, "linear").rule, name


@pytest.mark.parametrize("copied", [pickle.loads(pickle.dumps(FULL)), copy.deepcopy(FULL)])
def test_copies(copied: Policy) -> None:
    assert copied == FULL
    assert copied.rules[0].wgrad is INHERIT
    assert copied.identity() == FULL.identity()


def test_equal_policies_are_written_in_many_ways() -> None:
    alike = [
        Policy([Rule("a", None)], default=TENSORWISE.to_dict()),
        Policy((Rule("a", "high_precision"),), default=TENSORWISE),
        Policy(iter([Rule("a", None)]), default=Float8CurrentScaling()),  # pyright: ignore
    ]
    assert alike[0] == alike[1] == alike[2]
    assert len({policy.identity() for policy in alike}) == 1


LONG = "|".join(f"model.layers.{i}.self_attn.q_proj" for i in range(20))
DIFFERENT = [
    Policy(),
    Policy(default=None),
    Policy(default=Float8CurrentScaling(amax_epsilon=1e-9)),
    Policy(min_speedup=0),
    Policy(extends="default"),
    Policy(extends="default", default="rowwise"),
    Policy([Rule("a", None)]),
    Policy([Rule("a", "tensorwise")]),
    Policy([Rule("a", None, op="matmul")]),
    Policy([Rule("a", None, wgrad="tensorwise")]),
    Policy([Rule("a", None, dgrad="tensorwise")]),
    Policy([Rule("a", None, optional=True)]),
    Policy([Rule("a", None), Rule("b", "tensorwise")]),
    Policy([Rule("b", "tensorwise"), Rule("a", None)]),
    Policy([Rule(re.compile("a"), None)]),
    Policy([Rule(re.compile("a", re.IGNORECASE), None)]),
    # longer than what repr() of a compiled expression shows
    Policy([Rule(re.compile(f"{LONG}|lm_head"), None)]),
    Policy([Rule(re.compile(f"{LONG}|score"), None)]),
    Policy([Rule(f"{LONG}|lm_head", None)]),
    Policy([Rule(f"{LONG}|score", None)]),
]


def test_policies_that_decide_differently_have_different_identities() -> None:
    """The identity is part of the compile cache's key, and what tells a backend that set_policy changed something."""
    by_identity: dict[str, list[Policy]] = {}
    for policy in DIFFERENT:
        by_identity.setdefault(policy.identity(), []).append(policy)
    assert [same for same in by_identity.values() if len(same) > 1] == []


@pytest.mark.slow
def test_set_policy_is_obeyed_where_long_expressions_differ_at_their_ends() -> None:
    backend = eager_backend(Policy([Rule(re.compile(f"{LONG}|up"), None)]))
    model, x = torch.compile(MLP(), backend=backend), torch.randn(4, 32)
    model(x)
    backend.set_policy(Policy([Rule(re.compile(f"{LONG}|down"), None)]))
    model(x)
    left = [{gemm.fqn for gemm in graph.gemms if gemm.recipe is None} for graph in backend.report.graphs]
    assert left == [{"up"}, {"down"}]


def test_the_identity_of_a_policy_has_the_recipes_of_its_names() -> None:
    """Of a policy that was not given to a backend yet: names are looked up there."""
    fp8graph.register_recipe("test_policy_identity", Float8CurrentScaling())
    policy = Policy(default="test_policy_identity")
    before = policy.identity()
    fp8graph.register_recipe("test_policy_identity", Float8CurrentScaling(power_2_scale=True))
    assert policy.identity() != before


def test_files(tmp_path: Path) -> None:
    (tmp_path / "p.json").write_text(json.dumps(FULL.to_dict()))
    assert Policy.load(tmp_path / "p.json") == Policy.coerce(str(tmp_path / "p.json")) == FULL
    (tmp_path / "full.toml").write_text(FULL_TOML)
    assert Policy.load(str(tmp_path / "full.toml")) == Policy.coerce(tmp_path / "full.toml") == FULL
    (tmp_path / "empty.toml").write_text("")
    assert Policy.load(tmp_path / "empty.toml") == Policy()
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
        ("p.json", "[]", "expected a table of rules"),
        (
            "p.toml",
            "rule = 1",
            "unknown key 'rule'. Did you mean 'rules'. Known: batch_invariant, default, extends, guard, keep_heads, "
            "min_speedup",
        ),
        ("p.toml", "extends = 3", 'extends=3.*extends must be "default"'),
        ("p.toml", "rules = 3", "'rules' must be a list"),
        ("p.toml", "rules = [3]", "rule 0: expected a table"),
        ("p.toml", "[[rules]]\nrecipe = 'tensorwise'", "rule 0: exactly one of 'pattern' .* and 'regex'"),
        ("p.toml", "[[rules]]\npattern = 'a'\nregex = 'a'\nrecipe = 'tensorwise'", "exactly one"),
        ("p.toml", "[[rules]]\npattern = 'a'", "rule 0: 'recipe' is missing"),
        ("p.toml", "[[rules]]\npattern = 'a'\nrecipe = 'x'", "unknown recipe 'x'"),
        ("p.toml", "[[rules]]\npattern = 'a'\nrecipe = 'tensorwise'\nwgard = 1", "unknown key 'wgard'"),
        ("p.toml", "[[rules]]\nregex = '('\nrecipe = 'tensorwise'", r"regex '\(' does not compile"),
        ("p.toml", "[[rules]]\npattern = 3\nrecipe = 'tensorwise'", "must be a glob"),
        ("p.toml", "min_speedup = -1", "min_speedup=-1.*finite number >= 0"),
        ("p.toml", "min_speedup = true", "min_speedup=True.*finite number >= 0"),
        ("p.toml", "min_speedup = inf", "min_speedup=inf.*finite number >= 0"),
        ("p.toml", "min_speedup = '1'", "min_speedup='1'.*finite number >= 0"),
        ("p.toml", "default = 'nosuch'", "unknown recipe 'nosuch'. Available: 'tensorwise'"),
        ("p.toml", "default = 3", "3 is not a recipe"),
        ("p.toml", "default = { type = 'Nope' }", "unknown recipe type 'Nope'"),
        ("p.toml", "default = { type = ['a'] }", r"unknown recipe type \['a'\]"),
        ("p.toml", "default = { type = 'Float8CurrentScaling', fp8_format = 'E5M2' }", "E5M2 by E5M2"),
        ("p.toml", "[[rules]]\npattern = 'a'\nrecipe = { type = ['a'] }", r"unknown recipe type \['a'\]"),
        ("p.toml", "[[rules]]\npattern = 'a'\nrecipe = { type = 'Float8CurrentScaling', x = 1 }", "has no field 'x'"),
        ("p.toml", "[[rules]]\npattern = 'a'\nrecipe = 'tensorwise'\nwgrad = 1", "1 is not a recipe"),
        ("p.toml", "[[rules]]\npattern = 'a'\nrecipe = 'tensorwise'\nop = 'conv'", "op must be one of linear.*'conv'"),
        ("p.toml", "[[rules]]\npattern = 'a'\nrecipe = 'tensorwise'\nop = ['linear']", "op must be one of linear"),
        (
            "p.toml",
            "[[rules]]\npattern = 'a'\nrecipe = 'tensorwise'\noptional = 'yes'",
            "optional must be True or False",
        ),
        ("p.toml", "[[rules]]\nregex = 3\nrecipe = 'tensorwise'", "regex 3 must be a text"),
        ("p.json", '{"rules": [{"pattern": null, "recipe": null}]}', "must be a glob"),
        ("p.json", '{"rules": null}', "'rules' must be a list"),
        ("p.json", "3", "expected a table of rules"),
        ("p.json", '{"rules": ' + "[" * 100_000, "malformed JSON: .*recursion"),
        ("p.toml", "rules = " + "[" * 100_000, "malformed TOML: .*recursion"),
        ("p.json", '{"rules": "' + "x" * 10**6 + '"}', "'rules' must be a list of tables, not 'x+ ... .cut.$"),
    ],
)
def test_bad_files_say_which_file_and_what(tmp_path: Path, name: str, text: str, message: str) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(fp8graph.Fp8GraphError, match=f"policy file .*{name}.*{message}") as caught:
        Policy.load(tmp_path / name)
    assert isinstance(caught.value, ValueError)


YAML = "default: rowwise\nrules:\n  - pattern: lm_head\n    recipe: high_precision\n"


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("p.yaml", YAML, "malformed TOML: .*. YAML is not read. A policy"),
        ("p.yml", "- lm_head\n- rowwise\n", "malformed TOML: .*. YAML is not read. A policy"),
        ("p.toml", YAML, r"malformed TOML: [^.]*\. A policy"),
        ("p.json", "{'rules': []}", "malformed JSON: .*. A policy"),
        ("p.json", '["lm_head"]', r"expected a table of rules, not \['lm_head'\]. A policy"),
        ("p.json", '"rowwise"', "expected a table of rules, not 'rowwise'. A policy"),
        ("p.json", '{"layers": ["lm_head"]}', "unknown key 'layers'. Known: .*. A policy"),
        ("p.toml", "rule = []", "unknown key 'rule'. Did you mean 'rules'.*. A policy"),
        ("p.toml", "[quantization]\nrecipe = 'rowwise'", "unknown key 'quantization'. Known: .*. A policy"),
    ],
)
def test_a_file_that_is_no_policy_shows_the_smallest_one(tmp_path: Path, name: str, text: str, message: str) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(
        fp8graph.PolicyError, match=f"policy file .*{name}: .*{message} is a table of rules: "
    ) as caught:
        Policy.load(tmp_path / name)
    toml, json = str(caught.value).partition(" is a table of rules: ")[2].removesuffix(" in JSON.").split(" in TOML, ")
    policies: list[Policy] = []
    for suffix, example in (("toml", toml), ("json", json)):
        (tmp_path / f"example.{suffix}").write_text(example)
        policies.append(Policy.load(tmp_path / f"example.{suffix}"))
    assert policies == [Policy([Rule("*.o_proj", "rowwise")])] * 2


@pytest.mark.parametrize("name", ["nosuch.toml", "folder", "latin1.toml"])
def test_files_that_cannot_be_read(tmp_path: Path, name: str) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "latin1.toml").write_bytes(b"# caf\xe9")
    with pytest.raises(fp8graph.PolicyError, match=f"policy file .*{name}: cannot be read"):
        Policy.load(tmp_path / name)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("(((a*b?)*c?)*d?)*", "takes 9e.07 steps to match 256 characters, and 100000 are made"),
        (r"(a*)*\1", "cannot be read"),
        ("a" * 200_000, "has 200000 characters, more than 100000"),
    ],
)
def test_expressions_that_take_no_bounded_time_are_refused(tmp_path: Path, text: str, why: str) -> None:
    (tmp_path / "p.json").write_text(json.dumps({"rules": [{"regex": text, "recipe": None}]}))
    with pytest.raises(fp8graph.PolicyError, match=f"policy file .*p.json: rule 0: regex .*{why}"):
        Policy.load(tmp_path / "p.json")
    with pytest.raises(fp8graph.PolicyError, match=f"rule 0: regex .*{why}"):
        Policy.from_dict({"rules": [{"regex": text, "recipe": None}]})


@in_one_test("text", [".?" * 40 + "!", r"(?:\w|.)" * 39 + "!", "(.+)+!", "(?i)(?:A|a)*!", ".{0,40}" * 20 + "!"])
def test_expressions_of_a_file_cannot_hang(text: str) -> None:
    """Python's re tries 2**39 ways and more; so it would in copies of the policy."""
    policy = Policy.from_dict({"rules": [{"regex": text, "recipe": None}]})
    started = time.process_time()
    for one in (policy, pickle.loads(pickle.dumps(policy)), policy.at_step(0), policy.over(Policy())):
        assert one.resolve("a" * 40, "linear").source == "default"
        assert one.resolve("a" * 39 + "!", "linear").source != "default"
    assert time.process_time() - started < 1


def test_all_expressions_of_a_file_are_bounded_together() -> None:
    with pytest.raises(fp8graph.PolicyError, match="its expressions take up to [0-9]+ steps per name, more than"):
        Policy.from_dict({"rules": [{"regex": "(?:a?b?)*" * 60, "recipe": None}] * 20})


def test_more_rules_than_a_name_is_compared_with() -> None:
    rule = {"pattern": "a", "recipe": None}
    with pytest.raises(fp8graph.PolicyError, match="there are 200000 rules, more than 10000"):
        Policy.from_dict({"rules": [rule] * 200_000})
    with pytest.raises(fp8graph.PolicyError, match=r"Policy\(rules=...\): there are 10001 rules, more than 10000"):
        Policy([Rule("a", None)] * 10_001)
    assert len(Policy.from_dict({"rules": [rule] * 1_000}).rules) == 1_000


def test_files_without_an_end(tmp_path: Path) -> None:
    """A device has no end, a pipe waits for its writer, and a long key of TOML takes the square of its length."""
    os.mkfifo(tmp_path / "pipe.toml")
    for path in (Path("/dev/zero"), tmp_path / "pipe.toml"):
        with pytest.raises(
            fp8graph.PolicyError, match=f"policy file {path}: cannot be read .it is not a regular file."
        ):
            Policy.load(path)
    (tmp_path / "large.json").write_text(" " * (5 << 20) + "{}")
    with pytest.raises(fp8graph.PolicyError, match="cannot be read .it has more than 4194304 bytes"):
        Policy.load(tmp_path / "large.json")
    for text in (".".join("a" * 100_000) + " = 1", "[" + ' . "a"' * 100_000 + "]"):
        (tmp_path / "long.toml").write_text(text)
        with pytest.raises(fp8graph.PolicyError, match="malformed TOML: a key has more than 100 parts"):
            Policy.load(tmp_path / "long.toml")
    (tmp_path / "dots.toml").write_text(
        f"[[rules]]\nregex = '{'a.' * 200}'\nrecipe = 'rowwise'\nreason = \"{'.' * 200}\""
    )
    assert Policy.load(tmp_path / "dots.toml").rules[0].reason == "." * 200


def test_a_recipe_in_the_place_of_a_policy() -> None:
    with pytest.raises(fp8graph.PolicyError, match="For the recipe of that name, write recipe='rowwise'"):
        fp8graph.Backend("rowwise")
    with pytest.raises(fp8graph.PolicyError, match=r"Write Policy\(\[...\]\)"):
        fp8graph.Backend([Rule("*", "rowwise")])  # pyright: ignore[reportArgumentType]


def test_nothing_in_a_file_is_run(tmp_path: Path) -> None:
    (tmp_path / "p.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    with pytest.raises(fp8graph.PolicyError, match="malformed TOML"):
        Policy.load(tmp_path / "p.py")
    assert not (tmp_path / "ran").exists()


@in_one_test(
    ("make", "message"),
    [
        (lambda: Rule(3, None), "the pattern must be a glob"),  # pyright: ignore
        (lambda: Rule("", None), r"Rule\('', ...\): the pattern is empty: no layer has this name. \"\*\" matches all"),
        (lambda: Rule(re.compile(b"a"), None), "the pattern must be a glob"),  # pyright: ignore
        (lambda: Rule(r"layers\.0\..*", None), r"has \\\., and a string is a glob.* re.compile\(...\), or regex ="),
        (lambda: Rule("a", "nosuch"), r"Rule\('a', ...\): unknown recipe 'nosuch'"),
        (lambda: Rule("a", None, op="conv"), "op must be one of linear, matmul"),
        (lambda: Rule("a", None, wgrad="nosuch"), "unknown recipe 'nosuch'"),
        *(
            (
                lambda op=op: Rule("a", Float8CurrentScaling(hadamard_qk=True), op=op),
                "hadamard_qk=True is for attention alone",
            )
            for op in ("linear", "matmul", "grouped_mm", "*")
        ),
        (lambda: Rule("a", None, optional=1), "optional must be True or False"),  # pyright: ignore
        (lambda: Rule("a", None, reason=3), "reason must be a text, not 3"),  # pyright: ignore
        (lambda: Policy(Rule("a", None)), "rules must be a list of Rule objects"),  # pyright: ignore
        (lambda: Policy(["lm_head"]), "'lm_head' is not a Rule"),  # pyright: ignore
        (lambda: Policy(default="nosuch"), "unknown recipe 'nosuch'"),
        (lambda: Rule("a", INHERIT), "INHERIT is not a recipe"),  # pyright: ignore
        (lambda: Rule("a", None, op=None), "op must be one of linear, matmul, grouped_mm, .*, not None"),  # pyright: ignore
        (lambda: Rule(None, None), "the pattern must be a glob .* not NoneType"),  # pyright: ignore
        (lambda: Rule("a", 7), "7 is not a recipe"),  # pyright: ignore
        (lambda: Policy(None), "rules must be a list of Rule objects, not None"),  # pyright: ignore
        (lambda: Policy([("lm_head", None)]), "is not a Rule. Write Rule"),  # pyright: ignore
        (lambda: Policy(extends="defaults"), "extends='defaults'.*extends must be \"default\" or left out"),
        (lambda: Policy(min_speedup=-0.5), "min_speedup=-0.5.*finite number >= 0"),
        (lambda: Policy(min_speedup=float("inf")), "min_speedup=inf.*finite number >= 0"),
        (lambda: Policy(min_speedup=True), "min_speedup=True.*finite number >= 0"),
        (lambda: Policy(min_speedup=None), "min_speedup=None.*finite number >= 0"),  # pyright: ignore
        (lambda: Policy.from_dict(3), "policy: expected a table, not 3"),  # pyright: ignore
        (lambda: Policy.from_dict({3: 1}), "unknown key '3'"),  # pyright: ignore
        (lambda: Policy.coerce(None), "must be a Policy, a dict or a path, not None"),  # pyright: ignore
        (lambda: Policy(min_speedup=float("nan")), "finite number >= 0"),
        (lambda: Policy.coerce(3), "must be a Policy, a dict or a path"),  # pyright: ignore
    ],
)
def test_bad_values(make: Any, message: str) -> None:
    with pytest.raises(fp8graph.Fp8GraphError, match=message) as caught:
        make()
    assert isinstance(caught.value, ValueError)


def test_rules_and_policies_are_frozen() -> None:
    for value, name in ((Rule("a", None), "recipe"), (Policy(), "default")):
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(value, name, "tensorwise")


def test_the_rules_of_a_policy_are_its_own() -> None:
    rules = [Rule("a", None)]
    policy = Policy(rules)
    rules.clear()
    assert policy.resolve("a", "linear").rule == 0


def test_settings_are_keyword_only() -> None:
    with pytest.raises(TypeError, match="positional"):
        Rule("a", None, "linear")  # pyright: ignore
    with pytest.raises(TypeError, match="positional"):
        Policy([], "tensorwise")  # pyright: ignore


MINE = Policy([Rule("*.down_proj", None), Rule("lm_head", "rowwise", steps=(0, 2))], extends="default")


def test_rules_before_the_defaults() -> None:
    """A policy of one's own keeps what the defaults keep: heads, routers, and what the model's family adds."""
    policy = extended(MINE, ["clip"], "mxfp8")
    assert policy.rules[:2] == MINE.rules
    assert policy.rules[2:] == policy_of(["clip"]).rules
    assert (policy.extends, policy.default) == (None, "mxfp8")
    assert extended(dataclasses.replace(MINE, default="rowwise"), [], "mxfp8").default == "rowwise"
    assert extended(FULL, ["clip"], "mxfp8") is FULL
    names = ("model.layers.0.mlp.down_proj", "score", "model.layers.0.mlp.up_proj")
    assert [any(policy.resolve(name, "linear").recipes.values()) for name in names] == [False, False, True]
    with pytest.raises(fp8graph.PolicyError, match="depends on the model"):
        MINE.resolve("lm_head", "linear")


def test_extending_in_files(tmp_path: Path) -> None:
    assert Policy.from_dict(json.loads(json.dumps(MINE.to_dict()))) == MINE
    assert Policy.from_dict(MINE.to_dict()).default is INHERIT
    (tmp_path / "p.toml").write_text("""
        extends = "default"
        rules = [
            { pattern = "*.down_proj", recipe = "high_precision" },
            { pattern = "lm_head", recipe = "rowwise", steps = [0, 2] },
        ]
    """)
    assert Policy.load(tmp_path / "p.toml") == MINE
    assert MINE.at_step(2) == Policy([Rule("*.down_proj", None)], extends="default")


def test_print() -> None:
    rules = [
        Rule("lm_head", None),
        Rule(re.compile(r"layers\.[0-3]\..*"), Float8CurrentScaling(power_2_scale=True), steps=(0, 100)),
        Rule("*.down_proj", "delayed", dgrad="rowwise", wgrad=None, steps=(100, None)),
        Rule("*", Float8CurrentScaling(fp8_format=fp8graph.Format.E4M3), op="matmul"),
    ]
    text = r"""
Policy (the first match wins):
  "lm_head" -> high precision
  /layers\.[0-3]\..*/ (steps 0 to 99) -> Float8CurrentScaling(power_2_scale=True)
  "*.down_proj" (from step 100) -> delayed, dgrad: rowwise, wgrad: high precision
  "*" (op matmul) -> Float8CurrentScaling(fp8_format='E4M3')
  every other linear -> tensorwise
  min_speedup 1.05
"""
    assert str(Policy(rules)) == text.strip()
    assert str(Policy([Rule("a", None)], extends="default", min_speedup=0)).splitlines()[2:] == [
        "  then the rules of the default policy: heads, MoE routers, what the model's family keeps",
        "  every other linear -> the default policy's recipe",
        "  min_speedup 0",
    ]


def test_a_policy_without_a_schedule_is_the_same_at_every_step() -> None:
    assert FULL.at_step(7) == FULL
    assert FULL.at_step(7).identity() == FULL.identity()


def test_output_heads_are_kept_behind_the_users_rules_and_before_the_defaults() -> None:
    rules = [Rule("mine", "rowwise"), Rule("usual", "rowwise", optional=True)]
    policy = Policy(rules, keep_heads=True)
    assert policy.resolve("mine", "linear", "tied").source == 'rule "mine"'
    for name in ("usual", "other"):
        kept = policy.resolve(name, "linear", "tied")
        assert (kept.source, set(kept.recipes.values())) == ("output head: tied", {None})
    assert policy.resolve("usual", "linear").source == 'rule "usual"'
    assert Policy(rules).resolve("other", "linear", "tied").source == "default"
    assert policy.identity() != Policy(rules).identity()
    assert Policy.from_dict(policy.to_dict()) == policy
    with pytest.raises(fp8graph.ConfigError, match="keep_heads must be True or False"):
        Policy(keep_heads="yes")  # pyright: ignore[reportArgumentType]


def test_deep_tables() -> None:
    deep: Any = None
    for _ in range(100_000):
        deep = [deep]
    for values in ({"rules": [deep]}, {"rules": {"x": deep}}, {"default": deep}):
        with pytest.raises(fp8graph.PolicyError, match="nested too deep"):
            Policy.from_dict(values)
