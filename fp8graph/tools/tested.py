"""The versions of torch, Python and transformers on which the tests ran. ``docs/support.md`` says which tests, when.

An installer takes the newest versions that ``pyproject.toml`` allows, which may be newer than these. So ``fp8graph
doctor`` compares this machine's with them. A release of a fix (2.13.1) counts as the version that it fixes.
"""

from __future__ import annotations

import importlib.metadata
import platform
from dataclasses import dataclass
from typing import Final

import torch

SUPPORTED_TORCH: Final = ("2.11", "2.15")  # the oldest and the newest that pyproject.toml allows


@dataclass(frozen=True)
class Run:
    """One combination of versions."""

    torch: str
    python: str
    transformers: str
    all_fast_tests: bool  # all fast tests, at least; else a sample

    def __str__(self) -> str:
        return f"torch {self.torch} with Python {self.python} and transformers {self.transformers}"


RUNS: Final = (
    Run("2.13.0", "3.11", "5.23.0", all_fast_tests=True),
    Run("2.13.0", "3.13", "5.23.0", all_fast_tests=False),
    Run("2.13.0", "3.12", "5.23.0", all_fast_tests=False),
    Run("2.11.0", "3.11", "5.23.0", all_fast_tests=True),
    Run("2.14.1", "3.11", "5.24.0", all_fast_tests=True),
    Run("2.15.0", "3.12", "5.24.0", all_fast_tests=True),
)


def here() -> tuple[str, str, str | None]:
    """The versions of torch, Python and transformers (None: it is not installed) of this machine."""
    try:
        transformers = importlib.metadata.version("transformers")
    except importlib.metadata.PackageNotFoundError:
        transformers = None
    return torch.__version__, platform.python_version(), transformers


def remark(torch_version: str, python: str, transformers: str | None) -> str:
    """Whether tests ran on these versions together; if not, on which they did."""
    own = (torch_version, python, transformers)
    found = [run for run in RUNS if all(map(_same, own, (run.torch, run.python, run.transformers)))]
    if found:
        which = "all fast tests" if any(run.all_fast_tests for run in found) else "a sample of the tests"
        return f"{which} ran on them"
    low, high = SUPPORTED_TORCH
    allowed = _numbers(low) <= _numbers(torch_version) <= _numbers(high)
    runs = "; ".join(f"{run}{'' if run.all_fast_tests else ' (a sample)'}" for run in RUNS)
    only = "" if allowed else f", and only torch {low} to {high} is allowed"
    return f"no tests ran on them{only}. They ran on {runs}"


def _same(own: str | None, tested: str) -> bool:
    return own is None or _numbers(own) == _numbers(tested)


def _numbers(version: str) -> tuple[int, ...]:
    major, minor = version.split(".")[:2]
    return int(major), int(minor)
