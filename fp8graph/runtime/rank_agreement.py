"""Check that all ranks that train one model have the same policy, before anything is compiled.

The comparison uses the store in which the ranks met, not a collective: a rank that compiles later than the others (a
stage of a pipeline waits for the one before it), or never, must not make them hang.
"""

from __future__ import annotations

import datetime
import difflib
import logging
import zlib
from typing import Any, Final

import torch.distributed as dist

from fp8graph.compat import distributed
from fp8graph.errors import PolicyError
from fp8graph.ir import collectives

PATIENCE: Final = datetime.timedelta(seconds=30)  # the time within which the other ranks are expected to compile, too
_log = logging.getLogger("fp8graph")


def agree(text: str, group: str | None, kind: str = "training", patience: datetime.timedelta = PATIENCE) -> None:
    """Raise on all ranks of ``group`` if ``text`` is not the same on all of them.

    Args:
        text: the lines that must be the same.
        group: the name of a process group; None: there is one rank.
        kind: texts of one kind are compared, the first of each rank, the second of each rank, ...
        patience: how long to wait for ranks that have not called this. Then the others go on, with a warning.

    Raises:
        PolicyError: with the difference.
    """
    ranks = sorted(collectives.ranks_of(group))
    if len(ranks) < 2 or dist.get_backend() == "fake":
        return
    store, rank = distributed.default_store(), dist.get_rank()
    if store is None:  # MPI
        return
    place = f"fp8graph/{kind}/{zlib.crc32(repr(ranks).encode())}"
    place = f"{place}/{store.add(f'{place}/{rank}', 1)}"  # the same number on all ranks that compared equally often
    try:
        if rank == ranks[0]:
            store.set(f"{place}/text", text)
        _compare(store, place, text, ranks, rank, patience)
    except (dist.DistStoreError, RuntimeError) as error:  # FileStore raises the latter
        if "timeout" not in str(error).lower():
            raise
        _log.warning(
            "not all of the ranks %s compiled a model within %s of rank %d: their policies were not compared.",
            ranks, patience, rank,
        )  # fmt: skip


def _compare(store: Any, place: str, text: str, ranks: list[int], rank: int, patience: datetime.timedelta) -> None:
    store.wait([f"{place}/text"], patience)
    expected = store.get(f"{place}/text").decode()
    if text != expected:
        names = f"rank {ranks[0]}", f"rank {rank}"
        difference = difflib.unified_diff(expected.splitlines(), text.splitlines(), *names, lineterm="", n=0)
        store.set(f"{place}/verdict", "\n".join(difference))
    arrived = store.add(f"{place}/arrived", 1)
    if arrived == len(ranks) and not store.check([f"{place}/verdict"]):
        store.set(f"{place}/verdict", "equal")
    store.wait([f"{place}/verdict"], patience)
    verdict = store.get(f"{place}/verdict").decode()
    if verdict != "equal":
        raise PolicyError(
            f"the ranks do not agree on how to quantize:\n{verdict}\nGive all of them one policy; or, if they train "
            "different models, each its own group: fp8graph.autocast(amax_reduction_group=...) around the calls."
        )
