"""The ranks over which a backend reduces amaxes.

They are those of ``autocast(amax_reduction_group=...)``; else, within a stage of a pipeline, the ranks that run this
stage; else all ranks. The stages of a pipeline run forward and backward in different orders (1F1B): one that waited for
an amax of the others would never go on.
"""

from __future__ import annotations

import contextlib
import datetime
import difflib
import functools
import logging
import time
import zlib
from collections.abc import Generator
from dataclasses import dataclass
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from fp8graph.compat import distributed, fsdp
from fp8graph.errors import ConfigError, PolicyError, StateError
from fp8graph.ir import collectives
from fp8graph.recipes import autocast

_log = logging.getLogger("fp8graph")


class RankGroups:
    """The process group of the present call.

    Attributes:
        in_stage: the group of the ranks that run the same stage of a pipeline; None outside of a pipeline.
    """

    def __init__(self) -> None:
        self.in_stage: StageGroup | None = None
        self._comparisons: list[Comparison] = []  # whose verdict is not known yet

    def now(self) -> str | None:
        """Return the name of the group over which the present call reduces amaxes; None if there is one rank.

        Raises:
            PolicyError: the ranks were found to differ since the last call.
        """
        if self._comparisons:
            self._comparisons = [each for each in self._comparisons if not each.is_over()]
        if self.in_stage is not None and not autocast.names_a_group():
            return self.in_stage.name
        return autocast.amax_group()

    def same_in_stage(self, group: str | None) -> bool:
        """Give whether all ranks that have a layer record the same amaxes of it: those of its stage, over ``group``."""
        return self.in_stage is not None and self.in_stage.complete and self.in_stage.name == group

    def compare(self, text: str, kind: str, *, waits: bool) -> None:
        """Raise if ``text`` is not the same on all ranks of the present call: at once if it ``waits`` for the others.

        Else nothing that this rank does needs them: it raises in a later call, when it can see the difference.
        """
        group = self.now()
        if waits:
            agree(text, group, kind)
        elif (comparison := Comparison.of(text, group, kind)) is not None:
            self._comparisons.append(comparison)
            self.now()

    def is_dry_run(self) -> bool:
        """Return whether this call runs on uninitialized memory: no amax of it may be recorded."""
        return self.in_stage is not None and distributed.is_dry_run()

    def expect_equal_steps(self, group: str) -> None:
        """Refuse a forward under torch's ``Join`` of ranks that reduce amaxes together.

        Raises:
            StateError: says what to do instead.
        """
        joining = distributed.joining()
        if joining is not None and len(collectives.ranks_of(joining) & collectives.ranks_of(group)) > 1:
            raise StateError(
                "DistributedDataParallel.join(), torch's Join: under it ranks may take unequal numbers of steps, but "
                "delayed scaling reduces its amaxes over all ranks after each step. Use "
                "DelayedScaling(reduce_amax=False) or a recipe without state, such as tensorwise; or give all ranks "
                "equally many batches, or join(throw_on_early_termination=True)."
            )

    def detect_stage(self) -> bool:
        """Find a stage of a pipeline that is calling, the first time. Its other ranks do the same, at the same call."""
        if self.in_stage is None and (stage := distributed.running_stage()) is not None:
            self.in_stage = StageGroup(stage)
            return True
        return False


_SOONER: Final = 0.9  # of the timeout of the other collectives: the first error is then that which says what to do
_TAG: Final = "fp8graph: amaxes of delayed scaling"  # torch's own messages about the group name it, too


