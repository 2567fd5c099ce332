"""The command line, as a stranger meets it."""

from __future__ import annotations

from typing import Any

import pytest

from fp8graph.cli import main


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["explain", "nosuch"], "cannot build a causal language model from 'nosuch'"),
        (["explain", "llama", "--policy", "nosuch.toml"], "policy file nosuch.toml: cannot be read"),
        (["explain", "llama", "--recipe", "nosuch"], "unknown recipe 'nosuch'"),
        (
            ["explain", "llama", "--target", "h100"],
            "target must be 'cpu', a GPU like 'sm_90' or 'gfx942', or a calib",
        ),
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


@pytest.mark.parametrize("arguments", [[], ["nosuch"], ["demo", "--steps", "0"], ["demo", "--compiler", "x"]])
def test_wrong_arguments(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(arguments)
    assert "usage: fp8graph" in capsys.readouterr().err
