"""Let tensors be the rows of one: they are copied into its memory once, and stay there.

So a GEMM multiplies several weights as one, without a second copy of them, and whoever writes one of them, by whatever
means, writes the joined one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import torch
from torch import Tensor, nn

from fp8graph.compat import autograd

_PLAIN: Final = (Tensor, nn.Parameter)


def lie_side_by_side(parts: Sequence[Tensor]) -> bool:
    """Return whether each of ``parts`` begins in memory where the one before it ends."""
    if any(type(x) not in _PLAIN for x in parts):
        return False
    ends = [x.storage_offset() + x.numel() for x in parts]
    follow = all(x.storage_offset() == end for x, end in zip(parts[1:], ends, strict=False))
    pointers = {x.untyped_storage().data_ptr() for x in parts}
    return follow and len(pointers) == 1 and all(x.is_contiguous() for x in parts)


def side_by_side(parts: Sequence[Tensor]) -> Tensor | None:
    """Return the tensor whose rows those of ``parts`` are, which are moved to its memory if they do not lie so.

    None, and nothing is moved, if others may hold that memory too, and write to it or wait for writes: another tensor,
    another process, the library that allocated it; or if a part has a memory of no one address (a DTensor, a fake).
    """
    if not lie_side_by_side(parts):
        if not all(map(_can_move, parts)):
            return None
        _move(parts)
    first, rows = parts[0], sum(x.shape[0] for x in parts)
    joined = torch.empty(0, dtype=first.dtype, device=first.device)
    shape = rows, *first.shape[1:]  # one row alone may have any stride
    joined.set_(first.untyped_storage(), first.storage_offset(), shape, torch.empty(shape, device="meta").stride())
    return joined


def _can_move(x: Tensor) -> bool:
    if type(x) not in _PLAIN or x.is_meta or x.is_inference() or not x.is_contiguous():
        return False
    memory = x.untyped_storage()
    return memory.resizable() and not x.is_shared() and autograd.has_memory_alone(x)


def _move(parts: Sequence[Tensor]) -> None:
    first, rows = parts[0], [x.shape[0] for x in parts]
    with torch.inference_mode(False):  # in which a new tensor would have no version
        joined = torch.empty((sum(rows), *first.shape[1:]), dtype=first.dtype, device=first.device)
        for x, place in zip(parts, joined.split(rows), strict=True):
            place.copy_(x.detach())
            x.data = place  # its own memory is free now: no more than one part has two
