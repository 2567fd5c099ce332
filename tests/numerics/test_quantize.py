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
from fp8graph.numerics import hints, quantization
from fp8graph.recipes import Layout
from helpers import in_one_test

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
FP8 = (E4M3, E5M2, *oracle.FNUZ)
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
    return quantization.scale_from_amax(torch.tensor(amax), oracle.fp8_max(dtype), **settings).item()


@in_one_test("dtype", FP8)
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


@in_one_test("dtype", FP8)
def test_the_cast_of_every_16_bit_number(dtype: torch.dtype) -> None:
    """All bf16 and fp16 values: subnormals, ties, saturation, both infinities, NaN."""
    for source in (torch.bfloat16, torch.float16):
        x = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(source).float()
        oracle.assert_codes(hints.saturating_cast(x, dtype), oracle.cast(x.double().numpy(), dtype))


@pytest.mark.parametrize("dtype", oracle.FNUZ)
def test_fnuz_is_torchs_own_and_has_one_zero_and_one_nan(dtype: torch.dtype) -> None:
    """Within range ours is torch's cast, byte for byte; beyond, where torch's gives NaN, ours saturates."""
    every = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(torch.bfloat16).float()
    drawn = torch.randn(2**16, generator=torch.Generator().manual_seed(0)) * 2.0 ** torch.arange(-48, 16).repeat(2**10)
    x = torch.cat([every, drawn])
    got, torchs = hints.saturating_cast(x, dtype).view(torch.uint8), x.to(dtype).view(torch.uint8)
    largest = oracle.fp8_max(dtype)
    assert torch.equal(got[~(x.abs() > largest)], torchs[~(x.abs() > largest)])
    assert set(got[x > largest].tolist()) == {0x7F}
    assert set(got[x < -largest].tolist()) == {0xFF}
    assert set(got[x.isnan()].tolist()) == {0x80}
    smallest = float(oracle.table(dtype)[1])
    assert set(got[x.abs() <= smallest / 2].tolist()) == {0}  # a tie goes to the even code
    assert (largest, smallest) == {oracle.FNUZ[0]: (240.0, 2.0**-10), oracle.FNUZ[1]: (57344.0, 2.0**-17)}[dtype]
    with pytest.raises(AssertionError, match="got 0x00"):
        oracle.assert_codes(torch.tensor([-1e-9]).to(dtype), np.array([0x80], np.uint8))


@in_one_test("dtype", FP8)
def test_the_oracle_knows_the_value_of_every_code(dtype: torch.dtype) -> None:
    values = torch.arange(128, dtype=torch.uint8).view(dtype).double().numpy()
    np.testing.assert_array_equal(values, oracle.table(dtype))


@in_one_test("dtype", FP8)
def test_ties_go_to_the_even_code_and_their_neighbours_do_not(dtype: torch.dtype) -> None:
    """Every midpoint of two codes, one FP32 step below and above it; past the largest: saturated."""
    finite = oracle.table(dtype)[np.isfinite(oracle.table(dtype))].astype(np.float32)
    ties, lower = (finite[:-1] + finite[1:]) / 2, np.arange(len(finite) - 1)  # exact in FP32
    infinity = np.float32(math.inf)
    cases = [
        (ties, lower + lower % 2),
        (np.nextafter(ties, -infinity), lower),
        (np.nextafter(ties, infinity), lower + 1),
        (finite, np.arange(len(finite))),
        (finite[-1:] * np.float32(1.0625), [len(finite) - 1]),
        (np.nextafter(finite[-1:], infinity), [len(finite) - 1]),
        (np.array([oracle.FLT_MAX, math.inf], np.float32), [len(finite) - 1] * 2),
    ]
    for numbers, codes in cases:
        for sign, bit in ((1, 0), (-1, 128)):
            got = hints.saturating_cast(torch.from_numpy(numbers * np.float32(sign)), dtype)
            expected = np.asarray(codes, np.uint8) | np.uint8(bit)
            no_minus_zero = dtype in oracle.FNUZ
            oracle.assert_codes(got, np.where(no_minus_zero & (expected == 0x80), np.uint8(0), expected))


