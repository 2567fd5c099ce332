"""lower: every dialect node becomes the aten nodes of its reference function, forward and backward."""

from __future__ import annotations

import importlib
from operator import getitem
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

from fp8graph.compat import torch_build
from fp8graph.ir import ops
from fp8graph.ir.edit import insert, sign
from fp8graph.ir.nodes import NAMES_KEY, aten, nodes
from fp8graph.numerics import matmul
from fp8graph.passes.lower import FEW, lower, lower_for_torch_alone
from fp8graph.recipes import Float8CurrentScaling
from helpers import graph_inputs_for, graph_text, in_one_test, same_bits


def graph_with(target: Any, *args: Any) -> fx.Graph:
    """A graph of one dialect node; tensors among ``args`` become inputs."""
    graph = fx.Graph()
    node_args = graph_inputs_for(graph, args)
    first = next(a for a in node_args if isinstance(a, fx.Node))
    result = insert(graph, target, tuple(node_args), like=first)
    val = result.meta["val"]
    if isinstance(val, list):
        parts: list[fx.Node] = []
        for position in range(len(val)):
            node = graph.call_function(getitem, (result, position))
            node.meta["val"] = val[position]
            parts.append(node)
        graph.output(parts)
    else:
        graph.output([result])
    return graph


def run(graph: fx.Graph, *args: Tensor) -> list[Tensor]:
    return fx.GraphModule(nn.Module(), graph)(*args)


X = torch.randn(24, 40)
FP8 = torch.randn(16, 32).to(torch.float8_e4m3fn)
ONE = torch.tensor(0.5)
CASES = [
    pytest.param(ops.quantize, (X, torch.float8_e4m3fn, False, 0.0, [1, 16], [16, 16]), id="quantize both"),
    pytest.param(ops.quantize, (X.bfloat16(), torch.float8_e5m2, True, 1e-6, [], [1, 1]), id="quantize power 2"),
    pytest.param(ops.quantize, (X.t(), torch.float8_e4m3fn, False, 0.0, [1, 1], []), id="quantize strided"),
    pytest.param(ops.scaled_mm, (FP8, FP8, ONE, ONE, None, torch.bfloat16, True), id="scaled_mm"),
    pytest.param(ops.dequantize, (FP8, ONE, torch.bfloat16), id="dequantize"),
]


@in_one_test(("target", "args"), CASES)
def test_lowering_changes_no_bit(target: Any, args: tuple[Any, ...]) -> None:
    graph = graph_with(target, *args)
    tensors = [a for a in args if isinstance(a, Tensor)]
    before = run(graph, *tensors)
    lower(graph)
    assert not list(nodes(graph, ops.REFERENCE))
    graph.lint()
    assert same_bits(before, run(graph, *tensors))


def test_a_gpus_gemm_gets_a_column_major_b_without_a_copy() -> None:
    data, one = FP8.to("meta"), ONE.to("meta")
    graph = graph_with(ops.scaled_mm, data, data, one, one, None, torch.float32, True)
    lower(graph)
    assert [line.split(" = ")[1] for line in graph_text(graph).splitlines() if " = " in line] == [
        "aten.permute(x1, [1, 0])",
        "aten._scaled_mm(x0, permute, x2, x3, None, None, f32, True)",
    ]
    (gemm,) = nodes(graph, (aten._scaled_mm.default,))
    assert gemm.args[1].meta["val"].stride() == (1, 32)  # pyright: ignore


@pytest.fixture
def bf16_gemm(monkeypatch: pytest.MonkeyPatch) -> None:
    """A CPU that has one, whatever runs the test."""
    monkeypatch.setattr(torch_build, "multiplies_bf16_on_cpu", lambda: True)


@pytest.mark.usefixtures("bf16_gemm")
def test_a_cpu_multiplies_decoded_numbers_in_bf16() -> None:
    graph = graph_with(ops.scaled_mm, FP8, FP8, ONE, ONE, None, torch.bfloat16, True)
    before = run(graph, FP8, FP8, ONE, ONE)
    lower(graph)
    (product,) = nodes(graph, (matmul.BF16_PRODUCT,))
    assert [a.meta["val"].dtype for a in product.all_input_nodes[:2]] == [torch.float8_e4m3fn] * 2  # it decodes them
    assert same_bits(before, run(graph, FP8, FP8, ONE, ONE))


