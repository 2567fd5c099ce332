"""speed: what a GPU does per second, from data sheets, by name or measured."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import fp8graph
from fp8graph import Policy, hardware
from fp8graph.hardware.nvidia import BOARDS
from fp8graph.hardware.speed import RATES, Speed, gemm_seconds, of_data_sheet, of_device_name
from fp8graph.numerics.scalings import SCALINGS
from helpers import in_one_test
from predicted import H200

SPEED = {
    "name": "measured", "bf16_flops": 7e14, "fp32_flops": 5e13, "fp8_flops": 7.1e14, "fp4_flops": 1e15,
    "bandwidth": 4e12, "launch": 2e-6,
}  # fmt: skip


def written(path: Path, **speed: Any) -> str:
    path.write_text(json.dumps({"target": "sm_90", "speed": SPEED | speed}))
    return str(path)


def test_a_measured_table_takes_the_place_of_the_constants(tmp_path: Path) -> None:
    path = written(tmp_path / "slow.json")
    assert hardware.from_target(path).speed == Speed(**SPEED)  # pyright: ignore[reportArgumentType]
    model = nn.Linear(4096, 4096, bias=False, device="meta", dtype=torch.bfloat16)
    x = torch.empty(8192, 4096, device="meta", dtype=torch.bfloat16, requires_grad=True)
    report = fp8graph.explain(model, x, policy=Policy(default="tensorwise", min_speedup=1.0), target=path)
    assert not any(g.recipe for g in report.gemms)


def test_a_rate_that_was_not_measured_is_the_constant(tmp_path: Path) -> None:
    _, speed = Speed.load(written(tmp_path / "some.json", rates={"tensor": 1.0, "row": 0.7}))
    assert speed.rates == {**RATES, "row": 0.7}
    _, speed = Speed.load(written(tmp_path / "graphs.json", host_launch=0))
    assert speed.host_launch == 0
    with pytest.raises(fp8graph.ConfigError, match="give one number for each of tensor"):
        Speed.load(written(tmp_path / "unknown.json", rates={"rowise": 0.9}))


def test_a_key_that_there_is_not(tmp_path: Path) -> None:
    with pytest.raises(fp8graph.ConfigError, match=r"has no key 'bandwith'. Did you mean 'bandwidth'\?"):
        Speed.load(written(tmp_path / "typo.json", bandwith=4e12))
    (tmp_path / "short.json").write_text('{"target": "sm_90", "speed": {"name": "x", "launch": 2e-6}}')
    with pytest.raises(fp8graph.ConfigError, match=r'"speed" has no bf16_flops, .*, bandwidth\.$'):
        Speed.load(tmp_path / "short.json")


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        '{"target": "sm_90"}',
        '{"target": "sm_90", "speed": {"name": "x"}}',
        '{"target": "sm_90", "speed": {"name": "x", "rates": 1}}',
        '{"target": "sm_90", "speed": 1}',
        None,
    ],
)
def test_a_bad_table(tmp_path: Path, text: str | None) -> None:
    path = tmp_path / "bad.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(fp8graph.ConfigError, match=r"bad\.json: not a calibration"):
        fp8graph.Backend(target=str(path))


@in_one_test(
    ("target", "device_name", "board"),
    [
        ("sm_90", "", "H100"),
        ("sm_90", "NVIDIA H100 80GB HBM3", "H100"),
        ("sm_90", "NVIDIA H100 PCIe", "H100 PCIe"),
        ("sm_90", "NVIDIA H100 NVL", "H100 NVL"),
        ("sm_90", "NVIDIA H800", "H800"),
        ("sm_90", "NVIDIA H20", "H20"),
        ("sm_90", "NVIDIA H200", "H200"),
        ("sm_90", "NVIDIA H200 NVL", "H200 NVL"),
        ("sm_90", "NVIDIA GH200 480GB", "GH200"),
        ("sm_90a", "NVIDIA of tomorrow", "H100"),
        ("sm_89", "NVIDIA L4", "L4"),
        ("sm_89", "NVIDIA L40", "L40"),
        ("sm_89", "NVIDIA L40S", "L40S"),
        ("sm_89", "NVIDIA GeForce RTX 4090", "RTX 4090"),
        ("sm_89", "NVIDIA GeForce RTX 4090 Laptop GPU", "L40S"),
        ("sm_89", "NVIDIA RTX 6000 Ada Generation", "L40S"),
        ("sm_100", "NVIDIA B200", "B200"),
        ("sm_100", "NVIDIA GB200", "GB200"),
        ("sm_103", "NVIDIA B300 SXM6 AC", "B300"),
        ("sm_103", "NVIDIA GB300", "GB300"),
        ("sm_103", "", "B300"),
        ("sm_120", "NVIDIA GeForce RTX 5090", "RTX 5090"),
        ("sm_120", "NVIDIA GeForce RTX 5070", "RTX 5070"),
        ("sm_120", "NVIDIA GeForce RTX 5070 Ti", "RTX 5070 Ti"),
        ("sm_120", "NVIDIA GeForce RTX 5060 Ti", "RTX 5060 Ti"),
        ("sm_120", "NVIDIA GeForce RTX 5060", "RTX 5060"),
        ("sm_120", "NVIDIA RTX PRO 6000 Blackwell Workstation Edition", "RTX PRO 6000 Blackwell"),
        ("sm_120", "NVIDIA RTX PRO 6000 Blackwell Max-Q Workstation Edition", "RTX PRO 6000 Blackwell Max-Q"),
        ("sm_120", "NVIDIA RTX PRO 5000 Blackwell", "RTX PRO 5000 Blackwell"),
        ("sm_120a", "NVIDIA GeForce RTX 5090 Laptop GPU", "RTX 5090"),
        ("sm_121", "NVIDIA GB10", "GB10"),
        ("sm_121", "", "GB10"),
        ("sm_80", "NVIDIA A100-SXM4-80GB", None),
        ("cpu", "", None),
    ],
)
def test_which_gpu(target: str, device_name: str, board: str | None) -> None:
    assert hardware.from_target(target, device_name).speed == (BOARDS[board] if board else None)


def test_rates_of_a_data_sheet() -> None:
    speed = of_data_sheet("X", bf16=1000, fp8=2000, fp4=4000, fp32=50, bandwidth=3)
    assert (speed.bf16_flops, speed.fp8_flops, speed.fp4_flops) == (8e14, 1.36e15, 2.72e15)
    assert (speed.fp32_flops, speed.bandwidth) == (4e13, 2.7e12)


def test_a_data_sheet_with_another_rate_for_mxfp8() -> None:
    speed = of_data_sheet("X", bf16=100, fp8=200, fp4=800, fp32=50, bandwidth=1, mxfp8=400)
    assert speed.low_precision_flops(SCALINGS["mxfp8"]) == pytest.approx(2 * RATES["mxfp8"] * speed.fp8_flops)
    assert {name: rate for name, rate in speed.rates.items() if name != "mxfp8"} == {
        name: rate for name, rate in RATES.items() if name != "mxfp8"
    }


GEFORCE = [name for name in BOARDS if name.startswith("RTX 50")]


@in_one_test("board", [*GEFORCE, *(name for name in BOARDS if "PRO" in name), "GB10"])
def test_rates_of_blackwell_outside_of_data_centers(board: str) -> None:
    """GeForce halves what accumulates in FP32, bf16 and plain FP8, but no block-scaled product; other cards do not."""
    speed = BOARDS[board]
    per_tensor, mxfp8 = (speed.low_precision_flops(SCALINGS[name]) for name in ("tensor", "mxfp8"))
    halved = 2 if board in GEFORCE else 1
    assert mxfp8 / (RATES["mxfp8"] * per_tensor) == pytest.approx(halved, rel=0.02)
    assert per_tensor / speed.bf16_flops == pytest.approx(0.68 / 0.80 * 2, rel=0.02)
    assert speed.fp4_flops / (mxfp8 / RATES["mxfp8"]) == pytest.approx(2, rel=0.02)


def test_mxfp8_on_an_rtx_5060_ti_is_as_fast_as_it_was_measured() -> None:
    """ao#4932: 542 us in place of 1,674 us in bf16, [4096, 3072] @ [3072, 3072], torch 2.14.0 with CUDA 13.0."""
    speed = BOARDS["RTX 5060 Ti"]
    bf16, mxfp8 = (gemm_seconds(speed, 4096, 3072, 3072, torch.bfloat16, kind) for kind in (None, "mxfp8"))
    assert bf16 == pytest.approx(1674e-6, rel=0.25)
    assert bf16 / mxfp8 == pytest.approx(1674 / 542, rel=0.15)


