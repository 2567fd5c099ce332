"""One compiled graph in the report: its text and its module, and the origin of each node."""

from __future__ import annotations

import json

import pytest
import torch

import fp8graph
from fp8graph.report import GraphView
from fp8graph.report.graph_view import source_line
from helpers import ALL, MLP


def test_a_view_survives_json() -> None:
    (view,) = fp8graph.explain(MLP(), torch.randn(8, 32, requires_grad=True), policy=ALL).graphs
    again = GraphView.from_dict(json.loads(json.dumps(view.to_dict())))
    assert again == view
    assert again.origins["mm"].module == "gate"
    assert again.saved == view.saved


def test_nodes_of_all_stages_have_an_origin() -> None:
    x = torch.randn(8, 32, requires_grad=True)
    (view,) = fp8graph.explain(MLP(), x, policy=ALL, cache_weights="update").graphs
    mm = view.origins["mm"]
    assert (mm.module, mm.backward) == ("gate", False)
    assert mm.source.startswith("support/helpers.py:")
    assert "self.gate(x)" in mm.source
    assert view.origins["quantize_grad_output"].backward
    assert view.origins["primals_1"].module == "gate.weight"
    assert "gate.weight, up.weight rowwise" in {origin.module for origin in view.origins.values()}


def test_sums_of_gradients_belong_to_the_module_of_a_gradient() -> None:
    (view,) = fp8graph.explain(MLP(), torch.randn(8, 32, requires_grad=True), policy=ALL, fuse_linears=False).graphs
    sums = [line.partition(":")[0] for line in view.after.splitlines() if "aten.add.Tensor(dgrad" in line]
    assert sums
    assert {view.origins[name].module for name in sums} <= {"gate", "up"}


@pytest.mark.slow
def test_the_partitioned_graph_says_what_is_saved() -> None:
    x = torch.randn(8, 32, requires_grad=True)
    (view,) = fp8graph.explain(MLP(), x, policy=ALL).graphs
    assert "input_columnwise_3" in view.saved or any("columnwise" in name for name in view.saved)
    assert "mm" not in view.saved
    (inference,) = fp8graph.explain(MLP(), x, policy=ALL, training=False).graphs
    assert len(inference.saved) == 1  # its result


def test_lines_of_torch_are_not_the_models() -> None:
    trace = (
        '  File "/home/me/net/model.py", line 3, in forward\n    y = f(x)\n         ^^^^\n'
        '  File "/x/site-packages/torch/nn/functional.py", line 9, in f\n    return g(x)\n'
    )
    assert source_line(trace) == "net/model.py:3 y = f(x)"
    assert source_line("") == ""
    installed = 'File "/x/site-packages/timm/layers/mlp.py", line 7, in forward\n    x = self.fc1(x)\n'
    assert source_line(installed) == "timm/layers/mlp.py:7 x = self.fc1(x)"
