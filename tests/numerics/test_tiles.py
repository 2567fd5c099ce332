"""Rows, blocks, MXFP8 and NVFP4, bit for bit against the oracle: every tile, both layouts, ragged edges."""

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
from fp8graph import Float8BlockScaling, Float8RowwiseScaling, MXFP8BlockScaling, NVFP4BlockScaling, hardware, numerics
from fp8graph.ir import ops
from fp8graph.numerics import formats, quantization
from fp8graph.recipes import LAYOUTS, Recipe
from helpers import first_fast, in_one_test, same_bits

PLAIN_FP4 = NVFP4BlockScaling(disable_rht=True, disable_stochastic_rounding=True)  # the rest: test_nvfp4.py
SOURCES = [torch.bfloat16, torch.float32, torch.float16]
RECIPES: list[tuple[str, Recipe, Any]] = [
    ("1x128", Float8BlockScaling(), "input"),
    ("1x128 FP32 scales", Float8BlockScaling(power_2_scale=False), "input"),
    ("128x128", Float8BlockScaling(), "weight"),
    ("1x128 E5M2", Float8BlockScaling(fp8_format="HYBRID"), "grad_output"),  # pyright: ignore[reportArgumentType]
    ("2x48 with an epsilon", Float8BlockScaling(x_block=(2, 48), amax_epsilon=0.5), "input"),
    ("1x128 E8M0", Float8BlockScaling(scale_format="ue8m0"), "input"),
    ("128x128 E8M0", Float8BlockScaling(scale_format="ue8m0", amax_epsilon=1e-4), "weight"),
    ("row", Float8RowwiseScaling(), "input"),
    ("row FP32 scales", Float8RowwiseScaling(power_2_scale=False, amax_epsilon=0.0), "grad_output"),
    ("1x32 E8M0", MXFP8BlockScaling(), "weight"),
    ("32x32 E8M0", MXFP8BlockScaling(enable_2d_quantization=True), "weight"),
    ("1x32 E8M0 E5M2", MXFP8BlockScaling(fp8_format="HYBRID"), "grad_output"),  # pyright: ignore[reportArgumentType]
    ("1x16 FP4", PLAIN_FP4, "input"),
    ("16x16 FP4", PLAIN_FP4, "weight"),
]
CASES = [pytest.param(r, o, id=n) for n, r, o in RECIPES]
each_recipe = in_one_test(("recipe", "operand"), CASES)


def check(x: Tensor, recipe: Recipe, operand: Any) -> None:
    quantizer = recipe.quantizer(operand)
    for layout in ("rowwise", "columnwise"):
        q = numerics.quantize(x, recipe, operand, layout)
        codes, scale_inv, global_scale_inv = oracle.quantize_tiles(x, quantizer, columnwise=layout == "columnwise")
        got = q.scale_inv.float().numpy()
        np.testing.assert_array_equal(got, scale_inv.astype(np.float32))
        if quantizer.scaling == "nvfp4":
            unpacked = np.stack([q.data.numpy() & 15, q.data.numpy() >> 4], -1).reshape(*q.data.shape[:-1], -1)
            nan = np.repeat(np.repeat(np.isnan(scale_inv), quantizer.block[0], -2), quantizer.block[1], -1)
            padding = [(0, 0)] * (codes.ndim - 1) + [(0, unpacked.shape[-1] - codes.shape[-1])]
            nan = nan[..., : codes.shape[-2], : unpacked.shape[-1]]  # the codes under a NaN scale say nothing
            np.testing.assert_array_equal(np.where(nan, 0, unpacked), np.where(nan, 0, np.pad(codes, padding)))
            assert q.global_scale_inv is not None
            assert q.global_scale_inv.item() == global_scale_inv
        else:
            oracle.assert_codes(q.data, codes)
        assert numerics.dequantize(q).shape == x.shape


@each_recipe
def test_shapes(recipe: Recipe, operand: Any) -> None:
    """Several tiles each way, full and ragged: more than ``test_any_tensor`` draws."""
    for shape, source in (((128, 256), torch.bfloat16), ((303, 300), torch.float32), ((2, 33, 50), torch.float16)):
        check(torch.randn(shape).to(source) * torch.logspace(-3, 3, shape[-1]).to(source), recipe, operand)


