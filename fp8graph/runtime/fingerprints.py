"""The fingerprints of many tensors in one launch: see ``runtime/contents.py``. Needs Triton."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK: Final = 4096  # words of 32 bits per program: 16 KiB


@triton.jit
def add_fingerprints(addresses, sizes, owners, firsts, sums, BLOCK: tl.constexpr):  # pyright: ignore
    """``sums[i] += sum(word * key(position))`` over the 32-bit words of tensor ``i``, modulo 2^64.

    ``addresses``, ``sizes`` (words): int64 [tensors]; ``owners``: int32 [programs], the tensor of each program;
    ``firsts``: int32 [tensors], the first program of each.
    """
    program = tl.program_id(0)
    owner = tl.load(owners + program)
    words = tl.load(addresses + owner).to(tl.pointer_type(tl.int32))
    start = (program - tl.load(firsts + owner)).to(tl.int64) * BLOCK
    position = start + tl.arange(0, BLOCK)
    word = tl.load(words + position, mask=position < tl.load(sizes + owner), other=0).to(tl.int64)
    # odd, and different for each position: the steps of a linear generator, mixed once (splitmix64's constant)
    key = (position * 2 + 1) * -7046029254386353131
    key = (key ^ (key >> 29)) | 1
    tl.atomic_add(sums + owner, tl.sum(word * key, axis=0))


class Table:
    """Where some tensors of one device are, for one launch over all of them. It keeps none alive."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        sizes = [x.nbytes // 4 for x in tensors]
        programs = [-(-size // BLOCK) for size in sizes]
        firsts = [sum(programs[:i]) for i in range(len(programs))]
        owners = torch.repeat_interleave(torch.arange(len(tensors), dtype=torch.int32), torch.tensor(programs))
        addresses = [local.data_ptr() for local in tensors]

        def moved(x: Any, dtype: torch.dtype) -> Tensor:
            return torch.as_tensor(x, dtype=dtype).to(tensors[0].device)

        self._arguments = (
            moved(addresses, torch.int64), moved(sizes, torch.int64),
            moved(owners, torch.int32), moved(firsts, torch.int32),
        )  # fmt: skip
        self._grid = (sum(programs),)

    def __call__(self) -> Tensor:
        """[tensors] int64."""
        sums = torch.zeros(len(self._arguments[0]), dtype=torch.int64, device=self._arguments[0].device)
        kernel: Any = add_fingerprints
        # Triton 3.9 warns where nobody chooses whether floating-point operations fuse: the kernel has none
        kernel[self._grid](*self._arguments, sums, BLOCK=BLOCK, enable_fp_fusion=True)
        return sums
