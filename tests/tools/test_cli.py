"""The command line, as a stranger meets it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from fp8graph.cli import main
from fp8graph.tools.demo import LAST, run_demo, verdict


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


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["explain", "nosuch"], "cannot build a causal language model from 'nosuch'"),
        (["explain", "llama", "--policy", "nosuch.toml"], "policy file nosuch.toml: cannot be read"),
        (["explain", "llama", "--recipe", "nosuch"], "unknown recipe 'nosuch'"),
        (["explain", "llama", "--target", "h100"], "target must be 'cpu', like 'sm_90', or a calibration FILE.json"),
        (["explain", "llama", "--seq", "16", "--graph", "nosuch"], "no stage 'nosuch'. Stages: before, after, unpack"),
        (["demo", "--recipe", "nosuch"], "unknown recipe 'nosuch'"),
    ],
)
def test_errors_are_one_line(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == 2
    error = capsys.readouterr().err
    assert message in error
    assert len(error.splitlines()) == 1


def test_a_missing_extra(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def missing(*_: Any) -> None:
        raise ModuleNotFoundError("No module named 'rich'", name="rich")

    monkeypatch.setattr("fp8graph.cli._demo", missing)
    assert main(["demo"]) == 2
    assert 'rich is missing. Run: pip install "fp8graph[demo]"' in capsys.readouterr().err


def test_ctrl_c(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("fp8graph.cli._doctor", interrupted)
    assert main(["doctor"]) == 130
    assert capsys.readouterr().err == "\nfp8graph: interrupted\n"


def test_doctor(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor"]) == 0
    out = capsys.readouterr().out
    lines = {line.split("  ")[0]: line for line in out.splitlines()}
    assert lines["recipe"].split() == ["recipe", "cpu", "sm_89", "sm_90", "sm_100"]
    assert lines["tensorwise"].split()[1:] == ["native"] * 4
    assert lines["mxfp8"].split()[1:] == ["emulated", "emulated", "emulated", "native"]
    assert lines["tensorwise, experts"].split()[2:] == ["emulated", "emulated", "fprop", "native", "emulated"]
    assert out.splitlines()[-1].split()[2:] == ["tensorwise", "tensorwise", "tensorwise", "mxfp8"]


@pytest.mark.parametrize("arguments", [[], ["nosuch"], ["demo", "--steps", "0"], ["demo", "--compiler", "x"]])
def test_wrong_arguments(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(arguments)
    assert "usage: fp8graph" in capsys.readouterr().err


def test_the_verdict() -> None:
    ones = [9.0] * 5 + [1.0] * LAST
    assert verdict(ones, ones) == (0.0, True)
    difference, good = verdict(ones, [1.021] * 30)
    assert (round(difference, 3), good) == (0.021, False)
    assert verdict(ones, [0.985] * 30)[1]


@pytest.mark.parametrize(("good", "code"), [(True, 0), pytest.param(False, 1, marks=pytest.mark.slow)])
def test_demo_in_short(good: bool, code: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    done = run_demo(steps=3, seed=0, recipe="tensorwise", compiler="eager", out=tmp_path, judge=lambda *_: (0.0, good))
    out = capsys.readouterr().out
    assert done == code
    assert "42 of 45 GEMMs in FP8" in out
    assert "SQNR" in out
    assert (tmp_path / "loss.png").stat().st_size > 10_000
