"""The numbers of the generated GPU code, executed on the CPU: bit for bit those of the reference."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from fp8graph import offline
from helpers import first_slow

ROOT = Path(__file__).parents[2]


@first_slow(("cases", "count"), [("some", 3 + 7 + 5 + 5), ("all", 45 + 24 + 5 + 5)])
@pytest.mark.skipif(not offline.available(), reason="triton is not installed")
@pytest.mark.skipif(torch.__version__ < "2.13", reason="triton 3.6's interpreter fails with numpy 2.4")
def test_generated_kernels_compute_the_reference(cases: str, count: int) -> None:
    """Every recipe, behind a norm; zeros, saturation, all magnitudes, a ragged end of rows and columns.

    In all cases: behind a norm, SwiGLU and nothing, one layout and both, with a ragged end; and with whole tiles both
    layouts at once. The blocks of large tensors, which are in their code, are tried on small ones.

    Precision casts are emulated: else Inductor casts the producer's FP32 value (``numerics`` says what that changes).
    What the interpreter cannot see: races, FMA contraction, and approximate division, which test_kernels.py excludes.
    """
    found = interpreted(cases)
    assert len(found) == count
    assert all(case["outputs"] >= 2 for case in found)
    assert [case["case"] for case in found if case["different"]] == []


@pytest.mark.slow
@pytest.mark.skipif(not offline.available(), reason="triton is not installed")
@pytest.mark.skipif(torch.__version__ < "2.13", reason="triton 3.6's interpreter fails with numpy 2.4")
def test_a_layer_of_experts_computes_its_emulation() -> None:
    """Forward and backward on sm_100, an expert without tokens included, scales where torch's kernel reads them."""
    found = interpreted("experts")
    assert [each.pop("case") for each in found] == ["mxfp8", "nvfp4"]
    assert found == [{"sizes": [10, 0, 37, 3], "outputs": 4, "different": 0}] * 2


@pytest.mark.slow
@pytest.mark.skipif(not offline.available(), reason="triton is not installed")
@pytest.mark.skipif(torch.__version__ < "2.13", reason="triton 3.6's interpreter fails with numpy 2.4")
def test_block_scales_on_sm_120_compute_the_reference() -> None:
    """MXFP8 behind what makes it, and NVFP4: transforms and random bits, which come from no instruction of sm_120."""
    found = interpreted("cards")
    assert len(found) == 2 * (6 + 3)
    assert [case["outputs"] for case in found if "nvfp4" in case["case"]] == [6] * 6
    assert [case["case"][-1] for case in found if "grad_output" in case["case"]] == [True, True]
    assert [case["case"] for case in found if case["different"]] == []


@pytest.mark.slow
@pytest.mark.skipif(not offline.available(), reason="triton is not installed")
@pytest.mark.skipif(torch.__version__ < "2.13", reason="triton 3.6's interpreter fails with numpy 2.4")
def test_the_kernel_of_tiles_computes_the_reference() -> None:
    """Every function, each kind of scales, both orders of them; scales of amaxes of every exponent."""
    found = interpreted("tiles")
    assert len(found) == 9 + 4
    assert sum(case["outputs"] for case in found[:9]) == 7 * 4 + 3 + 5
    assert [case["case"] for case in found if case["different"]] == []


def interpreted(cases: str) -> list[dict[str, Any]]:
    path = os.pathsep.join(map(str, (ROOT / "tests" / "support", ROOT, os.environ.get("PYTHONPATH", ""))))
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "interpreted", cases],
        env={**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return [json.loads(line) for line in done.stdout.splitlines()]
