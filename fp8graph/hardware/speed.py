"""The speed of GPUs, from data sheets or measured, and a roofline model of one GEMM.

The model gives the time of a GEMM in high precision, and in FP8 with its quantization, to predict which is faster.
It takes the longer of its arithmetic and its memory traffic. In FP8 the arithmetic is faster and its operands are half
as wide, but they have to be quantized. That takes a pass that writes FP8 (fused into the producer it reads
nothing more), another one that reads for the amax if the scale depends on the tensor itself, and the launches.
GEMMs that share a quantization (q, k and v read one tensor) split its cost (``passes/assign/profit.py``). Weights that
are cached in FP8 cost nothing.

A launch costs twice: the GPU waits between two kernels, and the host has to issue each, while the GPU works on earlier
ones. The first is part of the time of a GEMM. The second says how fast a whole graph can be at best
(``passes/assign/clock.py``): the host runs ahead while large kernels run, and small ones catch up with it. In a CUDA
graph (``mode="reduce-overhead"``, ``"max-autotune"``) the host issues nothing (:meth:`Speed.replayed`).

The constants are the vendors' peak rates times the share that GEMMs reach; ``fp8graph bench --calibrate`` measures a
machine and writes a file that replaces them (``Backend(target="h200.json")``). They show where FP8 cannot be faster
(few rows, small matrices), not which of two fast variants is better: do not trust differences below 10 %.

Sources: NVIDIA's data sheets and architecture white papers, dense rates. On an H200 SXM, large GEMMs in bf16 reached 78
to 81 % of these (769 to 798 TFLOP/s), and a copy 90 % (4.3 TB/s); in FP8 GEMMs reached 63 to 68 % (1,240 to 1,347
TFLOP/s with ``_scaled_mm`` on an H100, pytorch/pytorch#143465): 1.70 x bf16. The end of one kernel and that of a next,
empty one are 2 us apart (torchao, benchmarks/float8). The host of an H200 took 41 to 50 us per launch of a compiled
training step of two Llama-3-8B layers in bf16, and as much under tensorwise (``benchmarks/results/first_hour``, section
``layers``: host_ms over launches), of which a part is once per step; from 34 to 50 us, the model says of each of six
recorded narrow layers whether FP8 makes it faster by the clock. 40 us is the default.
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

from fp8graph.compat import inductor
from fp8graph.errors import ConfigError, did_you_mean
from fp8graph.numerics import hints
from fp8graph.numerics.scalings import SCALINGS, Scaling
from fp8graph.recipes import Layout
from fp8graph.recipes import Scaling as ScalingName

# By scaling: the share of the per-tensor rate that its GEMM reaches.
RATES: Final[Mapping[str, float]] = {name: kind.rate for name, kind in SCALINGS.items()}
BF16_SHARE: Final = 0.80  # of a data sheet's dense bf16 rate that large GEMMs reach
# Of the rate of bf16 GEMMs: FlashAttention-2 reaches 35 % of an H100's peak (arXiv 2407.08608).
ATTENTION_SHARE: Final = 0.5
# Bytes that go through memory for each byte that goes into and comes out of a linear: a Llama-3-8B layer in bf16 moves
# 3394 MiB (tests/codegen/test_kernels.py) of 8192 tokens with 81,920 such numbers each.
MOVED: Final = 3394 * 2**20 / (8192 * 81_920 * 2)


@dataclass(frozen=True, kw_only=True)
class Speed:
    """The rates of a GPU, per second: those that large GEMMs reach, not the peaks."""

    name: str
    bf16_flops: float  # and fp16
    fp32_flops: float
    fp8_flops: float  # with one scale per tensor
    fp4_flops: float
    bandwidth: float  # bytes
    launch: float  # seconds that the GPU loses between two kernels
    host_launch: float = 40e-6  # seconds of the host per kernel of a compiled step, while the GPU works; 0: CUDA graph
    rates: Mapping[str, float] = field(default_factory=lambda: RATES, hash=False)  # by scaling, as parts of fp8_flops

    def __post_init__(self) -> None:
        numbers = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)[1:-1]}
        if set(self.rates) != set(RATES):
            raise ConfigError(f"Speed(rates=...): give one number for each of {', '.join(RATES)}.")
        for name, value in (*numbers.items(), *self.rates.items()):
            if type(value) not in (int, float) or not (value > 0 or (name == "host_launch" and value == 0)):
                raise ConfigError(f"Speed({name}={value!r}): {name} must be a number > 0.")

    @staticmethod
    def load(path: str | Path) -> tuple[str, Speed]:
        """Return the target ("sm_90") and its measured speed, as ``fp8graph bench --calibrate`` wrote them.

        A scaling that the file leaves out (it could not be measured) gets its rate from ``RATES``. A file without
        "host_launch" gets the default.

        Raises:
            ConfigError: the file is missing, is not a calibration, or has a key or a rate of an unknown name.
        """
        try:
            values: Any = json.loads(Path(path).read_text(encoding="utf-8"))
            speed = dict(values["speed"])
            speed["rates"] = {**RATES, **speed.get("rates", {})}
            target: str = values["target"]
        except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
            raise ConfigError(f"{path}: not a calibration file of fp8graph bench --calibrate: {error}") from None
        names = {f.name: f.default is dataclasses.MISSING for f in dataclasses.fields(Speed)}
        for name in speed.keys() - names:
            raise ConfigError(f'{path}: "speed" has no key {name!r}.{did_you_mean(name, names)}')
        if missing := [name for name, is_needed in names.items() if is_needed and name not in speed]:
            raise ConfigError(f'{path}: not a calibration file: "speed" has no {", ".join(missing)}.')
        return target, Speed(**speed)

    def low_precision_flops(self, kind: Scaling) -> float:
        """Return the rate of the GEMMs of ``kind``."""
        return (self.fp4_flops if kind.packed > 1 else self.fp8_flops) * self.rates[kind.name]

    def replayed(self) -> Speed:
        """Return the same speed in a CUDA graph, where the host launches nothing."""
        return dataclasses.replace(self, host_launch=0.0)


def of_data_sheet(
    name: str, bf16: float, fp8: float, fp4: float, fp32: float, bandwidth: float, mxfp8: float | None = None
) -> Speed:
    """Achievable rates from data-sheet peaks: 80 % of the FLOPS for bf16 GEMMs, 68 % for FP8, 90 % of the bandwidth.

    The peaks are dense TFLOPS; ``fp4`` is the one of FP8 if there is no FP4; the bandwidth is in TB/s. ``mxfp8``: that
    of FP8 if it is None.
    """
    return Speed(
        name=name,
        bf16_flops=BF16_SHARE * 1e12 * bf16,
        fp32_flops=0.80e12 * fp32,
        fp8_flops=0.68e12 * fp8,
        fp4_flops=0.68e12 * fp4,
        bandwidth=0.90e12 * bandwidth,
        launch=2e-6,
        rates=RATES if mxfp8 is None else {**RATES, "mxfp8": RATES["mxfp8"] * mxfp8 / fp8},
    )


def of_device_name(device_name: str, boards: Mapping[str, Speed], typical: str | None) -> Speed | None:
    """Return the speed of the first of ``boards`` that ``device_name`` names, else that of the ``typical`` one.

    A laptop's GPU has the name of a board, but not its speed.
    """
    if "Laptop" not in device_name:
        for name, speed in boards.items():
            if re.search(rf"\b{name}\b", device_name):
                return speed
    return boards[typical] if typical is not None else None


def launches_are_replayed(inductor_options: Mapping[str, Any]) -> bool:
    """Give whether Inductor records CUDA graphs: ``mode="reduce-overhead"`` and ``"max-autotune"`` set this option."""
    return bool(inductor_options.get("triton.cudagraphs", inductor.default_option("triton.cudagraphs")))


@dataclass(frozen=True, kw_only=True)
class Operand:
    """One operand of a GEMM, with the properties that determine the time of its quantization."""

    elements: int
    layouts: frozenset[Layout] = frozenset({"rowwise"})  # FP8 copies that are written
    users: int = 1  # GEMMs that share them
    fused: bool = True  # into the kernel that makes the tensor; else it is read for the cast (a weight)
    kept: bool = False  # a weight that was quantized before
    again: bool = False  # backward makes its columnwise copy, and reads it once more for that: a large weight


def gemm_launches(scaling: ScalingName | None = None, operands: tuple[Operand, ...] = ()) -> float:
    """Give the kernels of one GEMM in high precision, or in FP8 with its share of the quantizations of ``operands``."""
    if scaling is None:
        return 1.0
    kind = SCALINGS[scaling]
    return kind.gemm_launches + sum(_launches(each, kind) / each.users for each in operands if not each.kept)


def _launches(operand: Operand, kind: Scaling) -> float:
    columnwise = "columnwise" in operand.layouts
    if operand.elements <= hints.FEW and not columnwise and kind.launches_of_few is not None:
        return kind.launches_of_few
    return kind.launches[columnwise] + _apart(operand)


def _apart(operand: Operand) -> bool:
    """Return whether the two layouts are made apart from each other, forward's and backward's."""
    return operand.again and len(operand.layouts) > 1


def gemm_seconds(
    speed: Speed,
    m: int,
    n: int,
    k: int,
    dtype: torch.dtype,
    scaling: ScalingName | None = None,
    operands: tuple[Operand, ...] = (),
    batch: int = 1,
) -> float:
    """Return the GPU's time of ``[m, k] @ [k, n]`` in ``dtype``, or in FP8 with ``scaling``, ``operands`` quantized.

    One kernel multiplies a ``batch`` of them, in high precision.
    """
    flops = 2.0 * m * n * k
    wide = dtype.itemsize
    if scaling is None:
        rate = speed.fp32_flops if dtype == torch.float32 else speed.bf16_flops
        busy = max(flops / rate, wide * (m * k + k * n + m * n) / speed.bandwidth)
        return speed.launch + batch * busy
    kind = SCALINGS[scaling]
    narrow = 1.0 / kind.packed  # bytes per number
    rate = speed.low_precision_flops(kind)
    busy = max(flops / rate, (narrow * (m * k + k * n) + wide * m * n) / speed.bandwidth)
    for operand in operands:
        if not operand.kept:
            columnwise = "columnwise" in operand.layouts
            reads = kind.reads[columnwise] + (not operand.fused) + _apart(operand) * kind.reads_apart
            moved = operand.elements * (narrow * len(operand.layouts) + wide * reads)
            busy += moved / speed.bandwidth / operand.users
    return busy + gemm_launches(scaling, operands) * speed.launch
