"""collectives: what each of a graph sends, found in graphs by hand."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import fx

from fp8graph.ir import collectives
from fp8graph.ir.collectives import Gathered
from fp8graph.ir.nodes import GATHERED_KEY, PURPOSE_KEY
from fp8graph.report.graph_view import collective_records
from helpers import graph_inputs_for

pytestmark = pytest.mark.skipif(not torch.distributed.is_available(), reason="torch without torch.distributed")


def graph_of(target: Any, result: torch.Size | tuple[int, ...], *args: Any, **meta: Any) -> fx.Graph:
    """One collective of a tensor [4, 8] of bf16."""
    graph = fx.Graph()
    x, like = graph_inputs_for(
        graph, [torch.empty(4, 8, dtype=torch.bfloat16), torch.empty(result, dtype=torch.bfloat16)]
    )
    node = graph.call_function(target, (x, *args))
    node.meta.update({"val": like.meta["val"], **meta})
    graph.output(node)
    return graph


def test_an_all_gather_that_a_pass_has_looked_at() -> None:
    gathered = Gathered(tensor="up input", reason="quantized before it is sent")
    graph = graph_of(collectives.ALL_GATHER, (8, 8), 2, "0", **{GATHERED_KEY: gathered})
    (record,) = collective_records(graph)
    assert (record.kind, record.direction, record.dtype, record.shape) == ("all_gather", "forward", "bfloat16", (4, 8))
    assert (record.ranks, record.bytes_sent) == (2, 64)
    assert (record.tensor, record.reason) == ("up input", "quantized before it is sent")


def test_a_collective_of_the_users_is_called_by_its_module() -> None:
    stack = {"nn_module_stack": {"k": ("L['self']._modules['norm']", "cls")}}
    graph = graph_of(collectives.REDUCE_SCATTER, (1, 8), "sum", 4, "0", **stack)
    (record,) = collective_records(graph)
    assert (record.kind, record.tensor, record.reason, record.ranks) == ("reduce_scatter", "norm", "", 4)
    assert record.bytes_sent == 4 * 8 * 2 * 3 // 4  # of the larger side


def test_a_collective_that_a_pass_added_says_what_for() -> None:
    graph = graph_of(collectives.ALL_REDUCE, (4, 8), "max", "no such group", **{PURPOSE_KEY: "one scale"})
    (record,) = collective_records(graph)
    assert (record.kind, record.reason) == ("all_reduce", "one scale")
    assert (record.ranks, record.bytes_sent) == (1, 0)  # a group that is unknown here


def test_collective_of_a_gradient_is_in_backward() -> None:
    graph = graph_of(collectives.ALL_GATHER, (8, 8), 2, "0")
    next(iter(graph.nodes)).target = "tangents_1"
    assert [record.direction for record in collective_records(graph)] == ["backward"]


def test_other_nodes_are_not_collectives() -> None:
    graph = graph_of(torch.ops.aten.neg.default, (4, 8))
    assert collective_records(graph) == []
    assert collective_records(graph_of(collectives.WAIT, (4, 8))) == []
