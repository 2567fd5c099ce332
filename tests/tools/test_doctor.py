"""doctor: which recipe each device multiplies."""

from __future__ import annotations

import pytest

from fp8graph.cli import main


def test_doctor(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor"]) == 0
    out = capsys.readouterr().out
    lines = {line.split("  ")[0]: line for line in out.splitlines()}
    assert lines["recipe"].split() == ["recipe", "cpu", "sm_89", "sm_90", "sm_100"]
    assert lines["tensorwise"].split()[1:] == ["native"] * 4
    assert lines["mxfp8"].split()[1:] == ["emulated", "emulated", "emulated", "native"]
    assert lines["tensorwise, experts"].split()[2:] == ["emulated", "emulated", "fprop", "native", "emulated"]
    assert out.splitlines()[-1].split()[2:] == ["tensorwise", "tensorwise", "tensorwise", "mxfp8"]
