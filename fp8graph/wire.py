"""What collectives move over the wire, counted as a ring algorithm moves it: the bytes that each rank sends.

Source: the algorithm bandwidths of NCCL's performance notes (nccl-tests, PERFORMANCE.md).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

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
