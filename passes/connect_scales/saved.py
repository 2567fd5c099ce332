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
from fp8graph.runtime.state_dict import has_numbers, refusal, shown

_log = logging.getLogger("fp8graph")

_FIELDS: Final = ("scale", "amax_history")
_MAXIMUM: Final = "fp8_max"


@dataclass(frozen=True)
class SavedRow:
    """The state of one tensor outside any page, on the CPU."""

    scale: Tensor  # FP32 [1]
    amax_history: Tensor  # FP32 [length]
    fp8_max: float  # maximum of the type that the scale is for
    reduced: bool = True  # its recipe reduces amaxes over ranks, so that all have this scale

    @staticmethod
    def of(row: Tensor, fp8_max: float, *, reduced: bool = True) -> SavedRow:
        """Return a copy of a row of a page."""
        row = row.detach().cpu()
        return SavedRow(row[SCALE : SCALE + 1].clone(), row[history.HEADER :].clone(), fp8_max, reduced)

    def under(self, fp8_max: float, length: int | None = None) -> tuple[Tensor, Tensor]:
        """Scale and history for a type whose maximum is ``fp8_max``. Amaxes do not depend on it.

        Args:
            fp8_max: the maximum.
            length: of the history; None: as it is.
        """
        amaxes = self.amax_history if length is None else history.of_length(self.amax_history, length)
        return rescaled(self.scale, self.fp8_max, fp8_max), amaxes

    def entries(self, name: str) -> Iterator[tuple[str, Tensor]]:
        """Its entries in a state dict."""
        yield f"{name}|scale", self.scale.clone()
        yield f"{name}|amax_history", self.amax_history.clone()
        if self.fp8_max != _recipes_maximum(name):
            yield f"{name}|{_MAXIMUM}", torch.tensor([self.fp8_max])


def rescaled(scale: Tensor, saved: float, wanted: float) -> Tensor:
    """Convert a scale to another FP8 maximum, rounding once. Its reciprocal stays finite."""
    return (scale.double() * (wanted / saved)).clamp(torch.finfo(torch.float32).tiny, FLT_MAX).float()


def recipe_text(recipe: DelayedScaling) -> str:
    """Return the part of a name that identifies a recipe: the recipe's fields that differ from the defaults."""
    fields = [(field.name, getattr(recipe, field.name), field.default) for field in dataclasses.fields(recipe)]
    changed = [f"{name}={_plain(value)}" for name, value, default in fields if value != default]
    return f"delayed({','.join(changed)})"


def _plain(value: Any) -> str:
    if callable(value):
        return f"{value.__module__}.{value.__qualname__}"
    return str(getattr(value, "name", value)).replace(" ", "")


def recognizes(name: str) -> bool:
    """Return whether a state dict's entry of this name is part of a row."""
    row, _, field = name.rpartition("|")
    return field in (*_FIELDS, _MAXIMUM) and "|" in row


def checked(entries: Mapping[str, Any]) -> dict[str, SavedRow]:
    """Return the rows in entries of a state dict by name, or a :class:`StateError` that says what is wrong with them.

    Sizes are compared before numbers are read: a tensor of a few bytes may claim any size.
    """
    parts: dict[str, dict[str, Tensor]] = {}
    for key, value in entries.items():
        name, _, field = str(key).rpartition("|")
        if isinstance(value, Tensor) and not has_numbers(value):
            raise refusal(f"{shown(key)!r} is a tensor on the device {value.device} with the layout {value.layout}")
        if not isinstance(value, Tensor) or value.dtype != torch.float32 or value.ndim != 1 or value.numel() < 1:
            raise refusal(f"{shown(key)!r} is not a vector of FP32 numbers")
        try:
            length = _history_length(name) if field == "amax_history" else 1
            _recipes_maximum(name)
        except (KeyError, ValueError):
            raise refusal(f"{shown(name)} is not a row of any recipe") from None
        if value.numel() != length:
            kind = "a history" if field == "amax_history" else f"a {field}"
            raise refusal(f"{shown(name)} has {kind} of length {value.numel()}, its recipe one of {length}")
        # a scale is multiplied with, and its reciprocal, which is infinite for the smallest numbers
        good = value >= 0 if field == "amax_history" else (value > 0) & (value.reciprocal() <= FLT_MAX)
        bad = value[~(good & (value <= FLT_MAX))]  # nan compares False
        if bad.numel():
            raise refusal(f"{shown(key)!r} contains {bad[0].item()}")
        parts.setdefault(name, {})[field] = value.detach().cpu().clone()
    rows: dict[str, SavedRow] = {}
    for name, fields in parts.items():
        if missing := set(_FIELDS) - fields.keys():
            raise refusal(f"it is truncated: {shown(name)} has no {missing.pop()}")
        maximum = _recipes_maximum(name)
        if _MAXIMUM in fields:
            maximum = fields[_MAXIMUM][0].item()
            if maximum not in FP8_MAX.values():
                raise refusal(f"{shown(name)} has a scale for the maximum {maximum:g}, which no FP8 type has")
        rows[name] = SavedRow(fields["scale"], fields["amax_history"], maximum, _reduced(name))
    return rows


