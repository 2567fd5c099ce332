"""The scaling state as plain tensors under plain names, and back."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Final

import torch
from torch import Tensor

from fp8graph.errors import StateError
from fp8graph.numerics import history
from fp8graph.recipes import FLT_MAX, DelayedScaling
from fp8graph.runtime.checkpoint import ScalingState

VERSION: Final = 1
VERSION_KEY: Final = "fp8graph.state_version"
_FIELDS: Final = ("scale", "amax_history")


def numbers_of(row: Tensor) -> tuple[Tensor, Tensor]:
    """Copies of scale [1] and history [length] of a row, on the CPU."""
    row = row.detach().cpu()
    return row[:1].clone(), row[history.HEADER :].clone()


def recipe_text(recipe: DelayedScaling) -> str:
    """The part of a name that stands for a recipe: its fields that differ from the defaults."""
    fields = [(field.name, getattr(recipe, field.name), field.default) for field in dataclasses.fields(recipe)]
    changed = [f"{name}={_plain(value)}" for name, value, default in fields if value != default]
    return f"delayed({','.join(changed)})"


def _plain(value: Any) -> str:
    if callable(value):
        return f"{value.__module__}.{value.__qualname__}"
    return str(getattr(value, "name", value)).replace(" ", "")


def checked(state_dict: Mapping[str, Any] | ScalingState) -> dict[str, tuple[Tensor, Tensor]]:
    """The entries of a state dict by name, or a :class:`StateError` that says what is wrong with it."""

    def refuse(problem: str) -> StateError:
        return StateError(f"not a valid fp8graph state dict: {problem}. Nothing was loaded.")

    if not isinstance(state_dict, Mapping | ScalingState):
        raise refuse(f"expected a mapping, not {type(state_dict).__name__}")
    version = dict(state_dict).get(VERSION_KEY)
    if not isinstance(version, Tensor) or version.numel() != 1:
        raise refuse(f"{VERSION_KEY!r} is missing")
    if int(version.item()) != VERSION:
        raise refuse(f"it has version {int(version.item())}, but this fp8graph reads version {VERSION}")
    parts: dict[str, dict[str, Tensor]] = {}
    for key, value in state_dict.items():
        if key == VERSION_KEY:
            continue
        name, _, field = str(key).rpartition("|")
        if field not in _FIELDS or "|" not in name:
            raise refuse(f"unknown entry {key!r}")
        if not isinstance(value, Tensor) or value.dtype != torch.float32 or value.ndim != 1 or value.numel() < 1:
            raise refuse(f"{key!r} is not a vector of FP32 numbers")
        low_enough = value > 0 if field == "scale" else value >= 0
        bad = value[~(low_enough & (value <= FLT_MAX))]  # nan compares False
        if bad.numel():
            raise refuse(f"{key!r} contains {bad[0].item()}")
        parts.setdefault(name, {})[field] = value.detach().cpu().clone()
    for name, fields in parts.items():
        if missing := set(_FIELDS) - fields.keys():
            raise refuse(f"it is truncated: {name} has no {missing.pop()}")
        length = _history_length(name)
        if fields["scale"].numel() != 1 or fields["amax_history"].numel() != length:
            raise refuse(f"{name} has a history of length {fields['amax_history'].numel()}, its recipe one of {length}")
    return {name: (fields["scale"], fields["amax_history"]) for name, fields in parts.items()}


def _history_length(name: str) -> int:
    """The history length that a row's name states."""
    settings = name.rpartition("|")[2].removeprefix("delayed(").removesuffix(")").split(",")
    for setting in settings:
        field, _, value = setting.partition("=")
        if field == "amax_history_len" and value.isdigit():
            return int(value)
    return DelayedScaling().amax_history_len
