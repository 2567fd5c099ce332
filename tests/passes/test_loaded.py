"""loaded: rows wait for their layer; each is taken once, for the type that the device has."""

from __future__ import annotations

import logging

import pytest
import torch

from fp8graph.passes.connect_scales.saved import LoadedRows, SavedRow
from helpers import in_one_test

NAME, OTHER = "up.input|delayed(amax_history_len=2)", "up.input|delayed(amax_history_len=4)"


def row(scale: float = 8.0, fp8_max: float = 448.0) -> SavedRow:
    return SavedRow(torch.tensor([scale]), torch.tensor([3.0, 4.0]), fp8_max)


def rows(**more: SavedRow) -> LoadedRows:
    loaded = LoadedRows()
    loaded.replace({NAME: row(), **more})
    return loaded


def test_a_row_is_taken_once() -> None:
    loaded = rows()
    assert list(loaded) == [NAME]
    found = loaded.take(NAME, 448.0)
    assert found is not None
    assert [x.tolist() for x in found] == [[8.0], [3.0, 4.0]]
    assert list(loaded) == []
    assert loaded.take(NAME, 448.0) is None


def test_take_of_a_name_that_was_not_loaded() -> None:
    loaded = rows()
    assert loaded.take(OTHER, 448.0) is None
    assert list(loaded) == [NAME]


def test_another_state_dict_takes_the_place_of_the_first() -> None:
    loaded = rows()
    loaded.replace({OTHER: row(2.0)})
    assert list(loaded) == [OTHER]


def test_unused_rows_are_saved_again() -> None:
    entries = dict(rows().entries())
    assert set(entries) == {f"{NAME}|scale", f"{NAME}|amax_history"}
    assert entries[f"{NAME}|scale"].tolist() == [8.0]


def test_scales_for_another_maximum_are_converted_and_said_once(caplog: pytest.LogCaptureFixture) -> None:
    loaded = rows(**{OTHER: row()})
    with caplog.at_level(logging.WARNING, "fp8graph"):
        first, second = (loaded.take(name, 240.0) for name in (NAME, OTHER))
    assert first is not None
    assert second is not None
    assert first[0].item() == pytest.approx(8.0 * 240 / 448)
    assert first[1].tolist() == [3.0, 4.0]
    (message,) = [record.getMessage() for record in caplog.records]
    assert "other maxima (up.input: 448 there, 240 here): its scales are converted" in message


def test_each_state_dict_may_warn(caplog: pytest.LogCaptureFixture) -> None:
    loaded = LoadedRows()
    with caplog.at_level(logging.WARNING, "fp8graph"):
        for _ in range(2):
            loaded.replace({NAME: row()})
            loaded.take(NAME, 240.0)
    assert len(caplog.records) == 2


def test_the_same_maximum_is_not_spoken_of(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "fp8graph"):
        rows().take(NAME, 448.0)
    assert caplog.records == []


def test_a_tensor_finds_the_row_of_another_recipe() -> None:
    """Two recipes of one site may both begin with it; then it is no longer unused."""
    loaded = rows()
    assert loaded.under_another_recipe("down.input|delayed()", 1024) is None
    for _ in range(2):
        found = loaded.under_another_recipe(OTHER, 4)
        assert found is not None
        assert found.amax_history.tolist() == [3.0, 4.0]
    assert list(loaded) == []


@pytest.mark.parametrize(("length", "expected"), [(2, 8.0), (4, 2.0), (1024, 2.0)])
def test_the_row_with_the_same_length_goes_before_the_last(length: int, expected: float) -> None:
    other = SavedRow(torch.tensor([2.0]), torch.zeros(4), 448.0)
    found = rows(**{OTHER: other}).under_another_recipe("up.input|delayed(margin=1)", length)
    assert found is not None
    assert found.scale.tolist() == [expected]


@in_one_test(
    ("length", "expected"), [(1, [9.0]), (2, [9.0, 1.0]), (3, [9.0, 1.0, 2.0]), (6, [9.0, 1.0, 2.0, 3.0, 0.0, 0.0])]
)
def test_another_length_cuts_or_pads_at_the_end(length: int, expected: list[float]) -> None:
    saved = SavedRow(torch.tensor([8.0]), torch.tensor([9.0, 1.0, 2.0, 3.0]), 448.0)
    assert saved.under(448.0, length)[1].tolist() == expected


def test_a_converted_scale_has_a_finite_reciprocal() -> None:
    """From E5M2's maximum to E4M3's it is divided by 128."""
    scale, _ = SavedRow(torch.tensor([1e-37]), torch.zeros(2), 57344.0).under(448.0)
    assert scale.reciprocal().isfinite().all()
