"""A roofline model of one GEMM, in high precision and in FP8 with its quantization, to predict which is faster.

A GEMM takes the longer of its arithmetic and its memory traffic. In FP8 the arithmetic is faster and its operands
are half as wide, but they have to be quantized. That takes a pass that writes FP8 (fused into the producer it reads
nothing more), another one that reads for the amax if the scale depends on the tensor itself, and the launches.
GEMMs that share a quantization (q, k and v read one tensor) split its cost (``passes/assign/profit.py``). Weights that
are cached in FP8 cost nothing.

A launch costs twice: the GPU waits between two kernels, and the host has to issue each, while the GPU works on earlier
ones. So a GEMM takes the longer of the two; only a small one waits for the host. In a CUDA graph
(``mode="reduce-overhead"``, ``"max-autotune"``) the host issues nothing (:meth:`Speed.replayed`).

The constants are the vendors' peak rates times the share that GEMMs reach; ``fp8graph bench --calibrate`` measures a
machine and writes a file that replaces them (``Backend(target="h200.json")``). They show where FP8 cannot be faster
(few rows, small matrices), not which of two fast variants is better: do not trust differences below 10 %.

Sources: NVIDIA's data sheets and architecture white papers, dense rates. On an H200 SXM, large GEMMs in bf16 reached 78
to 81 % of these (769 to 798 TFLOP/s), and a copy 90 % (4.3 TB/s); in FP8 GEMMs reached 63 to 68 % (1,240 to 1,347
TFLOP/s with ``_scaled_mm`` on an H100, pytorch/pytorch#143465): 1.70 x bf16. The end of one kernel and that of a next,
empty one are 2 us apart (torchao, benchmarks/float8). 7 us of the host per launch is an estimate (6 to 15 us).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from fp8graph.compat import inductor
from fp8graph.hardware.speed import Speed
from fp8graph.numerics import hints
from fp8graph.numerics.scalings import SCALINGS
from fp8graph.recipes import Layout, Scaling


def launches_are_replayed(inductor_options: Mapping[str, Any]) -> bool:
    """Whether Inductor records CUDA graphs: ``mode="reduce-overhead"`` and ``"max-autotune"`` set this option."""
    return bool(inductor_options.get("triton.cudagraphs", inductor.default_option("triton.cudagraphs")))


@dataclass(frozen=True, kw_only=True)
class Operand:
    """One operand of a GEMM, with the properties that determine the time of its quantization."""

    elements: int
    layouts: frozenset[Layout] = frozenset({"rowwise"})  # FP8 copies that are written
    users: int = 1  # GEMMs that share them
    fused: bool = True  # into the kernel that makes the tensor; else it is read for the cast (a weight)
    kept: bool = False  # a weight that was quantized before


def _launches(operand: Operand, scaling: Scaling) -> float:
    columnwise, kind = "columnwise" in operand.layouts, SCALINGS[scaling]
    if operand.elements <= hints.FEW and not columnwise and kind.launches_of_few is not None:
        return kind.launches_of_few
    return kind.launches[columnwise]


def gemm_seconds(
    speed: Speed,
    m: int,
    n: int,
    k: int,
    dtype: torch.dtype,
    scaling: Scaling | None = None,
    operands: tuple[Operand, ...] = (),
    batch: int = 1,
) -> float:
    """The time of ``[m, k] @ [k, n]`` in ``dtype``, or in FP8 with ``scaling`` and the quantization of ``operands``.

    One kernel multiplies a ``batch`` of them, in high precision.
    """
    flops = 2.0 * m * n * k
    wide = dtype.itemsize
    if scaling is None:
        rate = speed.fp32_flops if dtype == torch.float32 else speed.bf16_flops
        busy = max(flops / rate, wide * (m * k + k * n + m * n) / speed.bandwidth)
        return max(speed.launch + batch * busy, speed.host_launch)
    kind = SCALINGS[scaling]
    narrow = 1.0 / kind.packed  # bytes per number
    rate = speed.low_precision_flops(kind)
    launches: float = kind.gemm_launches
    busy = max(flops / rate, (narrow * (m * k + k * n) + wide * m * n) / speed.bandwidth)
    for operand in operands:
        if not operand.kept:
            columnwise = "columnwise" in operand.layouts
            reads = kind.reads[columnwise] + (not operand.fused)
            moved = operand.elements * (narrow * len(operand.layouts) + wide * reads)
            busy += moved / speed.bandwidth / operand.users
            launches += _launches(operand, scaling) / operand.users
    return max(busy + launches * speed.launch, launches * speed.host_launch)
