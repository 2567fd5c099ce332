"""hoist_weights: weights are quantized outside of the graph, which takes their copies; what stays in it."""

from __future__ import annotations

import re
from operator import getitem
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional

from fp8graph import Backend, DelayedScaling, Policy, Rule
from fp8graph.compat import aot
from fp8graph.compat.fsdp import Shard
from fp8graph.ir import ops
from fp8graph.ir.compilation import Compilation
from fp8graph.ir.decisions import GatheredInFP8
from fp8graph.ir.edit import insert
from fp8graph.ir.extra_inputs import SpareInputs
from fp8graph.ir.naming import Parameter
from fp8graph.ir.nodes import OPERAND_KEY, nodes
from fp8graph.ir.settings import Settings
from fp8graph.ir.weight_graphs import WeightInput
from fp8graph.numerics import sqnr_db
from fp8graph.passes.connect_scales import PageLayout
from fp8graph.passes.gather_weights import GatheredWeight, ReadWhole, ToGather, gather_weights
from fp8graph.passes.hoist_weights import CachedWeight, hoist_weights, may_keep_weights
from helpers import ALL, MLP, Weight, brief, eager_backend, facts_of, first_fast, graph_text, in_one_test, view_of

EVERY_OP = Policy([Rule("*", "tensorwise", op="*")])
DELAYED = Policy(default=DelayedScaling(amax_history_len=4))
ARRIVED = (GatheredInFP8(frozenset({0})),)


def x(*shape: int, requires_grad: bool = False) -> Tensor:
    return torch.randn(shape, requires_grad=requires_grad)


def around(module: nn.Module, *args: Tensor, policy: Policy = ALL) -> tuple[list[str], list[str]]:
    """The lines of the graph before and after the pass."""
    stages = view_of(module, *args, policy=policy, cache_weights="update").stages
    return brief(stages["fuse_linears"]).splitlines(), brief(stages["hoist_weights"]).splitlines()


def quantized(lines: list[str]) -> list[str]:
    """The operands of the quantize nodes."""
    return [match[1] for line in lines if (match := re.search(r"fp8graph\.quantize\((\w+)", line))]


def test_the_copy_of_a_weight_is_an_input() -> None:
    with torch.no_grad():
        before, after = around(nn.Linear(32, 48, bias=False), x(16, 32))
    of_input = [
        "quantize_input: (e4m3[16, 32], f32[]) = fp8graph.quantize(arg1_1, dtype=e4m3, rowwise=[1, 16], columnwise=[])",
        "input_rowwise: e4m3[16, 32] = quantize_input[0]",
        "input_scale_inv: f32[] = quantize_input[1]",
    ]
    assert before == [
        "arg0_1: f32[48, 32]",
        "arg1_1: f32[16, 32]",
        "arg2_1: f32[0]",
        "arg3_1: f32[0]",
        *of_input,
        "quantize_weight: (e4m3[48, 32], f32[]) = fp8graph.quantize(arg0_1, dtype=e4m3, rowwise=[16, 16], "
        "columnwise=[])",
        "weight_rowwise: e4m3[48, 32] = quantize_weight[0]",
        "weight_scale_inv: f32[] = quantize_weight[1]",
        "fprop: f32[16, 48] = fp8graph.scaled_mm(input_rowwise, weight_rowwise, input_scale_inv, weight_scale_inv, "
        "bias=None, out_dtype=f32, use_fast_accum=True)",
        "return fprop",
    ]
    assert after == [
        "arg0_1: f32[48, 32]",
        "arg1_1: f32[16, 32]",
        "arg2_1: e4m3[48, 32]",
        "arg3_1: f32[]",
        *of_input,
        "fprop: f32[16, 48] = fp8graph.scaled_mm(input_rowwise, arg2_1, input_scale_inv, arg3_1, "
        "bias=None, out_dtype=f32, use_fast_accum=True)",
        "return fprop",
    ]