def test_the_first_board_that_is_named_else_the_typical_one() -> None:
    boards = {"L40S": BOARDS["L40S"], "L4": BOARDS["L4"]}
    assert of_device_name("NVIDIA L4", boards, "L40S") is BOARDS["L4"]
    assert of_device_name("NVIDIA L400", boards, "L40S") is BOARDS["L40S"]  # whole words
    assert of_device_name("NVIDIA L4 Laptop GPU", boards, "L40S") is BOARDS["L40S"]
    assert of_device_name("something", boards, None) is None


def test_low_precision_rates_are_those_of_the_scaling() -> None:
    speed = dataclasses.replace(H200, rates={**RATES, "row": 0.5}, fp4_flops=4e15)
    assert speed.low_precision_flops(SCALINGS["row"]) == 0.5 * speed.fp8_flops
    assert speed.low_precision_flops(SCALINGS["nvfp4"]) == RATES["nvfp4"] * 4e15
    assert speed.replayed().host_launch == 0


@in_one_test(
    ("wrong", "message"),
    [
        ({"bandwidth": 0}, "bandwidth=0"),
        ({"fp8_flops": "1e15"}, "fp8_flops='1e15'"),
        ({"launch": True}, "launch=True"),
        ({"host_launch": -1}, "host_launch=-1"),
        ({"bf16_flops": float("nan")}, "bf16_flops=nan"),
        ({"rates": {**RATES, "row": 0}}, "row=0"),
        ({"rates": {"row": 1.0}}, "give one number for each of tensor"),
    ],
)
def test_invalid_speeds_are_refused(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(fp8graph.ConfigError, match=message):
        dataclasses.replace(H200, **wrong)


def test_rates_of_an_h200() -> None:
    """Measured of one: 769 to 798 TFLOP/s in bf16, copies at 4.3 TB/s; in FP8 1.70 times as many."""
    assert 769e12 < H200.bf16_flops < 798e12
    assert H200.bandwidth == pytest.approx(4.3e12, rel=0.01)
    assert H200.fp8_flops / H200.bf16_flops == pytest.approx(1.70, abs=0.005)
