"""Would FP8 be faster? A roofline model of one GEMM, in high precision and in FP8, quantization included.

A GEMM takes the longer of its arithmetic and its memory traffic. In FP8 the arithmetic is faster and its operands
are half as wide, but they have to be quantized: that takes a pass that writes FP8 (behind a fused producer it reads
nothing more), one more that reads for the amax if the scale depends on the tensor itself, and the launches.
GEMMs that share a quantization (q, k and v read one tensor) split its cost (``analysis/profit.py``). Weights that are
cached in FP8 cost nothing.

A launch costs twice: the GPU waits between two kernels, and the host has to issue each, while the GPU works on earlier
ones. So a GEMM takes the longer of the two; only a small one waits for the host. In a CUDA graph
(``mode="reduce-overhead"``, ``"max-autotune"``) the host issues nothing (:meth:`Speed.replayed`).

The constants are the vendors' peak rates times what GEMMs reach of them; ``fp8graph bench --calibrate`` measures a
machine and writes a file that replaces them (``Backend(target="h200.json")``). They show where FP8 cannot win
(few rows, small matrices), not which of two fast variants is faster: do not trust differences below 10 %.

Sources: NVIDIA's data sheets and architecture white papers, dense rates. Of these large GEMMs reached 78 to 81 % in
bf16 (769 to 798 TFLOP/s) and a copy 90 % (4.3 TB/s) on an H200 SXM; in FP8 63 to 68 % (1,240 to 1,347 TFLOP/s with
``_scaled_mm`` on an H100, pytorch/pytorch#143465): 1.70 x bf16. 2 us from the end of one kernel to that of a next that
does nothing: torchao, benchmarks/float8. 7 us of the host a launch is an estimate (6 to 15 us).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import torch

from fp8graph.compat import inductor
from fp8graph.hardware.speed import Speed
from fp8graph.numerics import hints
from fp8graph.recipes import Layout, Scaling

# For a tensor that is needed rowwise, and for one that is needed columnwise (too).
# How often it is read once more before it can be cast: scales of the whole tensor, or of all of a column, need that;
# tiles that lie along columns are cast in a pass of their own. Counted in generated code (codegen/test_kernels.py).
_READS: Final[dict[Scaling, tuple[int, int]]] = {
    "tensor": (1, 1), "delayed": (0, 0), "row": (0, 1), "block": (0, 1), "mxfp8": (0, 1), "nvfp4": (1, 2),
}  # fmt: skip
# The kernels that it costs, producers that nothing fuses into (attention) and the update of amax histories included:
# those that a Llama-3-8B layer has more than in bf16, by the 4 tensors that it quantizes in inference (3 kernels in
# bf16, with 8 rows 5 delayed, 7 with any other scaling) and 8 in training (7, 27 tensorwise, 17 delayed, 24 rowwise
# and blockwise, 29 mxfp8: codegen/test_kernels.py). nvfp4 has both the amax of the whole tensor and tiles: not counted.
_LAUNCHES: Final[dict[Scaling, tuple[float, float]]] = {
    "tensor": (2.5, 2.5), "delayed": (0.5, 1.25), "row": (1.0, 2.1), "block": (1.0, 2.1), "mxfp8": (1.0, 2.75),
    "nvfp4": (3.0, 4.0),
}  # fmt: skip
_LAUNCHES_OF_FEW: Final[dict[Scaling, float]] = {"tensor": 1.0}  # rowwise, hints.FEW elements at most: one program
_GEMM_LAUNCHES: Final[dict[Scaling, int]] = {"mxfp8": 3, "nvfp4": 3}  # brings the scales of both operands in order


def launches_are_replayed(inductor_options: Mapping[str, Any]) -> bool:
    """Whether Inductor records CUDA graphs: ``mode="reduce-overhead"`` and ``"max-autotune"`` set this option."""
    return bool(inductor_options.get("triton.cudagraphs", inductor.default_option("triton.cudagraphs")))


@dataclass(frozen=True, kw_only=True)
class Operand:
    """One operand of a GEMM: what determines the time of its quantization."""

    elements: int
    layouts: frozenset[Layout] = frozenset({"rowwise"})  # FP8 copies that are written
    users: int = 1  # GEMMs that share them
    fused: bool = True  # into what makes the tensor; else it is read for the cast (a weight)
    kept: bool = False  # a weight that was quantized before


def _launches(operand: Operand, scaling: Scaling) -> float:
    columnwise = "columnwise" in operand.layouts
    few = operand.elements <= hints.FEW and not columnwise
    return _LAUNCHES_OF_FEW.get(scaling, _LAUNCHES[scaling][0]) if few else _LAUNCHES[scaling][columnwise]


def gemm_seconds(
    speed: Speed,
    m: int,
    n: int,
    k: int,
    dtype: torch.dtype,
    scaling: Scaling | None = None,
    operands: tuple[Operand, ...] = (),
) -> float:
    """The time of ``[m, k] @ [k, n]`` in ``dtype``, or in FP8 with ``scaling`` and what quantizes ``operands``."""
    flops = 2.0 * m * n * k
    wide = dtype.itemsize
    if scaling is None:
        rate = speed.fp32_flops if dtype == torch.float32 else speed.bf16_flops
        busy = max(flops / rate, wide * (m * k + k * n + m * n) / speed.bandwidth)
        return max(speed.launch + busy, speed.host_launch)
    narrow = 0.5 if scaling == "nvfp4" else 1.0
    rate = (speed.fp4_flops if scaling == "nvfp4" else speed.fp8_flops) * speed.rates[scaling]
    launches: float = _GEMM_LAUNCHES.get(scaling, 1)
    busy = max(flops / rate, (narrow * (m * k + k * n) + wide * m * n) / speed.bandwidth)
    for operand in operands:
        if not operand.kept:
            columnwise = "columnwise" in operand.layouts
            reads = _READS[scaling][columnwise] + (not operand.fused)
            moved = operand.elements * (narrow * len(operand.layouts) + wide * reads)
            busy += moved / speed.bandwidth / operand.users
            launches += _launches(operand, scaling) / operand.users
    return max(busy + launches * speed.launch, launches * speed.host_launch)
