"""The collectives of a graph: what each sends, in which dtype, how many bytes, and why."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, cast

from torch import fx

from fp8graph.ir import collectives
from fp8graph.ir.collectives import Gathered
from fp8graph.ir.keys import GATHERED_KEY, PURPOSE_KEY
from fp8graph.ir.nodes import backward_nodes, module_path, nodes, size_hint, value
from fp8graph.ir.sources import split_source
from fp8graph.records import CollectiveRecord


def collective_records(graph: fx.Graph) -> list[CollectiveRecord]:
    """Every functional collective of ``graph``, in order."""
    return list(_records(graph))


def _records(graph: fx.Graph) -> Iterator[CollectiveRecord]:
    in_backward = backward_nodes(graph)
    for node in nodes(graph, collectives.KINDS):
        kind = collectives.KINDS[node.target]
        given, result = value(cast(fx.Node, node.args[0])), value(node)
        gathered = cast("Gathered | None", node.meta.get(GATHERED_KEY))
        ranks = _ranks(node)
        largest = max(size_hint(x.numel()) for x in (given, result))
        yield CollectiveRecord(
            kind=kind,
            direction="backward" if node in in_backward else "forward",
            tensor=gathered.tensor if gathered else split_source(module_path(node))[1],
            dtype=str(given.dtype).removeprefix("torch."),
            shape=tuple(size if isinstance(size, int) else str(size) for size in given.shape),
            ranks=ranks,
            bytes_sent=collectives.bytes_sent(kind, largest * given.itemsize, ranks),
            reason=gathered.reason if gathered else str(node.meta.get(PURPOSE_KEY, "")),
        )


def _ranks(node: fx.Node) -> int:
    """The size of the group: an argument of gathers and scatters, else that of the group itself."""
    sizes: dict[Any, int] = {collectives.ALL_GATHER: 1, collectives.REDUCE_SCATTER: 2}
    if node.target in sizes:
        return cast(int, node.args[sizes[node.target]])
    return max(1, len(collectives.ranks_of(node.args[-1])))
