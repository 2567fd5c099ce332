"""The result of tune: its text, its file, its picture."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

from fp8graph import Float8BlockScaling, Policy, Rule
from fp8graph.extras.planning.tune import CurvePoint, Score, Tuned


def made_up(policy: Policy) -> Tuned:
    score = Score(
        site="up",
        op="linear",
        group="up",
        gemm="fprop",
        candidate=0,
        recipe="tensorwise",
        measured=1e-9,
        error=0.25,
        seconds=1e-5,
        high_precision_seconds=2e-5,
    )
    high, fast = CurvePoint(error=0, speedup=1), CurvePoint(error=1, speedup=1.5)
    return Tuned(
        policy=policy,
        scores=(score,),
        curve=(high, fast),
        chosen=high,
        uniform={"tensorwise": fast},
        target="sm_90",
        left_out=("experts: a reason",),
    )


def test_its_text() -> None:
    text = str(made_up(Policy([Rule("up", None)], extends="default")))
    assert "GEMMs 1.000 times as fast as in bf16, with 0.0% of the error" in text
    assert "tensorwise everywhere: 1.500 times, 100.0%" in text
    assert "up fprop: tensorwise 25.00%" in text
    assert "not measured: experts: a reason" in text


def test_its_file(tmp_path: Path) -> None:
    rules = [
        Rule('a "quoted" name', "rowwise", wgrad=None),
        Rule(re.compile(r"layers\.(0|1)\.up"), None, steps=(0, 5)),
        Rule("*", Float8BlockScaling(power_2_scale=False), op="matmul", optional=True),
    ]
    policy = Policy(rules, default="tensorwise", extends="default", keep_heads=True)
    made_up(policy).save(tmp_path / "policy.toml")
    assert Policy.load(tmp_path / "policy.toml") == policy


def test_its_picture(tmp_path: Path) -> None:
    made_up(Policy()).plot(tmp_path / "curve.png")
    assert (tmp_path / "curve.png").read_bytes().startswith(b"\x89PNG")


def test_layers_that_are_decided_together_add_up_their_errors() -> None:
    tuned = made_up(Policy())
    (score,) = tuned.scores
    two = dataclasses.replace(tuned, scores=(score, dataclasses.replace(score, site="gate", error=0.5)))
    assert "up fprop: tensorwise 75.00%" in str(two)
