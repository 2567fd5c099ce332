"""The errors that users can get. Each says where it happened, what was found and what to do.

They derive from torch's ``ShortenTraceback`` so that Dynamo hands them to the user as themselves
instead of wrapping them in ``BackendCompilerFailed`` (tests/test_errors.py keeps this fact).
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from typing import Any, Final, cast

import torch
from torch._dynamo.exc import ShortenTraceback  # compat stands above errors

from fp8graph.words import did_you_mean as did_you_mean

__all__ = [
    "CheckpointError",
    "ConfigError",
    "Fp8CoverageError",
    "Fp8GraphError",
    "PolicyError",
    "StateError",
    "UnsupportedRecipeError",
]

_LONGEST: Final = 10_000  # characters of a message about an argument or a file


class Fp8GraphError(ShortenTraceback):
    """Base of every error that fp8graph raises.

    ``except fp8graph.Fp8GraphError`` catches all of them. The message says where it happened, what was found and what
    to do. Errors about an argument are a ``ValueError``, too. Characters that would control a terminal are escaped.
    """

    def __init__(self, message: str) -> None:
        # first_useful_frame=None: "show the traceback as it is" to torch.
        super().__init__("\n".join(map(printable, message.split("\n"))), first_useful_frame=None)

    def __reduce__(self) -> tuple[type[Fp8GraphError], tuple[str]]:
        return type(self), (str(self),)


class ConfigError(Fp8GraphError, ValueError):
    """An argument, option, target, mesh or file that cannot be used as given. A long message is cut.

    Raised where the argument is given, before anything is compiled: by ``Backend``, ``compile``, ``explain``, ``tune``,
    ``planning``, and by ``torch.compile`` for options by name.
    """

    def __init__(self, message: str) -> None:
        super().__init__(message if len(message) <= _LONGEST else f"{message[:_LONGEST]} ... (cut)")


class PolicyError(ConfigError):
    """A policy, rule or policy file that cannot be used as written, or on which ranks do not agree.

    Raised by ``Policy``, ``Rule`` and ``Policy.load``; and, on all ranks, when a backend compiles its first graph and
    the ranks' policies, options or versions differ.
    """


class UnsupportedRecipeError(ConfigError):
    """A recipe that does not exist, or whose fields ask for something that no hardware supports.

    Raised where a recipe is made or named. A recipe that this machine does not multiply is not an error: it is
    emulated, and the report says so.
    """


class CheckpointError(ConfigError):
    """A checkpoint that cannot be read or written as asked: a damaged file, tensors that do not fit, an unknown format.

    Raised by ``load_checkpoint``, ``export``, ``quantized_state``, ``Policy.from_checkpoint`` and ``fp8graph inspect``,
    with file and tensor. The model, or the folder that was to be written, is then as it was before.
    """


class Fp8CoverageError(Fp8GraphError):
    """A GEMM that the user asked for in FP8 does not run in FP8.

    Raised by ``report.check()``, and in strict mode while a graph is compiled or at a later call: a GEMM or attention
    that a rule or region names is in high precision although FP8 would pay, a rule matched nothing, or code ran in
    eager. The message lists every case.
    """


class StateError(Fp8GraphError):
    """Scaling state that does not fit: names, shapes, versions or values; or ranks that do not share theirs in step.

    Raised by ``Backend.state_dict`` and ``load_state_dict``, by the callbacks of ``fp8graph.integrations``, and by
    ``torch.distributed.checkpoint`` through them. Nothing is loaded then. And by a call of a model or an optimizer's
    step that reduces amaxes of delayed scaling, if the ranks do not call equally often.
    """


def expect(call: str, argument: str, value: object, kinds: type | tuple[type, ...], wanted: str) -> None:
    """Check the type of an argument of a public function; ``wanted``: in words.

    Raises:
        ConfigError: ``value`` is of none of ``kinds``.
    """
    if not isinstance(value, kinds):
        shown = repr(value) if value is None or isinstance(value, (str, bytes, int, float)) else type(value).__name__
        raise ConfigError(f"{call}({argument}={shown:.100}): {argument} must be {wanted}.")


def expect_path(call: str, argument: str, value: object) -> None:
    """:func:`expect` the path of a file or folder, which a file can have."""
    expect(call, argument, value, (str, os.PathLike), "a path")
    path: Any = os.fspath(cast("os.PathLike[Any] | str", value))
    expect(call, argument, path, str, "a path")
    if why := why_no_path(path):
        raise ConfigError(f"{call}({argument}={path!r:.100}): {argument} must be a path; this {why}.")


def why_no_path(path: str) -> str:
    """Return why no file can have this path, whatever the system: it "has a NUL"; or nothing."""
    if "\0" in path:
        return "has a NUL"
    try:
        os.fsencode(path)
    except UnicodeEncodeError:
        return "has half of a pair of UTF-16"
    return ""


def expect_batches(call: str, argument: str, value: object) -> None:
    """:func:`expect` batches. One batch is not a list of batches: its rows or keys would be taken for them."""
    wanted = "a list of batches, or another iterable"
    expect(call, argument, value, Iterable, wanted)
    if isinstance(value, (Mapping, torch.Tensor, str)):
        raise ConfigError(f"{call}({argument}=...): {argument} must be {wanted}; this is one batch. Write [batch].")


def expect_batch(call: str, argument: str, value: object) -> None:
    """:func:`expect` one batch of those that :func:`expect_batches` let pass."""
    expect(call, f"{argument}=[...], batch", value, (Mapping, tuple, list, torch.Tensor), "a dict, a tuple or a tensor")


def printable(text: str) -> str:
    """``text`` in one line, with escapes for characters that are not printable, which names in files may have."""
    if text.isprintable():
        return text
    return "".join(one if one.isprintable() else one.encode("unicode_escape").decode() for one in text)
