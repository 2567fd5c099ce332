"""Every test starts from a fresh Dynamo, the same seed and one thread."""

from __future__ import annotations

import gc
import logging
import sys
import uuid
from collections.abc import Iterator
from importlib import import_module
from typing import Any

import pytest
import torch

# Torch measures for its own log how long new guards take, and flushes the CPU's caches before: 40 ms for each graph.
guards: Any = import_module("torch._dynamo.guards")
guards.profile_guard_manager = lambda *_: 0.0
# Pytest gives a handler to every logger that does not propagate. With one, torch's trace log prints every graph.
trace_log: Any = logging.getLogger("torch.__trace")
trace_log.addHandler = lambda _: None


def pytest_collection_finish() -> None:
    """Imported modules stay: the search for garbage among their objects was 7 % of the time that compiling takes."""
    gc.collect()
    gc.freeze()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark as ``fast`` what has no other mark of when it runs."""
    for item in items:
        if not any(item.get_closest_marker(other) for other in ("slow", "release", "gpu")):
            item.add_marker("fast")


@pytest.fixture(autouse=True, scope="module")
def frozen() -> Iterator[None]:
    """Freeze what lives after a file, as libraries that it was the first to import: it is no garbage later."""
    yield
    torch._dynamo.reset()
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def fresh() -> None:
    torch._dynamo.reset()
    torch.manual_seed(0)
    torch.set_num_threads(1)  # summation order, and with it every bit, is then the same each time


@pytest.fixture(autouse=True)
def options_of_inductor() -> Iterator[None]:
    """Set back what a test leaves: torchao's ``quantize_`` sets some for the whole process, and blocks are others."""
    options: Any = import_module("torch._inductor.config")
    before = options.get_config_copy()
    yield
    if options.get_config_copy() != before:
        options.load_config(before)


@pytest.fixture(autouse=True)
def callbacks_of_trainer() -> Iterator[None]:
    """Take out of Trainer's list what an Accelerator with our handler adds for the whole process."""
    yield
    if (trainer := sys.modules.get("transformers.trainer")) is not None:
        trainer.DEFAULT_CALLBACKS[:] = [x for x in trainer.DEFAULT_CALLBACKS if x.__name__ != "ScalingStateIfCompiled"]


@pytest.fixture
def group_of_two() -> Iterator[None]:
    """Two ranks, of which this process is one; nothing is sent."""
    from gathers import two_ranks

    with two_ranks():
        yield


@pytest.fixture
def empty_cache() -> Iterator[None]:
    """torch's compile cache, in which nothing is found that was compiled before."""
    functorch, inductor = import_module("torch._functorch.config"), import_module("torch._inductor.config")
    with (
        torch.compiler.config.patch(cache_key_tag=str(uuid.uuid4())),  # pyright: ignore[reportAttributeAccessIssue]
        functorch.patch(enable_autograd_cache=True),
        inductor.patch(fx_graph_cache=True),
    ):
        yield
