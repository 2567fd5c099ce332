"""The speed of GPUs, from data sheets or measured."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from fp8graph.errors import ConfigError, did_you_mean
from fp8graph.numerics.scalings import SCALINGS, Scaling

# By scaling: the share of the per-tensor rate that its GEMM reaches.
RATES: Final[Mapping[str, float]] = {name: kind.rate for name, kind in SCALINGS.items()}


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
    host_launch: float = 7e-6  # seconds that the host takes to launch one, while the GPU works; 0: in a CUDA graph
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
        """The target ("sm_90") and its measured speed, as ``fp8graph bench --calibrate`` wrote them.

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
            raise ConfigError(f'{path}: not a calibration file: "speed" lacks {", ".join(missing)}.')
        return target, Speed(**speed)

    def low_precision_flops(self, kind: Scaling) -> float:
        """The rate of the GEMMs of ``kind``."""
        return (self.fp4_flops if kind.packed > 1 else self.fp8_flops) * self.rates[kind.name]

    def replayed(self) -> Speed:
        """The same speed in a CUDA graph, where the host launches nothing."""
        return dataclasses.replace(self, host_launch=0.0)


def of_data_sheet(name: str, bf16: float, fp8: float, fp4: float, fp32: float, bandwidth: float) -> Speed:
    """Achievable rates from data-sheet peaks: 80 % of the FLOPS for bf16 GEMMs, 68 % for FP8, 90 % of the bandwidth.

    The peaks are dense TFLOPS; ``fp4`` is the one of FP8 if there is no FP4; the bandwidth is in TB/s.
    """
    return Speed(
        name=name,
        bf16_flops=0.80e12 * bf16,
        fp32_flops=0.80e12 * fp32,
        fp8_flops=0.68e12 * fp8,
        fp4_flops=0.68e12 * fp4,
        bandwidth=0.90e12 * bandwidth,
        launch=2e-6,
    )


def of_device_name(device_name: str, boards: Mapping[str, Speed], typical: str | None) -> Speed | None:
    """The speed of the first of ``boards`` that ``device_name`` names, else that of the ``typical`` one.

    A laptop's GPU has the name of a board, but not its speed.
    """
    if "Laptop" not in device_name:
        for name, speed in boards.items():
            if re.search(rf"\b{name}\b", device_name):
                return speed
    return boards[typical] if typical is not None else None
