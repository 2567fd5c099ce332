"""An oracle for quantization, written another way than the product: float64, and FP8 by table search.

Nothing here uses torch's casts to FP8, its amax or its division.
"""

from __future__ import annotations

import math
import struct
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

FLT_MAX = float(np.finfo(np.float32).max)
Array = npt.NDArray[Any]


@cache
def table(dtype: torch.dtype) -> Array:
    """The value of each of the 128 non-negative codes of an FP8 type, NaN and inf included, in float64."""
    exponent_bits, mantissa_bits, bias = (4, 3, 7) if dtype == torch.float8_e4m3fn else (5, 2, 15)
    values: list[float] = []
    for code in range(128):
        exponent, mantissa = code >> mantissa_bits, code & ((1 << mantissa_bits) - 1)
        if exponent == 0:
            values.append(mantissa * 2.0 ** (1 - bias - mantissa_bits))
        elif dtype == torch.float8_e4m3fn and code == 127:
            values.append(math.nan)
        elif dtype == torch.float8_e5m2 and exponent == (1 << exponent_bits) - 1:
            values.append(math.inf if mantissa == 0 else math.nan)
        else:
            values.append((1 + mantissa * 2.0**-mantissa_bits) * 2.0 ** (exponent - bias))
    return np.array(values)


def fp8_max(dtype: torch.dtype) -> float:
    values = table(dtype)
    return float(values[np.isfinite(values)].max())


def cast(x: Array, dtype: torch.dtype) -> Array:
    """The code of each float64 number: nearest, ties to the even code, saturating; 255 marks NaN."""
    values = table(dtype)
    finite = values[np.isfinite(values)]
    magnitude = np.minimum(np.abs(x), finite[-1])
    upper = np.searchsorted(finite, magnitude).clip(0, len(finite) - 1)
    lower = np.maximum(upper - 1, 0)
    to_upper, to_lower = finite[upper] - magnitude, magnitude - finite[lower]
    take_upper = (to_upper < to_lower) | ((to_upper == to_lower) & (upper % 2 == 0))
    code = np.where(take_upper, upper, lower).astype(np.uint8) | (np.signbit(x).astype(np.uint8) << 7)
    return np.where(np.isnan(x), np.uint8(255), code)


def round_to_float32(x: float) -> float:
    """Nearest float32, through its bytes."""
    if math.isnan(x) or math.isinf(x):
        return x
    try:
        return struct.unpack("f", struct.pack("f", x))[0]
    except OverflowError:
        return math.copysign(math.inf, x)


def scale(amax: float, dtype: torch.dtype, *, power_2_scale: bool = False, epsilon: float = 0.0) -> float:
    """The current scale for one amax."""
    amax = max(amax, round_to_float32(epsilon)) if not math.isnan(amax) else amax
    if amax == 0 or math.isinf(amax) or math.isnan(amax):
        return 1.0
    # float64 division of two float32 numbers, rounded once more: equal to IEEE float32 division
    result = min(round_to_float32(fp8_max(dtype) / amax), FLT_MAX)
    if power_2_scale:
        result = math.ldexp(1.0, math.frexp(result)[1] - 1)
    return result


def round_to(x: Array, dtype: torch.dtype) -> Array:
    """float32 numbers to ``dtype``, nearest even, as float32: bf16 by integer arithmetic, fp16 by numpy."""
    assert x.dtype == np.float32
    if dtype == torch.bfloat16:
        bits = x.view(np.uint32)
        rounded = ((bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000).astype(np.uint32).view(np.float32)
        return np.where(np.isnan(x), np.float32(math.nan), rounded)
    with np.errstate(over="ignore"):
        return x.astype(np.float16).astype(np.float32) if dtype == torch.float16 else x


def dequantize(codes: Array, scale_inv: float, dtype: torch.dtype, source: torch.dtype) -> Array:
    """What codes of the FP8 type ``dtype`` stand for, rounded to ``source``, as float32."""
    magnitude = table(dtype)[codes & 127]
    values = np.where(codes >> 7, -magnitude, magnitude).astype(np.float32)
    return round_to(values * np.float32(scale_inv), source)


def quantize(
    x: Tensor, dtype: torch.dtype, *, power_2_scale: bool = False, epsilon: float = 0.0, columnwise: bool = False
) -> tuple[Array, float]:
    """``(codes, scale_inv)``."""
    values = x.detach().double().numpy()
    amax = float(np.max(np.abs(values)))  # NaN if any is
    factor = scale(amax, dtype, power_2_scale=power_2_scale, epsilon=epsilon)
    with np.errstate(over="ignore", invalid="ignore"):
        scaled = (values.astype(np.float32) * np.float32(factor)).astype(np.float64)
    codes = cast(np.swapaxes(scaled, -1, -2) if columnwise else scaled, dtype)
    return codes, round_to_float32(1.0 / factor)


def assert_codes(got: Tensor, expected: Array) -> None:
    """Equal byte for byte, any NaN for a NaN; says where and what if not."""
    codes = got.contiguous().view(torch.uint8).numpy()
    assert codes.shape == expected.shape, (codes.shape, expected.shape)
    nan = np.isnan(table(got.dtype))[codes & 127]
    wrong = np.argwhere(np.where(expected == 255, ~nan, codes != expected))
    if len(wrong):
        where = tuple(int(i) for i in wrong[0])
        got_text, expected_text = (
            f"{code:#04x} ({'-' if code >> 7 else ''}{table(got.dtype)[code & 127]})"
            for code in (int(codes[where]), int(expected[where]))
        )
        raise AssertionError(
            f"{len(wrong)} of {codes.size} bytes differ, first at {where}: got {got_text}, expected {expected_text}"
        )
