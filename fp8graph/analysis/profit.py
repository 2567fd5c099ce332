"""Which GEMMs pay: each is compared with high precision, together with those that it shares a quantization with.

    fprop, dgrad, wgrad in FP8: 1.30, 1.20, 0.97   ->   wgrad refused; x and dy are quantized for one GEMM each
    fprop, dgrad                1.15, 1.02         ->   dgrad refused
    fprop                       1.15               ->   accepted

A quantization is paid by the GEMMs in FP8 that read it, in equal parts: a refused one pays nothing, so the others pay
more. Asked again until all that are left reach the bar, and so does their sum, whose parts add up to the whole.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from fp8graph.hardware.roofline import Operand, gemm_seconds
from fp8graph.hardware.speed import Speed
from fp8graph.recipes import Layout, Scaling


@dataclass(frozen=True, kw_only=True)
class Quantized:
    """A tensor, or several side by side, that is quantized once for all GEMMs that read it."""

    key: Any  # equal for one quantization: what, and how
    elements: int
    fused: bool = True  # as in roofline.Operand
    kept: bool = False


@dataclass(frozen=True, kw_only=True)
class Product:
    """One GEMM ``[m, k] @ [k, n]`` as it runs in FP8, and the layouts that it reads."""

    m: int
    n: int
    k: int
    reads: tuple[tuple[Quantized, Layout], ...]


@dataclass(frozen=True, kw_only=True, eq=False)
class Choice:
    """GEMMs that run in FP8 together or not at all."""

    gemms: tuple[Any, ...]  # whose they are, for the caller
    before: tuple[tuple[int, int, int], ...]  # m, n and k of each in high precision
    products: tuple[Product, ...]  # what they become in FP8: as many, or one
    dtype: torch.dtype
    scaling: Scaling
    speed: Speed | None  # of their device; None: they run in FP8 whatever it takes

    def seconds(self) -> float:
        """In high precision."""
        assert self.speed is not None
        return sum(gemm_seconds(self.speed, *sizes, self.dtype) for sizes in self.before)

    def fp8_seconds(self, uses: Uses) -> float:
        """In FP8, with this choice's part of the quantizations."""
        assert self.speed is not None
        total = 0.0
        for product in self.products:
            operands = tuple(uses.operand(quantized) for quantized, _ in product.reads)
            total += gemm_seconds(self.speed, product.m, product.n, product.k, self.dtype, self.scaling, operands)
        return total


class Uses:
    """By quantization: how many GEMMs in FP8 read it, and in which layouts."""

    def __init__(self, choices: Sequence[Choice]) -> None:
        self._layouts: dict[Any, list[Layout]] = {}
        for quantized, layout in (read for c in choices for product in c.products for read in product.reads):
            self._layouts.setdefault(quantized.key, []).append(layout)

    def operand(self, quantized: Quantized) -> Operand:
        found = self._layouts[quantized.key]
        return Operand(
            elements=quantized.elements,
            layouts=frozenset(found),
            users=len(found),
            fused=quantized.fused,
            kept=quantized.kept,
        )


def judge(choices: Sequence[Choice], min_speedup: float) -> dict[Choice, float]:
    """The predicted speedup of every choice that has a speed: >= ``min_speedup`` for those that are to run in FP8.

    Of a refused one it is the speedup that it had when it was refused.
    """
    speedups: dict[Choice, float] = {}
    left = list(choices)
    while True:
        uses = Uses(left)
        for choice in left:
            if choice.speed is not None:
                speedups[choice] = choice.seconds() / choice.fp8_seconds(uses)
        accepted = [choice for choice in left if speedups.get(choice, min_speedup) >= min_speedup]
        if len(accepted) == len(left):
            return speedups
        left = accepted
