"""write: what is copied into a graph input is written there, part by part."""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx

from fp8graph.ir.nodes import aten, nodes
from fp8graph.numerics.hints import ARRANGE, MATERIALIZE, WRITE, arrange, materialize
from fp8graph.passes.write import write
from helpers import in_one_test


def joined(buffer: Tensor, a: Tensor, b: Tensor) -> None:
    buffer.copy_(torch.cat([a + 1, b * 2], 1))


def viewed(buffer: Tensor, a: Tensor, b: Tensor) -> None:
    buffer.copy_(torch.cat([(a + 1).reshape(2, 2, 4), (b * 2).reshape(2, 2, 4)], 0).reshape(4, 8))


def padded(buffer: Tensor, a: Tensor, b: Tensor) -> None:
    inner = torch.cat([a[:1] + 1, b[:2] * 2])
    buffer.copy_(torch.cat([torch.cat([inner, torch.zeros(1, 4)]), b * 3], 1))


def arranged(buffer: Tensor, a: Tensor, b: Tensor) -> None:
    buffer.copy_(arrange([materialize(a + 1).t(), (b * 2).t()], 0).reshape(4, 8))


def stored(buffer: Tensor, a: Tensor, b: Tensor) -> None:
    buffer.copy_(materialize((a + b).repeat(1, 2)))


def single(buffer: Tensor, a: Tensor, b: Tensor) -> None:
    buffer.copy_((a + 1).repeat(1, 2))


def shared(buffer: Tensor, a: Tensor, b: Tensor) -> Tensor:
    both = torch.cat([a + 1, b * 2], 1)
    buffer.copy_(both)
    return both


def shifted(buffer: Tensor, a: Tensor, b: Tensor) -> None:
    buffer.copy_(torch.cat([a, buffer[:, :4]], 1))  # part by part, a would be there twice


def graph_of(function: Callable[..., object], arguments: list[Tensor]) -> fx.GraphModule:
    return make_fx(function, tracing_mode="fake")(*arguments)


def arguments(columns_first: bool = False) -> list[Tensor]:
    buffer = torch.zeros(8, 4).t() if columns_first else torch.zeros(4, 8)
    return [buffer, torch.arange(16.0).reshape(4, 4), -torch.arange(16.0).reshape(4, 4)]


@in_one_test(("function", "copies"), [(joined, 2), (viewed, 2), (padded, 4), (arranged, 2), (stored, 1)])
def test_parts_are_written_where_they_belong(function: Callable[..., None], copies: int) -> None:
    expected, got = arguments(), arguments()
    function(*expected)
    module = graph_of(function, got)
    write(module.graph)
    assert not list(nodes(module.graph, (aten.cat.default, ARRANGE, aten.copy_.default)))
    sources = [cast(fx.Node, written.args[1]).target for written in nodes(module.graph, (WRITE,))]
    assert len(sources) == copies
    assert MATERIALIZE not in sources
    module.recompile()
    module(*got)
    assert torch.equal(got[0], expected[0])


@in_one_test(
    ("function", "columns_first"),
    [(single, False), (shared, False), (joined, True), (shifted, False)],
    ids=["nothing to take apart", "read by others", "a strided input", "an input that is read"],
)
def test_other_copies_stay(function: Callable[..., object], columns_first: bool) -> None:
    module = graph_of(function, arguments(columns_first))
    before = str(module.graph)
    write(module.graph)
    assert str(module.graph) == before
