"""Quantizing before the gather gives the numbers of quantizing after it, on real processes, bit for bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import gathers
from ranks import run_ranks

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not torch.distributed.is_available(), reason="torch without torch.distributed"),
]

ROWS, SEQUENCES, SHARDED = ("rows", (128, 128)), ("sequences", (2, 64, 128)), ("sharded", (32, 128))
FP32, BF16 = torch.float32, torch.bfloat16
# (module, its input), dtype, recipe, which tensors travel in FP8
CASES: list[tuple[tuple[str, tuple[int, ...]], torch.dtype, str, int]] = [
    (ROWS, BF16, "tensorwise", 2),
    (ROWS, BF16, "delayed", 2),
    (ROWS, BF16, "blockwise", 0),  # both directions: no fewer bytes
    (ROWS, FP32, "blockwise", 4),
    (ROWS, FP32, "mxfp8", 8),  # its scales are bytes too
    (ROWS, BF16, "rowwise", 0),
    (SEQUENCES, BF16, "tensorwise", 2),
    (SEQUENCES, FP32, "delayed", 2),
    (("dynamic rows", (96, 128)), BF16, "tensorwise", 2),
    (("dynamic sequences", (3, 48, 128)), BF16, "delayed", 1),  # forward asks the gathered tensor for its sizes
    (SHARDED, BF16, "tensorwise", 1),
    (SHARDED, BF16, "blockwise", 1),
    (SHARDED, FP32, "mxfp8", 4),
]


def test_every_number_is_that_of_quantizing_after_the_gather(tmp_path: Path) -> None:
    cases: list[Any] = [(kind, dtype, recipe, shape) for (kind, shape), dtype, recipe, _ in CASES]
    ranks = run_ranks(gathers.run, 2, tmp_path, cases, seconds=600)
    for results in ranks:
        for (_, _, recipe, sent), result in zip(CASES, results, strict=True):
            tensors, collectives, state = result["with"]
            wanted, _, wanted_state = result["without"]
            assert all(map(torch.equal, tensors, wanted))
            assert [c[0] for c in collectives].count("uint8") == sent
            assert state.keys() == wanted_state.keys()
            assert bool(state) == (recipe == "delayed")
            assert all(torch.equal(value, wanted_state[name]) for name, value in state.items())
    state = [results[1]["with"][2] for results in ranks]  # delayed scaling of rows: equal on both ranks
    assert all(map(torch.equal, state[0].values(), state[1].values()))