def test_backward_takes_the_columnwise_copy() -> None:
    _, after = around(nn.Linear(32, 48, bias=False), x(16, 32, requires_grad=True))
    inputs = [line for line in after if " = " not in line and line.startswith("primals")]
    assert inputs[2:5] == ["primals_3: e4m3[48, 32]", "primals_4: f32[]", "primals_5: e4m3[32, 48]"]
    gemms = [re.findall(r"scaled_mm\((\w+), (\w+)", line)[0] for line in after if "scaled_mm" in line]
    assert gemms == [
        ("input_rowwise", "primals_3"),
        ("grad_output_columnwise", "input_columnwise_1"),
        ("grad_output_rowwise_1", "primals_5"),
    ]
    assert quantized(after) == ["primals_2", "tangents_1"]


WEIGHTS = [
    pytest.param(lambda w, a: a @ (w * 2 + 1).t(), id="parametrization"),
    pytest.param(lambda w, a: a @ torch.cat([w, w * 2]).t(), id="concatenated"),
    pytest.param(lambda w, a: a @ w[16:].t(), id="part of it"),
]


@pytest.mark.parametrize("body", WEIGHTS)
def test_tensors_computed_from_parameters_are_hoisted(body: Any) -> None:
    """The nodes that computed the weight leave the graph too, where gradients do not need them."""
    before, after = around(Weight(body, 48, 32), x(16, 32), policy=EVERY_OP)
    assert len(quantized(before)) == 3
    assert quantized(after) == ["primals_2", "tangents_1"]
    forward = after[: after.index("# backward")]
    assert [line.split(" = ")[1].split("(")[0] for line in forward if " = fp8graph" in line or " = aten" in line] == [
        "fp8graph.quantize",
        "fp8graph.scaled_mm",
    ]


def test_joined_weights_are_one() -> None:
    before, after = around(MLP(), x(16, 32))
    taken = [line for line in after if re.match(r"primals_\d+: (e4m3|f32\[\])", line)]
    assert [line.partition(": ")[2] for line in taken] == [
        "e4m3[128, 32]",
        "f32[]",
        "e4m3[32, 64]",
        "f32[]",
        "e4m3[64, 32]",
    ]
    assert len(quantized(before)) - len(quantized(after)) == 2
    assert any("more=[primals_3]" in line for line in before)
    assert not any("more=[primals_3]" in line for line in after)


REFUSALS = [
    pytest.param(lambda w, a: a @ nn.functional.dropout(w, 0.5).t(), EVERY_OP, id="random numbers"),
    pytest.param(lambda w, a: a @ (w + a[0]).t(), EVERY_OP, id="reads an input"),
    pytest.param(lambda w, a: w.sum() * (a @ a.t()), EVERY_OP, id="no parameter"),
]


@pytest.mark.parametrize(("body", "policy"), REFUSALS)
def test_other_operands_stay_in_the_graph(body: Any, policy: Policy) -> None:
    before, after = around(Weight(body, 48, 32), x(16, 32), policy=policy)
    assert len(quantized(before)) >= 2
    assert after == before


def test_a_buffer_stays_in_the_graph() -> None:
    class Masked(nn.Linear):
        def __init__(self) -> None:
            super().__init__(32, 48, bias=False)
            self.register_buffer("mask", torch.ones(48, 32))

        def forward(self, input: Tensor) -> Tensor:
            return input @ (self.weight * self.get_buffer("mask")).t()

    before, after = around(Masked(), x(16, 32), policy=EVERY_OP)
    assert len(quantized(before)) == 3
    assert after == before


# A graph by hand: what the backend knows beforehand (spare inputs, gathered parameters) is then the test's.


SHARDED: dict[str, Any] = {"gathered": frozenset({0}), "parameter_facts": {GatheredWeight.store: {0: Shard(24, None)}}}


