"""What ``Backend.state_dict()`` returns, so that ``torch.distributed.checkpoint`` (DCP) can save and load a Backend.

DCP opens every Mapping and stores its entries apart; it then loads only those that the object to load into already
has. A backend knows its rows when it has compiled, but a checkpoint is loaded before that. So the state is no Mapping:
to DCP it is one value under one name, to everybody else it has a dict's keys, values and items.
"""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import ItemsView, Iterator, KeysView, Mapping, ValuesView
from multiprocessing.reduction import ForkingPickler
from typing import Any

from torch import Tensor

from fp8graph.errors import StateError


class ScalingState:
    """Tensors by name, in order. ``dict(state)`` where a dict is asked for (safetensors); pickled as an OrderedDict.

    Args:
        entries: the tensors.
        not_shared: why other ranks may have other tensors under these names; "" if they have not.
    """

    def __init__(self, entries: Mapping[str, Tensor], not_shared: str = "") -> None:
        self._entries, self._not_shared = dict(entries), not_shared

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

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._entries!r})"

    def __deepcopy__(self, memo: dict[int, Any]) -> ScalingState:
        """What DCP makes before it saves in the background: still one value."""
        return ScalingState(copy.deepcopy(self._entries, memo), self._not_shared)

    def __reduce__(self) -> tuple[Any, ...]:
        """A file needs nothing of fp8graph to be read, ``weights_only=True`` included."""
        return OrderedDict, (), None, None, iter(self._entries.items())

    def __create_write_items__(self, fqn: str, _state: object) -> list[Any]:
        """DCP asks each rank what it writes; of what several ranks write under one name it keeps one.

        Raises:
            StateError: the ranks' states differ.
        """
        from torch.distributed.checkpoint.metadata import MetadataIndex
        from torch.distributed.checkpoint.planner import WriteItem, WriteItemType

        if self._not_shared:
            raise StateError(
                f"torch.distributed.checkpoint would keep the scaling state of one rank as {fqn!r}, but "
                f"{self._not_shared}. Nothing was saved. Let each rank save its own, "
                "torch.save(backend.state_dict(), path_of_this_rank), or reduce amaxes over all ranks."
            )
        return [WriteItem(index=MetadataIndex(fqn), type=WriteItemType.BYTE_IO)]


def _to_another_process(state: ScalingState) -> tuple[Any, ...]:
    """One value there, too: DCP may save in a process of its own (``AsyncCheckpointerType.PROCESS``)."""
    return ScalingState, (state._entries, state._not_shared)


ForkingPickler.register(ScalingState, _to_another_process)
