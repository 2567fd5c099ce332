"""fp8graph bench: that it measures and writes; what it measures needs a GPU."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import fp8graph
from fp8graph import hardware, offline
from fp8graph.cli import main
from fp8graph.hardware.speed import RATES, Speed
from fp8graph.tools import bench
from helpers import in_one_test

CPU = torch.device("cpu")


@pytest.fixture
def calibrated() -> list[bench.Calibration]:
    return list(bench.calibrate(CPU, hardware.of_device(CPU), size=64, copy=4096, compiler="eager"))


def test_a_calibration_is_a_target(calibrated: list[bench.Calibration], tmp_path: Path) -> None:
    """At each step: what comes later may end the process."""
    found = hardware.of_device(CPU)
    assert [done.measured[-1] for done in calibrated] == ["tensor", "row"]
    for done in calibrated:
        assert done.speed.rates["mxfp8"] == RATES["mxfp8"]  # not measured: a CPU has no such GEMM
        assert ("row" in done.measured) == (done.speed.rates["row"] != RATES["row"])
        bench.write(tmp_path / "here.json", found, done)
        assert set(json.loads((tmp_path / "here.json").read_text())["speed"]["rates"]) == set(done.measured)
        target, loaded = Speed.load(tmp_path / "here.json")
        assert (target, loaded) == ("cpu", done.speed)
        assert fp8graph.Backend(target=str(tmp_path / "here.json")).settings.hardware.speed == done.speed  # pyright: ignore
        assert bench.describe(done, found).startswith(("cpu (cpu): bf16 ", "rowwise: "))


class Ops(TorchDispatchMode):
    """Counts the ops that a step runs."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return func(*args, **(kwargs or {}))


def test_launches_are_the_difference_of_a_longer_and_a_shorter_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a device where each op takes a microsecond, and nothing else takes any time."""

    def seconds(run: Callable[[], Any], **_: Any) -> float:
        run()
        with Ops() as ops:
            run()
        return 1e-6 * ops.count

    monkeypatch.setattr(bench, "seconds", seconds)
    first = next(bench.calibrate(CPU, hardware.of_device(CPU), size=64, copy=4096, compiler="eager"))
    few, many = (seconds(bench.narrow_step(n, CPU, "eager")) for n in (1, 2))
    assert first.speed.launch == pytest.approx(1e-6)
    assert first.speed.host_launch == pytest.approx((many - few) / bench.LAUNCHES)


@pytest.mark.skipif(not offline.available(), reason="triton is not installed")
def test_each_layer_of_the_timed_step_launches_as_many_kernels_as_are_counted() -> None:
    def kernels(layers: int) -> int:
        model = torch.nn.Sequential(*bench.narrow(layers)).to("meta", torch.bfloat16)
        x = torch.empty(64, 64, dtype=torch.bfloat16, device="meta", requires_grad=True)
        return len(fp8graph.explain(model, x, policy=fp8graph.Policy(default=None), target="sm_90").kernels)

    assert kernels(3) - kernels(2) == bench.LAUNCHES


def test_a_scaling_that_fails_is_left_out(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Its reason is told, the others are kept; and each GEMM accumulates as its recipe says."""
    accumulated: dict[str, bool] = {}

    def scaled_mm(*args: Any, scaling: str, **_settings: Any) -> Tensor:
        accumulated[scaling] = args[6]
        if scaling == "block":
            raise RuntimeError("CUBLAS_STATUS_NOT_SUPPORTED when calling cublasLtMatmulAlgoGetHeuristic\nmore")
        return args[0]

    monkeypatch.setattr(hardware, "scaled_mm", scaled_mm)
    found = dataclasses.replace(hardware.of_device(CPU), scalings=frozenset({"tensor", "row", "block", "nvfp4"}))
    steps = list(bench.calibrate(CPU, found, size=128, copy=4096, compiler="eager"))
    assert [done.measured for done in steps] == [
        ("tensor",),
        ("tensor", "row"),
        ("tensor", "row"),
        ("tensor", "row", "nvfp4"),
    ]
    assert [bench.describe(done, found) for done in steps if done.failed] == [
        "left out: blockwise: CUBLAS_STATUS_NOT_SUPPORTED when calling cublasLtMatmulAlgoGetHeuristic"
    ]
    assert steps[-1].speed.rates["block"] == RATES["block"]
    bench.write(tmp_path / "here.json", found, steps[-1])
    assert Speed.load(tmp_path / "here.json")[1] == steps[-1].speed
    assert accumulated == {"tensor": True, "row": True, "block": False, "nvfp4": False}


@pytest.mark.slow
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
        (["--calibrate", "x.txt"], "x.txt: a calibration file must end in .json"),
    ],
)
def test_errors_are_one_line(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", *arguments]) == 2
    error = capsys.readouterr().err
    assert error.startswith("fp8graph: ")
    assert message in error
    assert error.count("\n") == 1


@in_one_test(
    "change", [{"rates": {"tensor": 1.0}}, {"rates": {**RATES, "row": 0}}, {"launch": "2"}, {"bandwidth": -1.0}]
)
def test_speeds_are_checked(change: dict[str, object]) -> None:
    values: dict[str, object] = {
        "name": "x", "bf16_flops": 1.0, "fp32_flops": 1.0, "fp8_flops": 2.0, "fp4_flops": 2.0, "bandwidth": 1.0,
        "launch": 1e-6,
    }  # fmt: skip
    with pytest.raises(fp8graph.ConfigError, match="a number > 0|give one number"):
        Speed(**(values | change))  # pyright: ignore[reportArgumentType]


@pytest.mark.gpu
def test_a_gpu_is_calibrated() -> None:
    device = bench.fp8_gpu()
    *_, done = bench.calibrate(device, found := hardware.of_device(device))
    speed = done.speed
    assert set(done.measured) == found.scalings
    assert speed.fp8_flops > speed.bf16_flops > speed.fp32_flops
    assert 1e11 < speed.bandwidth < 2e13
