"""Statistics of tensors against their definitions in FP64, on all recipes and both layouts, and merged."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from fp8graph import DelayedScaling, Float8CurrentScaling, NVFP4BlockScaling, numerics
from fp8graph.numerics import stats as parts
from fp8graph.numerics.quantization import quantizer_kwargs
from fp8graph.numerics.stats import finished, merged, named
from fp8graph.recipes import FP8_MAX, LAYOUTS, Layout, resolve_recipe
from helpers import RECIPES, in_one_test


def wide(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Numbers of many sizes, a tenth of them zero."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(shape, generator=generator) * torch.exp2(6 * torch.randn(shape, generator=generator))
    return torch.where(torch.rand(shape, generator=generator) < 0.1, 0.0, x).to(dtype)


def wanted_of_tensor(x: Tensor, block_size: int = 32) -> dict[str, float]:
    """Transformer Engine's definitions, in FP64."""
    a = x.double().numpy()
    sizes = np.abs(a)

    def dynamic_range(block: Any) -> float:
        used = block[block > 0]
        return float(np.log2(used.max()) - np.log2(used.min())) if used.size else 0.0

    blocks = [
        row[start : start + block_size]
        for side in (sizes, np.swapaxes(sizes, -2, -1))
        for row in side.reshape(-1, side.shape[-1])
        for start in range(0, side.shape[-1], block_size)
    ]
    return {
        "min": a.min(),
        "max": a.max(),
        "mean": a.mean(),
        "std": a.std(ddof=1) if a.size > 1 else math.nan,
        "l1_norm": sizes.sum(),
        "l2_norm": np.sqrt((a**2).sum()),
        "cur_amax": sizes.max(),
        "dynamic_range": dynamic_range(sizes),
        "max_blockwise_dynamic_range": max(map(dynamic_range, blocks)),
        "zeros%": 100 * (a == 0).mean(),
    }


