"""The result of ``Backend.state_dict()``, made for ``torch.distributed.checkpoint`` (DCP) to save and load a Backend.

DCP opens every Mapping and stores its entries one by one; it then loads only entries that the target object already
has. A backend knows its rows only after it has compiled, but a checkpoint is loaded before that. So the state is not a
Mapping: DCP sees one value under one name, and everybody else can use a dict's keys, values and items.
"""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import ItemsView, Iterable, Iterator, KeysView, Mapping, ValuesView
from multiprocessing.reduction import ForkingPickler
from typing import Any

from torch import Tensor

from fp8graph.compat import distributed
from fp8graph.errors import StateError


def not_shared(names: Iterable[str], groups: Iterable[str | None]) -> str:
    """Why other ranks may have different scales; "" if all have the same.

    Args:
        names: of the rows.
        groups: that their amaxes were reduced over; None: this rank alone.
    """
    ranks = distributed.number_of_ranks(None)
    if ranks > 1 and any("reduce_amax=False" in name.rpartition("|")[2] for name in names):
        return "DelayedScaling(reduce_amax=False) lets each rank have its own scales"
    smallest = min((1 if group is None else distributed.number_of_ranks(group) for group in groups), default=ranks)
    if smallest < ranks:
        return f"its amaxes were reduced over {smallest} of {ranks} ranks (autocast's amax_reduction_group)"
    return ""


class ScalingState:
    """Tensors by name, in order. ``dict(state)`` makes a dict (for safetensors); it is pickled as an OrderedDict.

    Args:
        entries: the tensors.
        not_shared: why other ranks may have different tensors under these names; "" if all ranks have the same.
        stage: the stage of a pipeline, by its place, whose layers these are; None: there are no others.
    """

    def __init__(self, entries: Mapping[str, Tensor], not_shared: str = "", stage: int | None = None) -> None:
        self._entries, self._not_shared, self._stage = dict(entries), not_shared, stage

    @property
    def not_shared(self) -> str:
        """Why other ranks may have other tensors; "" if they have not."""
        return self._not_shared

    def __getitem__(self, name: str) -> Tensor:
        return self._entries[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __contains__(self, name: object) -> bool:
        return name in self._entries

    def __len__(self) -> int:
        return len(self._entries)

    def keys(self) -> KeysView[str]:
        return self._entries.keys()

    def values(self) -> ValuesView[Tensor]:
        return self._entries.values()

    def items(self) -> ItemsView[str, Tensor]:
        return self._entries.items()

    def get(self, name: str, default: Any = None) -> Any:
        return self._entries.get(name, default)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._entries!r})"

    def __deepcopy__(self, memo: dict[int, Any]) -> ScalingState:
        """DCP makes this copy before it saves in the background: it is still one value."""
        return ScalingState(copy.deepcopy(self._entries, memo), self._not_shared, self._stage)

    def __reduce__(self) -> tuple[Any, ...]:
        """A file can be read without fp8graph, also with ``weights_only=True``."""
        return OrderedDict, (), None, None, iter(self._entries.items())

    def __create_write_items__(self, fqn: str, _state: object) -> list[Any]:
        """DCP asks each rank what it writes; if several ranks write under one name, it keeps the value of one.

        Raises:
            StateError: the ranks' states differ, or this is that of a stage of a pipeline under a name that the other
                stages may have, too.
        """
        from torch.distributed.checkpoint.metadata import MetadataIndex
        from torch.distributed.checkpoint.planner import WriteItem, WriteItemType

        if self._not_shared:
            raise StateError(
                f"torch.distributed.checkpoint would keep the scaling state of one rank as {fqn!r}, but "
                f"{self._not_shared}. Nothing was saved. Let each rank save its own, "
                "torch.save(backend.state_dict(), path_of_this_rank), or reduce amaxes over all ranks."
            )
        if self._stage is not None and not fqn.endswith(f"stage{self._stage}"):
            raise StateError(
                f"torch.distributed.checkpoint would keep the scaling state of one stage of the pipeline as {fqn!r}, "
                "and lose that of the others. Nothing was saved. Save and load each under a name of its own, here "
                f'"fp8graph-stage{self._stage}": backend.'
            )
        return [WriteItem(index=MetadataIndex(fqn), type=WriteItemType.BYTE_IO)]


def _to_another_process(state: ScalingState) -> tuple[Any, ...]:
    """Stay one value in another process, too: DCP may save in one (``AsyncCheckpointerType.PROCESS``)."""
    return ScalingState, (state._entries, state._not_shared, state._stage)


ForkingPickler.register(ScalingState, _to_another_process)
