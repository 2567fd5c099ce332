"""Notice that tensors hold other numbers than before, whoever wrote them and by whatever means.

A fingerprint is a sum over all 64-bit words of a tensor, each times a key of its position, modulo 2^64: any write
changes it but for one chance in 2^60 or so. Two fingerprints of equal bytes are equal.

On a CPU fingerprints are two integer products, at a tenth of the time of quantizing the tensor, and are compared at
each call. Elsewhere one kernel reads all tensors (``runtime/fingerprints.py``); its result is compared on the device,
and read at a later call, when it has arrived: no call waits.
"""

from __future__ import annotations

import functools
import importlib.util
import time
from collections.abc import Callable, Sequence
from typing import Any, Final

import torch
from torch import Tensor

from fp8graph.compat import checkpointing
from fp8graph.compat.distributed import local

EVERY: Final = 64  # calls between two looks at what is not on a CPU
PAUSE: Final = 0.25  # seconds between two calls, in which weights may have been replaced
_COLUMNS: Final = 2048  # words in one row of the first product


@functools.cache
def _keys(length: int) -> Tensor:
    """[length] int64, odd: the first ones of the same numbers, whatever the length."""
    generator = torch.Generator().manual_seed(0x_F8)
    with torch.inference_mode(False):
        return torch.randint(-(2**62), 2**62, (length,), generator=generator) * 2 + 1


def _words(tensor: Tensor) -> Tensor:
    """Return the bytes of a tensor as 64-bit integers, those of its last 7 as one each. A view, if it can be one."""
    flat = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    whole = flat.numel() // 8 * 8
    if flat.storage_offset() % 8:
        flat = flat.clone()
    words = flat[:whole].view(torch.int64)
    return words if whole == flat.numel() else torch.cat([words, flat[whole:].to(torch.int64)])


def fingerprint(tensor: Tensor) -> int:
    """Return the fingerprint of a tensor in the memory of a CPU."""
    words = _words(tensor)
    rows = words.numel() // _COLUMNS
    matrix, rest = words[: rows * _COLUMNS].view(rows, _COLUMNS), words[rows * _COLUMNS :]
    by_row = _keys(1 << rows.bit_length())[:rows]  # few lengths, so that few are kept
    sums = torch.dot(torch.mv(matrix.t(), by_row), _keys(_COLUMNS)) if rows else torch.zeros((), dtype=torch.int64)
    return int(sums + torch.dot(rest, _keys(2 * _COLUMNS)[_COLUMNS : _COLUMNS + rest.numel()]))


def contents_of(tensors: Sequence[Tensor]) -> list[Any]:
    """Return the fingerprint of each of some tensors of one device: a number, or [] int64 on the device.

    None where nothing can read it.
    """
    with torch.no_grad(), checkpointing.without_modes():
        if not tensors or tensors[0].is_cpu:
            return [*map(fingerprint, tensors)]
        table = _table(tensors)
        return [None] * len(tensors) if table is None else [*table().unbind()]


def same_contents(
    pick: Callable[[Sequence[Any]], Sequence[Tensor]], before: Sequence[Any]
) -> Callable[[Sequence[Any]], bool]:
    """Return a check whether tensors on a CPU hold the numbers that they held ``before``. It keeps no tensor alive.

    Args:
        pick: takes the tensors, or DTensors of them, out of the arguments of a call.
    """
    expected = [*before]
    return lambda args: contents_of([*map(local, pick(args))]) == expected


class Watch:
    """The contents of tensors that are not on a CPU. It keeps no tensor alive.

    Args:
        tensors: those of one device, which stay where they are.
        before: their fingerprints, as :func:`contents_of` returns them.
        changed: called with the positions of those that hold other numbers than before, some calls after the write;
            with none where nothing can tell.
        pauses: called after a pause between two calls; None: a pause means nothing.
        every: look at each call, and wait for it.
    """

    def __init__(
        self,
        tensors: Sequence[Tensor],
        before: Sequence[Any],
        changed: Callable[[Sequence[int]], None],
        pauses: Callable[[], None] | None,
        *,
        every: bool = False,
    ) -> None:
        self._changed, self._pauses, self._every = changed, pauses, every
        self._table = None if any(x is None for x in before) else _table(tensors)
        self._before = torch.stack([*before]) if self._table is not None else None
        self._calls, self._last = 0, time.monotonic()
        self._waiting: tuple[torch.Event, Tensor] | None = None

    def __call__(self, _args: Sequence[Any]) -> bool:
        """Return whether nothing is known of a change. Asked once per call: mostly a clock and two comparisons."""
        now = time.monotonic()
        pause, self._last = now - self._last > PAUSE, now
        if pause and self._pauses is not None:
            self._pauses()
            return False
        self._calls += 1
        if self._waiting is None and (self._every or self._calls % EVERY == 0):
            if self._table is None:
                self._changed([])
                return False
            self._look()
        if self._waiting is not None and (self._every or self._waiting[0].query()):
            arrived, differs = self._waiting
            self._waiting = None
            arrived.synchronize()
            if positions := differs.nonzero().flatten().tolist():
                self._changed(positions)
                return False
        return True

    def _look(self) -> None:
        assert self._table is not None
        assert self._before is not None
        if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
            return  # a replay of the user's graph runs no Python: nothing looks then
        self._waiting = sent_to_host(self._table() != self._before)


def sent_to_host(tensor: Tensor) -> tuple[torch.Event, Tensor]:
    """Return a copy of a tensor in the host's memory, and the event after which it is there."""
    copy = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    copy.copy_(tensor, non_blocking=True)
    arrived = torch.Event(tensor.device)
    arrived.record()
    return arrived, copy


def _table(tensors: Sequence[Tensor]) -> Any:
    """Return a function that returns the fingerprints of ``tensors`` on their device; None where no kernel can read
    them.
    """
    if importlib.util.find_spec("triton") is None or tensors[0].is_meta:
        return None
    if any(not x.is_contiguous() or x.nbytes % 4 for x in tensors):
        return None
    from fp8graph.runtime.fingerprints import Table

    return Table(tensors)
