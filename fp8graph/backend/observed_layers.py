"""The layers that somebody asked to measure: their globs, and those that match no layer."""

from __future__ import annotations

import fnmatch
import logging
from collections.abc import Callable, Collection, Sequence
from typing import Any

from fp8graph.errors import ConfigError, did_you_mean
from fp8graph.report.tables import sites

_log = logging.getLogger("fp8graph")


def texts(call: str, name: str, value: str | Sequence[str]) -> tuple[str, ...]:
    """The strings of an argument that is one string or a list of them."""
    given: Any = (value,) if isinstance(value, str) else value
    if not isinstance(given, Sequence) or not given or not all(isinstance(text, str) for text in given):
        raise ConfigError(f"{call}({name}={value!r}): expected a string or a list of strings.")
    return tuple(given)


def check_globs(call: str, patterns: Sequence[str], known: Collection[str]) -> None:
    """Raise for a glob that matches none of the layers of the bound models.

    Args:
        known: the names of all their modules; none if no model is bound.

    Raises:
        ConfigError: with the globs or names that may have been meant.
    """
    names = sorted(filter(None, known))
    for pattern in patterns if names else ():
        if not fnmatch.filter(known, pattern):
            anywhere = f"*.{pattern}"
            hint = did_you_mean(pattern, [anywhere] if fnmatch.filter(names, anywhere) else names)
            raise ConfigError(
                f"{call}(layers=[{pattern!r}]) matches no layer of the model.{hint} Its modules: {sites(names)}."
            )


class UnmatchedLayers:
    """Says once, after the first observed step, which globs match no layer.

    Args:
        known: the layers of all graphs.
    """

    def __init__(self, call: str, patterns: Sequence[str], known: Callable[[], Collection[str]]) -> None:
        self._call, self._patterns, self._known = call, patterns, known
        self._checked = False

    def __call__(self) -> None:
        if self._checked:
            return
        self._checked = True
        known = sorted(self._known())
        for pattern in self._patterns:
            if not fnmatch.filter(known, pattern):
                _log.warning(
                    "%s(layers=[%r]) matches no layer, so nothing is measured for it. Layers: %s.",
                    self._call, pattern, sites(known) or "none",
                )  # fmt: skip
