"""The table of activation checkpointing: recorded results are those of this code."""

from __future__ import annotations

import json
from typing import Any

import pytest

from benchmarks.checkpointing import CASES, EVERY_SECOND, MATMULS, NOTHING, RECIPES, WHOLE, count
from benchmarks.records import RESULTS
from generated import OF_ONE_INDUCTOR
from helpers import first_fast

ROWS: list[dict[str, Any]] = json.loads((RESULTS / "checkpointing.json").read_text(encoding="utf-8"))["results"]
RECORDED = {(row["recipe"], row["recomputed"], row["save"]): row for row in ROWS}
FEW = [("tensorwise", MATMULS, "speed"), *((recipe, WHOLE, "speed") for recipe in ("delayed", "rowwise", "mxfp8"))]


def without_kernels(row: dict[str, Any]) -> dict[str, Any]:
    directions = {d: {k: v for k, v in row[d].items() if k not in ("kernels", "mib")} for d in ("forward", "backward")}
    return row | directions


def test_every_case_is_recorded() -> None:
    assert list(RECORDED) == CASES


@first_fast("case", FEW)
def test_recorded_bytes_and_quantizations(case: tuple[str, str, str]) -> None:
    assert count(*case) == without_kernels(RECORDED[case])


@pytest.mark.release
@OF_ONE_INDUCTOR
@pytest.mark.parametrize("case", CASES)
def test_recorded_kernels(case: tuple[str, str, str]) -> None:
    assert count(*case, generate=True) == RECORDED[case]


def test_a_policy_keeps_as_many_bytes_as_in_bf16_and_runs_no_more_gemms_again() -> None:
    for recipe in RECIPES[1:]:
        for way in (WHOLE, MATMULS, EVERY_SECOND):
            row, plain = RECORDED[recipe, way, "speed"], RECORDED["bf16", way, "speed"]
            assert row["kept_mib"] <= plain["kept_mib"] + 1
            assert row["gemms_again"] <= plain["gemms_again"]
            assert row["backward"]["amaxes"] == 0
            assert row["backward"]["inputs"] == row["forward"]["inputs"]
            assert row["backward"]["weights"] == row["forward"]["weights"]
        least, less = (RECORDED[recipe, NOTHING, save]["kept_mib"] for save in ("memory", "speed"))
        assert least < less < RECORDED["bf16", NOTHING, "speed"]["kept_mib"]