@in_one_test("dtype", [torch.bfloat16, torch.float16, torch.float32])
@in_one_test("shape", [(64, 96), (33, 70), (2, 40, 33), (1, 1)])
def test_a_tensor(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    x = wide(*shape, dtype=dtype).clamp(-6e4, 6e4)
    found, wanted = numerics.statistics(x), wanted_of_tensor(x)
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        assert found[name] == pytest.approx(value, rel=1e-5, abs=1e-5 * wanted["cur_amax"], nan_ok=True), name


@in_one_test("operand", ["input", "weight", "grad_output"])
@in_one_test("layout", LAYOUTS)
@in_one_test("name", RECIPES)
def test_statistics_equal_those_of_the_decoded_tensor(name: str, layout: Layout, operand: Any) -> None:
    """Counted in the decoded numbers, one by one. The shape is ragged: what pads the data does not count."""
    x, recipe = wide(70, 100), resolve_recipe(name)
    assert recipe is not None
    if isinstance(recipe, NVFP4BlockScaling):  # test_nvfp4.py has the statistics of transformed copies
        recipe = NVFP4BlockScaling(disable_rht=True)
    found = numerics.statistics(x, recipe, operand, layout)
    q = numerics.quantize(x, recipe, operand, layout)
    a, b = x.double().numpy(), numerics.dequantize(q).float().double().numpy()
    # in FP32, since bf16 rounds what nvfp4's two scales give
    exact = numerics.statistics(x.float(), recipe, operand, layout)
    c = numerics.dequantize(numerics.quantize(x.float(), recipe, operand, layout)).double().numpy()
    assert exact["mse"] == pytest.approx(((a - c) ** 2).mean(), rel=1e-4)
    assert exact["sqnr"] == pytest.approx(10 * math.log10((a**2).sum() / ((a - c) ** 2).sum()), abs=1e-3)
    assert found["underflows%"] == pytest.approx(100 * ((a != 0) & (b == 0)).mean(), rel=1e-6)
    scales = q.scale_inv.double().numpy().reshape(-1)
    used = scales[scales > 0]
    assert (found["scale_inv_min"], found["scale_inv_max"]) == (used.min(), used.max())
    assert found["scale_inv_std"] == pytest.approx(np.log2(used).std(), rel=1e-4, abs=1e-5)
    assert found["scale_inv_q50"] == np.sort(scales)[round(0.5 * (scales.size - 1))]
    assert found["scale_inv_q5"] <= found["scale_inv_q25"] <= found["scale_inv_q75"] <= found["scale_inv_q95"]
    codes = q.data.float().abs()[..., :100, :70] if layout == "columnwise" else q.data.float().abs()[..., :70, :100]
    if q.data.dtype != torch.uint8:  # e4m3 and e5m2
        assert found["saturated%"] == pytest.approx(100 * (codes == FP8_MAX[q.quantizer.dtype]).sum().item() / 7000)
    assert found["zeros%"] == pytest.approx(wanted_of_tensor(x)["zeros%"])


def test_overflow_and_saturation_are_apart() -> None:
    """With a scale of 2, E4M3 has room for 224: 224 and whatever rounds to it saturate, larger numbers overflow."""
    x = torch.tensor([[224.0, 223.0, 300.0, -1000.0, 100.0, 0.0, 1e-6, 1.0]])
    found = numerics.statistics(x, DelayedScaling(), scale=torch.tensor(2.0))
    assert found["overflows%"] == 100 * 2 / 8
    assert found["saturated%"] == 100 * 4 / 8
    assert found["underflows%"] == found["zeros%"] == 100 / 8
    assert found["scale_inv_min"] == found["scale_inv_max"] == found["scale_inv_q50"] == 0.5


def test_zeros_alone_and_exact_numbers() -> None:
    zeros = numerics.statistics(torch.zeros(4, 4), Float8CurrentScaling())
    assert zeros["sqnr"] == math.inf
    assert zeros["underflows%"] == zeros["dynamic_range"] == zeros["max_blockwise_dynamic_range"] == 0
    assert zeros["zeros%"] == 100
    exact = numerics.statistics(torch.eye(4), Float8CurrentScaling(power_2_scale=True))
    assert (exact["mse"], exact["sqnr"], exact["overflows%"]) == (0, math.inf, 0)


@in_one_test("name", RECIPES)
def test_parts_of_micro_batches_are_those_of_the_whole(name: str) -> None:
    """Rows of different sizes and means; all but the quantiles, which are averaged."""
    recipe = resolve_recipe(name)
    assert recipe is not None
    x = torch.cat([wide(32, 64), 3 + 0.01 * wide(64, 64), -5 * wide(96, 64)])
    rows = x.split([32, 64, 96])
    whole, several = (
        finished(*(merged([named(names, v) for v in vectors]) for names, vectors in of.items()))
        for of in ({n: f([x], recipe) for n, f in VECTORS.items()}, {n: f(rows, recipe) for n, f in VECTORS.items()})
    )
    of_whole = name in ("tensorwise", "nvfp4")  # a scale that is another one for each micro-batch
    for statistic, value in whole.items():
        if "_q" in statistic or (of_whole and statistic not in numerics.statistics(x)):
            continue
        assert several[statistic] == pytest.approx(value, rel=1e-4, abs=1e-4), statistic


def of_tensors(xs: Any, _recipe: Any) -> list[Tensor]:
    return [parts.tensor_parts(x) for x in xs]


def of_quantized(xs: Any, recipe: Any) -> list[Tensor]:
    found: list[Tensor] = []
    for x in xs:
        q = numerics.quantize(x, recipe, "input", "rowwise")
        kwargs = quantizer_kwargs(q.quantizer)
        scales = q.scale_inv, q.global_scale_inv
        found.append(
            parts.quantized_parts(x, q.data, scales[0], layout="rowwise", global_scale_inv=scales[1], **kwargs)
        )
    return found


VECTORS = {parts.TENSOR_PARTS: of_tensors, parts.QUANTIZED_PARTS: of_quantized}


def test_averages_of_quantiles() -> None:
    one = {"numel": 1.0, "mean": 0.0, "square_deviation": 0.0, "scale_inv_q50": 1.0}
    assert merged([one, {**one, "scale_inv_q50": 2.0}, {**one, "scale_inv_q50": 6.0}])["scale_inv_q50"] == 3


@pytest.mark.parametrize("shape", [(4,), (0, 4)])
def test_shapes_that_have_no_statistics(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"x has shape .*, and needs at least 2 dims and one element"):
        numerics.statistics(torch.empty(shape))


def test_nan_survives_merging() -> None:
    """Whichever micro-batch has it: min and max alone would lose one of the two orders."""
    x = torch.ones(4, 32)
    bad = x.clone()
    bad[0, 0] = math.nan
    both = [named(parts.TENSOR_PARTS, parts.tensor_parts(each)) for each in (x, bad)]
    for several in (both, both[::-1]):
        assert math.isnan(merged(several)["cur_amax"])
