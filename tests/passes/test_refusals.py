"""Refusals of passes, from where they are found to the report. The texts: the tests of each pass."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import torch
from torch import nn

import fp8graph
from fp8graph import Backend, RefusalRecord
from fp8graph.backend import stored
from fp8graph.report import GraphView
from helpers import ALL, MLP, Two, view_of


def x() -> torch.Tensor:
    return torch.randn(16, 32, requires_grad=True)


def test_applied_passes_report_no_refusals() -> None:
    every: dict[str, Any] = {"cache_weights": True, "save": "memory", "save_activations_in_fp8": True}
    assert view_of(MLP(), x(), **every).refusals == ()
    assert view_of(nn.Linear(32, 48), x(), cache_weights="update").refusals == ()


def test_reasons_are_folded_in_the_report(tmp_path: Path) -> None:
    backend = Backend(ALL, compiler="eager")
    model = nn.Sequential(*(nn.Sequential(Two(72), nn.Linear(136, 32)) for _ in range(3)))
    torch.compile(model, backend=backend)(x())
    report = backend.report
    assert len(report.refusals) == 6
    lines = [re.split("  +", line) for line in str(report).splitlines() if line.startswith("one GEMM")]
    assert lines == [
        ["one GEMM", "*.*.gate", "3", "the others that read its input cannot be joined with it"],
        ["one GEMM", "*.*.up", "3", "its output size 72 is not a multiple of 16: pad it"],
    ]
    report.to_html(tmp_path / "page.html")
    assert "its output size 72" in (tmp_path / "page.html").read_text(encoding="utf-8")
    (view,) = report.graphs
    assert GraphView.from_dict(view.to_dict()).refusals == view.refusals
    assert "not done" not in str(fp8graph.explain(MLP(), x()))


def test_reasons_are_kept_with_compiled_code() -> None:
    backend = Backend(ALL, compiler="eager")
    torch.compile(Two(72), backend=backend)(x())
    ((program,),) = [list(backend.programs)]
    ((_, variant),) = program._variants.items()
    assert len(variant.view.refusals) == 2
    content = stored.dumped(variant.view, variant.findings)
    again = None if content is None else stored.loaded(content)
    assert again is not None
    assert again[0].refusals == variant.view.refusals


def test_layers_that_share_code_have_reasons_of_their_own() -> None:
    backend = Backend(ALL, compiler="eager")
    model = nn.ModuleList([Two(72), Two(72)])
    backend.bind(model)
    for layer in model:
        layer.compile(backend=backend)
        layer(x())
    reason = "its output size 72 is not a multiple of 16: pad it"
    assert [r for r in backend.report.refusals if r.fqn.endswith("up")] == [
        RefusalRecord(what="one GEMM", fqn=f"{i}.up", index=0, reason=reason) for i in range(2)
    ]
