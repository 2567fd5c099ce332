"""A weight that is quantized in shards has the bytes and scales of the whole one."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest

import fp8graph
import pieces
from ranks import run_ranks

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not pieces.dist.is_gloo_available(), reason="ranks are joined by gloo"),
]

RECIPES: dict[str, Any] = {
    "tensorwise": fp8graph.Float8CurrentScaling(),
    "rowwise": fp8graph.Float8RowwiseScaling(),
    "blockwise": fp8graph.Float8BlockScaling(power_2_scale=False),
    "ue8m0": fp8graph.Float8BlockScaling(scale_format="ue8m0"),
    "mxfp8": fp8graph.MXFP8BlockScaling(),
    "nvfp4": fp8graph.NVFP4BlockScaling(),
    "nvfp4 in rows": fp8graph.NVFP4BlockScaling(disable_2d_quantization=True),
}
SHAPES: dict[str, list[tuple[int, ...]]] = {
    "whole tiles": [(512, 512)],
    "cut tiles": [(192, 96)],
    "ragged": [(90, 144)],
    "empty shards": [(5, 64)],
    "joined": [(128, 256), (384, 256)],
    "experts": [(4, 128, 256)],
    "uneven experts": [(3, 128, 256)],
}
SPECIAL = {"": None, ", NaN": float("nan"), ", inf": float("inf")}


def cases(places: list[str]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for recipe, shape, where, special in itertools.product(RECIPES, SHAPES, places, SPECIAL):
        if special and shape not in ("cut tiles", "joined"):
            continue
        found[f"{recipe}, {shape}, {where}{special}"] = RECIPES[recipe], SHAPES[shape], where, SPECIAL[special]
    return found


@pytest.mark.parametrize(
    ("ranks", "places"),
    [
        pytest.param(2, ["rows", "columns", "on each"]),
        pytest.param(4, ["rows", "rows of rows", "rows and columns", "replicas"], marks=pytest.mark.release),
    ],
)
def test_shards_have_the_bytes_of_the_whole(ranks: int, places: list[str], tmp_path: Path) -> None:
    for found in run_ranks(pieces.run, ranks, tmp_path, cases(places)):
        assert {name: wrong for name, wrong in found.items() if wrong} == {}
        assert len(found) == len(cases(places))


def test_an_error_of_one_rank_is_raised_on_all(tmp_path: Path) -> None:
    first, second = run_ranks(pieces.disagree, 2, tmp_path)
    assert first[0] == "rank 1 failed, with ConfigError: its model was not called."
    assert second[0] == "its model was not called."
    assert first[1] == second[1]
    assert "-k: rowwise\n+k: mxfp8" in first[1]
