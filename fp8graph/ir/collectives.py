"""Collectives: their functional ops in a graph, and the bytes that they send.

The bytes are those that each rank sends in a ring algorithm.
Source: the algorithm bandwidths of NCCL's performance notes (nccl-tests, PERFORMANCE.md).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, cast

import torch
import torch.distributed as dist
from torch import fx

from fp8graph.compat import distributed


def _functional(name: str) -> Any:
    """Return the op ``_c10d_functional.<name>``, which DTensor and ``torch.compile`` use.

    If torch was built without torch.distributed, it is a string that no node has as its target.
    """
    return getattr(torch.ops._c10d_functional, name).default if dist.is_available() else f"no {name}"


ALL_GATHER: Final = _functional("all_gather_into_tensor")  # (shard, ranks, group): concatenated along the first dim
REDUCE_SCATTER: Final = _functional("reduce_scatter_tensor")  # (x, "sum", ranks, group)
ALL_REDUCE: Final = _functional("all_reduce")  # (x, "max", group)
ALL_TO_ALL: Final = _functional("all_to_all_single")  # (x, output sizes, input sizes, group)
WAIT: Final = _functional("wait_tensor")

KINDS: Final[Mapping[Any, str]] = {
    ALL_GATHER: "all_gather",
    REDUCE_SCATTER: "reduce_scatter",
    ALL_REDUCE: "all_reduce",
    ALL_TO_ALL: "all_to_all",
}

# By kind: how often each rank sends (ranks - 1) / ranks of the larger side.
_PASSES: Final[Mapping[str, int]] = {
    "all_gather": 1,
    "reduce_scatter": 1,
    "all_to_all": 1,
    "all_reduce": 2,  # a reduce_scatter and an all_gather
}


def bytes_sent(kind: str, payload: int, ranks: int) -> int:
    """Return the bytes that each of ``ranks`` ranks sends.

    Args:
        kind: "all_gather", "reduce_scatter", "all_to_all" or "all_reduce".
        payload: bytes of the larger side: the result of an all_gather, the argument of a reduce_scatter.
        ranks: the number of ranks in the group.

    Raises:
        ValueError: for an unknown kind.
    """
    if kind not in _PASSES:
        raise ValueError(f"kind must be one of {', '.join(_PASSES)}, not {kind!r}")
    return _PASSES[kind] * payload * (ranks - 1) // ranks


def ranks_of(group: Any) -> frozenset[int]:
    """Return the global ranks of a group, by its name or as an object; empty for None and for an unknown group."""
    if group is None:
        return frozenset()
    try:
        return frozenset(dist.get_process_group_ranks(distributed.process_group(group)))
    except (RuntimeError, ValueError, KeyError, AttributeError, TypeError):
        return frozenset()


def erase_unread(graph: fx.Graph) -> None:
    """Erase collectives that nothing reads any more: torch keeps them, since a wait has side effects."""
    for waited in reversed(graph.find_nodes(op="call_function", target=WAIT)):
        source = cast(fx.Node, waited.args[0])
        if source.target in (ALL_GATHER, ALL_TO_ALL) and not waited.users:
            graph.erase_node(waited)
            if not source.users:
                graph.erase_node(source)
    graph.eliminate_dead_code()


@dataclass(frozen=True, kw_only=True)
class Gathered:
    """The findings of the passes `gather_in_fp8` and `route_in_fp8` about one all-gather or all-to-all."""

    tensor: str  # "layers.0.up input"
    reason: str
