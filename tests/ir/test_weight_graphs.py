"""weight_graphs: what computes a weight from parameters alone, and its text, whatever the names and layouts."""

from __future__ import annotations

import pytest
import torch
from torch import fx

from fp8graph.ir import ops
from fp8graph.ir.compilation import Compilation
from fp8graph.ir.nodes import nodes
from fp8graph.ir.weight_graphs import WeightGraph, computed_from, weight_graph
from helpers import ALL, passed
from stored_weights import stored


def passed_to_fold(kind: str) -> tuple[fx.Graph, dict[fx.Node, int], Compilation]:
    x = torch.randn(16, 384, dtype=torch.bfloat16, requires_grad=True)
    graph, compilation = passed(stored(kind, 256, 384), x, last="fold", policy=ALL)
    placeholders = graph.find_nodes(op="placeholder")
    parameters = {node: index for index, node in enumerate(placeholders) if index in compilation.facts.parameters}
    return graph, parameters, compilation


def test_the_part_of_a_weight_and_no_more() -> None:
    graph, parameters, compilation = passed_to_fold("block")
    copies = list(nodes(graph, (ops.columnwise,)))
    assert len(copies) == 2
    for node in copies:
        assert computed_from(node, parameters) == [node]
        weight = weight_graph(node, parameters, compilation, WeightGraph)
        assert weight is not None
        assert [n.op for n in weight.quantizing.nodes] == ["placeholder", "call_function", "output"]
    (activations,) = (node for node in nodes(graph, (ops.quantize,)) if "input" in node.name)
    assert weight_graph(activations, parameters, compilation, WeightGraph) is None


def test_signatures_say_what_is_computed() -> None:
    graph, parameters, compilation = passed_to_fold("block")
    found = [weight_graph(node, parameters, compilation, WeightGraph) for node in nodes(graph, (ops.columnwise,))]
    texts = [weight.signature for weight in found if weight is not None]
    assert texts[0] != texts[1]  # data and scales
    assert all("columnwise" in text and "%" in text for text in texts)


def test_a_weight_is_found_without_reading_the_whole_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    """A graph of a hundred layers has hundreds of weights and tens of thousands of nodes."""
    graph, parameters, _ = passed_to_fold("block")
    copies = list(nodes(graph, (ops.columnwise,)))
    monkeypatch.setattr(fx.Graph, "nodes", property(lambda _: pytest.fail("the whole graph is read")))
    assert [computed_from(node, parameters) for node in copies] == [[node] for node in copies]
