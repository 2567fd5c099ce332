"""NVFP4 for training: Hadamard transform, stochastic rounding, four over six. The bytes are Transformer Engine's."""

from __future__ import annotations

import json
import math
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import oracle
import te_nvfp4
from fp8graph import NVFP4BlockScaling, numerics
from fp8graph.numerics import formats, quantization, random_bits, transforms
from fp8graph.numerics.gemm_error import gemm_error
from fp8graph.recipes import Layout, OperandName, Quantizer
from helpers import first_slow, in_one_test, same_bits

TRANSFORMER_ENGINE = json.loads(te_nvfp4.FILE.read_text())["digests"]
SIGNS = NVFP4BlockScaling().hadamard_signs
GRID = oracle.finite_table(None)  # 0, 0.5, 1, 1.5, 2, 3, 4, 6


def both_layouts(x: Tensor, quantizer: Quantizer, **more: Any) -> list[Tensor]:
    """data, data, scale_inv, scale_inv, global_scale_inv, global_scale_inv: rowwise before columnwise."""
    args, kwargs = quantization.quantizer_args(quantizer), quantization.quantizer_kwargs(quantizer)
    return quantization.quantize_layouts(x, *args, [1, 1], [1, 1], **kwargs, **more)


def sylvester(size: int) -> Any:
    """The Hadamard matrix by its recursion."""
    return np.ones((1, 1)) if size == 1 else np.block([[h := sylvester(size // 2), h], [h, -h]])


def transformed(x: Tensor) -> Tensor:
    """Each column, 16 rows at a time, in float64."""
    negated = np.array([-1.0 if SIGNS >> row & 1 else 1.0 for row in range(16)])
    matrix = np.diag(negated) @ sylvester(16) / 4
    padded = np.pad(x.double().numpy(), [(0, -x.shape[0] % 16), (0, 0)])
    groups = [matrix.T @ padded[row : row + 16] for row in range(0, len(padded), 16)]
    return torch.from_numpy(np.concatenate(groups))


@pytest.mark.parametrize("option", te_nvfp4.OPTIONS)
def test_bytes_and_scales_are_those_of_transformer_engine(option: str) -> None:
    fields, operand, _ = te_nvfp4.OPTIONS[option]
    quantizer = NVFP4BlockScaling(**fields).quantizer(operand)  # pyright: ignore[reportArgumentType]
    wanted = TRANSFORMER_ENGINE[option]
    if quantizer.rotation is not None:  # Transformer Engine transforms bf16 only; its reference would overflow in fp16
        wanted = {name: one for name, one in wanted.items() if not name.startswith("float16")}
    found = {name: te_nvfp4.digest(both_layouts(x, quantizer)[:4]) for name, x in te_nvfp4.tensors() if name in wanted}
    assert found == wanted


ROWS = NVFP4BlockScaling(disable_rht=True, row_scaled_activation=True)


@pytest.mark.parametrize("source", [torch.bfloat16, torch.float16, torch.float32])
def test_each_row_has_a_scale(source: torch.dtype) -> None:
    """Of the layout that a GEMM contracts: per row of x in fprop, per column of x in wgrad. 1 where all is zero."""
    x = (torch.randn(48, 80) * torch.logspace(-3, 3, 48).unsqueeze(1)).to(source)
    x[5] = 0
    made = both_layouts(x, ROWS.quantizer("input"))
    for layout, scale_inv in zip((x, x.t()), made[4:], strict=True):
        amax = layout.float().abs().numpy().max(1, keepdims=True)
        scale = np.divide(np.float32(448 * 6), amax, out=np.ones_like(amax), where=amax > 0)
        assert torch.equal(scale_inv, torch.from_numpy(np.float32(1) / scale))


def test_a_row_does_not_depend_on_the_others() -> None:
    x = torch.randn(20, 64) * torch.logspace(-4, 4, 20).unsqueeze(1)
    for four_over_six in ("none", "activations"):
        recipe = NVFP4BlockScaling(disable_rht=True, row_scaled_activation=True, nvfp4_4over6=four_over_six)
        whole = numerics.quantize(x, recipe, "input", "rowwise")
        for i in range(20):
            alone = numerics.quantize(x[i : i + 1], recipe, "input", "rowwise")
            assert same_bits([whole.data[i : i + 1], whole.scale_inv[i : i + 1]], [alone.data, alone.scale_inv])
    plain = NVFP4BlockScaling(disable_rht=True)
    lost = [
        (numerics.cast_to_representable(x, recipe, "input") - x)[0].norm() / x[0].norm() for recipe in (plain, ROWS)
    ]
    assert lost[0] == 1  # rounded to zero beside the others
    assert lost[1] < 0.2


@pytest.mark.parametrize("shape", [(10, 40), (3, 10, 40)])
def test_padded_rows_have_scales_too(shape: tuple[int, ...]) -> None:
    x, quantizer = torch.randn(shape), ROWS.quantizer("input")
    args, kwargs = quantization.quantizer_args(quantizer), quantization.quantizer_kwargs(quantizer)
    plain = both_layouts(x, quantizer)
    made = quantization.quantize_layouts(x, *args, [16, 32], [32, 16], **kwargs)
    batch = shape[:-2]
    assert [tuple(part.shape) for part in made[4:]] == [(*batch, 16, 1), (*batch, 64, 1)]
    assert same_bits([part[..., :rows, :] for part, rows in zip(made[4:], (10, 40), strict=True)], plain[4:])
    assert all((part[..., rows:, :] == 1).all() for part, rows in zip(made[4:], (10, 40), strict=True))
    assert not any(part[..., rows:, :].any() for part, rows in zip(made[:2], (10, 40), strict=True))
    joined = quantization.quantize_layouts(x[..., :32], *args, [1, 1], [1, 1], **kwargs, more=[x[..., 8:]])
    assert same_bits(joined, both_layouts(torch.cat([x[..., :32], x[..., 8:]], -1), quantizer))


def test_each_digest_tells_its_option_apart() -> None:
    """But for small tensors that 16x16 tiles and four over six leave as they are."""
    wide = [each["bfloat16 304x304, wide"] for each in TRANSFORMER_ENGINE.values()]
    assert len(set(wide)) == len(wide) - 1  # an input without a transform and a weight with 1x16 tiles are one


def test_the_matrix() -> None:
    """Orthogonal, with Transformer Engine's signs: rows 3, 5 to 10, 12, 14 and 15 are negated."""
    matrix = transforms.hadamard(torch.ones(1), SIGNS)
    assert torch.equal(matrix @ matrix.t(), torch.eye(16))
    assert torch.nonzero(matrix[:, 0] < 0).flatten().tolist() == [3, 5, 6, 7, 8, 9, 10, 12, 14, 15]
    assert torch.equal(transforms.hadamard(torch.ones(1), 0), torch.tensor(sylvester(16) / 4).float())
    assert torch.equal(transforms.hadamard(torch.ones(1).bfloat16(), SIGNS).float(), matrix)


@in_one_test("shape", [(64, 40), (50, 40), (1, 3), (16, 1)])
def test_the_transform_of_integers_is_exact(shape: tuple[int, int]) -> None:
    x = torch.randint(-8, 9, shape).float()
    got = transforms.transform_rows(x, transforms.hadamard(x, SIGNS))
    assert torch.equal(got.double(), transformed(x))
    back = transforms.transform_rows(got, transforms.hadamard(x, SIGNS).t())
    assert torch.equal(back[: shape[0]], x)
    assert not back[shape[0] :].any()
    batch = transforms.transform_rows(torch.stack([x, -x]), transforms.hadamard(x, SIGNS))
    assert torch.equal(batch, torch.stack([got, -got]))


@pytest.mark.parametrize("dim", [0, 1, 2])
def test_the_transform_along_any_dim(dim: int) -> None:
    """Exact: whole numbers, whose sums of 16 are multiples of a quarter."""
    x, matrix = torch.randint(-9, 9, (32, 48, 16)).float(), transforms.hadamard(torch.ones(1), SIGNS)
    got = transforms.rotate(x, matrix, dim)
    first, of_x = (y.movedim(dim, 0).reshape(x.shape[dim], -1) for y in (got, x))
    assert torch.equal(first.double(), transformed(of_x))
    assert torch.equal(transforms.rotate(got, matrix.t(), dim), x)
    assert got.is_contiguous()


@in_one_test("operand", ["input", "grad_output"])
@in_one_test("source", [torch.bfloat16, torch.float32])
def test_a_transformed_copy_has_scales_of_its_own(operand: OperandName, source: torch.dtype) -> None:
    """The columnwise copy is that of the transformed tensor, bit for bit; the rowwise one is not transformed."""
    x = (torch.randn(70, 96) * torch.logspace(-2, 2, 96)).to(source)
    quantizer = NVFP4BlockScaling(disable_stochastic_rounding=True).quantizer(operand)
    plain = NVFP4BlockScaling(disable_stochastic_rounding=True, disable_rht=True).quantizer(operand)
    rotated = transforms.transform_rows(x, transforms.hadamard(x, SIGNS))
    exact = transformed(x)
    half_step = 2.0 ** (-8 if source == torch.bfloat16 else -20)
    assert (rotated.double() - exact).abs().le(half_step * exact.abs() + 1e-6 * exact.abs().amax()).all()
    got = both_layouts(x, quantizer)
    assert same_bits(got[::2], both_layouts(x, plain)[::2])
    assert same_bits(got[1::2], both_layouts(rotated, plain)[1::2])


def test_the_transform_cancels_in_wgrad() -> None:
    """dy^T x of transformed copies is that of dy and x, but for rounding; an outlier is shared by its group."""
    x, dy = torch.randn(60, 64), torch.randn(60, 32)
    x[7, 5] = 60.0
    amaxes = [(whole * 448 * 6).item() for whole in both_layouts(x, NVFP4BlockScaling().quantizer("input"))[4:]]
    assert amaxes[0] == pytest.approx(60.0)
    assert 13 < amaxes[1] < 17
    exact = dy.t().double() @ x.double()

    def wgrad(recipe: NVFP4BlockScaling) -> float:
        a, b = (both_layouts(t, recipe.quantizer(o)) for t, o in ((dy, "grad_output"), (x, "input")))  # pyright: ignore[reportArgumentType]
        rows = [decode(each, "columnwise") for each in (a, b)]
        return numerics.sqnr_db(exact, rows[0] @ rows[1].t())

    assert wgrad(NVFP4BlockScaling(disable_stochastic_rounding=True)) > 15
    assert wgrad(NVFP4BlockScaling(disable_stochastic_rounding=True, hadamard_signs=0)) > 15


def decode(made: list[Tensor], layout: Layout) -> Tensor:
    data, scale_inv, whole = made[layout == "columnwise" :: 2]
    tiles = formats.unpack_e2m1(data).double().unflatten(-1, (-1, 16)) * scale_inv.double().unsqueeze(-1)
    return tiles.flatten(-2) * whole.double()


def test_large_numbers_of_fp16_do_not_overflow() -> None:
    """A channel along a column of the matrix becomes four times as large, which fp16 has no room for."""
    x = torch.randn(16, 32).half()
    x[:, 3] = 30000.0 * transforms.hadamard(torch.ones(1), SIGNS)[:, 0].sign().half()
    q = numerics.quantize(x, NVFP4BlockScaling(), "input", "columnwise")
    assert numerics.sqnr_db(x.float(), numerics.dequantize(q).float()) > 18


def test_ranks_draw_different_seeds(monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[int] = []
    for rank in (0, 1, 8, 9, 63, 4095, 2**20):
        monkeypatch.setattr(random_bits, "rank", lambda rank=rank: rank)
        torch.manual_seed(0)
        found.append(int(random_bits.random_seed(torch.device("cpu"))))
    assert len(set(found)) == len(found)


def test_dequantize_takes_the_transform_back() -> None:
    x = torch.randn(2, 50, 70)
    for layout in ("rowwise", "columnwise"):
        q = numerics.quantize(x, NVFP4BlockScaling(), "input", layout)
        assert numerics.dequantize(q).shape == x.shape
        assert numerics.sqnr_db(x, numerics.dequantize(q)) > 18


def test_statistics_of_a_transformed_copy_compare_it_with_the_transformed_tensor() -> None:
    x = torch.randn(70, 100)
    recipe = NVFP4BlockScaling(disable_stochastic_rounding=True)
    found = numerics.statistics(x, recipe, "input", "columnwise")
    wanted = transformed(x).t()
    decoded = decode(both_layouts(x, recipe.quantizer("input")), "columnwise")
    assert found["mse"] == pytest.approx((decoded - wanted).square().mean().item() * wanted.numel() / 7000, rel=1e-4)


def test_philox_draws_the_published_numbers() -> None:
    """The known answers of Random123, philox4x32-10: counter and key of zeros, of ones, of digits of pi."""
    answers = {
        ((0, 0, 0, 0), (0, 0)): (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8),
        ((2**32 - 1,) * 4, (2**32 - 1,) * 2): (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD),
        ((0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344), (0xA4093822, 0x299F31D0)): (
            0xD16CFE09,
            0x94FDCCEB,
            0x5001E420,
            0x24126EA1,
        ),
    }
    for (counter, key), words in answers.items():
        got = random_bits.philox(*([torch.tensor([word]) for word in each] for each in (counter, key)))  # pyright: ignore[reportArgumentType]
        assert tuple(int(word) for word in got) == words


def test_random_bits_depend_on_seed_tensor_and_part_alone() -> None:
    seed = torch.tensor([2**40 + 17])

    def bits(seed: Tensor | None, draw: int, part: int, groups: int = 32) -> Tensor:
        return random_bits.random_halves(seed, draw, part, groups, torch.device("cpu"))

    first = bits(seed, 0, 0)
    assert torch.equal(first, bits(seed.clone(), 0, 0))
    assert torch.equal(first[:7], bits(seed, 0, 0, groups=7))
    assert torch.equal(bits(None, 0, 0), bits(torch.tensor([0]), 0, 0))
    others = [bits(seed, 1, 0), bits(seed, 0, 1), bits(seed + 1, 0, 0), bits(seed + 2**32, 0, 0)]
    assert all((first == other).float().mean() < 0.02 for other in others)
    assert first.min() >= 0
    assert first.max() < 2**16


@settings(max_examples=40, deadline=None)
@given(number=st.floats(-8, 8, width=32) | st.sampled_from([0.0, -0.0, 0.25, 5.0, 6.0, 1e-30]), data=st.data())
def test_a_number_is_rounded_up_as_often_as_the_distance_says(number: float, data: st.DataObject) -> None:
    """Exactly, for all 65,536 random halves: the table of probabilities has no entry that is off by more than 2^-17."""
    x = torch.full((2**16,), number)
    codes = formats.cast_to_e2m1_stochastically(x, torch.arange(2**16, dtype=torch.int32))
    size = min(Fraction(abs(number)), Fraction(6))
    below = max(i for i, value in enumerate(GRID) if Fraction(value) <= size)
    above = min(below + 1, 7)
    distance = Fraction(0)
    if above > below:
        distance = (size - Fraction(GRID[below])) / (Fraction(GRID[above]) - Fraction(GRID[below]))
    ups = int((codes & 7 == above).sum()) if above > below else 0
    assert set((codes & 7).tolist()) <= {below, above}
    assert abs(Fraction(ups, 2**16) - distance) <= Fraction(1, 2**17)
    assert ((codes >> 3) == (1 if math.copysign(1.0, number) < 0 else 0)).all()
    random = data.draw(st.integers(0, 2**16 - 2))
    assert (codes & 7)[random] <= (codes & 7)[random + 1]  # larger random numbers never round down instead


def test_nan_is_zero_under_a_scale_that_is_nan() -> None:
    assert formats.cast_to_e2m1_stochastically(torch.tensor([math.nan]), torch.tensor([2**16 - 1])) & 7 == 0
    x = torch.randn(4, 32)
    x[1, 3] = math.nan
    made = numerics.quantize(x, NVFP4BlockScaling(), "grad_output", "rowwise")
    assert numerics.dequantize(made).isnan().any(-1).tolist() == [False, True, False, False]


def test_gradients_are_rounded_without_bias() -> None:
    """The mean of 200 roundings is the number itself, within six standard errors; rounding to nearest is off."""
    x = torch.randn(16, 64)
    recipe = NVFP4BlockScaling()
    made = torch.stack(
        [numerics.dequantize(numerics.quantize(x, recipe, "grad_output", "rowwise", seed=seed)) for seed in range(200)]
    )
    nearest = numerics.dequantize(
        numerics.quantize(x, NVFP4BlockScaling(disable_stochastic_rounding=True), "grad_output", "rowwise")
    )
    below, above = made.amin(0), made.amax(0)
    random = above > below  # not numbers of the grid, and not the largest of a tile whose scale was rounded down
    share = (x - below) / (above - below)
    error = (made.mean(0) - x).abs()
    assert random.float().mean() > 0.8
    assert (error <= 6 * (above - below) * (share * (1 - share) / 200).sqrt())[random].all()
    assert error[random].square().mean() < (nearest - x)[random].square().mean() / 20


def test_seeds_layouts_and_tensors_round_differently() -> None:
    x = torch.randn(64, 64)
    quantizer = NVFP4BlockScaling(disable_rht=True).quantizer("grad_output")
    seed = torch.tensor([5])
    first = both_layouts(x, quantizer, seed=seed)
    assert same_bits(first, both_layouts(x, quantizer, seed=seed.clone()))
    for other in (both_layouts(x, quantizer, seed=seed + 1), both_layouts(x, quantizer, seed=seed, draw=1)):
        assert (first[0] != other[0]).any()
        assert same_bits(first[2:], other[2:])  # the scales are not random
    turned = both_layouts(x.t().contiguous(), quantizer, seed=seed)
    assert (turned[1] != first[0]).any()  # the same numbers in the other layout


def test_four_over_six_loses_less() -> None:
    """In each tile at most what the scale for 6 loses, by its own measure, and in some less."""
    x = torch.randn(64, 256).bfloat16()

    def lost(mode: Any, scope: Any) -> Tensor:
        recipe = NVFP4BlockScaling(
            disable_rht=True, nvfp4_4over6=scope, nvfp4_4over6_err_mode=mode, nvfp4_4over6_e4m3_use_256="none"
        )
        difference = (decode(both_layouts(x, recipe.quantizer("input")), "rowwise") - x.double()).unflatten(
            -1, (-1, 16)
        )
        return (difference.abs() if mode == "MAE" else difference.square()).sum(-1)

    for mode in ("MAE", "MSE"):
        six, better = lost(mode, "none"), lost(mode, "activations")
        assert (better <= six * (1 + 1e-5) + 1e-9).all()
        assert (better < 0.9 * six).float().mean() > 0.1
        assert torch.equal(lost(mode, "weights"), six)  # not of this operand


def test_the_error_of_a_gemm_takes_the_transform_back() -> None:
    """``gemm_error`` of wgrad: what the difference of the decoded product is, summed."""
    dy, x = torch.randn(64, 32), torch.randn(64, 48)
    recipe = NVFP4BlockScaling(disable_stochastic_rounding=True)
    a, b = recipe.quantizer("grad_output"), recipe.quantizer("input")
    exact = dy.t() @ x
    parts = gemm_error(
        dy.t(),
        x,
        exact,
        a.dtype,
        a.dtype,
        [False] * 2,
        [0.0] * 2,
        ["nvfp4"] * 2,
        [1, 16],
        [1, 16],
        rotations=[SIGNS] * 2,
    )
    quantized = [decode(both_layouts(t, q), "columnwise") for t, q in ((dy, a), (x, b))]
    wanted = (quantized[0] @ quantized[1].t() - exact.double()).square().sum().item()
    assert parts[1].item() == pytest.approx(wanted, rel=1e-3)


@first_slow("operand", ["input", "weight", "grad_output"])
def test_compiled_bits_are_eager_bits(operand: OperandName) -> None:
    """Of all options, one seed, ragged sizes; random numbers are integers, so they are the same, too."""
    recipe = NVFP4BlockScaling(nvfp4_4over6="all", nvfp4_4over6_e4m3_use_256="weights")
    x, seed = torch.randn(50, 70).bfloat16(), torch.tensor([7])
    compiled = torch.compile(both_layouts)(x, recipe.quantizer(operand), seed=seed)
    assert same_bits(compiled, both_layouts(x, recipe.quantizer(operand), seed=seed))
