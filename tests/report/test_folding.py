"""Identical layers in a graph's text: one is kept, and nothing else is lost."""

from __future__ import annotations

import re

import torch
from torch import nn

import fp8graph
from fp8graph.records import Origin
from fp8graph.report.page import folded, layer_of
from helpers import ALL


def chain(ops: list[str]) -> tuple[str, dict[str, Origin]]:
    """A layer per op: ``n1: f32[8] = op(n0, w1)``."""
    lines = ["n0: f32[8]", *(f"w{i + 1}: f32[8]" for i in range(len(ops)))]
    lines += [f"n{i + 1}: f32[8] = {op}(n{i}, w{i + 1})" for i, op in enumerate(ops)]
    origins = {f"n{i + 1}": Origin(f"model.layers.{i}.f", "", False) for i in range(len(ops))}
    origins |= {f"w{i + 1}": Origin(f"model.layers.{i}.f.weight", "", False) for i in range(len(ops))}
    return "\n".join([*lines, f"return n{len(ops)}, n1"]), origins | {"n0": Origin("x", "", False)}


def test_identical_layers_are_left_out() -> None:
    text, origins = chain(["aten.mul"] * 4)
    found = folded({"before": text}, origins)
    assert found.identical == {"model.layers.1": ["model.layers.2", "model.layers.3"]}  # the first reads x
    assert found.stages["before"] == [
        "n0: f32[8]",
        "w1: f32[8]",
        "w2: f32[8]",
        "# 2 lines of 2 layers like model.layers.1",
        "n1: f32[8] = aten.mul(n0, w1)",
        "n2: f32[8] = aten.mul(n1, w2)",
        "# 2 lines of 2 layers like model.layers.1",
        "return n1  # and 1 more, of layers that were left out",
    ]


def test_layers_that_differ_in_one_stage_stay() -> None:
    text, origins = chain(["aten.mul"] * 4)
    later, _ = chain(["aten.mul", "aten.add", "aten.mul", "aten.mul"])
    found = folded({"before": text, "after": later}, origins)
    assert found.identical == {"model.layers.2": ["model.layers.3"]}
    assert "n2: f32[8] = aten.add(n1, w2)" in found.stages["after"]
    assert "n2: f32[8] = aten.mul(n1, w2)" in found.stages["before"]


def test_a_graph_without_repeated_layers_is_unchanged() -> None:
    text = "x: f32[8]\n# backward\ny: f32[8] = aten.neg(x)\n\nreturn y"
    found = folded({"before": text}, {"x": Origin("x", "", False), "y": Origin("net.neg", "", True)})
    assert found.identical == {}
    assert "\n".join(found.stages["before"]) == text


def test_names_of_layers() -> None:
    assert layer_of("model.layers.12.mlp.up_proj") == "model.layers.12"
    assert layer_of("0") == "0"
    assert layer_of("model.layers.1.mlp.experts.3.up") == "model.layers.1"
    assert layer_of("0.2.up") == "0"
    assert layer_of("layers.1.up.weight, layers.1.gate.weight rowwise") == "layers.1"
    assert [layer_of(name) for name in ("", "lm_head", "block1.up")] == ["", "", ""]


def test_arguments_are_not_layers() -> None:
    text = "a: f32[8]\nb: f32[8]\nreturn a"
    origins = {"a": Origin("args.0", "", False), "b": Origin("args.1", "", False)}
    assert folded({"before": text}, origins).identical == {}


def test_layers_of_a_compiled_model() -> None:
    block = [nn.Sequential(nn.Linear(32, 64, bias=False), nn.Tanh(), nn.Linear(64, 32, bias=False)) for _ in range(6)]
    (view,) = fp8graph.explain(nn.Sequential(*block), torch.randn(16, 32, requires_grad=True), policy=ALL).graphs
    found = folded({"before": view.before, **view.stages}, view.origins)
    (others,) = found.identical.values()
    assert len(others) >= 3  # the first and the last may differ: no gradient comes from outside, ...
    whole, kept = (len(view.after.splitlines()), len(found.stages["save_for_backward"]))
    assert kept < 0.7 * whole
    lines = set(view.after.splitlines())
    assert all(line in lines or re.match("# |return ", line) for line in found.stages["save_for_backward"])
