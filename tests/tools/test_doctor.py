"""doctor: which recipe each device multiplies."""

from __future__ import annotations

import pytest

from fp8graph.cli import main


def test_doctor(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor"]) == 0
    out = capsys.readouterr().out
    lines = {line.split("  ")[0]: line for line in out.splitlines()}
    assert lines["recipe"].split() == ["recipe", "cpu", "sm_89", "sm_90", "sm_100", "gfx942", "gfx950"]
    assert lines["tensorwise"].split()[1:] == ["native"] * 6
    assert lines["mxfp8"].split()[1:] == ["emulated", "emulated", "emulated", "native", "emulated", "native"]
    assert lines["tensorwise, experts"].split()[2:] == ["emulated", "emulated", "fprop", "native", *["emulated"] * 3]
    assert out.splitlines()[-1].split()[2:] == [*["tensorwise"] * 3, "mxfp8", *["tensorwise"] * 2]


def test_trainer(capsys: pytest.CaptureFixture[str]) -> None:
    """The words of the error that they search for (tests/integrations/test_transformers.py) are in the line."""
    assert main(["doctor"]) == 0
    (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("Trainer")]
    assert 'torch_compile_backend="fp8graph"' in line
    assert "not a valid DynamoBackend" in line
    assert "fp8graph.compile(model)" in line
