"""Collectives: their functional ops in a graph, and what they move over the wire.

Bytes are counted as a ring algorithm moves them: those that each rank sends.
Source: the algorithm bandwidths of NCCL's performance notes (nccl-tests, PERFORMANCE.md).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import torch
import torch.distributed as dist

from fp8graph.compat import distributed


def _functional(name: str) -> Any:
    """``_c10d_functional.<name>``: what DTensor and ``torch.compile`` write. A string that no node has as its target
    where torch was built without torch.distributed."""
    return getattr(torch.ops._c10d_functional, name).default if dist.is_available() else f"no {name}"


ALL_GATHER: Final = _functional("all_gather_into_tensor")  # (shard, ranks, group): joined along the first dim
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

# By kind: how often each rank sends its part, in parts of (ranks - 1) / ranks of the larger side.
_PASSES: Final[Mapping[str, int]] = {
    "all_gather": 1,
    "reduce_scatter": 1,
    "all_to_all": 1,
    "all_reduce": 2,  # a reduce_scatter and an all_gather
}


def bytes_sent(kind: str, payload: int, ranks: int) -> int:
    """The bytes that each of ``ranks`` ranks sends.

    Args:
        kind: "all_gather", "reduce_scatter", "all_to_all" or "all_reduce".
        payload: bytes of the larger side: what an all_gather returns, what a reduce_scatter takes.
        ranks: of the group.

    Raises:
        ValueError: for an unknown kind.
    """
    if kind not in _PASSES:
        raise ValueError(f"kind must be one of {', '.join(_PASSES)}, not {kind!r}")
    return _PASSES[kind] * payload * (ranks - 1) // ranks


def ranks_of(group: Any) -> frozenset[int]:
    """The global ranks of a group, by its name or as it is; empty for None, and if it is unknown here."""
    if group is None:
        return frozenset()
    try:
        return frozenset(dist.get_process_group_ranks(distributed.process_group(group)))
    except (RuntimeError, ValueError, KeyError, AttributeError, TypeError):
        return frozenset()


@dataclass(frozen=True, kw_only=True)
class Gathered:
    """What pass `gather_in_fp8` found of an all-gather."""

    tensor: str  # "layers.0.up input"
    reason: str
