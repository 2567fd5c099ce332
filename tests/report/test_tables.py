"""Tables of a report: layers that differ in numbers only are one row."""

from __future__ import annotations

import re

import torch
from torch import nn

import fp8graph
from fp8graph.records import RefusalRecord
from fp8graph.report.tables import refusal_rows
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
