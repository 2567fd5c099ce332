"""Attention as data: what its fields follow from."""

from __future__ import annotations

from torch import fx

from fp8graph.ir.naming import Place
from fp8graph.ir.sites import Attention, Read, Site, Sizes

SIZES = Sizes(batch=2, heads=4, kv_heads=2, queries=16, keys=16, head_size=64, value_size=64)


def attention(*forward: fx.Node) -> Attention:
    site = Site(place=Place(root="", path="", parameter=None), op="attention", region=None)
    reads = (Read(node=forward[0], position=0, operand="query"),)
    return Attention(site=site, form="flash", forward=forward, backward=(), reads=reads, sizes=SIZES)


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
