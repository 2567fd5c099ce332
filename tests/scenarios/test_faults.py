"""A rank that dies or hangs in the middle of a step: the others say so in time, and the last checkpoint goes on."""

from __future__ import annotations

import re
import signal
from pathlib import Path

import pytest
import torch

import checkpointing
from ranks import run_each, run_ranks

COLLECTIVE_SECONDS = 15
LIMIT = 120  # seconds for all of a run: more than its compilation takes on a busy machine

KINDS = [*checkpointing.KINDS, checkpointing.WITHOUT_STATE]

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not torch.distributed.is_available(), reason="torch without torch.distributed"),
]


@pytest.mark.timeout(5 * LIMIT)
def test_a_killed_rank_ends_the_others_and_the_checkpoint_resumes(tmp_path: Path) -> None:
    """Losses and scales after it are those of a run that nothing happened to, bit for bit."""
    for how in KINDS:
        killed = tmp_path / f"killed {how}"
        killed.mkdir()
        ((said, seconds),) = run_ranks(
            checkpointing.lose_a_rank,
            2,
            killed,
            *(str(tmp_path), how, signal.SIGKILL),
            seconds=LIMIT,
            collective_seconds=COLLECTIVE_SECONDS,
            lost=1,
        )
        assert re.search("gloo.*Connection (closed|reset) by peer", said)
        assert seconds < COLLECTIVE_SECONDS + 5
    undisturbed = tmp_path / "undisturbed"
    undisturbed.mkdir()
    calls = {
        "after": (checkpointing.load, (str(tmp_path), KINDS)),
        "expected": (checkpointing.save, (str(undisturbed), KINDS)),
    }
    results = run_ranks(run_each, 2, undisturbed, calls, seconds=2 * LIMIT)
    for how, found, wanted in ((how, r["after"], r["expected"]) for how in KINDS for r in results):
        assert found[how]["losses"] == wanted[how]["losses"]
        assert len(set(wanted[how]["losses"])) == 2  # it trains
        assert (wanted[how]["sent"] > 0) == (how != "ddp")  # weights that were gathered in FP8
        assert found[how]["after"].keys() == wanted[how]["after"].keys()
        assert all(torch.equal(value, wanted[how]["after"][name]) for name, value in found[how]["after"].items())


@pytest.mark.timeout(2 * LIMIT)
@pytest.mark.parametrize("how", [pytest.param("ddp", marks=pytest.mark.release), checkpointing.WITHOUT_STATE])
def test_a_rank_that_hangs_is_given_up_after_the_collectives_timeout(tmp_path: Path, how: str) -> None:
    ((said, seconds),) = run_ranks(
        checkpointing.lose_a_rank,
        2,
        tmp_path,
        *(str(tmp_path), how, signal.SIGSTOP),
        seconds=LIMIT,
        collective_seconds=COLLECTIVE_SECONDS,
        lost=1,
    )
    assert f"Timed out waiting {COLLECTIVE_SECONDS * 1000}ms" in said
    assert COLLECTIVE_SECONDS - 1 < seconds < COLLECTIVE_SECONDS + 15
