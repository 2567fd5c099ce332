"""The numbers of the generated GPU code, executed on the CPU: bit for bit those of the reference."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from fp8graph import offline

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
@pytest.mark.skipif(not offline.available(), reason="triton is not installed")
@pytest.mark.skipif(torch.__version__ < "2.13", reason="triton 3.6's interpreter fails with numpy 2.4")
def test_generated_kernels_compute_the_reference() -> None:
    """Every recipe, behind a norm, SwiGLU and nothing, one layout and both; zeros, saturation, all magnitudes.

    All of it with a ragged end of rows and columns; with whole tiles both layouts at once, which is one of them too.

    Precision casts are emulated: else Inductor casts the producer's FP32 value (``numerics`` says what that changes).
    What the interpreter cannot see: races, FMA contraction, and approximate division, which test_kernels.py excludes.
    """
    path = os.pathsep.join(map(str, (ROOT / "tests" / "support", ROOT, os.environ.get("PYTHONPATH", ""))))
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "interpreted"],
        env={**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    cases = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(cases) == 45 + 24 + 4
    assert all(case["outputs"] >= 2 for case in cases)
    assert [case["case"] for case in cases if case["different"]] == []
