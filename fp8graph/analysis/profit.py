"""Decide which GEMMs pay: compare each with high precision, along with those that share a quantization with it.

    fprop, dgrad, wgrad in FP8: 1.30, 1.20, 0.97   ->   wgrad refused; x and dy are quantized for one GEMM each
    fprop, dgrad                1.15, 1.02         ->   dgrad refused
    fprop                       1.15               ->   accepted

The FP8 GEMMs that read a quantization share its cost in equal parts. A refused GEMM pays nothing, so the others pay
more. This is repeated until every GEMM that is left reaches the required speedup, and so does their sum.
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

    key: Any  # equal for tensors that are quantized once: which tensor, and how
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
    before: tuple[tuple[int, int, int], ...]  # m, n and k of each GEMM in high precision
    products: tuple[Product, ...]  # the GEMMs that they become in FP8: as many, or a fused one
    dtype: torch.dtype
    scaling: Scaling
    speed: Speed | None  # of their device; None: they run in FP8 at any cost

    def seconds(self) -> float:
        """The time in high precision."""
        assert self.speed is not None
        return sum(gemm_seconds(self.speed, *sizes, self.dtype) for sizes in self.before)

    def fp8_seconds(self, uses: Uses) -> float:
        """The time in FP8, with this choice's share of the quantizations."""
        assert self.speed is not None
        total = 0.0
        for product in self.products:
            operands = tuple(uses.operand(quantized) for quantized, _ in product.reads)
            total += gemm_seconds(self.speed, product.m, product.n, product.k, self.dtype, self.scaling, operands)
        return total


class Uses:
    """How many FP8 GEMMs read each quantization, and in which layouts."""

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
    """The predicted speedup of every choice that has a speed: at least ``min_speedup`` for those to run in FP8.

    For a refused choice, it is the speedup that was predicted when it was refused.
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
