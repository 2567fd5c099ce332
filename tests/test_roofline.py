"""The speed model: where FP8 cannot win it is not used, and the report says so."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import fp8graph
from fp8graph import hardware
from fp8graph.policy import Policy, Rule
from fp8graph.roofline import B200, H100, H200, L40S, Operand, Speed, predicted_speedup

BF16 = torch.bfloat16


def speedup(m: int, n: int, k: int, scaling: Any = "tensor", speed: Speed = H200, **weight: Any) -> float:
    operands = Operand(elements=m * k), Operand(elements=n * k, **{"kept": True, **weight})
    return predicted_speedup(speed, m, n, k, BF16, scaling, operands)


def test_more_rows_pay_more() -> None:
    rising = [speedup(m, 4096, 4096) for m in (256, 1024, 4096, 16384)]
    assert rising == sorted(rising)
    assert speedup(16384, 14336, 4096) > 1.7
    assert speedup(64, 1024, 1024) < 1.0  # the passes that quantize cost more than the GEMM


def test_nothing_is_faster_than_the_hardware() -> None:
    for speed in (L40S, H100, H200, B200):
        limit = max(speed.fp8_flops / speed.bf16_flops, 2.0)  # arithmetic, or operands half as wide
        assert all(speedup(m, n, n, "delayed", speed) <= limit for m in (16, 512, 16384) for n in (1024, 8192))


def test_what_quantization_costs() -> None:
    assert speedup(8192, 4096, 4096, "delayed") > speedup(8192, 4096, 4096, "tensor")  # a pass for the amax
    assert speedup(64, 4096, 4096) > speedup(64, 4096, 4096, kept=False)  # a weight that is not kept
    assert speedup(64, 4096, 4096, kept=False) < 1.0
    shared = Operand(elements=512 * 4096, users=3), Operand(elements=4096 * 4096, kept=True)
    assert predicted_speedup(H200, 512, 4096, 4096, BF16, "tensor", shared) > speedup(512, 4096, 4096)


def explain(m: int, min_speedup: float, target: str | None = "sm_90", **settings: Any) -> fp8graph.Report:
    model = nn.Linear(4096, 4096, bias=False, device="meta", dtype=BF16)
    x = torch.empty(m, 4096, device="meta", dtype=BF16, requires_grad=True)
    policy = Policy([Rule("*", "tensorwise")], min_speedup=min_speedup)
    return fp8graph.explain(model, x, policy=policy, target=target, **settings)


def test_large_gemms_are_rewritten_and_small_ones_are_not() -> None:
    large, small = explain(8192, 1.0).gemms, explain(64, 1.0).gemms
    assert all(g.recipe and g.speedup and g.speedup > 1.5 and f"predicted {g.speedup:.2f}x" in g.reason for g in large)
    left = [g for g in small if g.recipe is None]
    assert {g.gemm for g in left} >= {"wgrad"}
    for gemm in left:
        assert gemm.by_profitability
        assert gemm.speedup is not None
        assert gemm.speedup < 1.0
        predicted = f"not faster in FP8: predicted {gemm.speedup:.2f}x, min_speedup is 1 "
        assert gemm.reason.startswith(predicted + "(")


def test_the_bar_is_the_users() -> None:
    assert all(g.recipe for g in explain(64, 0.0).gemms)
    assert not any(g.recipe for g in explain(8192, 3.0).gemms)


def test_what_is_left_for_speed_does_not_fail_the_check() -> None:
    """The rule names it: profitability is the one excuse."""
    report = explain(8192, 3.0)
    assert all(g.required for g in report.gemms)
    report.check()


@pytest.mark.parametrize("target", [None, "cpu", "sm_80"])
def test_where_there_is_no_speed_to_win_everything_legal_is_rewritten(target: str | None) -> None:
    report = explain(16, 5.0, target)
    assert all(g.recipe and g.speedup is None for g in report.gemms)
    expected = {"emulated"} if target == "sm_80" else {"native"}
    assert {g.execution for g in report.gemms} == expected


def test_a_dynamic_size_counts_as_it_was_traced() -> None:
    model = nn.Linear(4096, 4096, bias=False).to(BF16)
    policy = Policy([Rule("*", "tensorwise")])
    backend = fp8graph.Backend(policy, compiler="eager", target="sm_90")
    with torch.no_grad():
        torch.compile(model, backend=backend, dynamic=True)(torch.randn(32, 4096, dtype=BF16))
    (gemm,) = backend.report.gemms
    assert isinstance(gemm.m, str)
    assert gemm.speedup is not None


def test_a_measured_table_takes_the_place_of_the_constants(tmp_path: Path) -> None:
    path = tmp_path / "slow.json"
    speed = {
        "name": "measured", "bf16_flops": 7e14, "fp32_flops": 5e13, "fp8_flops": 7.1e14, "fp4_flops": 1e15,
        "bandwidth": 4e12, "launch": 2e-6,
    }  # fmt: skip
    path.write_text(json.dumps({"target": "sm_90", "speed": speed}))
    assert hardware.from_target(str(path)).speed == Speed(**speed)  # pyright: ignore[reportArgumentType]
    assert not any(g.recipe for g in explain(8192, 1.0, str(path)).gemms)


@pytest.mark.parametrize("text", ["", "[]", '{"target": "sm_90"}', '{"target": "sm_90", "speed": {"name": "x"}}', None])
def test_a_bad_table(tmp_path: Path, text: str | None) -> None:
    path = tmp_path / "bad.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(fp8graph.PolicyError, match=r"bad\.json: not a calibration"):
        fp8graph.Backend(target=str(path))


def test_which_gpu() -> None:
    assert hardware.from_target("sm_90").speed == H100
    assert hardware.from_target("sm_90", "NVIDIA H200").speed == H200
    assert hardware.from_target("sm_100").speed == B200
    assert hardware.from_target("sm_80").speed is None
    assert hardware.from_target("cpu").speed is None
