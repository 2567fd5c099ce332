"""torch.distributed: process groups by name and of their own, shards, ranks that join, and the stage of a pipeline."""

from __future__ import annotations

import datetime
import sys
from collections.abc import Iterator, Sequence
from types import FrameType
from typing import Any, Final, cast

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

SHARD: Final = "_local_tensor"  # the attribute in which a DTensor keeps its shard
_STAGE: Final = "torch.distributed.pipelining.stage"
_RUN: Final = "forward_maybe_with_nosync"  # the method by which a stage runs its module on data


def local(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor that a graph takes: the shard of a DTensor, any other as it is."""
    return getattr(tensor, SHARD, tensor)


def mesh_of(tensor: torch.Tensor) -> Any:
    """Return the DeviceMesh over which a DTensor is spread; None for any other tensor."""
    return getattr(tensor, "device_mesh", None)


def sharded_over(tensor: torch.Tensor) -> list[tuple[int, Any]]:
    """Return the dims along which a DTensor is sharded, one for each dim of its mesh that shards it, with its group."""
    if (mesh := mesh_of(tensor)) is None:
        return []
    dims = [getattr(placement, "dim", None) for placement in cast(Any, tensor).placements]
    sizes = enumerate(zip(dims, mesh.shape, strict=True))
    return [(dim, mesh.get_group(i)) for i, (dim, ranks) in sizes if dim is not None and ranks > 1]


def offset_of(tensor: torch.Tensor) -> tuple[int, ...]:
    """Return the place of this rank's shard in a DTensor: for each dim, where it begins.

    FSDP2 shards further what tensor parallelism has sharded; no public function knows the order.
    """
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    like: Any = tensor
    _, offset = compute_local_shape_and_global_offset(like.shape, like.device_mesh, like.placements)
    return offset


def spread_as(shard: torch.Tensor, like: torch.Tensor, shape: Sequence[int]) -> Any:
    """Give the DTensor of ``shape`` that is spread over ranks as ``like`` is, and of which this rank has ``shard``."""
    from torch.distributed.tensor import DTensor

    stride, other = torch.empty(shape, device="meta").stride(), cast(Any, like)
    return DTensor.from_local(shard, other.device_mesh, other.placements, shape=torch.Size(shape), stride=stride)


def process_group(group: Any) -> Any:
    """Return the process group with a name, by which graphs and functional collectives know it. A group is returned as
    it is.

    Only a private function finds a group by its name.
    """
    return dist.distributed_c10d._resolve_process_group(cast(Any, group)) if isinstance(group, str) else group


def group_of_mesh(mesh: Any) -> dist.ProcessGroup:
    """Return the process group of all ranks of a DeviceMesh. Only these ranks need to call this."""
    if mesh.ndim == 1:
        return mesh.get_group()
    ranks = sorted(mesh.mesh.flatten().tolist())
    if len(ranks) == dist.get_world_size():
        return cast(dist.ProcessGroup, dist.group.WORLD)
    return cast(dist.ProcessGroup, dist.new_group(ranks, use_local_synchronization=True))


def timeout_of(group: dist.ProcessGroup, device: torch.device) -> datetime.timedelta:
    """Return the time after which a collective of tensors on ``device`` fails. Only a private attribute has it."""
    backend = cast(Any, group)._get_backend(device)
    options = getattr(getattr(backend, "wrapped_pg", backend), "options", None)  # wrapped: TORCH_DISTRIBUTED_DEBUG
    return getattr(options, "_timeout", dist.default_pg_timeout)


def group_of_its_own(group: dist.ProcessGroup, tag: str, timeout: datetime.timedelta) -> dist.ProcessGroup:
    """Another process group of the ranks of ``group``, made once for ``tag``. These ranks, and no others, call this.

    It is ``group`` itself where some ranks alone cannot make one: with MPI, and if the default group is bound to a
    device and has more ranks, since it is then split by all of them. ``new_group(use_local_synchronization=True)``
    would do the same, but takes the group's name from the number of groups that a rank is in, which may differ.
    """
    c10d: Any = dist.distributed_c10d
    ranks = dist.get_process_group_ranks(group)
    split = len(ranks) < dist.get_world_size() and c10d._get_default_group().bound_device_id is not None
    if split or dist.get_backend(group) in (dist.Backend.MPI, "fake"):
        return group
    own, _ = c10d._new_process_group_helper(
        len(ranks),
        dist.get_rank(group),
        ranks,
        dist.Backend(dist.get_backend(group)),
        default_store(),
        f"{tag} {'_'.join(map(str, ranks))}",
        timeout=timeout,
        pg_tag=tag,
        group_desc=tag,
    )
    c10d._world.pg_group_ranks[own] = {rank: place for place, rank in enumerate(ranks)}
    return own


def joining() -> dist.ProcessGroup | None:
    """Return the group of the ``DistributedDataParallel`` whose forward is running, if its ranks may take unequal
    steps.

    They may under torch's ``Join`` (``ddp.join()``), unless it throws when the first rank has no more inputs.
    """
    module: Any = DistributedDataParallel._active_ddp_module
    config = getattr(module, "_join_config", None)
    unequal = config is not None and config.enable and not config.throw_on_early_termination
    return module.process_group if unequal else None


def number_of_ranks(group: str | None) -> int:
    """Get the number of ranks of the process group with the name ``group`` (None: all); 1 without torch.distributed."""
    if not dist.is_available() or not dist.is_initialized():
        return 1
    return dist.get_world_size() if group is None else process_group(group).size()


def rank() -> int:
    """This rank among all; 0 without torch.distributed."""
    return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0


def default_store() -> Any:
    """Return the store in which the ranks of ``init_process_group`` met. It is private, but torchrun's tools use it."""
    return dist.distributed_c10d._get_default_store()


def gathered_objects(value: Any, group: Any, *, others: bool) -> list[Any]:
    """Return the objects of the ranks of ``group`` (None: all), in order; ``others``: not this rank's. All ranks call
    it.
    """
    ranks = number_of_ranks(None) if group is None else dist.get_world_size(group)
    if ranks == 1:
        return [] if others else [value]
    objects: list[Any] = [None] * ranks
    dist.all_gather_object(objects, value, group=group)
    this = dist.get_rank(group)
    return [x for rank, x in enumerate(objects) if rank != this or not others]


def gathered_over(value: Any, mesh: Any) -> list[Any]:
    """Return the objects of all ranks of a DeviceMesh, small ones, in its order. All of them call it."""
    objects = [value]
    for dim in reversed(range(mesh.ndim)):
        objects = [x for one in gathered_objects(objects, mesh.get_group(dim), others=False) for x in one]
    return objects


def largest_over(x: torch.Tensor, mesh: Any) -> torch.Tensor:
    """Return the largest of all ranks of a DeviceMesh, elementwise, in ``x``."""
    for dim in range(mesh.ndim):
        dist.all_reduce(x, dist.ReduceOp.MAX, group=mesh.get_group(dim))
    return x


def running_stage() -> Any:
    """Return the ``PipelineStage`` whose module is being run by this thread; None outside of a pipeline.

    A stage calls its module like any other, so that only the call stack shows it. It is read before code is compiled or
    a call is prepared, not at each call.
    """
    return next((frame.f_locals["self"] for frame in _frames_of_stages()), None)


def is_dry_run() -> bool:
    """Return whether a stage runs its module, forward and backward, on uninitialized memory.

    Before the first step stages do so to learn the shapes of what they will send to each other.
    """
    names = [frame.f_code.co_name for frame in _frames_of_stages()]
    return bool(names) and _RUN not in names


def _frames_of_stages() -> Iterator[FrameType]:
    """Yield the calls of methods of stages that led here, innermost first."""
    module = sys.modules.get(_STAGE)
    frame: FrameType | None = sys._getframe() if module is not None else None
    while frame is not None:
        if frame.f_code.co_filename == getattr(module, "__file__", "") and hasattr(
            frame.f_locals.get("self"), "submod"
        ):
            yield frame
        frame = frame.f_back
