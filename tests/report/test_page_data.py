"""A report as data for the page: shares, rows, each graph and each line once, statistics."""

from __future__ import annotations

import array
import base64
import dataclasses
import json
import math
import pickle
import zlib
from typing import Any

import pytest
import torch
from torch import nn

import fp8graph
from fp8graph.errors import ConfigError
from fp8graph.hardware import from_target
from fp8graph.hardware.speed import gemm_seconds
from fp8graph.offline import KernelRecord
from fp8graph.records import StatisticRecord
from fp8graph.report import Report
from fp8graph.report.page import distinct_graphs, graph_data, packed, page_data, statistics_data
from helpers import ALL, MLP, eager_backend


def shares(report: Report) -> list[dict[str, Any]]:
    return page_data(report)["shares"]


def test_shares_of_flops_and_bytes() -> None:
    policy = fp8graph.Policy([fp8graph.Rule("*", "tensorwise", wgrad=None)], min_speedup=0)
    report = fp8graph.explain(nn.Sequential(nn.Linear(32, 64, bias=False)), torch.randn(16, 32), policy=policy)
    flops, read, seconds = shares(report)
    half = 2.0 * 16 * 32 * 64
    assert flops["parts"] == {"native": half, "emulated": 0.0, "low precision": 0.0, "high precision": half}
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
    rest = {"emulated": 0.0, "low precision": 0.0, "high precision": alone}
    assert seconds["parts"] == {"native": alone / first.speedup, **rest}


def test_emulated_gemms_are_marked_and_have_no_time() -> None:
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


def content(data: dict[str, Any]) -> dict[str, Any]:
    return json.loads(zlib.decompress(base64.b64decode(data["content"])))


def test_every_stage_can_be_read_back() -> None:
    (view,) = fp8graph.explain(MLP(), torch.randn(8, 32), policy=ALL).graphs
    data = graph_data([view])
    found = content(data)
    texts = {
        stage: "\n".join(found["lines"][number] for number in numbers)
        for stage, numbers in zip(data["stages"], found["texts"], strict=True)
    }
    assert texts == {"before": view.before, **view.stages}
    assert len(found["lines"]) == len(set(found["lines"]))
    module, source, backward = found["origins"]["mm"]
    assert (found["modules"][module], backward) == ("gate", 0)
    assert "self.gate(x)" in found["sources"][source]
    assert set(found["saved"]) == set(view.saved) & set(found["origins"])


def test_kernels_name_nodes_of_the_kept_layers() -> None:
    """By numbers of nodes, which the page has by name; nodes that are not in the text are left out."""
    (view,) = fp8graph.explain(MLP(), torch.randn(8, 32), policy=ALL).graphs
    common: dict[str, Any] = {"graph": "forward", "kind": "triton", "ops": (), "bytes": 0, "number": 0}
    kernels = {
        3: KernelRecord(name="a", nodes=("mm", "gone"), reads=("primals_1",), writes=("mm",), **common),
        5: KernelRecord(name="b", nodes=("gone",), **common),
    }
    found = content(graph_data([view], kernels))
    ((place, *numbers),) = found["kernels"]
    names = list(found["origins"])
    assert (place, *([names[number] for number in some] for some in numbers)) == (3, ["mm"], ["primals_1"], ["mm"])


def test_graphs_of_equal_text_are_one() -> None:
    report = fp8graph.explain(MLP(), torch.randn(8, 32), policy=ALL)
    (view,) = pickle.loads(pickle.dumps(report)).graphs  # no module: from a file
    other = dataclasses.replace(view, name="another", before=view.before + "\n")
    renamed = dataclasses.replace(view, gemms=tuple(dataclasses.replace(g, fqn=f"b.{g.fqn}") for g in view.gemms))
    assert distinct_graphs([view, other, renamed]) == [[0, 2], [1]]
    data = graph_data([view, renamed])
    assert data["count"] == 2
    assert data["others"] == ["b.down", "b.gate", "b.up"]


def test_packed_bytes() -> None:
    assert zlib.decompress(base64.b64decode(packed(b"abc" * 100))) == b"abc" * 100


def record(step: int, site: str, value: float, stat: str = "mse", operand: str = "input") -> StatisticRecord:
    return StatisticRecord(
        step=step, site=site, operand=operand, layout="", recipe="", what_if=False, stat=stat, value=value
    )


def values(plane: dict[str, Any]) -> list[float]:
    return list(array.array("f", zlib.decompress(base64.b64decode(plane["values"]))))


def test_a_matrix_per_tensor_and_statistic() -> None:
    records = [record(4, "a", 1.5), record(0, "b", 2.0), record(0, "a", math.inf), record(0, "a", 7.0, stat="std")]
    data = statistics_data(records, losses=None)
    assert (data["steps"], data["sites"], data["losses"]) == ([0, 4], ["a", "b"], None)
    mse, std = data["planes"]
    assert (mse["stat"], std["stat"]) == ("mse", "std")
    assert values(mse)[:3] == [math.inf, 1.5, 2.0]
    assert math.isnan(values(mse)[3])  # b was not measured at step 4
    assert values(std)[0] == 7.0


def test_numbers_beyond_32_bits_are_infinite() -> None:
    (plane,) = statistics_data([record(0, "a", -1e300)], None)["planes"]
    assert values(plane) == [-math.inf]


def test_losses_by_step() -> None:
    assert statistics_data([], [3.0, math.nan, 2.5])["losses"] == [(0, 3.0), (2, 2.5)]
    assert statistics_data([], {10: 2.0, 5: 3.0})["losses"] == [(5, 3.0), (10, 2.0)]


@pytest.mark.parametrize("losses", [5, ["high"], {"a": 1.0}])
def test_losses_must_be_one_number_per_step(losses: Any) -> None:
    with pytest.raises(ConfigError, match="Give one number per step, or a mapping from step to loss"):
        statistics_data([], losses)