@each_recipe
@first_fast("source", SOURCES)
def test_special_tiles(recipe: Recipe, operand: Any, source: torch.dtype) -> None:
    """Whole tiles of one number beside normal ones; one such element in a tile of normal numbers."""
    quantizer = recipe.quantizer(operand)
    size = 128 if quantizer.scaling == "row" else max(quantizer.block)
    tiles, element = torch.randn(size + 12, size + 22).to(source), torch.randn(20, size + 22).to(source)
    for number in (0.0, 1e-45, 1e-38, torch.finfo(source).max, math.inf, -math.inf, math.nan):
        tiles[: size + 2, : size + 2], element[3, size + 12] = number, number
        check(tiles, recipe, operand)
        check(element, recipe, operand)


@first_fast(("recipe", "operand"), CASES)
@given(data=st.data())
@settings(max_examples=25, deadline=None)
def test_any_tensor(recipe: Recipe, operand: Any, data: st.DataObject) -> None:
    sizes = data.draw(st.tuples(st.integers(1, 6), st.integers(1, 40)))
    numbers = st.floats(width=32) | st.floats(-1e3, 1e3, width=32)
    pool = torch.tensor(data.draw(st.lists(numbers, min_size=1, max_size=8)))
    x = pool[torch.randint(len(pool), sizes)].to(data.draw(st.sampled_from(SOURCES)))
    check(x, recipe, operand)


def test_e8m0_rounds_up() -> None:
    """Transformer Engine's table, and every power of two and its neighbours."""
    one = torch.tensor(1.0)
    table = {0.0: 0x00, 1.0: 0x7F, torch.nextafter(one, one * 2).item(): 0x80, math.inf: 0xFE, math.nan: 0xFF}
    for amax, exponent in table.items():
        assert formats.biased_exponent(torch.tensor(amax), 1.0).item() == exponent
    powers = torch.ldexp(torch.ones(253), torch.arange(-125, 128))
    for x, up in ((powers, 0), (powers.nextafter(powers * 0), 0), (powers.nextafter(one * math.inf), 1)):
        expected = (torch.arange(-125, 128) + 127 + up).clamp(max=254)
        assert torch.equal(formats.biased_exponent(x, 1.0), expected.int())
    assert (formats.biased_exponent(torch.tensor([448.0, 447.0, 449.0]), 448.0) == torch.tensor([127, 127, 128])).all()


def test_e8m0_decodes() -> None:
    got = formats.exp2_biased(torch.arange(256, dtype=torch.int32)).double().numpy()
    np.testing.assert_array_equal(got, [*(2.0 ** (e - 127) for e in range(255)), math.nan])


def test_every_e2m1_code_and_every_midpoint() -> None:
    values = oracle.finite_table(None)
    assert formats.unpack_e2m1(torch.arange(16, dtype=torch.uint8)).tolist()[::2] == [*values, *-values]
    ties = (values[:-1] + values[1:]) / 2
    for numbers, codes in (
        (ties, [0, 2, 2, 4, 4, 6, 6]),
        (np.nextafter(ties.astype(np.float32), np.float32(0)), range(7)),
        (np.nextafter(ties.astype(np.float32), np.float32(9)), range(1, 8)),
        (np.array([6.5, 1e30, math.inf]), [7, 7, 7]),
    ):
        x = torch.tensor(np.asarray(numbers), dtype=torch.float32)
        assert formats.cast_to_e2m1(x).tolist() == list(codes)
        assert formats.cast_to_e2m1(-x).tolist() == [code | 8 for code in codes]
    codes = torch.randint(16, (3, 10), dtype=torch.uint8)
    packed = formats.pack_e2m1(codes)
    assert packed.shape == (3, 5)
    assert packed[0, 0] == codes[0, 0] + 16 * codes[0, 1]


@pytest.mark.slow
def test_e4m3_scales_of_tiles_are_multiplied_by_the_rounded_sixth() -> None:
    """As Transformer Engine's kernel: a division by 6 rounds otherwise, here just above ties of E4M3."""
    x = torch.zeros(2, 64, dtype=torch.bfloat16)
    x[:, 0] = 1.015625  # the largest number of the tensor; the division gives 0.3125, 0.625 and 1.25 for the others
    x[:, 16], x[:, 32], x[:, 48] = 0.000743865966796875, 0.00148773193359375, 0.0029754638671875
    recipe = NVFP4BlockScaling()
    for wanted in (numerics.quantize, torch.compile(numerics.quantize)):
        q = wanted(x, recipe, "input", "rowwise")
        assert q.scale_inv.float().tolist() == 2 * [[448.0, 0.34375, 0.6875, 1.375]]