@dataclass(kw_only=True)
class Meeting:
    """A process group in which some ranks reduce amaxes, and nothing else.

    In the group of a trainer's own collectives, ranks that are out of step would meet in two of different kinds or
    sizes. That ends a process without a word, or mixes numbers. Here they wait for each other, until the timeout.

    Attributes:
        timeout: of the group.
        size: how many numbers each reduction sends, whichever backend it is of, so that also these fit each other.
        lanes: the number of backends that have reduced here.
    """

    group: dist.ProcessGroup
    timeout: datetime.timedelta
    size: int = 0
    lanes: int = 0

    @classmethod
    def of(cls, parent: dist.ProcessGroup, device: torch.device) -> Meeting:
        """Return the meeting of the ranks of ``parent``, made the first time: all call this, at their first reduction.

        Args:
            device: of the tensors that are reduced.
        """
        ranks = tuple(dist.get_process_group_ranks(parent))
        meetings = _meetings()
        if ranks not in meetings or not collectives.ranks_of(meetings[ranks].group):  # or it was destroyed
            timeout = distributed.timeout_of(parent, device) * _SOONER
            meetings[ranks] = cls(group=distributed.group_of_its_own(parent, _TAG, timeout), timeout=timeout)
        return meetings[ranks]

    def enter(self) -> int:
        """Return the number of one more backend here."""
        self.lanes += 1
        return self.lanes


@functools.cache
def _meetings() -> dict[tuple[int, ...], Meeting]:
    """Return those of this process, by their ranks: backends share them, since a communicator takes memory."""
    return {}