def test_a_difference_is_reported_with_its_place_its_byte_and_both_values() -> None:
    codes = torch.tensor([[1.0, 2.0], [3.0, 4.0]]).to(E4M3)
    expected = codes.view(torch.uint8).numpy().copy()
    oracle.assert_codes(codes, expected)
    expected[1, 0] = 0xBC
    with pytest.raises(AssertionError, match=r"1 of 4 .* at \(1, 0\): got 0x44 \(3.0\), expected 0xbc \(-1.5\)"):
        oracle.assert_codes(codes, expected)


@pytest.mark.parametrize("source", SOURCES)
def test_shapes_and_views(source: torch.dtype) -> None:
    """Larger than those of ``test_any_tensor``, and views that it does not draw."""
    x = torch.randn(32, 24).to(source)
    views = x.expand(3, -1, -1), x[:1].expand(8, -1), x[:, :1].expand(-1, 5), x[5:9, 3:4]
    permuted = x.view(4, 8, 24).permute(1, 2, 0), x.view(2, 16, 4, 6).permute(0, 3, 1, 2)
    for each in (torch.randn(303, 300).to(source), torch.randn(2, 3, 5, 8).to(source), *views, *permuted):
        check(each)


@in_one_test("source", SOURCES)
@in_one_test("fields", [{}, {"power_2_scale": True}, {"amax_epsilon": 1e-36}])
def test_magnitudes(source: torch.dtype, fields: dict[str, Any]) -> None:
    """Subnormal elements, scales that overflow FP32 (below fp8_max / FLT_MAX), the largest numbers there are."""
    x = torch.randn(6, 8)
    for amax in (1e-44, 1e-40, 1e-38, 6e-37, 1.3e-36, 1.8e-34, 1e-7, 3e4, 1e30, 3e38):
        check((x / x.abs().max() * amax).to(source), **fields)


@pytest.mark.parametrize("source", SOURCES)
def test_an_epsilon_above_the_amax_sets_the_scale(source: torch.dtype) -> None:
    x = torch.rand(4, 4).to(source)
    check(x, amax_epsilon=8.0)
    q = numerics.quantize(x, Float8CurrentScaling(amax_epsilon=8.0), "input", "rowwise")
    assert q.scale_inv == torch.tensor(448.0 / 8.0).reciprocal()


@in_one_test("source", SOURCES)
@in_one_test("special", [0.0, -0.0, math.inf, -math.inf, math.nan])
def test_special_elements(source: torch.dtype, special: float) -> None:
    for x in (torch.zeros(4, 8), torch.randn(4, 8)):
        x[1, 2] = special
        check(x.to(source))
        q = numerics.quantize(x.to(source), Float8CurrentScaling(), "grad_output", "rowwise")
        assert q.data.float()[1, 2].isnan() == (not math.isfinite(special))


@given(st.data())
@settings(max_examples=150, deadline=None)
def test_any_tensor(data: st.DataObject) -> None:
    """Any values in any dense or strided view of 2 to 4 dims."""
    sizes = data.draw(st.lists(st.integers(1, 6), min_size=2, max_size=4))
    numbers = st.floats(width=32) | st.floats(-1e3, 1e3, width=32)
    values = data.draw(st.lists(numbers, min_size=math.prod(sizes), max_size=math.prod(sizes)))
    x = torch.tensor(values, dtype=torch.float32).reshape(sizes).to(data.draw(st.sampled_from(SOURCES)))
    x = x.permute(data.draw(st.permutations(range(x.ndim))))
    x = x[..., :: data.draw(st.integers(1, 2))]
    check(x, power_2_scale=data.draw(st.booleans()), amax_epsilon=data.draw(st.sampled_from([0.0, 1e-12, 10.0])))


MULTIPLES = st.sampled_from([(1, 1), (1, 16), (16, 16), (8, 32), (3, 5)])