def a_weight_and_spares(spares: int) -> fx.Graph:
    """Input 0 is a parameter and quantized; the others mean nothing yet."""
    graph, mode = fx.Graph(), FakeTensorMode()
    for position, shape in enumerate([(48, 32), *[(0,)] * spares]):
        node = graph.placeholder(f"p{position}")
        node.meta["val"] = mode.from_tensor(torch.empty(shape))
        aot.set_input_position(node, position)
    weight = next(iter(graph.nodes))
    args = weight, torch.float8_e4m3fn, False, 0.0, [16, 16], []
    outputs = insert(graph, ops.quantize, args, like=weight, name="q")
    graph.output([insert(graph, getitem, (outputs, i), like=weight) for i in range(2)])
    return graph


def compilation(spares: int = 2, **known: Any) -> Compilation:
    known = {"parameters": {0: Parameter(source="L['self'].w", index=0)}, "settings": Settings(), **known}
    return Compilation(facts=facts_of(ALL, spares=SpareInputs(indices=range(1, 1 + spares)), **known))


def test_a_graph_by_hand() -> None:
    graph, known = a_weight_and_spares(2), compilation()
    hoist_weights(graph, known)
    assert graph_text(graph) == "p0: f32[48, 32]\np1: e4m3[48, 32]\np2: f32[]\nreturn p1, p2"
    (weight,) = known.extra_inputs
    assert type(weight) is CachedWeight
    assert (weight.parameters, weight.outputs, weight.layouts) == ((0,), ("rowwise", "scale_inv"), ((16, 16), ()))
    assert brief(graph_text(weight.quantizing)) == (
        "input0: f32[48, 32]\n"
        "q: (e4m3[48, 32], f32[]) = fp8graph.quantize(input0, dtype=e4m3, rowwise=[16, 16], columnwise=[])\n"
        "getitem: e4m3[48, 32] = q[0]\n"
        "getitem_1: f32[] = q[1]\n"
        "return getitem, getitem_1"
    )


@pytest.mark.parametrize("spares", [0, 1])
def test_too_few_spare_inputs_leave_the_graph_to_be_traced_again(spares: int) -> None:
    graph, known = a_weight_and_spares(spares), compilation(spares)
    before = graph_text(graph)
    hoist_weights(graph, known)
    assert graph_text(graph) == before
    assert known.facts.spares.wanted == 2


@in_one_test(
    "known",
    [
        pytest.param({"settings": Settings(cache_weights=False)}, id="by the user"),
        pytest.param({"parameters": {}}, id="no parameter"),
        pytest.param(SHARDED, id="gathered by FSDP2"),
        pytest.param({"subgraph": True}, id="the body of a higher-order op"),
        pytest.param({"training": True}, id="a graph with a backward"),
    ],
)
def test_weight_is_not_hoisted(known: dict[str, Any]) -> None:
    graph, refused = a_weight_and_spares(2), compilation(**known)
    before = graph_text(graph)
    if may_keep_weights(graph, refused):
        hoist_weights(graph, refused)
    assert graph_text(graph) == before
    assert not any(isinstance(each, WeightInput) for each in refused.extra_inputs)
    assert refused.facts.spares.wanted == 0


def test_weight_that_fsdp2_may_gather_in_fp8_is_noted() -> None:
    graph, found = a_weight_and_spares(2), compilation(**SHARDED)
    next(nodes(graph, (ops.quantize,))).meta[OPERAND_KEY] = "weight"
    gather_weights(graph, found)
    (asked,) = found.extra_inputs
    assert isinstance(asked, ToGather)
    assert (asked.parameters, asked.made, asked.outputs) == ((0,), ("rowwise", "scale_inv"), ())


def test_weight_gathered_in_fp8_becomes_an_input() -> None:
    graph, found = a_weight_and_spares(2), compilation(**SHARDED, conditions=ARRIVED)
    gather_weights(graph, found)
    assert graph_text(graph) == "p0: f32[48, 32]\np1: e4m3[48, 32]\np2: f32[]\nreturn p1, p2"
    assert [*map(type, found.extra_inputs)] == [GatheredWeight]


