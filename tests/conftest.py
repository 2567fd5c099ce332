"""Every test starts from a fresh Dynamo, the same seed and one thread."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest
import torch


def pytest_collection_finish() -> None:
    """What was imported stays: looking through it for garbage was 7 % of the time that compiling takes."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    torch._dynamo.reset()
    torch.manual_seed(0)
    torch.set_num_threads(1)  # summation order, and with it every bit, is then the same each time
    yield
    torch._dynamo.reset()
