"""The cost of an expression: bounded before it is matched, or refused; and the same answer as Python's ``re``."""

from __future__ import annotations

import random
import re
import time

import pytest

from fp8graph import PolicyError, Rule
from fp8graph.recipes.expressions import LONGEST_NAME, Name, cost, matches, parsed
from helpers import in_one_test

NAME = "model.layers.11.self_attn.q_proj"


@in_one_test(
    ("text", "flags"),
    [
        (r"(?i)MODEL\.LAYERS.*", 0),
        (r"(?i)(?i)MODEL\.LAYERS.*", 0),
        ("MODEL.*Q_[A-P]roj", re.IGNORECASE),
        (r"(?x) model \. .*  # all of it", 0),
        (r"model \. (?: .+ \. ) + q_proj", re.VERBOSE),
        ("^model.*$", re.MULTILINE | re.DOTALL),
        (r"(?a)\w+\..*", 0),
        ("(?P<first>model|visual).*", 0),
        ("model", 0),
    ],
)
def test_flags_and_names_of_groups_mean_what_they_mean_to_re(text: str, flags: int) -> None:
    expression = re.compile(text, flags)
    part = parsed(text[text.rindex("(?i)") + 4 :], "i") if text.startswith("(?i)") else None
    assert cost(expression) > 0
    for name in (NAME, NAME.upper(), "model"):
        wanted = expression.fullmatch(name) is not None
        assert matches(expression, name) == wanted
        assert part is None or bool(part.step(Name(name, 1000), 1) >> len(name) & 1) == wanted


def test_random_expressions_match_whole_names_as_re_does() -> None:
    draw = random.Random(1)

    def expression(depth: int) -> str:
        kind = draw.randrange(7) if depth else draw.randrange(2)
        if kind < 2:
            return draw.choice(["a", "b", ".", "[ab]", "^", "$"])
        if kind < 4:
            return expression(depth - 1) + expression(depth - 1)
        if kind == 4:
            return f"(?:{expression(depth - 1)}|{expression(depth - 1)})"
        return f"(?:{expression(depth - 1)}){draw.choice(['*', '+', '?', '{2}', '{0,3}', '{1,}', '??'])}"

    for _ in range(300):
        text, name = expression(4), "".join(draw.choice("ab") for _ in range(draw.randrange(7)))
        wanted = re.fullmatch(text, name) is not None
        assert matches(re.compile(text), name) == wanted, (text, name)
        assert bool(parsed(text).step(Name(name, 10_000), 1) >> len(name) & 1) == wanted, (text, name)


@in_one_test(
    ("text", "fast"),
    [
        (r"model\.layers\.\d+\..*", True),
        ("|".join(f"model\\.layers\\.{i}\\.up" for i in range(300)), True),
        (".*a.*", True),
        (".*a.*b.*c", False),
        ("(?:a|b)*", False),
        ("a?" * 30, False),
        (".{0,60}" * 4, False),
        (r"(?:\w+\.)*gate", False),
    ],
)
def test_re_matches_those_that_it_tries_few_ways_for(text: str, fast: bool) -> None:
    part = parsed(text)
    assert (part.tries + part.ways <= 200_000) == fast
    assert cost(re.compile(text)) <= 20_000


@in_one_test("text", ["(?:a|b)*!", "(.+)+!", "a?" * 60 + "!", "(?:(?:ab?)+c?)*!", "(?:a{0,30}){0,30}!"])
def test_the_steps_of_a_match_are_at_most_those_that_were_counted(text: str) -> None:
    part = parsed(text)
    for name in ("a" * LONGEST_NAME, "ab" * (LONGEST_NAME // 2), "abc" * 80):
        on = Name(name, part.steps)  # raises if it makes more
        assert not part.step(on, 1) >> len(name) & 1


def test_a_name_that_is_too_long_is_refused_in_time() -> None:
    expression, started = re.compile("(?:ab?)+!"), time.process_time()
    assert cost(expression) < 100_000
    with pytest.raises(ValueError, match="takes too long to match .*, a name of 60000 characters"):
        matches(expression, "ab" * 30_000)
    with pytest.raises(
        PolicyError, match=r"Rule\(re.compile\('.*'\), ...\): the expression takes too long to match 'aba"
    ):
        Rule(expression, None).matches("ab" * 30_000, "linear")
    assert time.process_time() - started < 10


def test_an_expression_of_ones_own_that_cannot_be_read_is_matched_by_re() -> None:
    expression = re.compile(r"(a+)\.\1")
    with pytest.raises(ValueError, match="cannot be read"):
        cost(expression)
    assert matches(expression, "aa.aa")
    assert not matches(expression, "aa.a")