def test_a_reader_in_high_precision_is_found() -> None:
    graph, found = a_weight_and_spares(2), compilation(**SHARDED, conditions=ARRIVED)
    (output,), (parameter, *_) = graph.find_nodes(op="output"), graph.find_nodes(op="placeholder")
    output.args = ([*output.args[0], parameter],)
    gather_weights(graph, found)
    assert found.extra_inputs[-1] == ReadWhole(parameters=(0,))


def weights_of(body: Any, shape: tuple[int, ...], policy: Policy = ALL) -> list[CachedWeight]:
    """The inputs that a graph of ``body`` takes, as the backend finds them."""
    backend = Backend(policy, compiler="eager", cache_weights="update")
    model = torch.compile(Weight(body, *shape), backend=backend)  # copies go with it
    model(x(16, 32))
    return [copy.request for copy in backend.weights._copies()]


def test_delayed_scaling_has_a_page_for_a_weight_and_a_graph_that_records() -> None:
    (weight,) = weights_of(lambda w, a: a @ w.t(), (48, 32), DELAYED)
    (page,) = weight.extra_inputs
    assert isinstance(page, PageLayout)
    assert weight.records
    assert [[row.operand for row in rows] for rows in page.rows] == [["weight"]]
    reads, records = (graph_text(graph) for graph in (weight.quantizing, weight.recording))
    assert "fp8graph.read_scales(input1" in reads
    assert "update_page" not in reads
    assert "fp8graph.update_page(input1, amaxes=[amax]" in records
    assert "aten.copy_(input1, " in records


def test_alike_weights_have_one_signature() -> None:
    """Whatever their graphs are called and whichever layouts they need; not of other sizes or arithmetic."""

    def signature(body: Any, *shape: int) -> str:
        torch._dynamo.reset()
        (weight,) = weights_of(body, shape)
        return weight.signature

    plain = signature(lambda w, a: a @ w.t(), 48, 32)
    assert signature(lambda w, a: (a.detach() @ w.t()).relu(), 48, 32) == plain
    assert len({plain, signature(lambda w, a: a @ w.t(), 64, 32), signature(lambda w, a: a @ (2 * w).t(), 48, 32)}) == 3


class Packed(nn.Module):
    """Two weights in one parameter."""

    def __init__(self, sizes: tuple[int, int]) -> None:
        super().__init__()
        self.sizes = sizes
        self.weight = nn.Parameter(torch.randn(sum(sizes), 32))

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        a, b = self.weight.split(self.sizes)
        return functional.linear(x, a), functional.linear(y, b)


@first_fast("recipe", ["tensorwise", "rowwise", "delayed"])
@first_fast("sizes", [(48, 48), (32, 64)])
def test_parts_of_one_parameter_are_weights_of_their_own(sizes: tuple[int, int], recipe: str) -> None:
    torch._dynamo.reset()
    model = Packed(sizes)
    x, y = torch.randn(16, 32), torch.randn(16, 32)
    expected = model(x, y)
    backend = eager_backend(Policy(default=recipe, min_speedup=0), cache_weights="update")
    compiled = torch.compile(model, backend=backend)
    for a, b in zip(compiled(x, y), expected, strict=True):
        assert sqnr_db(a, b) > 24
    assert backend.report.weights == 2


class Decoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(32, 2, batch_first=True)
        self.decoder = nn.TransformerDecoderLayer(32, 2, 64, dropout=0.0, batch_first=True)

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return self.decoder(self.attention(q, k, v, need_weights=False)[0], k)


@pytest.mark.slow
def test_attention_across_tensors() -> None:
    """torch packs q, k and v into one parameter and splits it: into three equal parts, or into q and k, v."""
    torch._dynamo.reset()
    model, backend = Decoder(), eager_backend(ALL, cache_weights="update")
    tensors = torch.randn(3, 2, 16, 32)
    compiled = torch.compile(model, backend=backend)
    assert sqnr_db(compiled(*tensors), model(*tensors)) > 20
    assert backend.report.weights == 4 + 2 + 3 + 2  # of attention; then self-attention, cross-attention, feed-forward
