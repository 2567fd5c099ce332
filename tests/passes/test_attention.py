"""Attention that is one op: each op is known, with its backward and the arguments that are q, k and v."""

from __future__ import annotations

from typing import Any

from torch import fx

from attentions import OPS, Attention, qkv, sdpa
from fp8graph.compat.attention import FLEX, FORMS
from fp8graph.compat.ops import schema
from fp8graph.ir.naming import Place
from fp8graph.ir.nodes import backward_nodes
from fp8graph.ir.sites import Site
from fp8graph.passes.attention.occurrences import Attention as Found
from fp8graph.passes.attention.occurrences import Read, Sizes, attention_ops, extra_results
from helpers import in_one_test, passed


def found_in(body: Any, *args: Any) -> tuple[list[Found], fx.Graph]:
    graph, _ = passed(Attention(body), *args, last="match")
    return list(attention_ops(graph, backward_nodes(graph))), graph


@in_one_test("target", [target for target in FORMS if target is not FLEX], ids=str)
def test_the_places_of_arguments_are_those_of_the_schemas(target: Any) -> None:
    form = FORMS[target]
    names = [argument.name for argument in schema(form.backward).arguments]
    assert [argument.name for argument in schema(target).arguments][:3] == ["query", "key", "value"]
    assert names[form.first : form.first + 3] == ["query", "key", "value"]
    assert names[form.logsumexp] in ("logsumexp", "lse")


def test_an_op_and_its_backward() -> None:
    (attention,), _ = found_in(lambda q, k, v: sdpa(is_causal=True, enable_gqa=True)(q, k, v), *qkv(kv_heads=2))
    assert (attention.form, attention.causal, attention.masked, attention.dropout) == ("CPU flash", True, False, False)
    (backward,) = attention.backward
    assert str(backward.target) == "aten._scaled_dot_product_flash_attention_for_cpu_backward.default"
    assert list(vars(attention.sizes).values()) == [2, 4, 2, 16, 16, 64, 64]
    reads = [(read.node, read.operand, str(read.argument)) for read in attention.reads]
    both = [("query", "q"), ("key", "k"), ("value", "v")]
    assert reads == [(node, *pair) for node in (*attention.forward, backward) for pair in both]


def test_each_backward_belongs_to_its_own_forward() -> None:
    found, _ = found_in(lambda q, k, v: sdpa()(sdpa()(q, k, v), k, v), *qkv())
    assert len(found) == 2
    for attention in found:
        (backward,) = attention.backward
        assert backward.args[1] is attention.result.args[0]


def test_results_beside_the_first_one() -> None:
    found, _ = found_in(lambda q, k, v: sdpa()(q, k, v), *qkv())
    assert [str(node) for node in extra_results(found[0])] == ["getitem_1"]


def test_other_ops_are_none() -> None:
    assert found_in(lambda q, k, v: (q + k).softmax(-1) * v, *qkv())[0] == []


def test_all_ops_are_tried() -> None:
    """Those of packed sequences in tests/passes/test_find_attention.py."""
    assert {form.name for form in FORMS.values()} - {"packed"} == {*OPS, "flex"}


SIZES = Sizes(batch=2, heads=4, kv_heads=2, queries=16, keys=16, head_size=64, value_size=64)


def attention(*forward: fx.Node) -> Found:
    site = Site(place=Place(root="", path="", parameter=None), op="attention", region=None)
    reads = (Read(node=forward[0], position=0, operand="query"),)
    return Found(site=site, form="flash", forward=forward, backward=(), reads=reads, sizes=SIZES)


def test_two_matmuls_are_written_out() -> None:
    graph = fx.Graph()
    q = graph.placeholder("q")
    first = graph.call_function(max, (q,))
    second = graph.call_function(max, (first,))
    assert not attention(first).written_out
    assert attention(first, second).written_out
    assert attention(first, second).result is second


def test_a_read_sees_its_argument_change() -> None:
    graph = fx.Graph()
    q, other = graph.placeholder("q"), graph.placeholder("other")
    (read,) = attention(node := graph.call_function(max, (q,))).reads
    assert read.argument is q
    node.args = (other,)
    assert read.argument is other
