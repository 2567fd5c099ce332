"""The speed model's predictions for one linear."""

from __future__ import annotations

from typing import Any

import torch

from fp8graph.hardware.nvidia import BOARDS
from fp8graph.hardware.speed import Speed
from fp8graph.passes.assign.profit import Choice, Fp8Gemm, Quantized, judge

BF16 = torch.bfloat16
H200 = BOARDS["H200"]
REPLAYED = H200.replayed()


def linear(
    m: int, k: int, n: int, scaling: Any, speed: Speed, *, training: bool = True, kept: bool = True
) -> dict[str, Choice]:
    """The GEMMs of a linear [m, k] -> [m, n], each a choice of its own."""
    x, dy = Quantized(key="x", elements=m * k), Quantized(key="dy", elements=m * n)
    w = Quantized(key="w", elements=n * k, fused=False, kept=kept)
    products = {
        "fprop": Fp8Gemm(m=m, n=n, k=k, reads=((x, "rowwise"), (w, "rowwise"))),
        "dgrad": Fp8Gemm(m=m, n=k, k=n, reads=((dy, "rowwise"), (w, "columnwise"))),
        "wgrad": Fp8Gemm(m=n, n=k, k=m, reads=((dy, "columnwise"), (x, "columnwise"))),
    }
    return {
        name: Choice(
            gemms=(name,), before=((p.m, p.n, p.k),), products=(p,), dtype=BF16, scaling=scaling, speed=speed
        )
        for name, p in products.items()
        if training or name == "fprop"
    }  # fmt: skip


def speedups(m: int, k: int, n: int, scaling: Any = "tensor", speed: Speed = H200, **more: Any) -> dict[str, float]:
    return {c.gemms[0]: s for c, s in judge(list(linear(m, k, n, scaling, speed, **more).values()), 1.05).items()}
