"""row_moves: how far back rows stay together."""

from __future__ import annotations

import torch
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx

from fp8graph.passes.route_in_fp8 import Moves, moves_of

ROWS = torch.tensor([1, 0, 1, 2])


def moves(function: object, *args: torch.Tensor) -> tuple[Moves | None, fx.Graph]:
    graph = make_fx(function, tracing_mode="fake")(*args).graph  # pyright: ignore[reportArgumentType]
    (result,) = graph.output_node().all_input_nodes
    return moves_of(result), graph


def names(found: Moves | None) -> tuple[str, list[str], list[torch.dtype]]:
    assert found is not None
    return found.source.name, [node.name for node in found.steps], list(found.casts)


def test_casts_and_views_between_moves() -> None:
    found, _ = moves(
        lambda x, rows: torch.ops.prims.convert_element_type(x.view(4, 8)[rows], torch.bfloat16).view(2, 2, 8)[
            rows % 2
        ],
        torch.randn(4, 8),
        ROWS,
    )
    assert names(found) == ("view", ["index", "view_1", "index_1"], [torch.bfloat16])


def test_an_index_of_columns_and_sums_end_the_way() -> None:
    found, _ = moves(lambda x, rows: (x + 1).index_select(0, rows), torch.randn(4, 8), ROWS)
    assert names(found) == ("add", ["index_select"], [])
    assert moves(lambda x, rows: x.index_select(1, rows), torch.randn(4, 8), ROWS)[0] is None
    assert moves(lambda x, rows: x[rows, rows], torch.randn(4, 8), ROWS)[0] is None
    assert moves(lambda x, chosen: x[chosen], torch.randn(4, 8), ROWS > 0)[0] is None  # a mask
    assert moves(lambda x, rows: torch.cat([x[rows], x]), torch.randn(4, 8), ROWS)[0] is None
    assert moves(lambda x, rows: x.view(8, 4) * rows, torch.randn(4, 8), ROWS)[0] is None


def test_other_readers() -> None:
    found, graph = moves(lambda x, rows: (x[rows].view(2, 16), x[rows].sum())[0], torch.randn(4, 8), ROWS)
    assert found is None  # a view of the last dim
    found, graph = moves(lambda x, rows: x[rows], torch.randn(4, 8), ROWS)
    assert found is not None
    assert found.other_readers(graph.output_node()) == []
    assert found.other_readers(found.source) == [graph.output_node()]
