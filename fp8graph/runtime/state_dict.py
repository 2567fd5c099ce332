"""Convert scaling state to plain tensors under plain names, and back.

Each row has a scale and an amax history. A scale maps an amax to the maximum of an FP8 type: the recipe's own (448 for
E4M3), unless the row has a third entry, "fp8_max", because the device uses another type in its place.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final, cast

import torch
from torch import Tensor

from fp8graph.errors import StateError
from fp8graph.numerics import history
from fp8graph.recipes import FLT_MAX, FP8_MAX, DelayedScaling, Format, OperandName
from fp8graph.runtime.checkpoint import ScalingState

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
    """What a state dict has of the step of training."""
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
    """What a state dict has of the rules that a guard applied: nothing, if there are none."""
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
