"""Expressions of configs match as Python's ``re`` does, in a time that they cannot choose."""

from __future__ import annotations

import fnmatch
import random
import re
import time

import pytest

from fp8graph.checkpoints.config import Expressions
from fp8graph.checkpoints.modelopt import of_glob
from fp8graph.errors import CheckpointError
from helpers import in_one_test

NAMES = """
    lm_head model.lm_head model.layers.0.mlp.gate model.layers.0.mlp.gate_proj model.layers.11.self_attn.q_proj
    model.vision_tower.layers.3.mlp.fc1 visual.blocks.2.attn.qkv model.layers.3.mlp.experts.17.down_proj aaaa a
    Model.Layers.0 model.layers.0.mlp.shared_expert_gate
""".split()
# as libraries and their recipes write them, and every form that is known
WRITTEN = r"""
    lm_head .*lm_head .*self_attn.* model\.layers\.\d+\..* .*mlp.gate$ .*\.mlp\.gate$ visual.* ^visual\.blocks
    .*vision_tower.* .*layers\.(0|1|11)\..* .*\.experts\.\d+\.(gate|up|down)_proj$ (?!.*self_attn).*proj
    ^(?!.*(?:lm_head|gate)).*$ .*(?<!_)gate$ .*(?<=mlp\.)gate .*[qkv]_proj .*[^a-p]_proj model\.layers\.[0-9]{1,2}\.mlp
    (a+)+! (a|aa)+$ a{2,3}$ a{4} a{5} a{2,}? .*?gate .*\bgate\b (model|visual)\..*(mlp|attn)\..+ (\w+\.)*gate \S+\.qkv
    [\]a]+$ [a\-z]+$ (?=.*11).*q_proj .+\.\D+$ \Amodel.*_proj\Z (a?){4}a{4}$ ((a*)*)*$ model.layers.0 (^m|^v)\w+
    (?P<kind>mlp|model)\.\w+
""".split()


@in_one_test("text", WRITTEN)
def test_they_match_what_re_matches(text: str) -> None:
    expressions = Expressions([text], "here")
    for name in NAMES:
        assert (expressions.first(name) is not None) == (re.match(text, name) is not None), name


def test_random_expressions_match_what_re_matches() -> None:
    draw = random.Random(0)

    def expression(depth: int) -> str:
        kind = draw.randrange(8) if depth else draw.randrange(3)
        if kind < 3:
            return draw.choice(["a", "b", ".", "[ab]", "[^a]", "^", "$", r"\b", r"\."])
        if kind < 5:
            return expression(depth - 1) + expression(depth - 1)
        if kind == 5:
            return f"({expression(depth - 1)}|{expression(depth - 1)})"
        if kind == 6:
            return f"(?:{expression(depth - 1)}){draw.choice(['*', '+', '?', '{2}', '{1,2}', '{1,}', '*?'])}"
        return f"(?{draw.choice('=!')}{expression(depth - 1)})"

    for _ in range(1500):
        text = expression(4)
        name = "".join(draw.choice("ab.") for _ in range(draw.randrange(7)))
        found = Expressions([text], "here").first(name)
        assert (found is not None) == (re.match(text, name) is not None), (text, name)


def test_the_first_that_matches() -> None:
    expressions = Expressions(["x.*", "model", "mod.*", "lm_head"], "here", then="$")
    assert [expressions.first(name) for name in ("model", "models", "lm_head", "xlm_head", "y")] == [1, 2, 3, 0, None]


@in_one_test(
    "text", ["(a+)+!", "((a*)*)*!", "(((a|){9}){9}){9}!", "(a|a)*!", "(a?){40}a{40}!", ".*a.*a.*a.*a.*a.*a.*!"]
)
def test_no_expression_takes_long(text: str) -> None:
    started = time.process_time()
    assert Expressions([text], "here").first("a" * 60) is None
    assert time.process_time() - started < 1  # milliseconds


@pytest.mark.parametrize("text", ["(((a{0,99}){0,99}){0,99}){0,99}!", "((((){999}){999}){999}){999}!"])
def test_one_that_would_take_long_is_named(text: str) -> None:
    expressions = Expressions([text], "config.json: ignore")
    with pytest.raises(
        CheckpointError, match=r"config.json: ignore: the expression '\(\(\(.*' takes too long to match 'aa"
    ):
        expressions.first("a" * 500)


@in_one_test(
    ("text", "why"),
    [
        ("[", "cannot be read .unterminated character set"),
        ("(a", "cannot be read .missing"),
        ("*a", "cannot be read .nothing to repeat"),
        (r"(a)\1", "cannot be read .at"),
        ("(?i)a", "cannot be read .at"),
        ("(?P<x>a)(?P=x)", "cannot be read .at"),
        ("a*+", r"cannot be read .'\+' after '\*'"),
        ("(" * 30 + "a*" + ")" * 30, "cannot be read .at"),
        ("(" * 499 + "a*" + ")" * 499, "cannot be read"),
        ("a*" * 600, "has 1200 characters"),
    ],
)
def test_refused_expressions_are_named(text: str, why: str) -> None:
    with pytest.raises(CheckpointError, match=f"^here: the expression '.*{why}") as caught:
        Expressions(["lm_head", text], "here")
    assert len(str(caught.value)) < 400


@in_one_test("pattern", ["*.mlp.*", "model?l*", "*[0-9].mlp*", "*.l[!x-z]yers.*", "a[^a]a*", "lm_head", "a[*"])
def test_globs_match_what_fnmatch_matches(pattern: str) -> None:
    expressions = Expressions([of_glob(pattern)], "here", then="$")
    for name in [*NAMES, "a^aa", "a[x"]:
        assert (expressions.first(name) is not None) == fnmatch.fnmatchcase(name, pattern), name
