"""Tables of a report: layers that differ in numbers only are one row; attention has rows of its own kind."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import torch
from torch import nn

import fp8graph
from attentions import qkv, sdpa, written_out
from fp8graph.records import AttentionRecord, RefusalRecord
from fp8graph.report import GraphView
from fp8graph.report.tables import by_kind, other_rows, refusal_rows
from helpers import ALL, MLP


def test_the_table_folds_layers_that_differ_in_numbers_only() -> None:
    report = fp8graph.explain(nn.Sequential(MLP(), MLP(), MLP()), torch.randn(16, 32), policy=ALL)
    lines = [line for line in str(report).splitlines() if line.lstrip().startswith("*.up")]
    # The first layer has no dgrad of the input; the other two do.
    assert [line.split()[1:4] for line in lines] == [
        ["3", "linear", "fprop"], ["3", "linear", "wgrad"], ["2", "linear", "dgrad"],
    ]  # fmt: skip


def test_rows_of_one_name_say_which_layers_they_are() -> None:
    policy = fp8graph.Policy([fp8graph.Rule(re.compile(r"[236]\.up"), None)], default="tensorwise")
    model = nn.Sequential(*(MLP() for _ in range(7)), nn.Sequential(MLP(), MLP()))
    report = fp8graph.explain(model, torch.randn(16, 32), policy=policy, training=False)
    sites = [line.split()[:2] for line in str(report).splitlines() if ".up" in line]
    assert sites == [["{0-1,4-5}.up", "4"], ["{2-3,6}.up", "3"], ["*.*.up", "2"]]


def test_refusals_share_a_row_where_they_share_a_reason() -> None:
    refused = [
        RefusalRecord(what="one GEMM", fqn=f"layers.{index}.{name}", index=0, reason=reason)
        for index, name, reason in [(0, "q", "a bias"), (1, "q", "a bias"), (0, "k", "a tile"), (0, "v", "a bias")]
    ]
    assert refusal_rows(refused)[1:] == [
        ("one GEMM", "layers.*.q, layers.*.v", "3", "a bias"),
        ("one GEMM", "layers.*.k", "1", "a tile"),
    ]


def report_of(module: Any, **settings: Any) -> fp8graph.Report:
    return fp8graph.explain(module, *qkv(**settings), training=True)


def test_the_share_of_the_flops() -> None:
    rows = report_of(sdpa()).attention
    assert AttentionRecord.share(rows, sum(row.flops for row in rows)) == (
        "1 attention with backward: 100 % of the FLOPs of all products; in high precision"
    )
    assert AttentionRecord.share(rows, 3 * sum(row.flops for row in rows)).startswith("1 attention with backward: 33 %")
    assert AttentionRecord.share(rows, 0) == "1 attention with backward: no FLOPs; in high precision"
    assert by_kind([]) == []


def test_flops_of_matmuls_are_counted_once() -> None:
    report = report_of(written_out())
    (line,) = (note for note in report.notes() if "attention" in note)
    assert line == (
        "1 attention with backward: 100 % of the FLOPs of all products; in high precision; "
        "1 written out as matmuls, which are GEMMs above"
    )


def test_one_row_per_kind() -> None:
    rows = other_rows(report_of(sdpa(is_causal=True, enable_gqa=True), kv_heads=2).attention)
    assert [row[:4] for row in rows[1:]] == [
        ("(root)", "1", "CPU flash, causal", "forward"),
        ("(root)", "1", "CPU flash, causal", "backward"),
    ]
    assert rows[0][4] == "batch x heads x queries x keys x size"
    assert rows[1][4] == "2 x 4:2 x 16 x 16 x 64"


def test_the_report_prints_it_and_counts_no_gemm() -> None:
    report = report_of(sdpa())
    assert report.summary() == "0 of 0 GEMMs in FP8, 0 % of the FLOPs of all products, in 1 graph"
    assert "CPU flash" in str(report)
    assert "CPU flash" not in str(fp8graph.explain(MLP(), qkv(size=32)[0]))


def test_dtypes_are_those_of_the_device() -> None:
    policy = fp8graph.Policy([fp8graph.Rule("*", "tensorwise", op="attention")], default=None)
    for target, dtype in (("cpu", "e4m3"), ("gfx942", "e4m3fnuz")):
        forward, backward = fp8graph.explain(sdpa(), *qkv(), policy=policy, target=target, training=True).attention
        assert (forward.dtypes, backward.dtypes) == ((dtype, "fp32"), ("fp32", "fp32"))


def test_attention_survives_json_and_reaches_the_page(tmp_path: Path) -> None:
    report = report_of(sdpa())
    view = report.graphs[0]
    assert GraphView.from_dict(json.loads(json.dumps(view.to_dict()))) == view
    assert all(isinstance(row, AttentionRecord) for row in report.attention)
    report.to_html(tmp_path / "report.html")
    assert "1 attention with backward: 100 %" in (tmp_path / "report.html").read_text()
