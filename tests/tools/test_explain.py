"""explain on the command line: a family or a config, what stays in high precision and why."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from fp8graph.cli import main


def test_explain_a_family(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "llama", "--seq", "16", "--target", "sm_90"]) == 0
    out = capsys.readouterr().out
    assert "24 of 45 GEMMs in FP8" in out  # 16 tokens: o and the gradients of weights would not be faster
    assert "not faster in FP8: predicted 0.97x, min_speedup is 1.05" in out
    assert main(["explain", "llama", "--seq", "16", "--target", "cpu"]) == 0
    assert "42 of 45 GEMMs in FP8" in capsys.readouterr().out


def test_explain_a_config_with_a_policy(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from fp8graph.models.llama import tiny_config

    tiny_config(1).save_pretrained(tmp_path)
    policy = tmp_path / "policy.toml"
    policy.write_text('[[rules]]\npattern = "*.down_proj"\nrecipe = "high_precision"\n')
    arguments = ["explain", str(tmp_path), "--inference", "--policy", str(policy), "--json"]
    assert main(arguments) == 0
    gemms = json.loads(capsys.readouterr().out)["graphs"][0]["gemms"]
    assert {g["fqn"] for g in gemms if g["recipe"] is None} == {"model.layers.0.mlp.down_proj"}
    assert main(["explain", str(tmp_path), "--inference", "--graph", "after"]) == 0
    assert "fp8graph.scaled_mm(" in capsys.readouterr().out
    assert main(["explain", str(tmp_path), "--inference", "--html", str(tmp_path / "r.html")]) == 0
    assert (tmp_path / "r.html").exists()