@pytest.mark.usefixtures("bf16_gemm")
def test_lowering_for_torch_alone_leaves_only_ops_of_torch() -> None:
    graph = graph_with(ops.scaled_mm, FP8, FP8, ONE, ONE, None, torch.bfloat16, True)
    before = run(graph, FP8, FP8, ONE, ONE)
    lower_for_torch_alone(graph)
    assert {node.target.namespace for node in graph.nodes if node.op == "call_function"} == {"aten", "prims"}
    after = run(graph, FP8, FP8, ONE, ONE)
    torch.testing.assert_close(after, before, rtol=2**-8, atol=0)  # one rounding each, of sums in other orders


def test_the_scale_and_its_inverse_are_true_divisions() -> None:
    quantizer = Float8CurrentScaling().quantizer("input")
    graph = graph_with(ops.quantize, X, quantizer.dtype, False, 0.0, [1, 1], [1, 1])
    lower(graph)
    names = [str(node.target) for node in graph.nodes if node.op == "call_function"]
    assert names.count("fp8graph_hints.divide.default") == 2  # fp8_max / amax and 1 / scale: each rounded once
    assert names.count("aten.div.Tensor") == names.count("aten.reciprocal.default") == 0
    assert names.count("fp8graph_hints.largest.default") == 1  # two layouts, one amax


def test_metadata_of_the_dialect_node_is_kept() -> None:
    graph = graph_with(ops.dequantize, FP8, ONE, torch.float32)
    (node,) = nodes(graph, ops.REFERENCE)
    node.meta["partitioner_tag"] = "is_backward"
    lower(graph)
    made = [n for n in graph.nodes if n.op == "call_function"]
    assert {n.meta["partitioner_tag"] for n in made} == {"is_backward"}
    assert {n.meta["fp8graph_pass"] for n in made} == {""}
    sign(graph, "lower")
    assert {n.meta["fp8graph_pass"] for n in made} == {"lower"}


def test_each_node_carries_the_names_of_what_it_computes() -> None:
    """Of the dialect node that it was made for, and of the result that it is; a node that was there, its own."""
    graph = graph_with(ops.quantize, X, torch.float8_e4m3fn, False, 0.0, [1, 16], [16, 16])
    (quantize,) = nodes(graph, ops.REFERENCE)
    rowwise, columnwise, scale_inv = quantize.users
    outputs = graph.output_node()
    with graph.inserting_before(outputs):
        kept = insert(graph, aten.neg.default, (scale_inv,), like=scale_inv, name="kept")
    outputs.args = ((rowwise, columnwise, kept),)
    expected = [(quantize.name, user.name) for user in (rowwise, columnwise, scale_inv)]
    lower(graph)
    results: Any = outputs.args[0]
    assert [node.meta[NAMES_KEY] for node in (*results[:2], *kept.all_input_nodes)] == expected
    assert kept.meta[NAMES_KEY] == ("kept",)
    made = [node for node in graph.nodes if node.op == "call_function" and node is not kept]
    assert len(made) > 10
    assert {node.meta[NAMES_KEY][0] for node in made} == {"quantize_default"}


def test_an_input_that_is_a_result_keeps_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(ops.REFERENCE, ops.quantize, lambda x, *_: [x, x.neg(), x.abs()])  # pyright: ignore
    graph = graph_with(ops.quantize, X, torch.float8_e4m3fn, False, 0.0, [1, 16], [16, 16])
    lower(graph)
    names = [node.meta[NAMES_KEY] for node in graph.output_node().all_input_nodes]
    assert names == [("x0",), ("quantize_default", "getitem_1"), ("quantize_default", "getitem_2")]


@pytest.fixture
def traced(monkeypatch: pytest.MonkeyPatch) -> list[fx.Node]:
    """The nodes that were traced."""
    module = importlib.import_module("fp8graph.passes.lower")  # not the function of that name
    found: list[fx.Node] = []
    original = module._trace  # pyright: ignore
    monkeypatch.setattr(module, "_trace", lambda node, *of: (found.append(node), original(node, *of))[1])
    return found


