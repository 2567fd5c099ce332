"""The speed of GPUs by name, from data sheets or measured."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from fp8graph.errors import ConfigError
from fp8graph.numerics.scalings import SCALINGS, Scaling

# By scaling: the share of the per-tensor rate that its GEMM reaches.
RATES: Final[Mapping[str, float]] = {name: kind.rate for name, kind in SCALINGS.items()}


@dataclass(frozen=True, kw_only=True)
class Speed:
    """What a GPU does per second. Rates are those that large GEMMs reach, not the peaks."""

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
            raise ConfigError(f"Speed(rates=...): give one number for each of {', '.join(RATES)}.")
        for name, value in (*numbers.items(), *self.rates.items()):
            if type(value) not in (int, float) or not (value > 0 or (name == "host_launch" and value == 0)):
                raise ConfigError(f"Speed({name}={value!r}): {name} must be a number > 0.")

    @staticmethod
    def load(path: str | Path) -> tuple[str, Speed]:
        """The target ("sm_90") and its measured speed, as ``fp8graph bench --calibrate`` wrote them.

        A scaling that the file leaves out (it could not be measured) gets its rate from ``RATES``. A file without
        "host_launch" gets the default.

        Raises:
            ConfigError: the file is missing, is not a calibration, or has a rate for an unknown scaling.
        """
        try:
            values: Any = json.loads(Path(path).read_text(encoding="utf-8"))
            speed = dict(values["speed"])
            speed["rates"] = {**RATES, **speed.get("rates", {})}
            return values["target"], Speed(**speed)
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ConfigError(f"{path}: not a calibration file of fp8graph bench --calibrate: {error}") from None

    def low_precision_flops(self, kind: Scaling) -> float:
        """The rate of the GEMMs of ``kind``."""
        return (self.fp4_flops if kind.packed > 1 else self.fp8_flops) * self.rates[kind.name]

    def replayed(self) -> Speed:
        """The same speed in a CUDA graph, where the host launches nothing."""
        return dataclasses.replace(self, host_launch=0.0)


def _speed(name: str, bf16: float, fp8: float, fp4: float, fp32: float, bandwidth: float) -> Speed:
    """Achievable rates from data-sheet peaks: 80 % of the FLOPS for bf16 GEMMs, 68 % for FP8, 90 % of the bandwidth."""
    return Speed(
        name=name,
        bf16_flops=0.80e12 * bf16,
        fp32_flops=0.80e12 * fp32,
        fp8_flops=0.68e12 * fp8,
        fp4_flops=0.68e12 * fp4,
        bandwidth=0.90e12 * bandwidth,
        launch=2e-6,
    )


# By the name that torch.cuda.get_device_name gives, the more specific one first: dense TFLOPS in bf16 (accumulated in
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


def of_target(target: str, device_name: str = "") -> Speed | None:
    """The speed of a board by its name, or of an "sm_XX"; None if neither is known.

    An unknown name, or a laptop's GPU, gets a typical speed of its architecture: sm_90 that of an H100 SXM.
    """
    if "Laptop" not in device_name:
        for name, speed in BOARDS.items():
            if re.search(rf"\b{name}\b", device_name):
                return speed
    return BOARDS.get(_BY_TARGET.get(target.removesuffix("a"), ""))
