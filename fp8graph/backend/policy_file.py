"""Read the policy and the tables [observe] and [guard] of its file, which say how training is watched.

These are no part of a policy: they change no code of the steps that are not observed, so that they are neither in the
key of compiled code nor compared between ranks.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, cast

from fp8graph.backend.policies import PolicyLike
from fp8graph.backend.watched import Watched
from fp8graph.errors import ConfigError
from fp8graph.ir.settings import choices
from fp8graph.recipes.policy import WATCH, in_file, values_of_file

_CALLS: dict[str, Callable[..., Any]] = {"observe": Watched.observe, "guard": Watched.guard}


@dataclass(frozen=True, kw_only=True)
class PolicyFile:
    """A policy and the arguments of ``observe`` and ``guard`` beside it."""

    policy: PolicyLike | None
    watch: Mapping[str, Mapping[str, Any]]
    path: str | os.PathLike[str] | None

    @staticmethod
    def of(policy: PolicyLike | None) -> PolicyFile:
        """Of a path, or of a dict with the content of such a file.

        Raises:
            PolicyError: the file cannot be read.
            ConfigError: a table holds an unknown key.
        """
        path = policy if isinstance(policy, str | os.PathLike) else None
        values: Any = values_of_file(path) if path is not None else policy
        watch: dict[str, Any] = {}
        if isinstance(values, Mapping):
            values = cast(Mapping[str, Any], values)
            with in_file(path) if path is not None else nullcontext():
                watch = {name: _arguments(name, values[name], f"[{name}]") for name in WATCH if name in values}
            policy = {name: value for name, value in values.items() if name not in WATCH}
        return PolicyFile(policy=policy, watch=watch, path=path)

    def named(self) -> AbstractContextManager[None]:
        """Name the file in errors about its values."""
        return in_file(self.path) if self.path is not None else nullcontext()


def asked_for(**given: Any) -> dict[str, Mapping[str, Any]]:
    """The arguments ``observe`` and ``guard`` of ``Backend``, without those that are None."""
    return {name: _arguments(name, values, name) for name, values in given.items() if values is not None}


def _arguments(name: str, values: Any, where: str) -> Mapping[str, Any]:
    """The arguments of ``Backend.observe`` or ``Backend.guard``; ``where``: where they are from."""
    if not isinstance(values, Mapping):
        raise ConfigError(f"{where} must be a table of arguments of Backend.{name}, not {values!r}.")
    known = [key for key in inspect.signature(_CALLS[name]).parameters if key != "self"]
    values = cast(Mapping[str, Any], values)
    for key in values:
        if key not in known:
            raise ConfigError(f"{where} has no key {key!r}{choices('Keys', str(key), known)}")
    return values
