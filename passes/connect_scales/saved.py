"""Rows of scaling state as plain tensors under plain names, and back.

Each row has a scale and an amax history. A scale maps an amax to the maximum of an FP8 type: the recipe's own (448 for
E4M3), unless the row has a third entry, "fp8_max", because the device uses another type in its place.

Rows of a loaded state dict wait until their layers run and put them into pages (:class:`LoadedRows`).
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final, cast

import torch
from torch import Tensor

from fp8graph.compat import distributed
from fp8graph.numerics import history
from fp8graph.numerics.formats import SCALE
from fp8graph.recipes import FLT_MAX, FP8_MAX, DelayedScaling, Format, OperandName
from fp8graph.runtime.state_dict import has_numbers, refusal

_log = logging.getLogger("fp8graph")

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
        return SavedRow(row[SCALE : SCALE + 1].clone(), row[history.HEADER :].clone(), fp8_max)

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


def recognizes(name: str) -> bool:
    """Whether a state dict's entry of this name is part of a row."""
    row, _, field = name.rpartition("|")
    return field in (*_FIELDS, _MAXIMUM) and "|" in row


def checked(entries: Mapping[str, Any]) -> dict[str, SavedRow]:
    """The rows in entries of a state dict by name, or a :class:`StateError` that says what is wrong with them."""
    parts: dict[str, dict[str, Tensor]] = {}
    for key, value in entries.items():
        name, _, field = str(key).rpartition("|")
        if isinstance(value, Tensor) and not has_numbers(value):
            raise refusal(f"{key!r} is a tensor on the device {value.device} with the layout {value.layout}")
        if not isinstance(value, Tensor) or value.dtype != torch.float32 or value.ndim != 1 or value.numel() < 1:
            raise refusal(f"{key!r} is not a vector of FP32 numbers")
        low_enough = value >= 0 if field == "amax_history" else value > 0
        bad = value[~(low_enough & (value <= FLT_MAX))]  # nan compares False
        if bad.numel():
            raise refusal(f"{key!r} contains {bad[0].item()}")
        parts.setdefault(name, {})[field] = value.detach().cpu().clone()
    rows: dict[str, SavedRow] = {}
    for name, fields in parts.items():
        if missing := set(_FIELDS) - fields.keys():
            raise refusal(f"it is truncated: {name} has no {missing.pop()}")
        try:
            length, maximum = _history_length(name), _recipes_maximum(name)
        except (KeyError, ValueError):
            raise refusal(f"{name} is not a row of any recipe") from None
        found = fields["amax_history"].numel()
        if fields["scale"].numel() != 1 or found != length:
            raise refusal(f"{name} has a history of length {found}, its recipe one of {length}")
        if _MAXIMUM in fields:
            maximum = fields[_MAXIMUM][0].item()
            if maximum not in FP8_MAX.values():
                raise refusal(f"{name} has a scale for the maximum {maximum:g}, which no FP8 type has")
        rows[name] = SavedRow(fields["scale"], fields["amax_history"], maximum)
    return rows


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


class LoadedRows:
    """The loaded rows that no layer has asked for, by name."""

    def __init__(self) -> None:
        self._rows: dict[str, SavedRow] = {}
        self._warned = False

    def replace(self, rows: dict[str, SavedRow]) -> None:
        """Replace the rows by those of another state dict."""
        self._rows = rows
        self._warned = False

    def __iter__(self) -> Iterator[str]:
        return iter(self._rows)

    def entries(self) -> Iterator[tuple[str, Tensor]]:
        """The entries of these rows in a state dict."""
        for name, row in self._rows.items():
            yield from row.entries(name)

    def take(self, name: str, fp8_max: float) -> tuple[Tensor, Tensor] | None:
        """Scale and history of ``name`` for a type whose maximum is ``fp8_max``; None if nothing was loaded for it."""
        row = self._rows.pop(name, None)
        return None if row is None else self.converted(name, row, fp8_max)

    def converted(self, name: str, row: SavedRow, fp8_max: float) -> tuple[Tensor, Tensor]:
        """Scale and history of ``row`` for a type whose maximum is ``fp8_max``. Warns once if that was different."""
        if row.fp8_max != fp8_max and not self._warned:
            self._warned = True
            _log.warning(
                "the loaded scaling state is from a device whose FP8 types have other maxima (%s: %g there, %g here): "
                "its scales are converted, and its amax histories are kept.",
                name.partition("|")[0],
                row.fp8_max,
                fp8_max,
            )
        return row.under(fp8_max)

    def warn_of_other_recipes(self, name: str) -> None:
        """Warn if no row was loaded for ``name`` but one was for the same tensor under another recipe."""
        place = name.partition("|")[0]
        for other in self._rows:
            if other.partition("|")[0] == place:
                _log.warning("%s: the loaded state is for recipe %s; starting afresh.", name, other.partition("|")[2])
