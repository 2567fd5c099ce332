"""Scales and histories of delayed scaling, bit for bit: the edge cases, the order of the slots, every length."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import delayed_oracle
import oracle
from fp8graph import DelayedScaling, Float8CurrentScaling, numerics
from fp8graph.numerics import quantization
from fp8graph.numerics.formats import SCALE, SCALE_INV
from fp8graph.numerics.history import HEADER, delayed_scale, new_page, read_scales, updated_page
from fp8graph.recipes import Layout
from helpers import in_one_test

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
LENGTHS = [1, 4, 31, 1024]
ALGORITHMS: list[Any] = ["max", "most_recent"]


def update(page: Tensor, *amaxes: float, fp8_max: float = 448.0, margin: float = 0.0, algorithm: Any = "max") -> Tensor:
    return updated_page(page, [torch.tensor(a) for a in amaxes], fp8_max, margin, algorithm)


@in_one_test("fp8_max", [448.0, 57344.0])
@in_one_test(
    ("amax", "expected"),
    [
        (0.0, 3.0),  # keeps the old scale
        (math.inf, 3.0),
        (math.nan, 3.0),
        (1e-45, oracle.FLT_MAX),  # overflow
        (1.0, None),
        (0.3, None),
        (oracle.FLT_MAX, None),
    ],
)
def test_scale_table(amax: float, expected: float | None, fp8_max: float) -> None:
    got = delayed_scale(torch.tensor([amax]), torch.tensor([3.0]), fp8_max, 0.0)
    value = oracle.round_to_float32(amax)
    assert got.item() == (expected or oracle.round_to_float32(fp8_max / value))


@in_one_test("margin", [0, 1, 3, 0.5])
def test_margin(margin: float) -> None:
    page = update(new_page(4, 1), 3.0, margin=margin)
    top = oracle.round_to_float32(448.0 * 2.0**-margin)
    assert page[0, SCALE].item() == oracle.round_to_float32(top / 3.0)
    assert page[0, SCALE_INV].item() == oracle.round_to_float32(1.0 / page[0, SCALE].item())


@in_one_test("length", LENGTHS)
@in_one_test("algorithm", ALGORITHMS)
def test_four_steps_of_constant_tensors(length: int, algorithm: str) -> None:
    """Transformer Engine's test: tensors filled with 3, 1, 2, 5; scale and history after each step, written out."""
    page, seen = new_page(length, 1), list[float]()
    for number in (3.0, 1.0, 2.0, 5.0):
        q = quantization.quantize_layouts(
            torch.full((16, 16), number),
            E4M3,
            False,
            0.0,
            [1, 1],
            [],
            scaling="delayed",
            scales=page[:, :HEADER].clone(),
        )
        old_scale = page[0, SCALE].item()
        assert q[0].float().unique().item() == torch.tensor(number * old_scale).clamp(max=448.0).to(E4M3).float().item()
        page = updated_page(page, [q[-1]], 448.0, 0.0, algorithm)  # pyright: ignore[reportArgumentType]
        seen.append(number)
        window = seen[-1:] if algorithm == "most_recent" else seen[-length:]
        assert page[0, SCALE].item() == oracle.round_to_float32(448.0 / max(window))
        slots = [0.0] * (length - len(seen[-(length - 1) :] if length > 1 else [])) if length > 1 else [0.0]
        expected = [*slots, *(seen[-(length - 1) :] if length > 1 else [])]
        assert page[0, HEADER:].tolist() == expected


def test_the_order_of_the_slots() -> None:
    """new[i] = old[i + 1], new[length - 1] = this step's amax, new[0] = 0."""
    page = new_page(4, 1)
    page[0, HEADER:] = torch.tensor([0.0, 7.0, 5.0, 6.0])  # staging, oldest ... newest
    new = update(page, 2.0)
    assert new[0, HEADER:].tolist() == [0.0, 5.0, 6.0, 2.0]
    assert new[0, SCALE].item() == 448.0 / 7.0  # the slot that is dropped still counts
    assert update(new, 1.0)[0, SCALE].item() == oracle.round_to_float32(448.0 / 6.0)


@in_one_test("bad", [0.0, math.inf, math.nan])
@in_one_test("length", LENGTHS)
@in_one_test("algorithm", ALGORITHMS)
def test_a_step_that_saw_nothing_or_too_much_changes_nothing(bad: float, length: int, algorithm: str) -> None:
    page = update(update(new_page(length, 2), 3.0, 4.0), 1.0, 2.0)
    new = update(page, bad, 8.0, algorithm=algorithm)
    assert torch.equal(new[0], page[0])
    assert new[1, SCALE].item() == 56.0
    assert torch.isfinite(new).all()


def test_the_page_given_is_not_changed_and_the_new_one_is_another() -> None:
    page = new_page(4, 2)
    copy = page.clone()
    new = update(page, 1.0, 2.0)
    assert torch.equal(page, copy)
    scales = read_scales(page, copy=True)
    assert scales.data_ptr() != page.data_ptr()
    assert not torch.equal(new, page)


@given(data=st.data())
@settings(max_examples=60, deadline=None)
def test_any_sequence_against_the_oracle(data: st.DataObject) -> None:
    recipe = DelayedScaling(
        amax_history_len=data.draw(st.sampled_from([1, 2, 3, 7])),
        amax_compute_algo=data.draw(st.sampled_from(ALGORITHMS)),
        margin=data.draw(st.integers(0, 3)),
    )
    amaxes = st.floats(0, width=32) | st.floats(0.125, 8.0, width=32) | st.sampled_from([0.0, math.nan])
    steps = data.draw(st.lists(st.tuples(amaxes, amaxes), max_size=12))
    histories = [delayed_oracle.History(E5M2, recipe) for _ in range(2)]
    page = new_page(recipe.amax_history_len, 2)
    for step in steps:
        page = update(page, *step, fp8_max=57344.0, margin=recipe.margin, algorithm=recipe.amax_compute_algo)
        for history, amax in zip(histories, step, strict=True):
            history.now = amax
            history.end_of_step()
    for row, history in enumerate(histories):
        assert page[row, SCALE].item() == history.scale
        assert page[row, HEADER:].tolist() == history.slots()


@in_one_test("source", [torch.float32, torch.bfloat16, torch.float16])
@in_one_test("scale", [1.0, 0.3, 1e-3, 1e4])
def test_quantize_uses_the_scale_it_is_given(source: torch.dtype, scale: float) -> None:
    """And says what it saw: the amax is that of x, not of what the cast kept."""
    x = torch.randn(7, 9).to(source) * 100
    layouts: list[tuple[Layout, Tensor]] = [("rowwise", x), ("columnwise", x.T)]
    for layout, values in layouts:
        q = numerics.quantize(x, DelayedScaling(), "grad_output", layout, scale=torch.tensor(scale))
        scaled = values.float().numpy() * torch.tensor(scale).numpy()
        oracle.assert_codes(q.data, oracle.cast(scaled.astype(float), E5M2))
        assert q.scale_inv.item() == oracle.round_to_float32(1.0 / torch.tensor(scale).item())
        assert q.amax is not None
        assert q.amax.item() == x.float().abs().max().item()


def test_a_scale_is_for_delayed_scaling_only() -> None:
    with pytest.raises(ValueError, match="tensorwise makes its own"):
        numerics.quantize(torch.ones(2, 2), Float8CurrentScaling(), "input", "rowwise", scale=torch.tensor(2.0))
