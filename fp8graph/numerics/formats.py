"""Number formats and scales: amax -> scale, FP32 -> FP8 or FP4, E8M0. Plain eager functions, traced by ``lower``.

They are written so that Inductor fuses them, with integer arithmetic on the bits instead of casts to types that it
leaves to extern kernels (E8M0, E2M1).
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from fp8graph.numerics import hints
from fp8graph.recipes import FLT_MAX

# Columns of a table of scales, a row per tensor. cuBLASLt reads a scale_inv where it is, and refuses addresses that are
# not multiples of 16 bytes (measured on an H200, CUDA 13.0): it comes first, and rows are multiples of 16 bytes.
SCALE_INV: Final = 0
SCALE: Final = 1


def table_of(scale: Tensor, scale_inv: Tensor) -> Tensor:
    """[..., 2]: the columns of a table of scales."""
    return torch.stack([scale_inv, scale], -1)


def amax_of(x: Tensor, dim: int | tuple[int, ...] = (), keepdim: bool = False) -> Tensor:
    """``max |x|`` along ``dim`` (or all dims) in FP32; NaN if any element is NaN. It is exact for all dtypes here.

    It is widened last: an amax that two loops read is stored in between, and generated code rounds it there as eager
    code does. Columns on a CPU are an exception, see :func:`widened_columns`.
    """
    return narrow_amax_of(x, dim, keepdim).to(torch.float32)


def narrow_amax_of(x: Tensor, dim: int | tuple[int, ...] = (), keepdim: bool = False) -> Tensor:
    """:func:`amax_of` before it is widened, so that several parts can be joined without work after their loops."""
    if isinstance(dim, int):
        x = widened_columns(x, dim)
    return x.abs().amax(dim, keepdim) if dim != () else hints.largest(x.abs())


def widened_columns(x: Tensor, dim: int) -> Tensor:
    """``x``, widened to FP32 if it is on a CPU and not contiguous along ``dim``, along which its amax is taken.

    Code generated for a CPU declares a name twice if it stores two amaxes of the columns of one half-precision tensor
    (also in torch 2.15; ``tests/compat/test_inductor.py`` watches it).
    """
    return x.to(torch.float32) if x.device.type == "cpu" and x.stride(dim) != 1 else x


def scale_from_amax(
    amax: Tensor,
    fp8_max: float,
    *,
    power_2_scale: bool = False,
    amax_epsilon: float = 0.0,
    largest: float = FLT_MAX,
) -> Tensor:
    """``fp8_max / max(amax, epsilon)`` with Transformer Engine's edge cases. FP32 in, FP32 out, any shape.

    amax 0, inf or nan -> 1; a quotient that overflows -> ``largest``; ``power_2_scale`` clears the mantissa.
    Source: ``compute_scale_from_amax``, Transformer Engine ``common/recipe/recipe_common.cuh``.
    """
    if amax_epsilon > 0.0:
        amax = amax.clamp_min(amax_epsilon)  # NaN passes through
    # Tensor / tensor: one IEEE division. (python float) / tensor would be reciprocal * float: two roundings.
    scale = hints.divide(torch.full_like(amax, fp8_max), amax)
    scale = torch.where(scale > FLT_MAX, torch.full_like(scale, largest), scale)
    usable = (amax > 0.0) & (amax <= FLT_MAX)  # False for 0, inf and nan
    scale = torch.where(usable, scale, torch.ones_like(scale))
    if power_2_scale:
        # sign and exponent bits only; 0xFF800000 as a signed 32-bit integer
        bits = torch.bitwise_and(scale.view(torch.int32), -(1 << 23))
        scale = bits.view(torch.float32)
    return scale


def inverse(scale: Tensor) -> Tensor:
    """``1 / scale``, one IEEE division."""
    return hints.divide(torch.ones_like(scale), scale)


def nvfp4_global_scale(amax: Tensor, largest_scale: float = 448.0) -> Tensor:
    """``largest_scale * 6 / amax``, FP32, at most FLT_MAX; 1 for an amax of 0, inf or nan. One IEEE division."""
    return scale_from_amax(amax, largest_scale * 6.0)


def biased_exponent(amax: Tensor, fp8_max: float) -> Tensor:
    """E8M0 scale of a tile with ``amax``: the exponent of ``amax * (1 / fp8_max)`` rounded toward +inf, as int32.

    0 -> 0x00 (2^-127), 1.0 -> 0x7F, one step above 1.0 -> 0x80, inf -> 0xFE, nan -> 0xFF.
    Source: ``float_to_e8m0``, Transformer Engine ``common/util/ptx.cuh``.
    """
    x = amax * (1.0 / fp8_max)
    bits = x.view(torch.int32)
    exponent, mantissa = torch.bitwise_right_shift(bits, 23), torch.bitwise_and(bits, 0x7FFFFF)
    # subnormal numbers up to half the smallest normal one (2^-127) are 0x00
    up = (mantissa > 0) & (exponent < 0xFE) & ((exponent > 0) | (mantissa > 0x400000))
    exponent = torch.where(up, exponent + 1, exponent)
    exponent = torch.where(x > FLT_MAX, torch.full_like(exponent, 0xFE), exponent)
    return torch.where(x.isnan(), torch.full_like(exponent, 0xFF), exponent)


def exp2_biased(exponent: Tensor) -> Tensor:
    """``2 ** (exponent - 127)`` in FP32 from int32 bits; 0 -> 2^-127 (subnormal), 255 -> nan."""
    bits = torch.bitwise_left_shift(exponent, 23)
    bits = torch.where(exponent == 0, torch.full_like(bits, 0x00400000), bits)
    bits = torch.where(exponent == 255, torch.full_like(bits, 0x7FC00000), bits)
    return bits.view(torch.float32)


def overflow_as_nan(x: Tensor) -> Tensor:
    """``x`` in FP32, NaN where it is infinite. Multiplied by a scale it is cast, and the cast hides no overflow.

    A finite number that the scale makes infinite saturates.
    """
    return hints.visible(x.to(torch.float32))


def cast_to_e2m1(x: Tensor) -> Tensor:
    """FP32 -> 4-bit codes in uint8, round to nearest even, saturating at 6. Codes 0..7: 0 .5 1 1.5 2 3 4 6; 8: sign.

    NaN, which E2M1 does not have, becomes 0: the scale of its tile is NaN.
    """
    magnitude = x.abs()
    code = torch.zeros_like(x, dtype=torch.int32)
    # the midpoints; on a tie the even code wins: the lower one at 0.25, the upper one at 0.75
    for midpoint, tie_goes_up in ((0.25, 0), (0.75, 1), (1.25, 0), (1.75, 1), (2.5, 0), (3.5, 1), (5.0, 0)):
        above = magnitude >= midpoint if tie_goes_up else magnitude > midpoint
        code = code + above.to(torch.int32)
    sign = torch.bitwise_and(torch.bitwise_right_shift(x.view(torch.int32), 28), 8)
    return torch.bitwise_or(code, sign).to(torch.uint8)


def cast_to_e2m1_stochastically(x: Tensor, random: Tensor) -> Tensor:
    """As :func:`cast_to_e2m1`, but rounded up with a probability that is the distance from the neighbour below.

    ``random``: 16 random bits for each number, int32. The probability is a multiple of 2^-16, the nearest one.
    """
    magnitude = x.abs()
    code = torch.zeros_like(x, dtype=torch.int32)
    for number in (0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0):
        code = code + (magnitude >= number).to(torch.int32)
    below = torch.where(code < 4, 0.5 * code, torch.where(code < 6, code - 2.0, 4.0))
    per_step = torch.where(code < 4, 2.0, torch.where(code < 6, 1.0, 0.5)) * 65536.0
    distance = (magnitude - below) * per_step  # exact, in units of 2^-16 of the step
    goes_up = (code < 7) & (distance >= 65535.5 - random.to(torch.float32))
    sign = torch.bitwise_and(torch.bitwise_right_shift(x.view(torch.int32), 28), 8)
    return torch.bitwise_or(code + goes_up.to(torch.int32), sign).to(torch.uint8)


def pack_e2m1(codes: Tensor) -> Tensor:
    """[..., k] codes -> [..., k / 2] bytes, the first of two in the low half (torch.float4_e2m1fn_x2's order)."""
    return torch.bitwise_or(codes[..., ::2], torch.bitwise_left_shift(codes[..., 1::2], 4))


def unpack_e2m1(data: Tensor) -> Tensor:
    """[..., k / 2] bytes -> [..., k] FP32 numbers."""
    codes = torch.stack([torch.bitwise_and(data, 15), torch.bitwise_right_shift(data, 4)], -1).flatten(-2)
    code = torch.bitwise_and(codes, 7).to(torch.float32)
    magnitude = torch.where(code < 4, code * 0.5, torch.where(code < 6, code - 2, code * 2 - 8))
    return torch.where(codes > 7, -magnitude, magnitude)
