"""The ranks over which a backend reduces amaxes.

They are those of ``autocast(amax_reduction_group=...)``; else, within a stage of a pipeline, the ranks that run this
stage; else all ranks. The stages of a pipeline run forward and backward in different orders (1F1B): one that waited for
an amax of the others would never go on.
"""

from __future__ import annotations

import contextlib
import datetime
import difflib
import logging
import zlib
from collections.abc import Generator
from typing import Any, Final

import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from fp8graph.compat import distributed, fsdp
from fp8graph.errors import ConfigError, PolicyError
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

    def now(self) -> str | None:
        """The name of the group over which the present call reduces amaxes; None if there is one rank."""
        if self.in_stage is not None and not autocast.names_a_group():
            return self.in_stage.name
        return autocast.amax_group()

    def same_in_stage(self, group: str | None) -> bool:
        """Whether all ranks that have a layer record the same amaxes of it: those of its stage, over ``group``."""
        return self.in_stage is not None and self.in_stage.complete and self.in_stage.name == group

    def rehearses(self) -> bool:
        """Whether this call runs on uninitialized memory: no amax of it may be recorded."""
        return self.in_stage is not None and distributed.rehearses()

    def look(self) -> bool:
        """Find a stage of a pipeline that is calling, the first time. Its other ranks do the same, at the same call."""
        if self.in_stage is None and (stage := distributed.running_stage()) is not None:
            self.in_stage = StageGroup(stage)
            return True
        return False


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
    """The group of the ranks that train ``module`` together, as its wrapper or its parameters know it."""
    for each in module.modules():
        if isinstance(each, DistributedDataParallel):
            return each.process_group
    meshes = [mesh for x in module.parameters() if (mesh := getattr(x, "device_mesh", None)) is not None]
    meshes += fsdp.meshes(module)
    if not meshes:
        return None
    return distributed.group_of_mesh(max(meshes, key=lambda mesh: mesh.size()))


@contextlib.contextmanager
def together(mesh: Any) -> Generator[list[str]]:
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
    found = distributed.gathered_over((distributed.rank(), "", lines), mesh)
    for rank, error, _ in found:
        if error:
            raise ConfigError(f"rank {rank} failed, with {error}")
    (first, _, expected), *others = found
    for rank, _, these in others:
        if these != expected:
            names = f"rank {first}", f"rank {rank}"
            difference = "\n".join(difflib.unified_diff(expected, these, *names, lineterm="", n=0))
            raise ConfigError(f"the ranks that share a model do not hand over the same:\n{difference}")


PATIENCE: Final = datetime.timedelta(seconds=30)  # the time within which the other ranks are expected to compile, too


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
    ranks = sorted(collectives.ranks_of(group))
    if len(ranks) < 2 or dist.get_backend() == "fake":
        return
    store, rank = distributed.default_store(), dist.get_rank()
    if store is None:  # MPI
        return
    place = f"fp8graph/{kind}/{zlib.crc32(repr(ranks).encode())}"
    place = f"{place}/{store.add(f'{place}/{rank}', 1)}"  # the same number on all ranks that compared equally often
    try:
        if rank == ranks[0]:
            store.set(f"{place}/text", text)
        _compare(store, place, text, ranks, rank, patience)
    except (dist.DistStoreError, RuntimeError) as error:  # FileStore raises the latter
        if "timeout" not in str(error).lower():
            raise
        _log.warning(
            "not all of the ranks %s compiled a model within %s of rank %d: their policies were not compared.",
            ranks, patience, rank,
        )  # fmt: skip


def _compare(store: Any, place: str, text: str, ranks: list[int], rank: int, patience: datetime.timedelta) -> None:
    store.wait([f"{place}/text"], patience)
    expected = store.get(f"{place}/text").decode()
    if text != expected:
        names = f"rank {ranks[0]}", f"rank {rank}"
        difference = difflib.unified_diff(expected.splitlines(), text.splitlines(), *names, lineterm="", n=0)
        store.set(f"{place}/verdict", "\n".join(difference))
    arrived = store.add(f"{place}/arrived", 1)
    if arrived == len(ranks) and not store.check([f"{place}/verdict"]):
        store.set(f"{place}/verdict", "equal")
    store.wait([f"{place}/verdict"], patience)
    verdict = store.get(f"{place}/verdict").decode()
    if verdict != "equal":
        raise PolicyError(
            f"the ranks do not agree on how to quantize:\n{verdict}\nGive all of them one policy; or, if they train "
            "different models, each its own group: fp8graph.autocast(amax_reduction_group=...) around the calls."
        )