@each_recipe
def test_dequantize_is_data_times_scale(recipe: Recipe, operand: Any) -> None:
    """In float64, tile by tile; FP32 rounds once (NVFP4: once more for the global scale)."""
    quantizer = recipe.quantizer(operand)
    x = torch.randn(70, 150)
    q = numerics.quantize(x, recipe, operand, "rowwise")
    codes, scale_inv, global_scale_inv = oracle.quantize_tiles(x, quantizer)
    fp4 = quantizer.scaling == "nvfp4"
    finite, sign = oracle.finite_table(None if fp4 else quantizer.dtype), 8 if fp4 else 128
    values = np.where(codes & sign, -1.0, 1.0) * finite[codes & (sign - 1)]
    scales = np.exp2(scale_inv - 127) if quantizer.scaling in ("mxfp8", "block_e8m0") else scale_inv
    rows, columns = (1, 150) if quantizer.scaling == "row" else quantizer.block
    exact = values * np.repeat(np.repeat(scales, rows, 0), columns, 1)[:70, :150]
    exact = (exact.astype(np.float32) * np.float32(global_scale_inv)) if fp4 else exact.astype(np.float32)
    np.testing.assert_array_equal(numerics.dequantize(q).numpy(), exact)


def test_square_tiles_hold_the_same_numbers_in_both_layouts() -> None:
    x = torch.randn(256, 384)
    for recipe in (Float8BlockScaling(), NVFP4BlockScaling()):
        quantized = [numerics.quantize(x, recipe, "weight", layout) for layout in LAYOUTS]
        row, column = map(numerics.dequantize, quantized)
        assert torch.equal(row, column)


@pytest.mark.parametrize("dim", [-2, -1])
@first_fast(
    "recipe",
    [
        Float8BlockScaling(power_2_scale=False),
        Float8BlockScaling(scale_format="ue8m0"),
        Float8BlockScaling(w_block=(64, 64)),
    ],
)
def test_square_tiles_are_cast_again_with_the_scales_that_were_kept(recipe: Recipe, dim: int) -> None:
    """Bit for bit, without an amax, side by side and with ragged edges, zeros and numbers that are not finite."""
    quantizer = recipe.quantizer("weight")
    whole = torch.randn(384, 256) * torch.logspace(-30, 30, 384).unsqueeze(1)
    whole[0, 0], whole[130, 0], whole[200:] = math.inf, math.nan, 0.0
    settings = quantization.quantizer_kwargs(quantizer)
    for parts in ([whole[:256], whole[256:]] if dim == -2 else [whole[:, :128], whole[:, 128:]], [whole[:300, :200]]):
        x, more = parts[0], {"more": parts[1:], "dim": dim} if len(parts) > 1 else {}
        scales: Any = {}
        row, column = [16, 16], [16, 128]
        both = ops.quantize(x, *quantization.quantizer_args(quantizer), row, column, **settings, **more)
        for layouts, kept in ((row, []), True), (([], column), False):
            again = ops.quantize(
                x, *quantization.quantizer_args(quantizer), *layouts, keep_scales=kept, **scales, **settings, **more
            )
            if kept:
                scales = {"tile_scales": again.pop()}
            assert same_bits(again, both[::2] if kept else both[1::2])


@each_recipe
@in_one_test("bias", [False, True])
def test_the_gemm_is_the_one_of_the_decoded_operands(recipe: Recipe, operand: Any, bias: bool) -> None:
    """The dialect's reference on a CPU: FP32 accumulation of k products, one rounding."""
    a = numerics.quantize(torch.randn(12, 256), recipe, "input", "rowwise")
    b = numerics.quantize(torch.randn(48, 256), recipe, "weight", "rowwise")
    blocks = {"block_a": a.quantizer.block, "block_b": b.quantizer.block}
    extra: Any = {"global_scale_inv_a": a.global_scale_inv, "global_scale_inv_b": b.global_scale_inv}
    vector = torch.randn(48) if bias else None
    args = (a.data, b.data, a.scale_inv, b.scale_inv, vector, torch.float32, False)
    got = hardware.scaled_mm(*args, scaling=a.quantizer.scaling, **blocks, **extra)
    exact = numerics.dequantize(a).double() @ numerics.dequantize(b).double().T
    exact = exact if vector is None else exact + vector.double()
    assert (got.double() - exact).abs().max() <= 256 * 2.0**-24 * exact.abs().max()


