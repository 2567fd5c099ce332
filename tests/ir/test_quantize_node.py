"""quantize_node: what a node is asked for, by name, and its outputs."""

from __future__ import annotations

import dataclasses
from operator import getitem
from typing import Any

import pytest
import torch
from torch import fx

from fp8graph.ir import ops
from fp8graph.ir.edit import insert, update_value
from fp8graph.ir.quantize_node import QuantizeNode, call
from helpers import graph_inputs_for, graph_text, in_one_test

FP8 = torch.float8_e4m3fn


def node_of(*more: Any, **settings: Any) -> QuantizeNode:
    """A quantize node of [32, 48]."""
    graph = fx.Graph()
    (x,) = graph_inputs_for(graph, [torch.empty(32, 48)])
    return QuantizeNode(insert(graph, ops.quantize, (x, FP8, False, 0.0, *more), like=x, kwargs=settings))


def test_arguments_have_names_and_defaults() -> None:
    quantized = node_of([1, 16], [])
    asked = quantized.arguments
    assert (asked.x, asked.dtype, asked.rowwise, asked.columnwise) == (quantized.node.args[0], FP8, [1, 16], [])
    assert (asked.scaling, asked.more) == ("tensor", None)
    assert quantized.kind.one_scale


@in_one_test(
    ("layouts", "settings", "names"),
    [
        (([1, 16], []), {}, ["rowwise", "scale_inv"]),
        (([1, 16], [1, 16]), {"keep_scales": True}, ["rowwise", "columnwise", "scale_inv", "scales"]),
        (
            ([1, 16], []),
            {"scaling": "block", "block": [128, 128], "keep_scales": True},
            ["rowwise", "rowwise_scale_inv", "scales"],
        ),
        (
            ([1, 16], [1, 16]),
            {"scaling": "row"},
            ["rowwise", "columnwise", "rowwise_scale_inv", "columnwise_scale_inv"],
        ),
        (([], [1, 16]), {"scaling": "delayed"}, ["columnwise", "scale_inv", "amax"]),
    ],
)
def test_outputs_have_names(layouts: Any, settings: Any, names: list[str]) -> None:
    quantized = node_of(*layouts, **settings)
    assert quantized.names == names
    assert list(quantized.values) == names
    for name, value in quantized.values.items():
        if name in ("rowwise", "columnwise"):
            assert value.shape == ((32, 48) if name == "rowwise" else (48, 32))
            assert value.dtype == FP8


@in_one_test(
    ("block", "multiples", "square"),
    [
        ([128, 128], [16, 16], True),
        ([128, 128], [16, 512], True),  # tiles of zeros, which are made apart
        ([1, 128], [1, 16], False),
        ([40, 40], [16, 1], False),  # a row of tiles for zeros
        ([40, 40], [1, 16], False),
    ],
)
def test_square_tiles_are_those_of_both_layouts(block: list[int], multiples: list[int], square: bool) -> None:
    assert node_of([], multiples, scaling="block", block=block).arguments.has_square_tiles == square


def test_readers_of_outputs_by_name() -> None:
    quantized = node_of([1, 16], [1, 16])
    assert quantized.outputs == {}
    made = insert(quantized.node.graph, getitem, (quantized.node, 1), like=quantized.node)
    assert quantized.outputs == {"columnwise": made}


def test_ask_changes_arguments() -> None:
    """A later read returns the node's new arguments; its value waits for ``update_value``."""
    quantized = node_of([1, 16], [])
    quantized.ask(rowwise=[], columnwise=[16, 16], keep_scales=True)
    assert quantized.arguments.columnwise == [16, 16]
    assert quantized.names == ["columnwise", "scale_inv", "scales"]
    assert len(quantized.node.meta["val"]) == 2
    update_value(quantized.node)
    assert list(quantized.values) == quantized.names
    assert "columnwise=[16, 16], keep_scales=True" in graph_text(quantized.node.graph)


def test_nothing_can_be_asked_for_that_does_not_exist() -> None:
    with pytest.raises(TypeError, match="colwise"):
        node_of([1, 16], []).ask(colwise=[1, 1])


def test_defaults_are_left_out_of_a_call() -> None:
    args, kwargs = call(node_of([1, 16], [], scaling="block", block=[1, 128], keep_scales=False).arguments)
    assert len(args) == 6
    assert kwargs == {"scaling": "block", "block": [1, 128]}
    assert call(dataclasses.replace(node_of([1, 16], []).arguments, block=[]))[1] == {}  # as an op's schema gives it
