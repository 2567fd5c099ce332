"""Stored numbers times stored scales, compared with loops over tiles in FP64; and what is counted of them."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from fp8graph.checkpoints.layer_format import QuantizedWeight, decoded_scales, dequantize
from fp8graph.numerics import quantize
from fp8graph.recipes import NVFP4BlockScaling
from fp8graph.tools.inspect_checkpoint import counts_of, scale_ratio
from helpers import in_one_test

E2M1 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0]


def slowly(data: Tensor, scales: Tensor, block: tuple[int, int]) -> Tensor:
    """[n, k] numbers times the scale of their tile: both exact in FP64, and rounded once."""
    result = torch.empty(data.shape)
    for row in range(data.shape[0]):
        for column in range(data.shape[1]):
            scale = scales[row // block[0], column // block[1]]
            result[row, column] = (data[row, column].double() * scale.double()).float()
    return result


def fp8(*shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (100 * torch.randn(shape, generator=generator)).clamp(-448, 448).to(torch.float8_e4m3fn)


@in_one_test("dtype", [torch.float32, torch.bfloat16, torch.float16])
@in_one_test(
    ("shape", "block"), [((6, 8), (6, 8)), ((6, 8), (1, 8)), ((6, 8), (2, 4)), ((5, 7), (2, 4)), ((3, 64), (1, 32))]
)
def test_scales_in_floats(dtype: torch.dtype, shape: tuple[int, int], block: tuple[int, int]) -> None:
    grid = [-(-size // tile) for size, tile in zip(shape, block, strict=True)]
    scales = (torch.rand(grid) + 0.1).to(dtype)
    weight = QuantizedWeight(data=fp8(*shape), scale_inv=scales, block=block)
    assert weight.shape == shape
    assert torch.equal(dequantize(weight), slowly(weight.data.float(), scales, block))


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float8_e8m0fnu])
def test_scales_in_e8m0(dtype: torch.dtype) -> None:
    bytes_ = torch.tensor([[0, 1, 100], [127, 128, 254]], dtype=torch.uint8)
    powers = torch.tensor([[2.0**-127, 2.0**-126, 2.0**-27], [1.0, 2.0, 2.0**127]])
    assert torch.equal(decoded_scales(bytes_.view(dtype)), powers)
    weight = QuantizedWeight(data=fp8(2, 96), scale_inv=bytes_.view(dtype), block=(1, 32))
    assert torch.equal(dequantize(weight), slowly(weight.data.float(), powers, (1, 32)))
    assert decoded_scales(torch.tensor([255], dtype=torch.uint8).view(dtype)).isnan().all()


@in_one_test("dtype", [torch.uint8, torch.int8])
@in_one_test("stored", ["factor", "divisor"])
def test_packed_numbers(dtype: torch.dtype, stored: str) -> None:
    data = torch.arange(256, dtype=torch.uint8).reshape(16, 16)  # each byte once
    scales = torch.rand(16, 2, generator=torch.Generator().manual_seed(1)).to(torch.float8_e4m3fn)
    one = torch.tensor(0.37)
    more: dict[str, Any] = {"global_scale_inv": one} if stored == "factor" else {"global_scale": one}
    weight = QuantizedWeight(data=data.view(dtype), scale_inv=scales, block=(1, 16), **more)
    assert weight.shape == (16, 32)
    numbers = torch.tensor([[E2M1[half] for byte in row for half in (byte & 15, byte >> 4)] for row in data.tolist()])
    together = scales.float() * one if stored == "factor" else scales.float() / one  # rounded first
    assert torch.equal(dequantize(weight), slowly(numbers, together, (1, 16)))


def test_fused_experts() -> None:
    data, scales = fp8(3, 4, 8), torch.rand(3, 2, 2)
    weight = QuantizedWeight(data=data, scale_inv=scales, block=(2, 4))
    alone = [slowly(data[i].float(), scales[i], (2, 4)) for i in range(3)]
    assert torch.equal(dequantize(weight), torch.stack(alone))


def test_quantized_nvfp4_weight_is_decoded() -> None:
    """A weight in NVFP4 that this library made is decoded as its own dequantize decodes it, up to the last rounding."""
    q = quantize(torch.randn(32, 64), NVFP4BlockScaling(), "weight", "rowwise")
    scales = q.scale_inv.repeat_interleave(16, 0) if q.quantizer.block[0] == 16 else q.scale_inv
    weight = QuantizedWeight(data=q.data, scale_inv=scales, block=(1, 16), global_scale_inv=q.global_scale_inv)
    torch.testing.assert_close(dequantize(weight), fp4_values(q), rtol=2.0**-22, atol=0)


def fp4_values(q: Any) -> Tensor:
    import fp8graph

    return fp8graph.numerics.dequantize(q).float()


def test_counts() -> None:
    data = torch.tensor([[0.0, -0.0, 448.0, -448.0], [447.0, 1.0, math.nan, 2.0**-9]]).to(torch.float8_e4m3fn)
    counts = counts_of(data)
    assert (counts.numbers, counts.saturated, counts.zero, counts.nan) == (8, 3, 2, 1)  # 447 rounds to 448
    wide = torch.tensor([57344.0, math.inf, 0.0, 1.0]).to(torch.float8_e5m2)
    counts = counts_of(wide)
    assert (counts.saturated, counts.zero, counts.nan) == (2, 1, 0)
    packed = torch.tensor([0x07, 0xF8, 0x11], dtype=torch.uint8)  # 6 0, -0 -6, .5 .5
    counts = counts_of(packed)
    assert (counts.numbers, counts.saturated, counts.zero) == (6, 2, 2)


def test_ratios_of_scales() -> None:
    assert scale_ratio(torch.tensor([[2.0, 0.5], [0.0, 1.0]])) == 4.0
    assert scale_ratio(torch.tensor(3.0)) == 1.0
    assert scale_ratio(torch.zeros(3)) == 1.0
    assert scale_ratio(torch.tensor([1.0, math.inf])) == math.inf
    assert math.isnan(scale_ratio(torch.tensor([1.0, math.nan])))