@given(st.data())
@settings(max_examples=60, deadline=None)
def test_padding_adds_zero_bytes_and_changes_nothing_else(data: st.DataObject) -> None:
    """The multiples are those of the result: [rows, columns] of the rowwise, [columns, rows] of the columnwise copy."""
    sizes = data.draw(st.lists(st.integers(1, 40), min_size=2, max_size=3))
    dtype, rowwise, columnwise = data.draw(st.tuples(st.sampled_from(FP8), MULTIPLES, MULTIPLES))
    x = torch.randn(sizes).to(data.draw(st.sampled_from(SOURCES)))
    x[..., 0, 0] = -0.0  # byte 0x80: padding must be 0x00
    x = x.transpose(0, -1) if data.draw(st.booleans()) else x
    outputs = quantization.quantize_layouts(x, dtype, False, 0.0, rowwise, columnwise)
    for got, multiples, transposed in zip(outputs, (rowwise, columnwise), (False, True), strict=False):
        codes, scale_inv = oracle.quantize(x, dtype, columnwise=transposed)
        last = [(0, -size % multiple) for size, multiple in zip(codes.shape[-2:], multiples, strict=True)]
        oracle.assert_codes(got, np.pad(codes, [(0, 0)] * (codes.ndim - 2) + last))
        assert got.is_contiguous()
        assert outputs[-1].item() == scale_inv


@pytest.mark.parametrize(("rowwise", "columnwise", "shapes"), [([1, 1], [], [(3, 5)]), ([], [1, 1], [(5, 3)])])
def test_only_the_layouts_asked_for(rowwise: list[int], columnwise: list[int], shapes: list[Any]) -> None:
    *data, scale_inv = quantization.quantize_layouts(torch.randn(3, 5), E4M3, False, 0.0, rowwise, columnwise)
    assert [d.shape for d in data] == shapes
    assert scale_inv.shape == ()


def test_formats() -> None:
    x = torch.randn(4, 8)
    for fmt, expected in ((Format.HYBRID, [E4M3, E4M3, E5M2]), (Format.E4M3, [E4M3] * 3)):
        recipe = Float8CurrentScaling(fp8_format=fmt)
        got = [numerics.quantize(x, recipe, o, "rowwise").data.dtype for o in ("input", "weight", "grad_output")]
        assert got == expected


@in_one_test("source", SOURCES)
@in_one_test("layout", ["rowwise", "columnwise"])
@in_one_test(("operand", "dtype"), [("weight", E4M3), ("grad_output", E5M2)])
def test_dequantize(source: torch.dtype, layout: Layout, operand: Any, dtype: torch.dtype) -> None:
    """``data * scale_inv`` in FP32, then one rounding to the source's dtype; back in the source's orientation."""
    for shape in ((8, 24), (2, 3, 5)):
        x = torch.randn(shape).to(source)
        q = numerics.quantize(x, Float8CurrentScaling(), operand, layout)
        got = numerics.dequantize(q)
        codes, scale_inv = oracle.quantize(x, dtype)
        expected = oracle.dequantize(codes, scale_inv, dtype, source)
        assert (got.shape, got.dtype, q.layout, q.dtype) == (x.shape, source, layout, source)
        np.testing.assert_array_equal(got.float().numpy(), expected)


@in_one_test("source", SOURCES)
@in_one_test("power_2", [False, True])
@in_one_test("operand", ["input", "grad_output"])
def test_representable_tensors_quantize_without_loss(source: torch.dtype, power_2: bool, operand: Any) -> None:
    """Casting again changes no bit, whatever the magnitude.

    One exception: in FP32, ``fp8_max / amax`` and its reciprocal are both rounded, so a scale that is no power of
    two comes back two FP32 steps off at most. The FP8 bytes are then the same.
    """
    recipe = Float8CurrentScaling(power_2_scale=power_2)
    for magnitude in (3.0, 1e-3, 7e3) + ((1e-30, 1e30) if source != torch.float16 else ()):
        full = (torch.randn(24, 40) * magnitude).to(source)
        for x in (full, full.t(), full[::2, 1::3], full.view(4, 6, 40)):
            once = numerics.cast_to_representable(x, recipe, operand)
            twice = numerics.cast_to_representable(once, recipe, operand)
            assert (once.shape, once.dtype) == (x.shape, x.dtype)
            assert 18 < numerics.sqnr_db(x, once) < 40
            if source == torch.float32 and not power_2:
                steps = (once.contiguous().view(torch.int32) - twice.contiguous().view(torch.int32)).abs()
                assert steps.max() <= 2
                before, after = (numerics.quantize(t, recipe, operand, "rowwise").data for t in (x, once))
                assert torch.equal(before.view(torch.uint8), after.view(torch.uint8))
            else:
                assert torch.equal(once, twice)


