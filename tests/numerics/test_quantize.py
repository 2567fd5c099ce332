"""Current scaling, bit for bit against the oracle."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import oracle
from fp8graph import Float8CurrentScaling, Format, numerics
from fp8graph.recipes import Layout

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
FP8 = (E4M3, E5M2)
SOURCES = (torch.bfloat16, torch.float16, torch.float32)


def check(x: Tensor, **fields: Any) -> None:
    """Both operands' types and both layouts of ``x`` against the oracle."""
    recipe = Float8CurrentScaling(**fields)
    layouts: tuple[Layout, ...] = ("rowwise", "columnwise")
    for operand, dtype in (("input", E4M3), ("grad_output", E5M2)):
        for layout in layouts:
            q = numerics.quantize(x, recipe, operand, layout)  # pyright: ignore[reportArgumentType]
            codes, scale_inv = oracle.quantize(
                x,
                dtype,
                power_2_scale=recipe.power_2_scale,
                epsilon=recipe.amax_epsilon,
                columnwise=layout == "columnwise",
            )
            oracle.assert_codes(q.data, codes)
            assert q.data.is_contiguous()
            assert (q.scale_inv.dtype, q.scale_inv.shape) == (torch.float32, torch.Size([]))
            assert q.scale_inv.item() == scale_inv


def scale_of(amax: float, dtype: torch.dtype, **settings: Any) -> float:
    return numerics.scale_from_amax(torch.tensor(amax), oracle.fp8_max(dtype), **settings).item()


@pytest.mark.parametrize("dtype", FP8)
def test_the_scale_table(dtype: torch.dtype) -> None:
    fp8_max = oracle.fp8_max(dtype)
    tiny = oracle.round_to_float32(fp8_max / oracle.FLT_MAX / 2)
    assert scale_of(0.0, dtype) == 1.0
    assert scale_of(tiny, dtype) == oracle.FLT_MAX
    assert scale_of(0.37, dtype) == np.float32(fp8_max) / np.float32(0.37)
    assert scale_of(math.inf, dtype) == 1.0
    assert scale_of(math.nan, dtype) == 1.0
    assert scale_of(0.0, dtype, amax_epsilon=1e-12) == np.float32(fp8_max) / np.float32(1e-12)
    assert scale_of(math.nan, dtype, amax_epsilon=1e-12) == 1.0


@given(
    amax=st.floats(0, width=32) | st.just(math.nan), power_2=st.booleans(), epsilon=st.sampled_from([0.0, 1e-12, 0.5])
)
@settings(max_examples=400, deadline=None)
def test_any_scale(amax: float, power_2: bool, epsilon: float) -> None:
    for dtype in FP8:
        expected = oracle.scale(amax, dtype, power_2_scale=power_2, epsilon=epsilon)
        assert scale_of(amax, dtype, power_2_scale=power_2, amax_epsilon=epsilon) == expected


@pytest.mark.parametrize("dtype", FP8)
def test_the_cast_of_every_16_bit_number(dtype: torch.dtype) -> None:
    """All bf16 and fp16 values: subnormals, ties, saturation, both infinities, NaN."""
    for source in (torch.bfloat16, torch.float16):
        x = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(source).float()
        oracle.assert_codes(numerics.saturating_cast(x, dtype), oracle.cast(x.double().numpy(), dtype))


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("fields", [{}, {"power_2_scale": True}, {"amax_epsilon": 1e-3}])
@pytest.mark.parametrize("shape", [(16, 32), (1, 1), (303, 300), (7, 1), (2, 3, 5, 8)])
def test_shapes_and_dtypes(source: torch.dtype, fields: dict[str, Any], shape: tuple[int, ...]) -> None:
    check(torch.randn(shape).to(source), **fields)


