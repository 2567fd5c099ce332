"""The speed model: where FP8 cannot win it is not used, and the report says so."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch
from torch import nn

import fp8graph
from fp8graph.hardware.nvidia import BOARDS
from fp8graph.hardware.speed import Operand, Speed, gemm_launches, gemm_seconds, launches_are_replayed
from fp8graph.passes.assign.profit import Uses, judge
from fp8graph.recipes import Layout
from fp8graph.recipes.policy import Policy
from fp8graph.recipes.rules import Rule
from helpers import in_one_test
from predicted import BF16, H200, REPLAYED, linear, speedups

H100 = BOARDS["H100"]
BOTH: frozenset[Layout] = frozenset({"rowwise", "columnwise"})


def together(m: int, k: int, n: int, speed: Speed) -> float:
    """Of fprop, dgrad and wgrad with one scale per tensor, weights quantized too: what a step gains."""
    choices = list(linear(m, k, n, "tensor", speed, kept=False).values())
    return sum(c.seconds() for c in choices) / sum(c.fp8_seconds(Uses(choices)) for c in choices)


# ---- one GEMM


def test_more_rows_pay_more() -> None:
    rising = [speedups(m, 4096, 4096, speed=REPLAYED, training=False)["fprop"] for m in (256, 1024, 4096, 16384)]
    assert rising == sorted(rising)
    assert 1.4 < rising[-1] < 1.7
    assert speedups(64, 1024, 1024, speed=REPLAYED)["fprop"] < 1.0  # what quantizes costs more than the GEMM


@in_one_test("name", BOARDS)
def test_nothing_is_faster_than_the_hardware(name: str) -> None:
    speed = BOARDS[name].replayed()
    limit = max(speed.fp8_flops / speed.bf16_flops, 2.0)  # arithmetic, or operands half as wide
    for m, n in ((16, 1024), (512, 8192), (16384, 8192)):
        assert speedups(m, n, n, "delayed", speed, training=False)["fprop"] <= limit


def seconds(speed: Speed, m: int, scaling: Any, **operand: Any) -> float:
    x = Operand(elements=m * 4096, **operand)
    return gemm_seconds(speed, m, 4096, 4096, BF16, scaling, (x, Operand(elements=4096 * 4096, kept=True)))


def cost(scaling: Any, **operand: Any) -> float:
    """The bytes per element that the quantization of x moves; launches aside."""
    at_once = dataclasses.replace(REPLAYED, launch=1e-30)
    spent = seconds(at_once, 8192, scaling, **operand) - seconds(at_once, 8192, scaling, kept=True)
    return spent * at_once.bandwidth / (8192 * 4096)


def test_quantization_cost_in_passes_over_the_tensor() -> None:
    assert cost("delayed") == pytest.approx(1)  # the FP8 copy
    assert cost("delayed", layouts=BOTH) == pytest.approx(2)
    assert cost("delayed", layouts=BOTH, users=2) == pytest.approx(1)
    assert cost("delayed", fused=False) == pytest.approx(3)  # nothing makes it in the graph: it is read
    assert cost("tensor") == pytest.approx(3)  # and once more, for the amax
    assert cost("row") == pytest.approx(1)  # the amax of a row is at hand where the row is
    assert cost("row", layouts=BOTH) == pytest.approx(4)  # that of a column is not
    assert cost("mxfp8", layouts=BOTH) == pytest.approx(4)
    assert cost("tensor", kept=True) == pytest.approx(0)
    assert cost("delayed", fused=False, layouts=BOTH) == pytest.approx(4)
    assert cost("delayed", fused=False, layouts=BOTH, again=True) == pytest.approx(6)  # read once more, in backward
    assert cost("delayed", fused=False, again=True) == pytest.approx(3)  # that needs no other layout
    assert cost("mxfp8", layouts=BOTH, again=True) == cost("mxfp8", layouts=BOTH)  # it was read twice before


def test_launches_are_counted() -> None:
    """The host takes its time for each, the GPU waits between two; a graph takes what is longer (test_clock.py)."""
    w = Operand(elements=4096 * 4096, kept=True)
    assert gemm_launches() == 1
    assert gemm_launches("tensor", (Operand(elements=4096), w)) == 1 + 1  # few: one kernel finds the amax and casts
    assert gemm_launches("tensor", (Operand(elements=4096, layouts=BOTH), w)) == 1 + 2.5
    assert gemm_launches("tensor", (Operand(elements=4096, layouts=BOTH, users=2), w)) == 1 + 1.25
    assert gemm_launches("tensor", (Operand(elements=4096, layouts=BOTH, again=True), w)) == 1 + 2.5 + 1
    assert gemm_launches("nvfp4", (w,)) == 2
    slow = dataclasses.replace(H200, launch=1e-3)
    assert gemm_seconds(slow, 1, 16, 16, BF16) == pytest.approx(1e-3, rel=1e-3)
    assert seconds(slow, 1, "tensor", layouts=BOTH) == pytest.approx((1 + 2.5) * 1e-3, rel=0.01)
    assert gemm_seconds(H200, 1, 16, 16, BF16) == gemm_seconds(REPLAYED, 1, 16, 16, BF16)  # the host is not in it


def test_delayed_scaling_has_launches_too() -> None:
    free = gemm_seconds(REPLAYED, 1, 4096, 4096, BF16, "delayed", ())
    assert seconds(REPLAYED, 1, "delayed") - free > 0.4 * REPLAYED.launch
    assert seconds(REPLAYED, 1, "delayed", layouts=BOTH) - free > 1.2 * REPLAYED.launch  # and its history's update


# Rows from which on each GEMM runs in FP8 on an H200: fprop/dgrad/wgrad in training, and in inference. By the GPU's
# time. "-": not up to 16384.
THRESHOLDS = {
    (4096, 4096): ("512/512/512 512", "1/1/512 1", "1/1/512 1", "1/1/1024 1"),
    (4096, 14336): ("1/1/256 1", "1/1/256 1", "1/1/256 1", "1/1/256 1"),
    (2048, 8192): ("512/512/512 512", "1/1/512 1", "1/1/512 1", "1/512/1024 1"),
    (4096, 1024): ("4096/2048/4096 8192", "512/512/1024 512", "2048/1024/4096 1024", "8192/1024/- 2048"),
    (2048, 2048): ("4096/4096/4096 4096", "512/512/1024 512", "1024/1024/4096 1024", "2048/2048/16384 2048"),
}


def test_thresholds() -> None:
    for (k, n), texts in THRESHOLDS.items():
        found: list[str] = []
        for scaling in ("tensor", "delayed", "row", "block"):
            rows = [2**i for i in range(15)]
            training = {m: speedups(m, k, n, scaling) for m in rows}
            inference = {m: speedups(m, k, n, scaling, training=False) for m in rows}
            of_gemms = [_from(training, gemm) for gemm in ("fprop", "dgrad", "wgrad")]
            found.append(f"{'/'.join(of_gemms)} {_from(inference, 'fprop')}")
        assert tuple(found) == texts, (k, n)


def _from(found: dict[int, dict[str, float]], gemm: str) -> str:
    """The number of rows from which on all reach the bar."""
    below = [m for m, by_gemm in found.items() if by_gemm[gemm] < 1.05]
    return str(2 * below[-1] if below else 1) if not below or below[-1] < 2**14 else "-"


# ---- published pairs


def test_torchaos_small_linear_is_refused() -> None:
    """1024 x 2048 x 1024 (M, K, N) on an H100: 0.80 (torchao, torchao/float8/README.md, "Performance", example 1)."""
    assert together(1024, 2048, 1024, H100) < 1
    for kept in (True, False):
        choices = linear(1024, 2048, 1024, "tensor", H100, kept=kept)
        assert max(judge(list(choices.values()), 1.05).values()) < 1
        assert all(judge([choice], 1.05)[choice] < 1 for choice in choices.values())


def test_torchaos_large_linear() -> None:
    """4096 x 8192 x 16384: 1.39 (the same, example 2); their H100s have memory of 2.4 TB/s (float8_roofline.py)."""
    assert abs(together(4096, 8192, 16384, H100) - 1.39) < 0.1
    theirs = dataclasses.replace(H100, bandwidth=0.92 * 2.4e12)
    assert abs(together(4096, 8192, 16384, theirs) - 1.39) < 0.03


def test_one_scale_per_tensor_beats_mxfp8_for_a_dense_405b() -> None:
    """GB300, Llama 3.1 405B: 1,048 over 952 tokens/s/GPU (Megatron-Bridge's performance summary): 1.10."""
    took = {"tensor": 0.0, "mxfp8": 0.0}
    for scaling in took:
        for k, n in ((16384, 16384 + 2 * 1024), (16384, 16384), (16384, 2 * 53248), (53248, 16384)):
            choices = list(linear(8192, k, n, scaling, BOARDS["GB300"], kept=False).values())
            assert min(judge(choices, 1.05).values()) > 1.05
            took[scaling] += sum(choice.fp8_seconds(Uses(choices)) for choice in choices)
    assert abs(took["mxfp8"] / took["tensor"] - 1048 / 952) < 0.03


# ---- what the compiler does


def explain(m: int, min_speedup: float, target: str | None = "sm_90", **settings: Any) -> fp8graph.Report:
    model = nn.Linear(4096, 4096, bias=False, device="meta", dtype=BF16)
    x = torch.empty(m, 4096, device="meta", dtype=BF16, requires_grad=True)
    policy = Policy([Rule("*", "tensorwise")], min_speedup=min_speedup)
    return fp8graph.explain(model, x, policy=policy, target=target, **settings)


def test_large_gemms_are_rewritten_and_small_ones_are_not() -> None:
    large, small = explain(8192, 1.05).gemms, explain(64, 1.05).gemms
    assert all(g.recipe and g.speedup and g.speedup > 1.3 and f"predicted {g.speedup:.2f}x" in g.reason for g in large)
    assert len(small) == 3
    for gemm in small:
        assert gemm.recipe is None
        assert gemm.by_profitability
        assert gemm.speedup is not None
        assert gemm.speedup < 1.0
        predicted = f"not faster in FP8: predicted {math.floor(100 * gemm.speedup) / 100:.2f}x, min_speedup is 1.05 "
        assert gemm.reason == predicted + '(rule "*" asked for tensorwise)'


def test_the_default_bar_is_above_what_the_model_cannot_tell() -> None:
    assert Policy().min_speedup == 1.05
    assert fp8graph.models.general_policy().min_speedup == 1.05
    assert Policy.from_dict({"rules": []}).min_speedup == 1.05


def test_the_bar_is_the_users() -> None:
    assert all(g.recipe for g in explain(64, 0.0).gemms)
    assert not any(g.recipe for g in explain(8192, 3.0).gemms)


def test_check_accepts_gemms_that_are_slower_in_fp8() -> None:
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


def test_which_modes_replay_launches() -> None:
    modes = {name: launches_are_replayed(options) for name, options in torch._inductor.list_mode_options().items()}
    assert {name for name, replayed in modes.items() if replayed} == {"reduce-overhead", "max-autotune"}
    assert "max-autotune-no-cudagraphs" in modes
    assert not launches_are_replayed({})