def _recipes_maximum(name: str) -> float:
    """Return the FP8 maximum of the type that the recipe in a row's name gives to its operand."""
    operand = cast(OperandName, name.partition("|")[0].rpartition(".")[2])
    return FP8_MAX[Format[_setting(name, "fp8_format", DelayedScaling().fp8_format.name)].dtype(operand)]


def _history_length(name: str) -> int:
    """Return the history length that a row's name states. Raises ``ValueError`` for one that no recipe has."""
    length = int(_setting(name, "amax_history_len", str(DelayedScaling().amax_history_len)))
    return DelayedScaling(amax_history_len=length).amax_history_len


def _reduced(name: str) -> bool:
    """Return whether the recipe in a row's name reduces amaxes."""
    return _setting(name, "reduce_amax", "True") == "True"


def _setting(name: str, field: str, default: str) -> str:
    """Return the value of ``field`` in the recipe of a row's name, which leaves out default values."""
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
    if ranks > 1 and not all(map(_reduced, names)):
        return "DelayedScaling(reduce_amax=False) lets each rank have its own scales"
    smallest = min((1 if group is None else distributed.number_of_ranks(group) for group in groups), default=ranks)
    if smallest < ranks:
        return f"its amaxes were reduced over {smallest} of {ranks} ranks (autocast's amax_reduction_group)"
    return ""


class LoadedRows:
    """The loaded rows that no layer has asked for, by name."""

    def __init__(self) -> None:
        self._rows: dict[str, SavedRow] = {}
        self._passed_on: dict[str, SavedRow] = {}  # to a row of the same tensor under another recipe
        self._of_place: dict[str, list[str]] = {}
        self._warned = False

    def replace(self, rows: dict[str, SavedRow]) -> None:
        """Replace the rows by those of another state dict."""
        self._rows, self._passed_on, self._of_place = rows, {}, {}
        for name in rows:
            self._of_place.setdefault(name.partition("|")[0], []).append(name)
        self._warned = False

    def __iter__(self) -> Iterator[str]:
        return iter(self._rows)

    def entries(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the entries of these rows in a state dict."""
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
                shown(name.partition("|")[0]),
                row.fp8_max,
                fp8_max,
            )
        return row.under(fp8_max)

    def under_another_recipe(self, name: str, length: int) -> SavedRow | None:
        """Return a row of the same tensor as ``name``, under another recipe; None if there is none.

        Of several it is one with histories of ``length``, else the last: states used to have rows of earlier recipes.
        """
        kept, chosen = None, ""
        for other in self._of_place.get(name.partition("|")[0], ()):
            if (row := self._rows.get(other) or self._passed_on.get(other)) is not None:
                if kept is None or row.amax_history.numel() == length or kept.amax_history.numel() != length:
                    kept, chosen = row, other
        if kept is not None:
            self._passed_on[chosen] = kept
            self._rows.pop(chosen, None)
        return kept
