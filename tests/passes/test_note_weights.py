"""note_weights: how the graph quantizes the weights that stay in it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from fp8graph import Policy
from fp8graph.ir.compilation import Compilation
from fp8graph.ir.settings import Settings
from fp8graph.ir.weight_graphs import WeightGraph
from fp8graph.passes.connect_scales import PageLayout
from helpers import graph_text, passed

IN_GRAPH = Settings(cache_weights=False)
DELAYED = Policy(default="delayed", min_speedup=0)


def linear() -> nn.Linear:
    return nn.Linear(32, 48, bias=False)


def noted(found: Compilation) -> list[WeightGraph]:
    return [each for each in found.extra_inputs if type(each) is WeightGraph]


def test_a_weight_that_stays() -> None:
    graph, found = passed(linear(), torch.randn(16, 32), last="note_weights", settings=IN_GRAPH)
    before, _ = passed(linear(), torch.randn(16, 32), last="hoist_weights", settings=IN_GRAPH)
    assert graph_text(graph) == graph_text(before)
    (weight,) = noted(found)
    (source,) = (index for index in found.facts.parameters)
    assert (weight.parameters, weight.outputs) == ((source,), ("rowwise", "scale_inv"))
    text = graph_text(weight.quantizing).splitlines()
    assert text[0] == "input0: f32[48, 32]"
    assert "fp8graph.quantize(input0, dtype=e4m3, " in text[1]
    assert text[-1].count(",") == 1


def test_delayed_scaling_has_a_page_of_its_own() -> None:
    _, found = passed(
        linear(),
        torch.randn(16, 32),
        last="connect_scales",
        policy=Policy(default="delayed", min_speedup=0),
        settings=IN_GRAPH,
    )
    (weight,) = noted(found)
    assert [type(each) for each in weight.extra_inputs] == [PageLayout]
    assert graph_text(weight.quantizing).startswith("input0: f32[48, 32]\ninput1: f32[1, 1028]\n")


def test_a_weight_that_fsdp2_gathers_is_noted_as_any_other() -> None:
    _, plain = passed(linear(), torch.randn(16, 32), last="note_weights", settings=IN_GRAPH)
    gathered = frozenset(plain.facts.parameters)
    _, found = passed(linear(), torch.randn(16, 32), last="note_weights", settings=IN_GRAPH, gathered=gathered)
    (expected,), (weight,) = noted(plain), noted(found)
    assert weight.parameters == expected.parameters
    assert graph_text(weight.quantizing) == graph_text(expected.quantizing)


@pytest.mark.parametrize(
    "known",
    [
        pytest.param({}, id="taken out: traced again, with spare inputs"),
        pytest.param({"parameters": {}, "settings": IN_GRAPH}, id="no parameter"),
        pytest.param({"subgraph": True, "settings": IN_GRAPH}, id="the body of a higher-order op"),
    ],
)
def test_weight_is_not_noted(known: dict[str, Any]) -> None:
    _, found = passed(linear(), torch.randn(16, 32), last="note_weights", **known)
    assert noted(found) == []
