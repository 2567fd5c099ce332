"""The demo: its verdict, and a run of three steps."""

from __future__ import annotations

from pathlib import Path

import pytest

from fp8graph.tools.demo import LAST, run_demo, verdict


def test_the_verdict() -> None:
    ones = [9.0] * 5 + [1.0] * LAST
    assert verdict(ones, ones) == (0.0, True)
    difference, good = verdict(ones, [1.021] * 30)
    assert (round(difference, 3), good) == (0.021, False)
    assert verdict(ones, [0.985] * 30)[1]


@pytest.mark.slow
@pytest.mark.parametrize(("good", "code"), [(True, 0), pytest.param(False, 1, marks=pytest.mark.release)])
def test_demo_in_short(good: bool, code: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    done = run_demo(steps=3, seed=0, recipe="tensorwise", compiler="eager", out=tmp_path, judge=lambda *_: (0.0, good))
    out = capsys.readouterr().out
    assert done == code
    assert "42 of 45 GEMMs in FP8" in out
    assert "SQNR" in out
    assert (tmp_path / "loss.png").stat().st_size > 10_000
