"""gather_path: what may stand between an all-gather and a linear, and what ends the search."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

from fp8graph.analysis.gather_path import Path, path_of, replay
from fp8graph.ir.nodes import aten, value
from gathers import Turned, gather, gathered, reasons_of, report_of
from helpers import in_one_test, traced

pytestmark = [
    pytest.mark.skipif(not torch.distributed.is_available(), reason="torch without torch.distributed"),
    pytest.mark.usefixtures("group_of_two"),
]


@pytest.mark.parametrize(
    "turn",
    [
        pytest.param(lambda x: x.t().contiguous(), id="transposed"),
        pytest.param(lambda x: x.reshape(64, 16).repeat(1, 2), id="rows cut apart"),
        pytest.param(lambda x: torch.cat(x.split(16, 1)[::-1], 1), id="columns joined"),
        pytest.param(lambda x: torch.cat(x.split(16, 0)[::-1], 0), id="another order"),
        pytest.param(lambda x: x + 1, id="another value"),
    ],
)
def test_ops_that_do_not_move_rows_are_unchanged(turn: Any) -> None:
    report = report_of(Turned(turn), torch.randn(16, 32))
    assert reasons_of(report) == [""]


class OneRow(nn.Module):
    """A vector whose parts the ranks have is one row of a linear's input."""

    def __init__(self) -> None:
        super().__init__()
        self.proj = nn.Linear(64, 48, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.proj(gather(x, 0).view(1, 64))


def test_a_vector_is_gathered_as_it_is() -> None:
    assert [c.dtype for c in report_of(OneRow(), torch.randn(32)).collectives] == ["float32"]


def result_of(body: Any, *shape: int) -> fx.Node:
    """The graph of ``body`` for a gathered tensor, whose shard has ``shape``."""
    graph = traced(lambda x: body(gathered(x, 0)), shape)
    (output,) = graph.find_nodes(op="output")
    return output.args[0]


MOVES = [
    pytest.param(lambda x: x, (4, 8), [], id="nothing"),
    pytest.param(lambda x: x.bfloat16().double(), (4, 8), [], id="casts"),
    pytest.param(lambda x: x.view(2, 4, 8), (4, 8), ["view"], id="a view"),
    pytest.param(lambda x: x.permute(1, 0, 2), (4, 3, 8), ["permute"], id="rows in another order"),
    pytest.param(
        lambda x: torch.cat(x.split(4, 0), 1), (4, 3, 8), ["split", "getitem", "getitem_1", "cat"], id="another dim"
    ),
]


@in_one_test(("body", "shape", "steps"), MOVES)
def test_rows_that_move_as_wholes(body: Any, shape: tuple[int, ...], steps: list[str]) -> None:
    """A scale of each row moves as the rows do."""
    result = result_of(body, *shape)
    path = path_of(result)
    assert path is not None
    assert [step.name for step in path.steps] == steps
    assert path.shard.op == "placeholder"
    assert path.other_readers(next(iter(result.users))) == []
    assert path.is_plain == (not steps or steps == ["view"])
    assert path.keeps_shape == (steps == [])
    whole = torch.randn(*value(path.waited).shape)
    moved, wanted = (moved_as(path, x) for x in (whole[..., :1].contiguous(), whole))
    assert wanted.shape == value(result).shape
    assert torch.equal(moved, wanted[..., :1])


def moved_as(path: Path, x: Tensor) -> Tensor:
    """The steps of the path, done with a tensor."""
    run: Any = replay
    *_, result = run(path.steps, path.waited, x, x.shape[-1], lambda target, *args: target(*args)).values()
    return result


def test_casts_are_kept_in_order() -> None:
    path = path_of(result_of(lambda x: x.bfloat16().double(), 4, 8))
    assert path is not None
    assert list(path.casts) == [torch.bfloat16, torch.float64]


def test_who_else_reads() -> None:
    graph = traced(lambda x: (lambda y: [y.view(2, 4, 8), y.sin()])(gathered(x, 0)), (4, 8))
    (view,) = [node for node in graph.nodes if node.target is aten.view.default]
    path = path_of(view)
    assert path is not None
    assert {node.name for node in path.other_readers(graph.output_node())} == {"sin"}


ENDS = [
    pytest.param(lambda x: x.t(), (4, 8), id="transposed"),
    pytest.param(lambda x: x.view(8, 2, 4), (4, 8), id="rows cut apart"),
    pytest.param(lambda x: torch.cat(x.split(4, 1), 1), (4, 8), id="joined along rows"),
    pytest.param(lambda x: torch.cat(x.split(2, 0)[:2], 1), (4, 8), id="not all parts"),
    pytest.param(lambda x: torch.cat([*x.split(4, 0)][::-1], 0), (4, 8), id="parts in another order"),
    pytest.param(lambda x: torch.cat([x, x], 0), (4, 8), id="twice"),
    pytest.param(lambda x: x + 1, (4, 8), id="another value"),
    pytest.param(lambda x: x, (8,), id="a vector"),
]


@in_one_test(("body", "shape"), ENDS)
def test_there_is_no_path(body: Any, shape: tuple[int, ...]) -> None:
    assert path_of(result_of(body, *shape)) is None


def test_there_is_no_path_without_a_gather() -> None:
    graph = traced(lambda x: x.view(8, 4), (4, 8))
    assert [path_of(node) for node in graph.nodes if node.op != "output"] == [None, None]
