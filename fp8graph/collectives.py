"""The collectives of a graph: what is sent, in which dtype, how many bytes, and why so."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final, cast

from torch import fx

from fp8graph import wire
from fp8graph.graph import backward_nodes, module_path, nodes, size_hint, split_source, value

GATHERED_KEY: Final = "fp8graph_gathered"  # node.meta of an all-gather of what is quantized: Gathered
PURPOSE_KEY: Final = "fp8graph_purpose"  # node.meta of a collective that a pass added: what it is for


@dataclass(frozen=True, kw_only=True)
class Gathered:
    """What pass `gather` found of an all-gather."""

    tensor: str  # "layers.0.up input"
    reason: str


@dataclass(frozen=True, kw_only=True)
class CollectiveRecord:
    """One collective of a graph."""

    kind: str  # all_gather, reduce_scatter, all_reduce or all_to_all
    direction: str  # forward or backward; step: once after both, outside of the graphs
    tensor: str  # whose: "layers.0.up input", or the module that it was traced in
    dtype: str  # that it travels in: FP8 goes as uint8
    shape: tuple[int | str, ...]  # of what this rank gives; a string where it is dynamic
    ranks: int
    bytes_sent: int  # by each rank, see ``fp8graph/wire.py``; with the traced sizes where they are dynamic
    reason: str  # why it travels so; "" where fp8graph changed nothing


def collective_records(graph: fx.Graph) -> list[CollectiveRecord]:
    """Every functional collective of ``graph``, in order."""
    return list(_records(graph))


def _records(graph: fx.Graph) -> Iterator[CollectiveRecord]:
    in_backward = backward_nodes(graph)
    for node in nodes(graph, wire.KINDS):
        kind = wire.KINDS[node.target]
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
            bytes_sent=wire.bytes_sent(kind, largest * given.itemsize, ranks),
            reason=gathered.reason if gathered else str(node.meta.get(PURPOSE_KEY, "")),
        )


def _ranks(node: fx.Node) -> int:
    """The size of the group: an argument of gathers and scatters, else that of the group itself."""
    sizes: dict[Any, int] = {wire.ALL_GATHER: 1, wire.REDUCE_SCATTER: 2}
    if node.target in sizes:
        return cast(int, node.args[sizes[node.target]])
    return max(1, len(wire.ranks_of(node.args[-1])))
