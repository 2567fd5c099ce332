"""torch.distributed: groups by name, FSDP2's parameters."""

from __future__ import annotations

from typing import Any, cast

import torch.distributed as dist


def process_group(group: Any) -> Any:
    """The process group with a name: graphs and functional collectives know it by that, only a private function finds
    it so. A group is returned as it is."""
    return dist.distributed_c10d._resolve_process_group(cast(Any, group)) if isinstance(group, str) else group


def ranks_of(group: str | None) -> int:
    """How many ranks the process group with the name ``group`` has (None: all); 1 without torch.distributed."""
    if not dist.is_available() or not dist.is_initialized():
        return 1
    return dist.get_world_size() if group is None else process_group(group).size()


def default_store() -> Any:
    """The store in which the ranks of ``init_process_group`` met. Private in torch, and used by torchrun's tools."""
    return dist.distributed_c10d._get_default_store()


def gathered_by_fsdp() -> set[int]:
    """The ids of the parameters that FSDP2 gathers for the calls of a layer and frees between them.

    FSDP2 says it nowhere in public. Without this (an empty set) their FP8 copies would be kept whole on every rank.
    """
    found: set[int] = set()
    if not dist.is_available():
        return found
    from torch.distributed import _composable_state

    for reference in list(_composable_state._module_state_mapping.values()):
        group = getattr(reference(), "_fsdp_param_group", None)
        for sharded in getattr(group, "fsdp_params", ()):
            if (parameter := getattr(sharded, "_unsharded_param", None)) is not None:
                found.add(id(parameter))
    return found
