"""A rank that dies or hangs in the middle of a step: the others say so in time, and the last checkpoint goes on."""

from __future__ import annotations

import re
import signal
from pathlib import Path

import pytest
import torch

import checkpointing
from ranks import run_ranks

COLLECTIVE_SECONDS = 15
LIMIT = 120  # seconds for all of a run: more than its compilation takes on a busy machine

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not torch.distributed.is_available(), reason="torch without torch.distributed"),
]


@pytest.mark.timeout(4 * LIMIT)
@pytest.mark.parametrize("how", checkpointing.KINDS)
def test_a_killed_rank_ends_the_others_and_the_checkpoint_resumes(how: str, tmp_path: Path) -> None:
    """Losses and scales after it are those of a run that nothing happened to, bit for bit."""
    folders = [tmp_path / name for name in ("killed", "resumed", "undisturbed")]
    for folder in folders:
        folder.mkdir()
    killed, resumed, undisturbed = folders
    ((said, seconds),) = run_ranks(
        checkpointing.lose_a_rank,
        2,
        killed,
        *(str(killed), how, signal.SIGKILL),
        seconds=LIMIT,
        collective_seconds=COLLECTIVE_SECONDS,
        lost=1,
    )
    assert re.search("gloo.*Connection (closed|reset) by peer", said)
    assert seconds < COLLECTIVE_SECONDS + 5
    after = run_ranks(checkpointing.load, 2, resumed, str(killed), [how], seconds=LIMIT)
    expected = run_ranks(checkpointing.save, 2, undisturbed, str(undisturbed), [how], seconds=LIMIT)
    for found, wanted in zip(after, expected, strict=True):
        assert found[how]["losses"] == wanted[how]["losses"]
        assert len(set(wanted[how]["losses"])) == 2  # it trains
        assert found[how]["after"].keys() == wanted[how]["after"].keys()
        assert all(torch.equal(value, wanted[how]["after"][name]) for name, value in found[how]["after"].items())


@pytest.mark.timeout(2 * LIMIT)
def test_a_rank_that_hangs_is_given_up_after_the_collectives_timeout(tmp_path: Path) -> None:
    ((said, seconds),) = run_ranks(
        checkpointing.lose_a_rank,
        2,
        tmp_path,
        *(str(tmp_path), "ddp", signal.SIGSTOP),
        seconds=LIMIT,
        collective_seconds=COLLECTIVE_SECONDS,
        lost=1,
    )
    assert f"Timed out waiting {COLLECTIVE_SECONDS * 1000}ms" in said
    assert COLLECTIVE_SECONDS - 1 < seconds < COLLECTIVE_SECONDS + 15
