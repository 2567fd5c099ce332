"""torch.distributed: process groups by name, and FSDP2's parameters."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Sequence
from typing import Any, Final, cast

import torch
import torch.distributed as dist

from fp8graph.errors import Fp8GraphError

SHARD: Final = "_local_tensor"  # the attribute in which a DTensor keeps its shard


def local(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor that a graph takes: the shard of a DTensor, any other as it is."""
    return getattr(tensor, SHARD, tensor)


def process_group(group: Any) -> Any:
    """The process group with a name, by which graphs and functional collectives know it. A group is returned as it is.

    Only a private function finds a group by its name.
    """
    return dist.distributed_c10d._resolve_process_group(cast(Any, group)) if isinstance(group, str) else group


def number_of_ranks(group: str | None) -> int:
    """How many ranks the process group with the name ``group`` has (None: all); 1 without torch.distributed."""
    if not dist.is_available() or not dist.is_initialized():
        return 1
    return dist.get_world_size() if group is None else process_group(group).size()


def default_store() -> Any:
    """The store in which the ranks of ``init_process_group`` met. It is private, but torchrun's tools use it."""
    return dist.distributed_c10d._get_default_store()


def gathered_by_fsdp() -> set[int]:
    """The ids of the parameters that FSDP2 gathers for the calls of a layer and frees between them.

    FSDP2 has no public way to ask. Without the answer, whole FP8 copies of these parameters would be kept on every
    rank, so an unknown layout is an error, never a guess.

    Raises:
        Fp8GraphError: there are FSDP2 modules, but this torch keeps their parameters in another place.
    """
    found: set[int] = set()
    fsdp = sys.modules.get("torch.distributed.fsdp")  # not imported: nobody uses it
    if fsdp is None or not dist.is_available():
        return found
    from torch.distributed import _composable_state

    states = getattr(_composable_state, "_module_state_mapping", None)
    if states is None:
        # FSDP2 gives each class of modules that it shards a subclass
        if any(issubclass(kind, torch.nn.Module) for kind in fsdp.FSDPModule.__subclasses__()):
            raise _unknown_fsdp("torch.distributed._composable_state._module_state_mapping")
        return found
    for module, reference in list(states.items()):
        if isinstance(module, fsdp.FSDPModule) and (state := reference()) is not None:
            for group in _parameter_groups(state):
                for sharded in _read(group, "fsdp_params"):
                    # set by the first gather; until then only declared by the class
                    if hasattr(sharded, "_unsharded_param") or not _declares(sharded, "_unsharded_param"):
                        found.add(id(_read(sharded, "_unsharded_param")))
    return found


def _parameter_groups(state: Any) -> Sequence[Any]:
    if hasattr(state, "_fsdp_param_groups"):  # torch 2.13 has one group per mesh, 2.11 a single one
        return state._fsdp_param_groups
    group = _read(state, "_fsdp_param_group")
    return [] if group is None else [group]  # None: a module without parameters of its own


def _read(owner: Any, name: str) -> Any:
    if not hasattr(owner, name):
        raise _unknown_fsdp(f"{type(owner).__name__}.{name}")
    return getattr(owner, name)


def _declares(owner: Any, name: str) -> bool:
    return any(name in inspect.get_annotations(kind) for kind in type(owner).__mro__)


def _unknown_fsdp(missing: str) -> Fp8GraphError:
    return Fp8GraphError(
        f"torch {torch.__version__} has no {missing}: fp8graph cannot tell which weights FSDP2 gathers, and would keep "
        "whole FP8 copies of them on every rank. Install a torch version that fp8graph supports (`fp8graph doctor` "
        "names them), or do not compile modules under fully_shard with fp8graph."
    )
