"""A backend's state as plain tensors under plain names, and back: of its stores, its schedule and its guards.

Each of them (a :class:`Keeper`) writes entries of its own, and recognizes them by their names. A state dict is loaded
all or nothing: every keeper has checked its entries before the first one takes them.
"""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Callable, Collection, ItemsView, Iterable, Iterator, KeysView, Mapping, ValuesView
from multiprocessing.reduction import ForkingPickler
from typing import Any, Final, Protocol

import torch
from torch import Tensor

from fp8graph.errors import StateError

VERSION: Final = 1
VERSION_KEY: Final = "fp8graph.state_version"
_LONGEST: Final = 200  # characters of a name in a message
OTHERS: Final = "backend"  # the name of the entries that are of no layer


class Keeper(Protocol):
    """Whatever has entries in the state dict of a backend."""

    def entries(self) -> Mapping[str, Tensor]:
        """Its entries, copies on the CPU."""
        ...

    def recognizes(self, name: str) -> bool:
        """Return whether an entry of this name is one of its own."""
        ...

    def loader(self, entries: Mapping[str, Any]) -> Callable[[], None]:
        """Take its own entries of a state dict, perhaps none, when the result is called.

        Raises:
            StateError: now, if they cannot be used.
        """
        ...


def refusal(problem: str) -> StateError:
    """Return the error for a state dict that cannot be loaded."""
    return StateError(f"not a valid fp8graph state dict: {problem}. Nothing was loaded.")


def has_numbers(x: Tensor) -> bool:
    """Return whether the numbers of a tensor are there, one after the other."""
    return not x.is_meta and x.layout is torch.strided


def shown(name: object) -> str:
    """Return the name of an entry for a message: the beginning of one that is longer than any real one."""
    text = str(name)
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}..."


def loader(state_dict: Mapping[str, Any] | BackendState, keepers: Iterable[Keeper]) -> Callable[[], None]:
    """Let ``keepers`` take their entries of a state dict when the result is called.

    Raises:
        StateError: now, if some entry cannot be used.
    """
    if not isinstance(state_dict, Mapping | BackendState):
        raise refusal(f"expected a mapping, not {type(state_dict).__name__}")
    left: dict[Any, Any] = dict(state_dict)
    for name, value in left.items():  # a file of a few bytes may claim any size
        if isinstance(value, Tensor) and has_numbers(value) and value.numel() > 1 and 0 in value.stride():
            raise refusal(f"{shown(name)!r} is one number, which is to stand for {value.numel()}")
    version = left.pop(VERSION_KEY, None)
    if not isinstance(version, Tensor) or version.numel() != 1 or not has_numbers(version):
        raise refusal(f"{VERSION_KEY!r} is missing")
    if int(version.item()) != VERSION:
        raise refusal(f"it has version {int(version.item())}, but this fp8graph reads version {VERSION}")
    shares: list[tuple[Keeper, dict[str, Any]]] = []
    for keeper in keepers:
        shares.append((keeper, {name: left.pop(name) for name in [*left] if keeper.recognizes(str(name))}))
    if left:
        raise refusal(f"unknown entry {shown(next(iter(left)))!r}")
    loaders = [keeper.loader(entries) for keeper, entries in shares]

    def load() -> None:
        for each in loaders:
            each()

    return load


class BackendState:
    """Tensors by name, in order. ``dict(state)`` makes a dict (for safetensors); it is pickled as an OrderedDict.

    Args:
        entries: the tensors.
        not_shared: why other ranks may have different tensors under these names; "" if all ranks have the same.
        stage: the stage of a pipeline, by its place, that this rank runs; None: it runs the whole model.
        of_stage: the names of those entries that are of this stage's layers.
    """

    def __init__(
        self,
        entries: Mapping[str, Tensor],
        not_shared: str = "",
        stage: int | None = None,
        of_stage: Collection[str] = (),
    ) -> None:
        self._entries, self._not_shared = dict(entries), not_shared
        self._stage, self._of_stage = stage, frozenset(of_stage)

    @property
    def not_shared(self) -> str:
        """Reason why other ranks may have other tensors; "" if they have not."""
        return self._not_shared

    def by_layer(self, layers: Iterable[str]) -> dict[str, BackendState]:
        """Return a value for each of ``layers``, by its full name, and one for all other entries, as :data:`OTHERS`.

        Ranks that run other layers save under other names then, and whoever runs a layer later finds it.
        """
        left, states = dict(self._entries), dict[str, BackendState]()
        for layer in layers:
            own = {name: left.pop(name) for name in [*left] if name.startswith(f"{layer}.")}
            states[layer] = BackendState(own, self._not_shared)
        return {**states, OTHERS: BackendState(left, self._not_shared, self._stage, self._of_stage)}

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

    def __deepcopy__(self, memo: dict[int, Any]) -> BackendState:
        """DCP makes this copy before it saves in the background: it is still one value."""
        return BackendState(copy.deepcopy(self._entries, memo), self._not_shared, self._stage, self._of_stage)

    def __reduce__(self) -> tuple[Any, ...]:
        """Let a file be read without fp8graph, also with ``weights_only=True``."""
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
        of_stage = self._stage is not None and not self._of_stage.isdisjoint(self._entries)
        if of_stage and not fqn.endswith(f"stage{self._stage}"):
            raise StateError(
                f"torch.distributed.checkpoint would keep the scaling state of one stage of the pipeline as {fqn!r}, "
                "and lose that of the others. Nothing was saved. Save and load each under a name of its own, here "
                f'"fp8graph-stage{self._stage}": backend.'
            )
        return [WriteItem(index=MetadataIndex(fqn), type=WriteItemType.BYTE_IO)]


def _to_another_process(state: BackendState) -> tuple[Any, ...]:
    """Stay one value in another process, too: DCP may save in one (``AsyncCheckpointerType.PROCESS``)."""
    return BackendState, (state._entries, state._not_shared, state._stage, state._of_stage)


ForkingPickler.register(BackendState, _to_another_process)
