"""fp8graph bench: that it measures and writes; what it measures needs a GPU."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

import fp8graph
from fp8graph import bench, compat, hardware
from fp8graph.cli import main
from fp8graph.roofline import RATES, Speed

CPU = torch.device("cpu")


def test_a_calibration_is_a_target(tmp_path: Path) -> None:
    found = hardware.of_device(CPU)
    speed = bench.calibrate(CPU, found, size=64, copy=4096)
    assert speed.rates["mxfp8"] == RATES["mxfp8"]  # not measured: a CPU has no such GEMM
    assert ("row" in compat.CPU_SCALINGS) == (speed.rates["row"] != RATES["row"])
    bench.write(tmp_path / "here.json", found, speed)
    target, loaded = Speed.load(tmp_path / "here.json")
    assert (target, loaded) == ("cpu", speed)
    assert fp8graph.Backend(target=str(tmp_path / "here.json")).hardware.speed == speed  # pyright: ignore


def test_linears() -> None:
    (result,) = bench.linears(CPU, ["tensorwise"], [(16, 32, 48)], rounds=1)
    assert (result.tokens, result.inputs, result.outputs, result.recipe) == (16, 32, 48, "tensorwise")
    assert min(result.bf16_ms, result.fp8_ms, result.speedup) > 0
    assert math.isnan(result.predicted)  # there is no speed to win here


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "nothing to measure: cpu has no fast FP8 GEMM"),
        (["--calibrate", "x.json"], "nothing to measure"),
        (["--calibrate", "x.txt"], "x.txt: a target is told from a file by its ending"),
        (["--recipe", "rowise"], "rowise"),
    ],
)
def test_errors_are_one_line(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", *arguments]) == 2
    error = capsys.readouterr().err
    assert error.startswith("fp8graph: ")
    assert message in error
    assert error.count("\n") == 1


@pytest.mark.parametrize(
    "change", [{"rates": {"tensor": 1.0}}, {"rates": {**RATES, "row": 0}}, {"launch": "2"}, {"bandwidth": -1.0}]
)
def test_speeds_are_checked(change: dict[str, object]) -> None:
    values: dict[str, object] = {
        "name": "x", "bf16_flops": 1.0, "fp32_flops": 1.0, "fp8_flops": 2.0, "fp4_flops": 2.0, "bandwidth": 1.0,
        "launch": 1e-6,
    }  # fmt: skip
    with pytest.raises(fp8graph.PolicyError, match="a number > 0|one number is needed"):
        Speed(**(values | change))  # pyright: ignore[reportArgumentType]


@pytest.mark.gpu
def test_a_gpu_is_calibrated() -> None:
    device = bench.fp8_gpu()
    speed = bench.calibrate(device, hardware.of_device(device))
    assert speed.fp8_flops > speed.bf16_flops > speed.fp32_flops
    assert 1e11 < speed.bandwidth < 2e13
