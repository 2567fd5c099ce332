"""Rules: patterns, ops, one recipe per GEMM, schedules."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

import fp8graph
from fp8graph import INHERIT, Float8CurrentScaling, Policy, PolicyError, Rule
from helpers import MLP, eager_backend, in_one_test

TENSORWISE = Float8CurrentScaling()


@in_one_test(
    ("pattern", "matching", "others"),
    [
        ("layers.1", ["layers.1"], ["layers.10", "a.layers.1", "layers.1.q", "Layers.1"]),
        ("*.down_proj", ["a.b.down_proj", ".down_proj"], ["down_proj", "a.down_proj2", "a.DOWN_PROJ"]),
        ("layers.[0-3].*", ["layers.2.q"], ["layers.4.q", "layers.12.q"]),
        (re.compile(r"layers\.[0-3]\..*"), ["layers.3.q"], ["model.layers.3.q", "layers.30.q"]),
        ("*", ["", "a", "a.b"], []),
        ("layers.1*", ["layers.1", "layers.10", "layers.1.q"], ["layers.2"]),
        ("layers.?.q", ["layers.1.q"], ["layers.10.q", "layers..q"]),
        ("layers.[!0].q", ["layers.1.q"], ["layers.0.q"]),
        ("a.b", ["a.b"], ["aXb"]),
        (re.compile("lm_head"), ["lm_head"], ["model.lm_head", "lm_head2"]),
        (re.compile("a|ab"), ["a", "ab"], ["abc", "b"]),
        (re.compile("Lm_Head"), [], ["lm_head", "LM_HEAD"]),
        (re.compile("Lm_Head", re.IGNORECASE), ["lm_head", "LM_HEAD"], ["lm_heads"]),
    ],
)
def test_patterns_match_the_whole_name(pattern: Any, matching: list[str], others: list[str]) -> None:
    rule = Rule(pattern, "tensorwise")
    assert [name for name in [*matching, *others] if rule.matches(name, "linear")] == matching


@in_one_test(
    ("rule_op", "matching"),
    [
        ("linear", {"linear"}),
        ("matmul", {"matmul"}),
        ("grouped_mm", {"grouped_mm"}),
        ("attention", {"attention"}),
        ("*", {"linear", "matmul", "grouped_mm", "attention"}),
    ],
)
def test_op(rule_op: str, matching: set[str]) -> None:
    rule = Rule("*", None, op=rule_op)
    assert {op for op in ("linear", "matmul", "grouped_mm", "attention") if rule.matches("x", op)} == matching


@pytest.mark.parametrize("own", [{}, {"fprop": None}, {"dgrad": None, "wgrad": None}])
def test_fp8_attention_is_asked_for_by_its_name(own: dict[str, Any]) -> None:
    assert not Rule("*", "tensorwise", op="*", **own).matches("x", "attention")
    assert not Rule("*", None, op="*", fprop="tensorwise").matches("x", "attention")
    assert Rule("*", "tensorwise", op="attention").matches("x", "attention")
    assert Policy(default="tensorwise").resolve("x", "attention").recipes["fprop"] is None


@pytest.mark.parametrize("own", [{"fprop": None}, {"dgrad": "rowwise", "wgrad": None}])
def test_attention_has_no_gemms(own: dict[str, Any]) -> None:
    with pytest.raises(PolicyError, match=f'op="attention" takes no {", ".join(own)}: attention has no such GEMMs'):
        Rule("*", "tensorwise", op="attention", **own)


@in_one_test(
    ("rule", "expected"),
    [
        (Rule("*", "tensorwise"), (TENSORWISE, TENSORWISE, TENSORWISE)),
        (Rule("*", "tensorwise", wgrad=None), (TENSORWISE, TENSORWISE, None)),
        (Rule("*", None, fprop="tensorwise"), (TENSORWISE, None, None)),
        (Rule("*", None, fprop=INHERIT, dgrad=TENSORWISE.to_dict()), (None, TENSORWISE, None)),
        (Rule("*", "high_precision", wgrad=TENSORWISE), (None, None, TENSORWISE)),
        (Rule("*", "tensorwise", dgrad="high_precision", wgrad=INHERIT), (TENSORWISE, None, TENSORWISE)),
    ],
)
def test_one_gemm_can_have_another_recipe(rule: Rule, expected: tuple[Any, ...]) -> None:
    assert tuple(Policy([rule]).resolve("x", "linear").recipes.values()) == expected


WARM_UP = Policy(
    [Rule("*", None, steps=(0, 100)), Rule("*.down_proj", "rowwise", steps=(200, None)), Rule("head", None)],
    default="delayed",
)


@in_one_test(
    ("step", "expected"),
    [
        (0, {"a.down_proj": None, "a.up_proj": None, "head": None}),
        (99, {"a.down_proj": None, "a.up_proj": None, "head": None}),
        (100, {"a.down_proj": "delayed", "a.up_proj": "delayed", "head": None}),
        (200, {"a.down_proj": "rowwise", "a.up_proj": "delayed", "head": None}),
        (10**9, {"a.down_proj": "rowwise", "a.up_proj": "delayed", "head": None}),
    ],
)
def test_a_schedule(step: int, expected: dict[str, str | None]) -> None:
    policy = WARM_UP.at_step(step)
    assert not policy.scheduled
    for name, recipe in expected.items():
        got = policy.resolve(name, "linear").recipes["fprop"]
        assert (got.name if got else None) == recipe
    assert WARM_UP.at_step(step).identity() == policy.identity()


def test_a_schedule_in_a_file(tmp_path: Path) -> None:
    assert Policy.from_dict(json.loads(json.dumps(WARM_UP.to_dict()))) == WARM_UP
    file = tmp_path / "p.toml"
    file.write_text('[[rules]]\npattern = "*"\nrecipe = "high_precision"\nsteps = [0, 100]\n')
    assert Policy.load(file) == Policy([Rule("*", None, steps=(0, 100))])


@in_one_test("steps", [(5, 5), (5, 2), (-1, 4), (0.0, 4), (1, 2, 3), (None, 4), 7, "0-100"])
def test_bad_schedules(steps: Any) -> None:
    with pytest.raises(fp8graph.PolicyError, match="steps must be"):
        Rule("*", None, steps=steps)


@in_one_test("step", [-1, 1.0, None, True])
def test_bad_steps(step: Any) -> None:
    with pytest.raises(fp8graph.PolicyError, match="at_step"):
        WARM_UP.at_step(step)


def test_the_first_steps_in_high_precision_without_a_restart() -> None:
    """Two variants are compiled, however many steps: and the second time around none."""
    policy = Policy([Rule("*", None, steps=(0, 2))], default="tensorwise")
    backend = eager_backend(policy)
    module, x = MLP(), torch.randn(4, 32, requires_grad=True)
    model = torch.compile(module, backend=backend)
    exact = module(x)
    for step in [0, 1, 2, 3, 4, 0, 3]:
        backend.set_policy(policy.at_step(step))
        out = model(x)
        out.sum().backward()
        assert (fp8graph.numerics.sqnr_db(exact, out) > 100) == (step < 2)
    assert len(backend.report.graphs) == 2
