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
E4M3 = torch.float8_e4m3fn
FNUZ = (torch.float8_e4m3fnuz, torch.float8_e5m2fnuz)


@cache
def table(dtype: torch.dtype) -> Array:
    """The value of each of the 128 non-negative codes of an FP8 type, NaN and inf included, in float64.

    fnuz: every code is a number, and each is half of what it is in the OCP type.
    """
    exponent_bits, mantissa_bits, bias = (4, 3, 7) if "e4m3" in str(dtype) else (5, 2, 15)
    bias += dtype in FNUZ
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
    """The code of each float64 number: nearest, ties to the even code, saturating; 255 marks NaN.

    fnuz has no -0: a negative number that rounds to zero is 0x00, and 0x80 is its one NaN.
    """
    codes = _nearest(x, finite_table(dtype))
    if dtype in FNUZ:
        codes = np.where(np.isnan(x), np.uint8(0x80), np.where(codes == 0x80, np.uint8(0), codes))
    return codes


def finite_table(dtype: torch.dtype | None) -> Array:
    """The finite non-negative values of an FP8 type, or of E2M1 (None)."""
    if dtype is None:
        return np.array([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
    values = table(dtype)
    return values[np.isfinite(values)]


def _nearest(x: Array, finite: Array) -> Array:
    magnitude = np.minimum(np.abs(x), finite[-1])
    upper = np.searchsorted(finite, magnitude).clip(0, len(finite) - 1)
    lower = np.maximum(upper - 1, 0)
    to_upper, to_lower = finite[upper] - magnitude, magnitude - finite[lower]
    take_upper = (to_upper < to_lower) | ((to_upper == to_lower) & (upper % 2 == 0))
    sign_bit = 7 if len(finite) > 8 else 3  # FP8, E2M1
    code = np.where(take_upper, upper, lower).astype(np.uint8) | (np.signbit(x).astype(np.uint8) << sign_bit)
    return np.where(np.isnan(x), np.uint8(255), code)


def round_to_float32(x: float) -> float:
    """Nearest float32, through its bytes."""
    if math.isnan(x) or math.isinf(x):
        return x
    try:
        return struct.unpack("f", struct.pack("f", x))[0]
    except OverflowError:
        return math.copysign(math.inf, x)


def scale(
    amax: float,
    dtype: torch.dtype,
    *,
    power_2_scale: bool = False,
    epsilon: float = 0.0,
    largest: float = FLT_MAX,
    top: float | None = None,
) -> float:
    """The current scale for one amax."""
    amax = max(amax, round_to_float32(epsilon)) if not math.isnan(amax) else amax
    if amax == 0 or math.isinf(amax) or math.isnan(amax):
        return 1.0
    # float64 division of two float32 numbers, rounded once more: equal to IEEE float32 division
    result = round_to_float32((top or fp8_max(dtype)) / amax)
    result = largest if math.isinf(result) else result
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
    """The numbers that codes of the FP8 type ``dtype`` stand for, rounded to ``source``, as float32."""
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
    scaled[np.isinf(values)] = math.nan
    codes = cast(np.swapaxes(scaled, -1, -2) if columnwise else scaled, dtype)
    return codes, round_to_float32(1.0 / factor)


def e8m0(amax: float, dtype: torch.dtype) -> int:
    """The E8M0 exponent of ``amax * (1 / fp8_max)`` rounded up: logarithms where the product moves bits."""
    return e8m0_above(float(np.float32(amax) * np.float32(1.0 / fp8_max(dtype))))


def e8m0_above(x: float) -> int:
    """The E8M0 exponent of ``x`` rounded up."""
    if math.isnan(x):
        return 255
    if math.isinf(x):
        return 254
    if x == 0:
        return 0
    mantissa, exponent = math.frexp(x)  # x = mantissa * 2 ** exponent, 0.5 <= mantissa < 1
    return min(max(127 + exponent - (mantissa == 0.5), 0), 254)


def quantize_tiles(x: Tensor, quantizer: Any, *, columnwise: bool = False) -> tuple[Array, Array, float]:
    """``(codes, scale_inv of each tile, global scale_inv)``, one tile after another, in Python.

    ``codes`` of E2M1 are not packed; an E8M0 scale comes as its exponent, an E4M3 scale as its value.
    """
    fp4 = quantizer.scaling == "nvfp4"
    values = x.float().numpy().astype(np.float32)
    values = np.swapaxes(values, -2, -1) if columnwise else values
    rows, columns = values.shape[-2:]
    tile_rows, tile_columns = (1, columns) if quantizer.scaling == "row" else quantizer.block
    grid = -(-rows // tile_rows), -(-columns // tile_columns)
    codes = np.zeros(values.shape, np.uint8)
    scale_inv = np.zeros((*values.shape[:-2], *grid), np.float64)
    whole = float(np.abs(values).max())
    global_scale = scale(whole, E4M3, top=448.0 * 6.0) if fp4 else 1.0
    inverse_of = lambda v: round_to_float32(1.0 / v) if v else math.inf  # noqa: E731
    for index in np.ndindex(*values.shape[:-2], *grid):
        *batch, i, j = index
        where = (*batch, slice(i * tile_rows, (i + 1) * tile_rows), slice(j * tile_columns, (j + 1) * tile_columns))
        tile = values[where]
        amax = float(np.abs(tile).max())
        if quantizer.scaling == "mxfp8":
            stored = float(e8m0(amax, quantizer.dtype))
            factor = math.nan if stored == 255 else math.ldexp(1.0, 127 - int(stored))
        elif quantizer.scaling == "block_e8m0":
            stored = float(e8m0_above(round_to_float32(max(amax, quantizer.amax_epsilon) / fp8_max(quantizer.dtype))))
            factor = math.nan if stored == 255 else math.ldexp(1.0, 127 - int(stored))
        elif fp4:
            product = np.float32(amax) * (np.float32(global_scale) * np.reciprocal(np.float32(6.0)))
            code = 255 if math.isinf(amax) else int(cast(np.array([product], np.float64), E4M3)[0])
            stored = math.nan if code == 255 else float(table(E4M3)[code])
            inverse = inverse_of(global_scale)
            factor = inverse_of(float(np.float32(stored) * np.float32(inverse))) if stored == stored else math.nan
            factor = min(factor, FLT_MAX) if factor == factor else factor
        else:
            settings = {"power_2_scale": quantizer.power_2_scale, "epsilon": quantizer.amax_epsilon}
            largest = float(torch.finfo(x.dtype).max) if quantizer.scaling == "block" else FLT_MAX
            factor = scale(amax, quantizer.dtype, **settings, largest=largest)
            stored = inverse_of(factor)
        with np.errstate(over="ignore", invalid="ignore"):
            scaled = (tile * np.float32(factor)).astype(np.float64)
        scaled[np.isinf(tile)] = math.nan
        fp4_codes = _nearest(np.nan_to_num(scaled, nan=0.0), finite_table(None))  # E2M1 has no NaN
        codes[where] = fp4_codes if fp4 else cast(scaled, quantizer.dtype)
        scale_inv[index] = stored
    return codes, scale_inv, inverse_of(global_scale)


def assert_codes(got: Tensor, expected: Array) -> None:
    """Equal byte for byte, any NaN for a NaN; says where and what if not."""
    codes = got.contiguous().view(torch.uint8).numpy()
    assert codes.shape == expected.shape, (codes.shape, expected.shape)
    nan = np.isnan(table(got.dtype))[codes & 127]
    any_nan = (expected == 255) & (got.dtype not in FNUZ)  # fnuz has one
    wrong = np.argwhere(np.where(any_nan, ~nan, codes != expected))
    if len(wrong):
        where = tuple(int(i) for i in wrong[0])
        got_text, expected_text = (
            f"{code:#04x} ({'-' if code >> 7 else ''}{table(got.dtype)[code & 127]})"
            for code in (int(codes[where]), int(expected[where]))
        )
        raise AssertionError(
            f"{len(wrong)} of {codes.size} bytes differ, first at {where}: got {got_text}, expected {expected_text}"
        )
