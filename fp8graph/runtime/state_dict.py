"""Convert scaling state to plain tensors under plain names, and back.

Each row has a scale and an amax history. A scale maps an amax to the maximum of an FP8 type: the recipe's own (448 for
E4M3), unless the row has a third entry, "fp8_max", because the device uses another type in its place.
"""

from __future__ import annotations

import copy
import dataclasses
import json
from collections import OrderedDict
from collections.abc import ItemsView, Iterable, Iterator, KeysView, Mapping, ValuesView
from dataclasses import dataclass
from multiprocessing.reduction import ForkingPickler
from typing import Any, Final, cast

import torch
from torch import Tensor

from fp8graph.compat import distributed
from fp8graph.errors import StateError
from fp8graph.numerics import history
from fp8graph.recipes import FLT_MAX, FP8_MAX, DelayedScaling, Format, OperandName

VERSION: Final = 1
VERSION_KEY: Final = "fp8graph.state_version"
STEP_KEY: Final = "fp8graph.step"  # of training, under a policy with a schedule
GUARD_KEY: Final = "fp8graph.guard"  # the rules that a guard applied: JSON in UTF-8
_FIELDS: Final = ("scale", "amax_history")
_MAXIMUM: Final = "fp8_max"


@dataclass(frozen=True)
class SavedRow:
    """The state of one tensor outside any page, on the CPU."""

    scale: Tensor  # FP32 [1]
    amax_history: Tensor  # FP32 [length]
    fp8_max: float  # maximum of the type that the scale is for

    @staticmethod
    def of(row: Tensor, fp8_max: float) -> SavedRow:
        """A copy of a row of a page."""
        row = row.detach().cpu()
        return SavedRow(row[:1].clone(), row[history.HEADER :].clone(), fp8_max)

    def under(self, fp8_max: float) -> tuple[Tensor, Tensor]:
        """Scale and history for a type whose maximum is ``fp8_max``. Amaxes do not depend on it."""
        return rescaled(self.scale, self.fp8_max, fp8_max), self.amax_history

    def entries(self, name: str) -> Iterator[tuple[str, Tensor]]:
        """Its entries in a state dict."""
        yield f"{name}|scale", self.scale.clone()
        yield f"{name}|amax_history", self.amax_history.clone()
        if self.fp8_max != _recipes_maximum(name):
            yield f"{name}|{_MAXIMUM}", torch.tensor([self.fp8_max])


def rescaled(scale: Tensor, saved: float, wanted: float) -> Tensor:
    """Convert a scale to another FP8 maximum, rounding once."""
    return (scale.double() * (wanted / saved)).clamp_max(FLT_MAX).float()


def recipe_text(recipe: DelayedScaling) -> str:
    """The part of a name that identifies a recipe: the recipe's fields that differ from the defaults."""
    fields = [(field.name, getattr(recipe, field.name), field.default) for field in dataclasses.fields(recipe)]
    changed = [f"{name}={_plain(value)}" for name, value, default in fields if value != default]
    return f"delayed({','.join(changed)})"


def _plain(value: Any) -> str:
    if callable(value):
        return f"{value.__module__}.{value.__qualname__}"
    return str(getattr(value, "name", value)).replace(" ", "")