def test_representable_is_what_both_layouts_stand_for() -> None:
    x, recipe = torch.randn(24, 40), Float8CurrentScaling()
    columnwise = numerics.dequantize(numerics.quantize(x, recipe, "input", "columnwise"))
    assert torch.equal(columnwise, numerics.cast_to_representable(x, recipe, "input"))


def test_numerics_leave_their_input_alone() -> None:
    x = torch.randn(8, 8)
    copy = x.clone()
    numerics.cast_to_representable(x, Float8CurrentScaling(), "input")
    assert torch.equal(x, copy)


def test_sqnr() -> None:
    x = torch.tensor([3.0, 4.0])
    assert numerics.sqnr_db(x, x) == math.inf
    assert numerics.sqnr_db(x, torch.zeros(2)) == 0.0
    assert numerics.sqnr_db(x, -x) == pytest.approx(-20 * math.log10(2))
    assert numerics.sqnr_db(x, 1.1 * x.double()) == pytest.approx(20.0, abs=1e-5)
    assert numerics.sqnr_db(torch.zeros(2), x) == -math.inf
    assert math.isnan(numerics.sqnr_db(x, x * math.nan))
    assert numerics.sqnr_db(x.requires_grad_(), x.detach()) == math.inf
    assert numerics.sqnr_db(x, x + torch.tensor([0.3, 0.4])) == pytest.approx(20.0, abs=1e-5)
    with pytest.raises(ValueError, match="they must be equal"):
        numerics.sqnr_db(x, torch.zeros(3))


@pytest.mark.parametrize(
    "x", [torch.zeros(3), torch.zeros(0), torch.tensor([1.0, math.inf, -math.inf])], ids=["zeros", "empty", "infinite"]
)
def test_equal_tensors_have_no_noise(x: Tensor) -> None:
    assert numerics.sqnr_db(x, x.clone()) == math.inf


@pytest.mark.parametrize("operand", ["grad-output", "inputs", ""])
def test_an_operand_that_does_not_exist(operand: Any) -> None:
    """A typo must not choose a dtype: "grad-output" is not E4M3."""
    with pytest.raises(ValueError, match="operand.*input, weight, grad_output"):
        numerics.quantize(torch.zeros(2, 2), Float8CurrentScaling(), operand, "rowwise")


@pytest.mark.parametrize("recipe", ["rowwise", Float8CurrentScaling])
def test_quantize_refuses_names_and_classes_of_recipes(recipe: Any) -> None:
    with pytest.raises(ValueError, match="recipe must be a recipe object like"):
        numerics.quantize(torch.zeros(2, 2), recipe, "input", "rowwise")


@in_one_test(
    ("x", "layout", "message"),
    [
        (torch.zeros(2, 2), "diagonal", "layout must be one of rowwise, columnwise"),
        (torch.zeros(2, 2).int(), "rowwise", "x is torch.int32"),
        (torch.zeros(2, 2).double(), "rowwise", "x is torch.float64, and must be bf16, fp16 or fp32"),
        (torch.zeros(2, 2).to(E4M3), "rowwise", "x is torch.float8_e4m3fn"),
        (torch.zeros(2, 2) * 1j, "rowwise", "x is torch.complex64"),
        (torch.tensor(1.0), "rowwise", "needs at least 2 dims"),
        (torch.zeros(2), "rowwise", "needs at least 2 dims"),
        (torch.zeros(0, 2), "rowwise", "one element"),
    ],
)
def test_inputs_that_cannot_be_quantized(x: Tensor, layout: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        numerics.quantize(x, Float8CurrentScaling(), "input", layout)


@pytest.mark.parametrize("special", [torch.nan, torch.inf, -torch.inf])
def test_an_overflow_survives_a_reduction_over_ranks(special: float) -> None:
    """A maximum of two numbers may drop a NaN, and none drops inf."""
    x = torch.tensor([[1.0, -3.0], [2.0, 0.5]])
    assert torch.equal(quantization.reducible_amax(x), torch.tensor([3.0]))
    x[1, 0] = special
    assert torch.equal(quantization.reducible_amax(x.bfloat16()), torch.tensor([torch.inf]))
