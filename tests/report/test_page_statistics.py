"""Statistics as data for the page."""

from __future__ import annotations

import array
import base64
import math
import zlib
from typing import Any

import pytest

from fp8graph.errors import ConfigError
from fp8graph.records import StatisticRecord
from fp8graph.report.page import statistics_data


def record(step: int, site: str, value: float, stat: str = "mse", operand: str = "input") -> StatisticRecord:
    return StatisticRecord(
        step=step, site=site, operand=operand, layout="", recipe="", what_if=False, stat=stat, value=value
    )


def values(plane: dict[str, Any]) -> list[float]:
    return list(array.array("f", zlib.decompress(base64.b64decode(plane["values"]))))


def test_a_matrix_per_tensor_and_statistic() -> None:
    records = [record(4, "a", 1.5), record(0, "b", 2.0), record(0, "a", math.inf), record(0, "a", 7.0, stat="std")]
    data = statistics_data(records, losses=None)
    assert (data["steps"], data["sites"], data["losses"]) == ([0, 4], ["a", "b"], None)
    mse, std = data["planes"]
    assert (mse["stat"], std["stat"]) == ("mse", "std")
    assert values(mse)[:3] == [math.inf, 1.5, 2.0]
    assert math.isnan(values(mse)[3])  # b was not measured at step 4
    assert values(std)[0] == 7.0


def test_numbers_beyond_32_bits_are_infinite() -> None:
    (plane,) = statistics_data([record(0, "a", -1e300)], None)["planes"]
    assert values(plane) == [-math.inf]


def test_losses_by_step() -> None:
    assert statistics_data([], [3.0, math.nan, 2.5])["losses"] == [(0, 3.0), (2, 2.5)]
    assert statistics_data([], {10: 2.0, 5: 3.0})["losses"] == [(5, 3.0), (10, 2.0)]


@pytest.mark.parametrize("losses", [5, ["high"], {"a": 1.0}])
def test_what_is_no_loss(losses: Any) -> None:
    with pytest.raises(ConfigError, match="Give one number per step, or a mapping from step to loss"):
        statistics_data([], losses)