@each_recipe
def test_an_infinity_is_decoded_as_nan(recipe: Recipe, operand: Any) -> None:
    """And it alone, or its tile where numbers have no NaN."""
    x = torch.randn(48, 64)
    x[7, 9], x[39, 2] = -math.inf, math.inf
    quantizer = recipe.quantizer(operand)
    for layout in LAYOUTS:
        lost = numerics.dequantize(numerics.quantize(x, recipe, operand, layout)).isnan()
        assert lost[x.isinf()].all()
        assert lost.sum() == 2 * (math.prod(quantizer.block) if quantizer.scaling == "nvfp4" else 1)


@pytest.mark.parametrize("recipe", [MXFP8BlockScaling(enable_2d_quantization=True), PLAIN_FP4], ids=["mxfp8", "nvfp4"])
def test_both_layouts_of_a_weight_in_square_tiles_hold_the_same_numbers(recipe: Recipe) -> None:
    w = torch.randn(96, 160) * torch.logspace(-2, 2, 160)
    one, other = (numerics.dequantize(numerics.quantize(w, recipe, "weight", layout)) for layout in LAYOUTS)
    assert torch.equal(one, other)
    plain = MXFP8BlockScaling()
    one, other = (numerics.dequantize(numerics.quantize(w, plain, "weight", layout)) for layout in LAYOUTS)
    assert not torch.equal(one, other)


FROM_ROWWISE = MXFP8BlockScaling(columnwise_from_rowwise=True)


def decoded(data: Tensor, scale_inv: Tensor) -> Tensor:
    """The numbers of a copy with one E8M0 scale per 1x32 tile, in float64."""
    exponents = scale_inv.double() - 127
    return data.double() * torch.exp2(exponents).repeat_interleave(32, -1)[..., : data.shape[-1]]


@in_one_test("order", ["", "128x4"])
@in_one_test("made", ["alone", "with the rowwise copy", "joined", "in groups"])
def test_columnwise_copy_is_that_of_the_rowwise_numbers(made: str, order: str) -> None:
    """Padded, in blocks and of several parts, too; 60 rows and 80 columns are no whole tiles, and each part is."""
    columns = 128 if made == "joined" else 80
    x = torch.randn(60, columns) * torch.logspace(-20, 20, columns)
    offs = torch.tensor([7, 7, 41, 60], dtype=torch.int32) if made == "in groups" else None

    def both(x: Tensor, recipe: Recipe, rowwise: list[int], parts: int = 1) -> list[Tensor]:
        quantizer = recipe.quantizer("input")
        first, *more = x.chunk(parts, -1)
        given = quantization.quantizer_kwargs(quantizer) | {"offs": offs}
        given |= {"rowwise_order": order, "columnwise_order": order}
        given |= {"more": more, "dim": -1} if more else {}
        return ops.quantize(first, *quantization.quantizer_args(quantizer), rowwise, [16, 32], **given)

    rowwise = [] if made == "alone" else [16, 16] if offs is None else [1, 16]
    found = both(x, FROM_ROWWISE, rowwise, 2 if made == "joined" else 1)
    q = numerics.quantize(x, MXFP8BlockScaling(), "input", "rowwise")
    expected = both(decoded(q.data, q.scale_inv).float(), MXFP8BlockScaling(), [])
    assert same_bits([found[len(found) // 2 - 1], found[-1]], expected)
    assert not same_bits(expected, both(x, MXFP8BlockScaling(), []))


def sample(name: str, *shape: int) -> Tensor:
    rows, columns = shape
    if name == "Student's t":
        return torch.distributions.StudentT(2.0).sample(shape)
    sizes = {"tokens": torch.arange(rows).unsqueeze(1) % 97, "channels": torch.arange(columns) % 97}
    return torch.randn(*shape) * torch.where(sizes.get(name, torch.ones(())) == 0, 1000.0, 1.0)


@in_one_test("name", ["normal", "Student's t", "tokens", "channels"])
def test_wgrad_of_the_rowwise_numbers_is_no_less_exact(name: str) -> None:
    """A power of two changes no mantissa: what is rounded twice differs where numbers are small beside their tile."""
    x, dy = sample(name, 1024, 256), sample(name, 1024, 128)
    found: list[Tensor] = []
    errors: list[float] = []
    for recipe in (MXFP8BlockScaling(), FROM_ROWWISE):
        a = numerics.dequantize(numerics.quantize(dy, recipe, "grad_output", "columnwise"))
        b = numerics.dequantize(numerics.quantize(x, recipe, "input", "columnwise"))
        errors.append(numerics.sqnr_db(dy.t() @ x, a.t() @ b))
        found.append(b)
    assert abs(errors[0] - errors[1]) < 0.02
    assert errors[1] > 26
    assert 0 < (found[0] != found[1]).float().mean() < 0.01
