"""The objects that all graphs of one backend share."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from fp8graph.backend.guarded import Guarded
from fp8graph.backend.inductor_passes import Stopwatch, source_hash
from fp8graph.backend.policies import Policies
from fp8graph.backend.schedule import Schedule
from fp8graph.ir.settings import Settings
from fp8graph.runtime.call import Epoch
from fp8graph.runtime.names import Names
from fp8graph.runtime.rank_groups import RankGroups
from fp8graph.runtime.recomputation import Recomputations
from fp8graph.runtime.staleness import Steps
from fp8graph.runtime.stores import Services, Store


class Generator(Protocol):
    """The part of a backend that generates code for rewritten graphs and checks how they were rewritten."""

    @property
    def inner_compile(self) -> Callable[..., Any] | None:
        """The compiler that compile_fx calls for each graph after the passes; None: Inductor."""
        ...

    def check_call(self, *, second: bool, empty: bool) -> None:
        """Check what was compiled so far, at the second call of a graph; in strict mode at later ones, too.

        Args:
            empty: the graph has no GEMM.
        """
        ...


@dataclass(frozen=True, kw_only=True, eq=False)
class Shared:
    """Settings, policy, and the state that outlives a call."""

    settings: Settings
    policies: Policies
    schedule: Schedule
    generator: Generator
    epoch: Epoch
    names: Names
    steps: Steps
    groups: RankGroups
    services: Services
    stores: Mapping[str, Store]  # by the names that extra inputs have for them; before those that depend on them
    guarded: Guarded
    recomputations: Recomputations = field(default_factory=Recomputations)
    stopwatch: Stopwatch = field(default_factory=Stopwatch)

    @functools.cached_property
    def measuring(self) -> Sequence[Store]:
        """The stores that may measure what a call does."""
        return [store for store in self.stores.values() if type(store).measures is not Store.measures]

    def decides(self, *, training: bool) -> str:
        """Whatever decides how graphs are rewritten, line by line, for a comparison with other ranks."""
        lines = [*self.policies.lines()]
        if self.schedule.runs and training:
            lines.append(f"step {self.schedule.step()}")
        lines += [f"{name} {value}" for name, value in self.settings.decisions().items()]
        lines += [f"torch {torch.__version__}", f"fp8graph {source_hash()[:12]}"]
        return re.sub(" at 0x[0-9a-f]+", "", "\n".join(lines))  # a function has another address on each rank
