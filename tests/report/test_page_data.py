"""A report as data for the page: the shares of FP8, one row per kind of GEMM."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from torch import nn

import fp8graph
from fp8graph.hardware import from_target
from fp8graph.hardware.speed import gemm_seconds
from fp8graph.report import Report
from fp8graph.report.page import page_data
from helpers import ALL, MLP, eager_backend


def shares(report: Report) -> list[dict[str, Any]]:
    return page_data(report)["shares"]


def test_shares_of_flops_and_bytes() -> None:
    policy = fp8graph.Policy([fp8graph.Rule("*", "tensorwise", wgrad=None)], min_speedup=0)
    report = fp8graph.explain(nn.Sequential(nn.Linear(32, 64, bias=False)), torch.randn(16, 32), policy=policy)
    flops, read, seconds = shares(report)
    assert flops["parts"] == {"native": 2.0 * 16 * 32 * 64, "emulated": 0.0, "high precision": 2.0 * 16 * 32 * 64}
    assert read["parts"]["native"] == 16 * 32 + 32 * 64  # one byte per number
    assert read["parts"]["high precision"] == 4 * (16 * 64 + 16 * 32)
    assert seconds["missing"].startswith("not predicted: this report's device has no speed model")


def test_the_share_of_predicted_time() -> None:
    policy = fp8graph.Policy([fp8graph.Rule("1", None)], default="tensorwise", min_speedup=0)
    model = nn.Sequential(nn.Linear(4096, 4096, bias=False), nn.Linear(4096, 4096, bias=False)).bfloat16().to("meta")
    x = torch.empty(4096, 4096, dtype=torch.bfloat16, device="meta")
    report = fp8graph.explain(model, x, policy=policy, target="sm_90", training=False)
    *_, seconds = shares(report)
    device = from_target("sm_90")
    assert device.speed is not None
    alone = gemm_seconds(device.speed, 4096, 4096, 4096, torch.bfloat16)
    first, second = report.gemms
    assert (first.seconds, second.seconds) == (alone, alone)
    assert first.speedup is not None
    assert first.speedup > 1
    assert seconds["before"] == 2 * alone
    assert seconds["parts"] == {"native": alone / first.speedup, "emulated": 0.0, "high precision": alone}


def test_emulated_gemms_are_told_apart_and_have_no_time() -> None:
    flops, _, seconds = shares(fp8graph.explain(MLP(), torch.randn(8, 32), recipe="blockwise", target="sm_80"))
    assert flops["parts"]["emulated"] > 0
    assert flops["parts"]["native"] == 0
    assert "missing" in seconds


def test_layers_share_a_row_that_has_their_names() -> None:
    model = nn.Sequential(*(nn.Sequential(nn.Linear(32, 32, bias=False)) for _ in range(5)))
    data = page_data(fp8graph.explain(model, torch.randn(16, 32), policy=ALL))
    (row,) = [row for row in data["gemms"] if row["gemm"] == "fprop"]
    assert row["names"] == [f"{layer}.0" for layer in range(5)]
    assert row["flops"] == 5 * 2 * 16 * 32 * 32


def test_an_empty_report() -> None:
    data = page_data(eager_backend().report)
    assert (data["gemms"], data["graphs"], data["kernels"], data["statistics"]) == ([], [], None, None)
    assert data["shares"][2]["missing"] == "there are no GEMMs"
    json.dumps(data)


def test_dynamic_sizes_are_text() -> None:
    backend = eager_backend()
    torch.compile(MLP(), backend=backend, dynamic=True)(torch.randn(16, 32))
    data = page_data(backend.report)
    assert any("s" in row["size"] for row in data["gemms"])
    json.dumps(data)


@pytest.mark.parametrize("target", ["sm_90", None])
def test_kernels_are_not_generated_for_the_page(target: str | None) -> None:
    report = fp8graph.explain(MLP(), torch.randn(8, 32), target=target)
    data = page_data(report)
    assert data["kernels"] is None
    assert data["has_target"] == (target is not None)
    assert "kernels" not in vars(report)