def checked(state_dict: Mapping[str, Any] | ScalingState) -> dict[str, SavedRow]:
    """The rows of a state dict by name, or a :class:`StateError` that says what is wrong with it."""

    def refuse(problem: str) -> StateError:
        return StateError(f"not a valid fp8graph state dict: {problem}. Nothing was loaded.")

    if not isinstance(state_dict, Mapping | ScalingState):
        raise refuse(f"expected a mapping, not {type(state_dict).__name__}")
    version = dict(state_dict).get(VERSION_KEY)
    if not isinstance(version, Tensor) or version.numel() != 1 or not _has_numbers(version):
        raise refuse(f"{VERSION_KEY!r} is missing")
    if int(version.item()) != VERSION:
        raise refuse(f"it has version {int(version.item())}, but this fp8graph reads version {VERSION}")
    parts: dict[str, dict[str, Tensor]] = {}
    for key, value in state_dict.items():
        if key in (VERSION_KEY, STEP_KEY, GUARD_KEY):
            continue
        name, _, field = str(key).rpartition("|")
        if field not in (*_FIELDS, _MAXIMUM) or "|" not in name:
            raise refuse(f"unknown entry {key!r}")
        if isinstance(value, Tensor) and not _has_numbers(value):
            raise refuse(f"{key!r} is a tensor on the device {value.device} with the layout {value.layout}")
        if not isinstance(value, Tensor) or value.dtype != torch.float32 or value.ndim != 1 or value.numel() < 1:
            raise refuse(f"{key!r} is not a vector of FP32 numbers")
        low_enough = value >= 0 if field == "amax_history" else value > 0
        bad = value[~(low_enough & (value <= FLT_MAX))]  # nan compares False
        if bad.numel():
            raise refuse(f"{key!r} contains {bad[0].item()}")
        parts.setdefault(name, {})[field] = value.detach().cpu().clone()
    rows: dict[str, SavedRow] = {}
    for name, fields in parts.items():
        if missing := set(_FIELDS) - fields.keys():
            raise refuse(f"it is truncated: {name} has no {missing.pop()}")
        try:
            length, maximum = _history_length(name), _recipes_maximum(name)
        except (KeyError, ValueError):
            raise refuse(f"{name} is not a row of any recipe") from None
        if fields["scale"].numel() != 1 or fields["amax_history"].numel() != length:
            raise refuse(f"{name} has a history of length {fields['amax_history'].numel()}, its recipe one of {length}")
        if _MAXIMUM in fields:
            maximum = fields[_MAXIMUM][0].item()
            if maximum not in FP8_MAX.values():
                raise refuse(f"{name} has a scale for the maximum {maximum:g}, which no FP8 type has")
        rows[name] = SavedRow(fields["scale"], fields["amax_history"], maximum)
    return rows


def _has_numbers(x: Tensor) -> bool:
    """Whether the numbers of a tensor are there, one after the other."""
    return not x.is_meta and x.layout is torch.strided


def step_entry(step: int) -> dict[str, Tensor]:
    """The entry of a state dict for the step of training."""
    return {STEP_KEY: torch.tensor([step])}


def saved_step(state_dict: Mapping[str, Any] | ScalingState) -> int | None:
    """The step of training in a state dict; None in those without a schedule, and in all of earlier versions."""
    if not isinstance(state_dict, Mapping | ScalingState) or STEP_KEY not in state_dict:
        return None
    step: Any = state_dict[STEP_KEY]
    is_one = isinstance(step, Tensor) and step.dtype == torch.int64 and step.numel() == 1 and _has_numbers(step)
    if not is_one or step.item() < 0:
        raise StateError(
            f"not a valid fp8graph state dict: {STEP_KEY!r} is not a whole number >= 0. Nothing was loaded."
        )
    return int(step.item())


def guard_entry(rules: list[dict[str, Any]]) -> dict[str, Tensor]:
    """The entries of a state dict for the rules that a guard applied; none without such rules."""
    return {GUARD_KEY: torch.tensor([*json.dumps(rules).encode()], dtype=torch.uint8)} if rules else {}


def saved_guard(state_dict: Mapping[str, Any] | ScalingState) -> list[Any]:
    """The inverse of :func:`guard_entry`."""
    if not isinstance(state_dict, Mapping | ScalingState) or GUARD_KEY not in state_dict:
        return []
    text: Any = state_dict[GUARD_KEY]
    try:
        rules = json.loads(bytes(text.tolist()))
        if not isinstance(rules, list):
            raise TypeError(f"found {rules!r}")
    except (AttributeError, TypeError, ValueError, RecursionError) as error:
        raise StateError(
            f"not a valid fp8graph state dict: {GUARD_KEY!r} is not a list of rules ({error}). Nothing was loaded."
        ) from None
    return cast(list[Any], rules)


def _recipes_maximum(name: str) -> float:
    """The FP8 maximum of the type that the recipe in a row's name gives to its operand."""
    operand = cast(OperandName, name.partition("|")[0].rpartition(".")[2])
    return FP8_MAX[Format[_setting(name, "fp8_format", DelayedScaling().fp8_format.name)].dtype(operand)]


def _history_length(name: str) -> int:
    """The history length that a row's name states."""
    return int(_setting(name, "amax_history_len", str(DelayedScaling().amax_history_len)))


def _setting(name: str, field: str, default: str) -> str:
    """The value of ``field`` in the recipe of a row's name, which leaves out default values."""
    settings = name.rpartition("|")[2].removeprefix("delayed(").removesuffix(")").split(",")
    values = [setting.removeprefix(f"{field}=") for setting in settings if setting.startswith(f"{field}=")]
    return values[0] if values else default


def not_shared(names: Iterable[str], groups: Iterable[str | None]) -> str:
    """Reason why other ranks may have different scales; "" if all have the same.

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
        """Reason why other ranks may have other tensors; "" if they have not."""
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
