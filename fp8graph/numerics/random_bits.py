"""Random bits for stochastic rounding: Philox4x32-10, a function of a key and a counter without any state.

Source: Salmon, Moraes, Dror, Shaw, "Parallel random numbers: as easy as 1, 2, 3" (SC 2011). The arithmetic is that of
integers, so every device, eager or compiled, draws the same numbers.
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from fp8graph.compat.distributed import rank
from fp8graph.numerics.hints import materialize

_MULTIPLIERS: Final = (0xD2511F53, 0xCD9E8D57)
_KEY_STEPS: Final = (0x9E3779B9, 0xBB67AE85)
_ROUNDS: Final = 10
_RANKS_APART: Final = 0x1E3779B97F4A7C15  # an odd number with bits in both words
_HALF, _WORD = 0xFFFF, 0xFFFFFFFF
_BITS: Final = 16  # per number that is rounded


def philox(counter: tuple[Tensor, Tensor, Tensor, Tensor], key: tuple[Tensor, Tensor]) -> tuple[Tensor, ...]:
    """Four random 32-bit words for each counter of four words. All tensors are int64 and hold 32-bit words."""
    words = counter
    for turn in range(_ROUNDS):
        first, second = ((k + turn * step) & _WORD for k, step in zip(key, _KEY_STEPS, strict=True))
        a, b, c, d = words
        high_a, low_a = _product(a, _MULTIPLIERS[0])
        high_c, low_c = _product(c, _MULTIPLIERS[1])
        # Inductor follows each use of a number to its start, and each word is used twice in each round: 2^10 times. It
        # need not beyond what is stored, and stores none of these after all, since one kernel makes and reads them: as
        # long as they are few, for it fuses at most 64 loops (``max_fusion_size``), and each of these words is one.
        words = (high_c ^ b ^ first, low_c, high_a ^ d ^ second, low_a)
        words = tuple(map(materialize, words)) if turn % 3 == 2 else words  # 2^3 times
    return words


def random_halves(seed: Tensor | None, draw: int, part: int, groups: int, device: torch.device) -> Tensor:
    """[groups, 16] int32: 16 random bits for each of 16 numbers in ``groups`` groups.

    ``seed``: int64 [1]; None: 0. ``draw``, ``part``: which of the tensors that share a seed, and which part of it.
    """
    seed = torch.zeros(1, dtype=torch.int64, device=device) if seed is None else seed
    key = seed & _WORD, (seed >> 32) & _WORD
    group = torch.arange(groups, device=device).unsqueeze(1)
    half = torch.arange(2, device=device)  # two counters, 4 words of 2 halves each
    counter = (group & _WORD, half, torch.full_like(half, draw), torch.full_like(half, part))
    # two's complement in int32, two bytes per number: else each number would compute all of its group's
    words = [materialize((word - ((word >> 31) << 32)).to(torch.int32)) for word in philox(counter, key)]
    four = torch.stack(torch.broadcast_tensors(*words), -1)  # [groups, 2, 4]
    return ((four.unsqueeze(-1) >> (_BITS * half).to(torch.int32)) & _HALF).reshape(groups, 16)


def random_seed(device: torch.device) -> Tensor:
    """int64 [1]: a seed from torch's generator of ``device``, another one on each rank."""
    seed = torch.randint(-(2**63), 2**63 - 1, (1,), dtype=torch.int64, device=device)
    apart = rank() * _RANKS_APART & (2**64 - 1)
    return seed ^ (apart - (apart >> 63 << 64))  # as a signed number


def _product(a: Tensor, b: int) -> tuple[Tensor, Tensor]:
    """High and low word of the product of 32-bit words, in sums of less than 50 bits: none overflows."""
    low = a * (b & _HALF)
    high = a * (b >> _BITS) + (low >> _BITS)
    return high >> _BITS, ((high & _HALF) << _BITS) | (low & _HALF)
