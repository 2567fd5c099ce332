"""Would FP8 be faster? A roofline model of one GEMM, in high precision and in FP8, quantization included.

A GEMM takes the longer of its arithmetic and its memory traffic. In FP8 the arithmetic is faster and its operands
are half as wide, but somebody has to quantize them: a pass that writes FP8 (behind a fused producer it reads
nothing more), one more that reads for the amax where the scale depends on the tensor itself, and the launches.
What several GEMMs share (q, k and v read one tensor) each pays a part of. Weights that are kept in FP8 cost nothing.

The constants are the vendors' peak rates times what GEMMs reach of them; ``fp8graph bench --calibrate`` measures a
machine and writes a file that takes their place (``Backend(target="h200.json")``). They decide where FP8 cannot win
(few rows, small matrices), not which of two fast things is faster: within 10 % they should not be believed.

Sources: NVIDIA's data sheets (L40S, H100, H200, B200, dense rates); Transformer Engine's H200 linears for the share
that FP8 GEMMs reach (1.90 x bf16 with scales for whole tensors).
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import torch

from fp8graph.errors import PolicyError
from fp8graph.recipes import Scaling

# The share of the per-tensor rate that GEMMs with more scales reach (Transformer Engine's and DeepGEMM's figures).
RATES: Final[Mapping[str, float]] = {
    "tensor": 1.0, "delayed": 1.0, "row": 0.95, "block": 0.8, "mxfp8": 1.0, "nvfp4": 1.0,
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
    launch: float  # seconds that one more kernel costs
    rates: Mapping[str, float] = field(default_factory=lambda: RATES, hash=False)  # by scaling, in parts of fp8_flops

    def __post_init__(self) -> None:
        numbers = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)[1:-1]}
        if set(self.rates) != set(RATES):
            raise PolicyError(f"Speed(rates=...): one number is needed for each of {', '.join(RATES)}.")
        for name, value in (*numbers.items(), *self.rates.items()):
            if type(value) not in (int, float) or not value > 0:
                raise PolicyError(f"Speed({name}={value!r}): a number > 0 is needed.")

    @staticmethod
    def load(path: str | Path) -> tuple[str, Speed]:
        """The target ("sm_90") and its measured speed, as ``fp8graph bench --calibrate`` wrote them.

        A scaling that the file does not have (its GEMM failed) keeps its rate of ``RATES``.
        """
        try:
            values: Any = json.loads(Path(path).read_text(encoding="utf-8"))
            speed: dict[str, Any] = dict(values["speed"])
            rates = {**RATES, **speed.pop("rates", {})}
            return values["target"], Speed(**speed, rates=rates)
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise PolicyError(f"{path}: not a calibration of fp8graph bench --calibrate: {error}") from None


def _speed(name: str, bf16: float, fp8: float, fp4: float, fp32: float, bandwidth: float) -> Speed:
    """From peak TFLOPS and TB/s: GEMMs reach about 72 % of the one in bf16, 68 % in FP8, copies 85 % of the other."""
    return Speed(
        name=name,
        bf16_flops=0.72e12 * bf16,
        fp32_flops=0.72e12 * fp32,
        fp8_flops=0.68e12 * fp8,
        fp4_flops=0.68e12 * fp4,
        bandwidth=0.85e12 * bandwidth,
        launch=2e-6,
    )


L40S: Final = _speed("L40S", 362, 733, 733, 91, 0.864)
H100: Final = _speed("H100", 989, 1979, 1979, 67, 3.35)
H200: Final = _speed("H200", 989, 1979, 1979, 67, 4.8)
B200: Final = _speed("B200", 2250, 4500, 9000, 80, 8.0)
_BY_TARGET: Final = {"sm_89": L40S, "sm_90": H100, "sm_100": B200, "sm_103": B200}

# Scales that need the whole tensor (or all of a column): how often it is read again before it can be cast.
_READS: Final[dict[Scaling, int]] = {"tensor": 1, "delayed": 0, "row": 1, "block": 0, "mxfp8": 0, "nvfp4": 1}
_LAUNCHES: Final[dict[Scaling, int]] = {"tensor": 2, "delayed": 0, "row": 2, "block": 1, "mxfp8": 1, "nvfp4": 3}


def of_target(target: str, device_name: str = "") -> Speed | None:
    """The speed of an "sm_XX", or None if it is not known. ``device_name`` tells an H200 from an H100."""
    known = [speed for speed in (H200, H100, B200, L40S) if speed.name in device_name]
    return known[0] if known else _BY_TARGET.get(target.removesuffix("a"))


@dataclass(frozen=True, kw_only=True)
class Operand:
    """One operand of a GEMM, as far as its quantization costs time."""

    elements: int
    layouts: int = 1  # FP8 copies that are written
    users: int = 1  # GEMMs that share them
    kept: bool = False  # a weight that was quantized before


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
        return speed.launch + max(flops / rate, wide * (m * k + k * n + m * n) / speed.bandwidth)
    narrow = 0.5 if scaling == "nvfp4" else 1.0
    rate = (speed.fp4_flops if scaling == "nvfp4" else speed.fp8_flops) * speed.rates[scaling]
    seconds = speed.launch + max(flops / rate, (narrow * (m * k + k * n) + wide * m * n) / speed.bandwidth)
    for operand in operands:
        if not operand.kept:
            moved = operand.elements * (narrow * operand.layouts + wide * _READS[scaling])
            seconds += (moved / speed.bandwidth + speed.launch * _LAUNCHES[scaling]) / operand.users
    return seconds


def predicted_speedup(
    speed: Speed, m: int, n: int, k: int, dtype: torch.dtype, scaling: Scaling, operands: tuple[Operand, Operand]
) -> float:
    """The time of ``[m, k] @ [k, n]`` in ``dtype`` over its time in FP8 with ``scaling``, quantization included."""
    return gemm_seconds(speed, m, n, k, dtype) / gemm_seconds(speed, m, n, k, dtype, scaling, operands)
