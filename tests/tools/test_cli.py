"""The command line, as a stranger meets it."""

from __future__ import annotations

from typing import Any

import pytest

import fp8graph
from fp8graph.cli import main


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["explain", "nosuch"], "no file or folder 'nosuch', and transformers"),
        (["explain", "lama"], "no model type 'lama'. Did you mean 'llama'?"),
        (["explain", "nosuch.json"], "nosuch.json: no such file or folder."),
        (["explain", "folder/nosuch"], "folder/nosuch: no such file or folder."),
        (["explain", "llama", "--class", "NoSuch"], "has no class 'NoSuch'"),
        (["explain", "llama", "--class", "AutoModelForImageClassification"], "cannot build AutoModelForImageClass"),
        (["explain", "t5", "--mesh", "dp=2"], "--mesh predicts causal language models, and T5ForConditionalGeneration"),
        (["explain", "llama", "--target", "sm_999"], "target: there is no 'sm_999'. Known: sm_70, "),
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
    error = capsys.readouterr().err.splitlines()
    assert message in error[-1]
    assert len(error[-1]) < 400
    assert all("cut to 2 layers" in line for line in error[:-1])


@pytest.mark.parametrize(("package", "extra"), [("rich", "demo"), ("transformers", "hf")])
def test_a_missing_extra(
    package: str, extra: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def missing(*_: Any) -> None:
        raise ModuleNotFoundError(f"No module named {package!r}", name=package)

    monkeypatch.setattr("fp8graph.cli._demo", missing)
    assert main(["demo"]) == 2
    assert f'{package} is missing. Run: pip install "fp8graph[{extra}]"' in capsys.readouterr().err


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        main(["--version"])
    assert capsys.readouterr().out == f"fp8graph {fp8graph.__version__}\n"


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
