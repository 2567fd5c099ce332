"""Would FP8 be faster? A roofline model of one GEMM, in high precision and in FP8, quantization included.

A GEMM takes the longer of its arithmetic and its memory traffic. In FP8 the arithmetic is faster and its operands
are half as wide, but somebody has to quantize them: a pass that writes FP8 (behind a fused producer it reads
nothing more), one more that reads for the amax where the scale depends on the tensor itself, and the launches.
What several GEMMs share (q, k and v read one tensor) each pays a part of (``profit.py``). Weights that are kept in
FP8 cost nothing.

A launch costs twice: the GPU waits between two kernels, and the host has to issue each, while the GPU works on earlier
ones. So a GEMM takes the longer of the two; only one that is small waits for the host. In a CUDA graph
(``mode="reduce-overhead"``, ``"max-autotune"``) the host issues nothing (:meth:`Speed.replayed`).

The constants are the vendors' peak rates times what GEMMs reach of them; ``fp8graph bench --calibrate`` measures a
machine and writes a file that takes their place (``Backend(target="h200.json")``). They decide where FP8 cannot win
(few rows, small matrices), not which of two fast things is faster: within 10 % they should not be believed.

Sources: NVIDIA's data sheets and architecture white papers, dense rates. Of these large GEMMs reached 78 to 81 % in
bf16 (769 to 798 TFLOP/s) and a copy 90 % (4.3 TB/s) on an H200 SXM; in FP8 63 to 68 % (1,240 to 1,347 TFLOP/s with
``_scaled_mm`` on an H100, pytorch/pytorch#143465): 1.70 x bf16. 2 us from the end of one kernel to that of a next that
does nothing: torchao, benchmarks/float8. 7 us of the host a launch is an estimate (6 to 15 us).
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import torch
from torch._inductor import config as inductor_config

from fp8graph import hints
from fp8graph.errors import PolicyError
from fp8graph.recipes import Layout, Scaling

# The share of the per-tensor rate that GEMMs with more scales reach (Transformer Engine's and DeepGEMM's figures).
# mxfp8: what is left to the GEMMs of the 10 % by which one scale per tensor trains a dense Llama 3.1 405B faster on
# GB300 (1,048 against 952 tokens/s/GPU: Megatron-Bridge's performance summary, whose two runs are sharded differently).
RATES: Final[Mapping[str, float]] = {
    "tensor": 1.0, "delayed": 1.0, "row": 0.95, "block": 0.8, "mxfp8": 0.9, "nvfp4": 1.0,
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Speed:
    """What a GPU does in a second. Rates are those that large GEMMs reach, not the peaks."""

    name: str
    bf16_flops: float  # and fp16
    fp32_flops: float
    fp8_flops: float  # with one scale per tensor
    fp4_flops: float
    bandwidth: float  # bytes
    launch: float  # seconds that the GPU loses between two kernels
    host_launch: float = 7e-6  # seconds that the host takes to launch one, while the GPU works; 0: in a CUDA graph
    rates: Mapping[str, float] = field(default_factory=lambda: RATES, hash=False)  # by scaling, in parts of fp8_flops

    def __post_init__(self) -> None:
        numbers = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)[1:-1]}
        if set(self.rates) != set(RATES):
            raise PolicyError(f"Speed(rates=...): one number is needed for each of {', '.join(RATES)}.")
        for name, value in (*numbers.items(), *self.rates.items()):
            if type(value) not in (int, float) or not (value > 0 or (name == "host_launch" and value == 0)):
                raise PolicyError(f"Speed({name}={value!r}): a number > 0 is needed.")

    @staticmethod
    def load(path: str | Path) -> tuple[str, Speed]:
        """The target ("sm_90") and its measured speed, as ``fp8graph bench --calibrate`` wrote them.

        Of a scaling that the file leaves out (it could not be measured) the rate is that of ``RATES``. A file without
        "host_launch" gets the default.

        Raises:
            PolicyError: the file is missing, is no calibration, or has a rate of an unknown scaling.
        """
        try:
            values: Any = json.loads(Path(path).read_text(encoding="utf-8"))
            speed = dict(values["speed"])
            speed["rates"] = {**RATES, **speed.get("rates", {})}
            return values["target"], Speed(**speed)
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise PolicyError(f"{path}: not a calibration of fp8graph bench --calibrate: {error}") from None

    def replayed(self) -> Speed:
        """The same in a CUDA graph: the host launches nothing."""
        return dataclasses.replace(self, host_launch=0.0)


def _speed(name: str, bf16: float, fp8: float, fp4: float, fp32: float, bandwidth: float) -> Speed:
    """From peak TFLOPS and TB/s: GEMMs reach 80 % of the one in bf16, 68 % in FP8, copies 90 % of the other."""
    return Speed(
        name=name,
        bf16_flops=0.80e12 * bf16,
        fp32_flops=0.80e12 * fp32,
        fp8_flops=0.68e12 * fp8,
        fp4_flops=0.68e12 * fp4,
        bandwidth=0.90e12 * bandwidth,
        launch=2e-6,
    )


# By what torch.cuda.get_device_name says of them, the more specific name first: dense TFLOPS in bf16 (accumulated in
# FP32, which GeForce does at half of its FP16 rate), FP8, FP4 (that of FP8 where there is none) and FP32; TB/s.
BOARDS: Final[Mapping[str, Speed]] = {
    name: _speed(name, *numbers)
    for name, *numbers in (
        ("L4", 121, 242, 242, 30, 0.300),
        ("L40S", 362, 733, 733, 91, 0.864),
        ("L40", 181, 362, 362, 90, 0.864),
        ("RTX 4090", 165, 330, 330, 82, 1.008),
        ("H20", 148, 296, 296, 44, 4.0),
        ("H100 PCIe", 756, 1513, 1513, 51, 2.0),
        ("H100 NVL", 835, 1671, 1671, 60, 3.9),
        ("H100", 989, 1979, 1979, 67, 3.35),
        ("H800", 989, 1979, 1979, 67, 3.35),
        ("H200 NVL", 835, 1671, 1671, 60, 4.8),
        ("H200", 989, 1979, 1979, 67, 4.8),
        ("GH200", 989, 1979, 1979, 67, 4.0),
        ("B200", 2250, 4500, 9000, 80, 8.0),
        ("GB200", 2500, 5000, 10000, 80, 8.0),
        ("B300", 2250, 4500, 13500, 75, 8.0),
        ("GB300", 2500, 5000, 15000, 80, 8.0),
        ("RTX 5090", 209, 419, 1676, 105, 1.792),
    )
}
_BY_TARGET: Final = {"sm_89": "L40S", "sm_90": "H100", "sm_100": "B200", "sm_103": "B300", "sm_120": "RTX 5090"}

# For a tensor that is needed rowwise, and for one that is needed columnwise (too).
# How often it is read once more before it can be cast: scales of the whole tensor, or of all of a column, need that;
# tiles that lie along columns are cast in a pass of their own. Counted in generated code: tests/test_kernels.py.
_READS: Final[dict[Scaling, tuple[int, int]]] = {
    "tensor": (1, 1), "delayed": (0, 0), "row": (0, 1), "block": (0, 1), "mxfp8": (0, 1), "nvfp4": (1, 2),
}  # fmt: skip
# The kernels that it costs, producers that nothing fuses into (attention) and the update of amax histories included:
# those that a Llama-3-8B layer has more than in bf16, by the 4 tensors that it quantizes in inference (3 kernels in
# bf16, with 8 rows 5 delayed, 7 with any other scaling) and 8 in training (7, 27 tensorwise, 17 delayed, 24 rowwise
# and blockwise, 29 mxfp8: tests/test_kernels.py). nvfp4 has both the amax of the whole tensor and tiles: not counted.
_LAUNCHES: Final[dict[Scaling, tuple[float, float]]] = {
    "tensor": (2.5, 2.5), "delayed": (0.5, 1.25), "row": (1.0, 2.1), "block": (1.0, 2.1), "mxfp8": (1.0, 2.75),
    "nvfp4": (3.0, 4.0),
}  # fmt: skip
_LAUNCHES_OF_FEW: Final[dict[Scaling, float]] = {"tensor": 1.0}  # rowwise, hints.FEW elements at most: one program
_GEMM_LAUNCHES: Final[dict[Scaling, int]] = {"mxfp8": 3, "nvfp4": 3}  # brings the scales of both operands in order


def of_target(target: str, device_name: str = "") -> Speed | None:
    """The speed of a board by its name, or of an "sm_XX"; None if neither is known.

    An unknown name, or that of a laptop's GPU, is taken for the architecture's: sm_90 for an H100 SXM.
    """
    if "Laptop" not in device_name:
        for name, speed in BOARDS.items():
            if re.search(rf"\b{name}\b", device_name):
                return speed
    return BOARDS.get(_BY_TARGET.get(target.removesuffix("a"), ""))


def launches_are_replayed(inductor_options: Mapping[str, Any]) -> bool:
    """Whether Inductor records CUDA graphs: ``mode="reduce-overhead"`` and ``"max-autotune"`` set this option."""
    return bool(inductor_options.get("triton.cudagraphs", inductor_config.triton.cudagraphs))


@dataclass(frozen=True, kw_only=True)
class Operand:
    """One operand of a GEMM, as far as its quantization costs time."""

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
