"""One compiled graph in the report."""

from __future__ import annotations

import json

import torch

import fp8graph
from fp8graph.report import GraphView
from helpers import ALL, MLP


def test_a_view_survives_json() -> None:
    (view,) = fp8graph.explain(MLP(), torch.randn(8, 32, requires_grad=True), policy=ALL).graphs
    again = GraphView.from_dict(json.loads(json.dumps(view.to_dict())))
    assert again == view
    assert again.origins["mm"].module == "gate"
    assert again.saved == view.saved