@pytest.mark.parametrize(
    "view",
    [
        pytest.param(lambda x: x.t(), id="transposed"),
        pytest.param(lambda x: x[::2, 1::3], id="strided"),
        pytest.param(lambda x: x[:1].expand(8, -1), id="expanded"),
        pytest.param(lambda x: x.view(4, 8, 24).permute(1, 2, 0), id="permuted"),
    ],
)
def test_non_contiguous_inputs(view: Any) -> None:
    check(view(torch.randn(32, 24).bfloat16()))


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("special", [0.0, -0.0, math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("alone", [True, False])
def test_special_elements(source: torch.dtype, special: float, alone: bool) -> None:
    x = torch.zeros(4, 8) if alone else torch.randn(4, 8)
    x[1, 2] = special
    check(x.to(source))
    q = numerics.quantize(x.to(source), Float8CurrentScaling(), "grad_output", "rowwise")
    assert q.data.float()[1, 2].isnan() == math.isnan(special)
    if math.isinf(special):
        assert q.data.float()[1, 2] == math.copysign(57344, special)


@given(st.data())
@settings(max_examples=150, deadline=None)
def test_any_tensor(data: st.DataObject) -> None:
    rows, columns = data.draw(st.integers(1, 9)), data.draw(st.integers(1, 9))
    numbers = st.floats(width=32) | st.floats(-1e3, 1e3, width=32)
    values = data.draw(st.lists(numbers, min_size=rows * columns, max_size=rows * columns))
    x = torch.tensor(values, dtype=torch.float32).reshape(rows, columns).to(data.draw(st.sampled_from(SOURCES)))
    check(x, power_2_scale=data.draw(st.booleans()))


@pytest.mark.parametrize("multiples", [(1, 1), (1, 16), (16, 16), (8, 32)])
def test_padding_adds_zeros_and_changes_nothing_else(multiples: tuple[int, int]) -> None:
    x = torch.randn(20, 24)
    row, column, scale_inv = numerics.quantize_layouts(x, E4M3, False, 0.0, multiples, multiples)
    plain_row, plain_column, plain_scale_inv = numerics.quantize_layouts(x, E4M3, False, 0.0, [1, 1], [1, 1])
    assert torch.equal(scale_inv, plain_scale_inv)
    for padded, plain in ((row, plain_row), (column, plain_column)):
        rows, columns = plain.shape
        assert padded.shape == (rows + -rows % multiples[0], columns + -columns % multiples[1])
        assert torch.equal(padded.float()[:rows, :columns], plain.float())
        assert padded.float().abs().sum() == plain.float().abs().sum()


def test_formats() -> None:
    x = torch.randn(4, 8)
    for fmt, expected in ((Format.HYBRID, [E4M3, E4M3, E5M2]), (Format.E4M3, [E4M3] * 3)):
        recipe = Float8CurrentScaling(fp8_format=fmt)
        got = [numerics.quantize(x, recipe, o, "rowwise").data.dtype for o in ("input", "weight", "grad_output")]
        assert got == expected


@pytest.mark.parametrize("source", SOURCES)
def test_representable_tensors_quantize_without_loss(source: torch.dtype) -> None:
    x = (torch.randn(24, 40) * 3).to(source)
    recipe = Float8CurrentScaling(power_2_scale=True)
    once = numerics.cast_to_representable(x, recipe, "input")
    assert (once.shape, once.dtype) == (x.shape, x.dtype)
    q = numerics.quantize(x, recipe, "input", "columnwise")
    assert torch.equal(numerics.dequantize(q), once)
    assert torch.equal(numerics.cast_to_representable(once, recipe, "input"), once)
    assert 25 < numerics.sqnr_db(x, once) < 40


def test_dequantize_rounds_once() -> None:
    q = numerics.quantize(torch.randn(8, 8), Float8CurrentScaling(), "input", "rowwise")
    exact = q.data.double() * q.scale_inv.double()
    assert torch.equal(numerics.dequantize(q), exact.float())


def test_sqnr() -> None:
    x = torch.tensor([3.0, 4.0])
    assert numerics.sqnr_db(x, x) == math.inf
    assert numerics.sqnr_db(x, torch.zeros(2)) == 0.0
    assert numerics.sqnr_db(x, x + torch.tensor([0.3, 0.4])) == pytest.approx(20.0, abs=1e-5)
    with pytest.raises(ValueError, match="shapes differ"):
        numerics.sqnr_db(x, torch.zeros(3))


@pytest.mark.parametrize(
    ("x", "layout", "message"),
    [
        (torch.zeros(2, 2), "diagonal", "layout must be one of rowwise, columnwise"),
        (torch.zeros(2, 2).int(), "rowwise", "cannot quantize torch.int32"),
        (torch.zeros(2), "rowwise", "needs 2 dims"),
        (torch.zeros(0, 2), "rowwise", "one element"),
    ],
)
def test_inputs_that_cannot_be_quantized(x: Tensor, layout: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        numerics.quantize(x, Float8CurrentScaling(), "input", layout)