class StageGroup:
    """The ranks that run one stage of a pipeline, each on its part of the batch or of the weights.

    Attributes:
        stage: the stage, by its place in the pipeline.
        name: of their group; None: this rank alone.
        complete: whether all of them are in it. Else their scales differ.
    """

    def __init__(self, stage: Any) -> None:
        self.stage: int = stage.stage_index
        group = _ranks_of(stage.submod)
        size = 1 if group is None else group.size()
        expected = max(1, dist.get_world_size() // stage.group_size)
        self.name: str | None = group.group_name if group is not None and size > 1 else None
        self.complete = size >= expected
        if not self.complete:
            _log.warning(
                "%d ranks seem to run stage %d of the pipeline, and %d of them share what delayed scaling records: the "
                "stage's module is neither wrapped in DistributedDataParallel nor sharded over the others. Name their "
                "group: fp8graph.autocast(amax_reduction_group=...) around schedule.step().",
                expected, self.stage, size,
            )  # fmt: skip


def _ranks_of(module: nn.Module) -> dist.ProcessGroup | None:
    """Return the group of the ranks that train ``module`` together, as its wrapper or its parameters know it."""
    for each in module.modules():
        if isinstance(each, DistributedDataParallel):
            return each.process_group
    meshes = [mesh for x in module.parameters() if (mesh := getattr(x, "device_mesh", None)) is not None]
    meshes += fsdp.meshes(module)
    if not meshes:
        return None
    return distributed.group_of_mesh(max(meshes, key=lambda mesh: mesh.size()))


@contextlib.contextmanager
def fail_together(mesh: Any) -> Generator[list[str]]:
    """A block that raises on all ranks of ``mesh`` if it raises on one, or if the lines that it is given differ.

    Args:
        mesh: a DeviceMesh; None: this rank is alone.

    Raises:
        ConfigError: with what another rank says.
    """
    lines: list[str] = []
    try:
        yield lines
    except Exception as error:
        if mesh is not None:
            distributed.gathered_over((distributed.rank(), f"{type(error).__name__}: {error}", lines), mesh)
        raise
    if mesh is None:
        return
    gathered = distributed.gathered_over((distributed.rank(), "", lines), mesh)
    for rank, error, _ in gathered:
        if error:
            raise ConfigError(f"rank {rank} failed, with {error}")
    (first, _, expected), *others = gathered
    for rank, _, these in others:
        if these != expected:
            names = f"rank {first}", f"rank {rank}"
            difference = "\n".join(difflib.unified_diff(expected, these, *names, lineterm="", n=0))
            raise ConfigError(f"the ranks that share a model do not hand over the same:\n{difference}")


PATIENCE: Final = datetime.timedelta(seconds=30)  # the time within which the other ranks are expected to compile, too
_EQUAL: Final = "equal"  # the verdict of a comparison without a difference


def agree(text: str, group: str | None, kind: str = "training", patience: datetime.timedelta = PATIENCE) -> None:
    """Raise on all ranks of ``group`` if ``text`` is not the same on all of them.

    Args:
        text: the lines that must be the same.
        group: the name of a process group; None: there is one rank.
        kind: texts of one kind are compared, the first of each rank, the second of each rank, ...
        patience: how long to wait for ranks that have not called this. Then the others go on, with a warning.

    Raises:
        PolicyError: with the difference.
    """
    if (comparison := Comparison.of(text, group, kind)) is None:
        return
    try:
        comparison.wait(patience)
    except (dist.DistStoreError, RuntimeError) as error:  # FileStore raises the latter
        if "timeout" not in str(error).lower():
            raise
        _log.warning(
            "not all of the ranks %s compiled a model within %s of rank %d: their policies were not compared.",
            comparison.ranks, patience, comparison.rank,
        )  # fmt: skip


class Comparison:
    """The comparison of a text with those of other ranks, through the store of their rendezvous.

    Attributes:
        ranks: those that take part.
        rank: this one.
    """

    def __init__(self, text: str, ranks: list[int], place: str, store: Any) -> None:
        self._text, self.ranks, self._store, self.rank = text, ranks, store, dist.get_rank()
        self._place = f"{place}/{store.add(f'{place}/{self.rank}', 1)}"  # the same on all that compared equally often
        self._compared = False
        self._next = 0.0  # seconds: when ``is_over`` looks again
        if self.rank == ranks[0]:
            store.set(f"{self._place}/text", text)

    @classmethod
    def of(cls, text: str, group: str | None, kind: str) -> Comparison | None:
        """Return a comparison that begins now; None where there is nobody, or no store, to compare with. It does not
        wait.
        """
        ranks = sorted(collectives.ranks_of(group))
        if len(ranks) < 2 or dist.get_backend() == "fake" or (store := distributed.default_store()) is None:  # MPI
            return None
        return cls(text, ranks, f"fp8graph/{kind}/{zlib.crc32(repr(ranks).encode())}", store)

    def wait(self, patience: datetime.timedelta) -> None:
        """Wait for the others, each time for as long as ``patience``, and raise a PolicyError on a difference."""
        self._store.wait([f"{self._place}/text"], patience)
        self._look()
        self._store.wait([f"{self._place}/verdict"], patience)
        self._judge(self._look())

    def is_over(self) -> bool:
        """Say whether all have compared, as far as this rank can see without waiting. Raises a PolicyError as above."""
        now = time.monotonic()
        if now < self._next:
            return False
        try:
            verdict = self._look()
        except RuntimeError:  # the store is gone, with the ranks
            return True
        self._next = now + 1.0  # a look takes some 0.1 ms
        self._judge(verdict)
        return bool(verdict)

    def _look(self) -> str:
        """Return the verdict, "" if there is none yet."""
        store, place = self._store, self._place
        if not self._compared and store.check([f"{place}/text"]):
            expected = store.get(f"{place}/text").decode()
            if self._text != expected:
                names = f"rank {self.ranks[0]}", f"rank {self.rank}"
                lines = expected.splitlines(), self._text.splitlines()
                store.set(f"{place}/verdict", "\n".join(difflib.unified_diff(*lines, *names, lineterm="", n=0)))
            arrived = store.add(f"{place}/arrived", 1)
            if arrived == len(self.ranks) and not store.check([f"{place}/verdict"]):
                store.set(f"{place}/verdict", _EQUAL)
            self._compared = True
        return store.get(f"{place}/verdict").decode() if store.check([f"{place}/verdict"]) else ""

    def _judge(self, verdict: str) -> None:
        if verdict not in ("", _EQUAL):
            raise PolicyError(
                f"the ranks do not agree on how to quantize:\n{verdict}\nGive all of them one policy; or, if they "
                "train different models, each its own group: fp8graph.autocast(amax_reduction_group=...) around the "
                "calls."
            )
