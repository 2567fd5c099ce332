"""weight_graphs: what computes a weight from parameters alone, and its text, whatever the names and layouts."""

from __future__ import annotations

import torch
from torch import fx

from fp8graph.analysis.weight_graphs import computed_from, copy_of, signature_of, sources_of
from fp8graph.ir import ops
from fp8graph.ir.nodes import nodes
from helpers import ALL, passed
from stored_weights import stored


def graph_of(kind: str) -> tuple[fx.Graph, dict[fx.Node, int]]:
    x = torch.randn(16, 384, dtype=torch.bfloat16, requires_grad=True)
    graph, compilation = passed(stored(kind, 256, 384), x, last="fold", policy=ALL)
    placeholders = graph.find_nodes(op="placeholder")
    return graph, {node: index for index, node in enumerate(placeholders) if index in compilation.known.parameters}


def test_the_part_of_a_weight_and_no_more() -> None:
    graph, parameters = graph_of("block")
    copies = list(nodes(graph, (ops.columnwise,)))
    assert len(copies) == 2
    for node in copies:
        body = computed_from(node, parameters)
        assert body is not None
        assert body == [node]
        (source,) = sources_of(body, parameters)
        own, copied = copy_of(node, body, [source])
        assert copied.graph is own
        assert [n.op for n in own.nodes] == ["placeholder", "call_function"]
    (activations,) = (node for node in nodes(graph, (ops.quantize,)) if "input" in node.name)
    assert computed_from(activations, parameters) is None


def test_signatures_say_what_is_computed() -> None:
    graph, parameters = graph_of("block")
    texts: list[str] = []
    for node in nodes(graph, (ops.columnwise,)):
        body = computed_from(node, parameters)
        assert body is not None
        own, copied = copy_of(node, body, sources_of(body, parameters))
        own.output([copied])
        texts.append(signature_of(own))
    assert texts[0] != texts[1]  # data and scales
    assert all("columnwise" in text and "%" in text for text in texts)
