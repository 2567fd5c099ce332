"""Graphs as data for the page: each line once, equal graphs once, packed."""

from __future__ import annotations

import base64
import dataclasses
import json
import pickle
import zlib
from typing import Any

import torch

import fp8graph
from fp8graph.offline import KernelRecord
from fp8graph.report.page import distinct_graphs, graph_data, packed
from helpers import ALL, MLP


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