def test_rows_of_a_table_share_a_trace(traced: list[fx.Node]) -> None:
    """Under delayed scaling each tensor of each layer has a row of its own: they would be traced one by one."""
    x, table = torch.randn(32, 32), torch.tensor([[1 / s, s] for s in (0.5, 8.0, 64.0)])
    graph = fx.Graph()
    inputs = graph_inputs_for(graph, [x, table])
    results: list[fx.Node] = []
    for row in (2, 0, 1):
        settings: dict[str, Any] = {"scaling": "delayed", "scales": inputs[1], "row": row}
        args = (inputs[0], torch.float8_e4m3fn, False, 0.0, [1, 16], [16, 16])
        node = insert(graph, ops.quantize, args, like=inputs[0], kwargs=settings)
        results += (insert(graph, getitem, (node, i), like=node) for i in range(len(node.meta["val"])))
    graph.output(results)
    before = run(graph, x, table)
    assert {float(found) for found in before if found.shape == (1,)} == {1 / 64, 2.0, 1 / 8}
    lower(graph)
    assert same_bits(before, run(graph, x, table))
    assert len(traced) == 1


def test_equal_signatures_are_traced_once(traced: list[fx.Node]) -> None:
    graph = graph_with(ops.dequantize, FP8, ONE, torch.float32)
    (node,) = nodes(graph, ops.REFERENCE)
    with graph.inserting_after(node):
        for dtype in (torch.float32, torch.bfloat16):
            insert(graph, ops.dequantize, (*node.args[:2], dtype), like=node)
    lower(graph)
    assert len(traced) == 2


def groups_of(*widths: int) -> fx.Graph:
    """Tokens [33, width] of each width, with one routing: quantized in both layouts as operands of grouped GEMMs."""
    graph = fx.Graph()
    offs, *tokens = graph_inputs_for(graph, [OFFS, *(torch.randn(33, width) for width in widths)])
    settings: dict[str, Any] = {"scaling": "mxfp8", "block": [1, 32], "offs": offs}
    settings |= {"rowwise_order": "128x4", "columnwise_order": "128x4"}
    results: list[fx.Node] = []
    for x in tokens:
        args = (x, torch.float8_e4m3fn, True, 0.0, [1, 32], [16, 32])
        node = insert(graph, ops.quantize, args, like=x, kwargs=settings)
        results += (insert(graph, getitem, (node, position), like=node) for position in range(4))
    graph.output(results)
    return graph


OFFS = torch.tensor([5, 5, 20, 31], dtype=torch.int32)
PLACES = (aten.cumsum.default, aten.searchsorted.Tensor)  # where groups end, and the group of each row and tile


def test_places_of_groups_are_computed_once_for_all_operands() -> None:
    counts: list[int] = []
    for widths in ((64,), (64, 96, 160)):
        graph = groups_of(*widths)
        inputs = [OFFS, *(torch.randn(33, width) for width in widths)]
        before = run(graph, *inputs)
        lower(graph)
        graph.lint()
        assert same_bits(before, run(graph, *inputs))
        counts.append(sum(1 for _ in nodes(graph, PLACES)))
    assert counts == [6, 6]  # ends padded to 32, to 4 * 32 and to 128; groups of rows, of padded rows and of tiles


def test_two_draws_stay_two(monkeypatch: pytest.MonkeyPatch) -> None:
    def reference(x: Tensor, *_args: Any, offs: Tensor, **_settings: Any) -> list[Tensor]:
        first, second = (torch.randint(9, [4]) for _ in range(2))
        return [x.neg(), x.abs(), first + offs, second - offs]

    monkeypatch.setitem(ops.REFERENCE, ops.quantize, reference)
    graph = groups_of(64)
    lower(graph)
    assert [str(node.target) for node in graph.nodes].count(str(aten.randint.low)) == 2


@pytest.mark.parametrize(("count", "kept"), [(FEW, 1), (FEW + 1, 2)])
def test_many_integers_are_computed_again_where_they_are_used(
    count: int, kept: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As random bits are, of a counter for each number: kernels would store them, and read them again."""

    def reference(x: Tensor, *_args: Any, offs: Tensor, **_settings: Any) -> list[Tensor]:
        return [x.neg(), x.abs(), torch.arange(count) + offs[0], torch.arange(count) - offs[0]]

    monkeypatch.setitem(ops.REFERENCE, ops.quantize, reference)
    graph = groups_of(64)
    lower(graph)
    assert [str(node.target) for node in graph.nodes].count("prims.iota.default") == kept


def test_equal_results_of_a_graph_stay_two_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    def reference(x: Tensor, *_args: Any, offs: Tensor, **_settings: Any) -> list[Tensor]:
        return [x.neg(), x.abs(), offs.neg(), offs.neg()]

    monkeypatch.setitem(ops.REFERENCE, ops.quantize, reference)
    graph = groups_of(64)
    lower(graph)
    assert len(set(graph.output_node().all_input_nodes)) == 4
