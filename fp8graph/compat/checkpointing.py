"""Activation checkpointing: the forwards that are being checkpointed, and the one that autograd runs again.

Torch passes no word of either to the code it calls. Both can be identified without a guess:

* Not reentrant: ``torch.utils.checkpoint`` keeps one object per checkpointed forward. The hooks for saved tensors that
  it sets in forward hold that object, and so do those that it sets around the repetition.
* Reentrant (torch's ``CheckpointFunction``, and functions of libraries that work like it): the ``ctx`` of an
  ``autograd.Function`` is one object. Its ``forward`` is on Python's stack, and in ``backward`` it is the node that
  autograd evaluates. A call in a backward repeats a call of the forward of the same ``ctx``.
"""

from __future__ import annotations

import contextlib
import inspect
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any, Final, NamedTuple, cast

import torch
from torch.autograd.function import FunctionCtx
from torch.utils._python_dispatch import (
    _disable_current_modes,  # pyright: ignore[reportPrivateUsage]
    _len_torch_dispatch_stack,  # pyright: ignore[reportPrivateUsage]
)

_autograd: Final[Any] = cast(Any, torch._C)._autograd


class Repetition(NamedTuple):
    """One of the times that autograd runs a checkpointed forward again."""

    forward: Any  # lives as long as the forward's autograd graph
    number: Any  # hashable: different for each backward


class Checkpointing(NamedTuple):
    """The position of a call among checkpointed forwards."""

    repeats: Repetition | None  # the forward that it is a part of runs again
    running: list[Any]  # forwards around the call, as in ``Repetition.forward``; a repeated one is not among them


def matters() -> bool:
    """Say whether a call may be a part of a checkpointed forward, or of its repetition. Called in each call: 0.3 us."""
    if torch._C._current_graph_task_id() != -1 or _autograd._top_saved_tensors_default_hooks(True) is not None:
        return True
    return not torch._C._is_fwd_grad_enabled() and _in_forward_of_function()


def graph_task() -> int:
    """Return the number of the backward that this thread is in; -1 outside of backward. A nested one has another
    number.
    """
    return torch._C._current_graph_task_id()


def now() -> Checkpointing:
    """Return the position of the present call."""
    repeats, running, task = None, list[Any](), torch._C._current_graph_task_id()
    for hook in _pack_hooks():
        variables = _variables(hook)
        if "gid" in variables:
            # an int is the backward in which autograd unpacked a saved tensor. A nested backward is more recent
            if not isinstance(variables["gid"], int) or task in (-1, variables["gid"]):
                repeats = Repetition(variables["target_frame_ref"](), variables["gid"])
            break
        if "frame" in variables:
            running.append(variables["frame"])
    if repeats is None and task != -1 and isinstance(node := cast(Any, torch._C._current_autograd_node()), FunctionCtx):
        repeats = Repetition(node, task)
    if _in_forward_of_function():
        running += _functions()
    return Checkpointing(repeats, running)


def without_modes() -> AbstractContextManager[Any]:
    """No dispatch mode inside a ``with``.

    That of selective checkpointing gives each op of a repetition the result of the forward's op of that number: it may
    see nothing that happens once, or that happens for the sake of the repetition.
    """
    return _disable_current_modes() if _len_torch_dispatch_stack() else contextlib.nullcontext()


def _in_forward_of_function() -> bool:
    """Return whether the ``forward`` of an ``autograd.Function`` runs: it alone, but for inference mode, has no forward
    AD.
    """
    return not (torch._C._is_fwd_grad_enabled() or torch.is_inference_mode_enabled())


def _functions() -> Iterator[Any]:
    """Yield the contexts of the ``autograd.Function`` objects whose ``forward`` is on Python's stack,
    innermost first.
    """
    frame = sys._getframe()
    while frame is not None:
        code = frame.f_code
        if code.co_name == "forward" and code.co_varnames[:1] == ("ctx",):
            if isinstance(ctx := frame.f_locals.get("ctx"), FunctionCtx):
                yield ctx
        frame = frame.f_back


def _pack_hooks() -> list[Any]:
    """Return the hooks that are called for tensors that autograd saves, innermost first. Torch shows only the
    innermost.
    """
    pairs: list[tuple[Any, Any]] = []
    if not _autograd._saved_tensors_hooks_is_enabled():  # none could be put back
        return []
    try:
        while (pair := _autograd._top_saved_tensors_default_hooks(True)) is not None:
            pairs.append(pair)
            _autograd._pop_saved_tensors_default_hooks()
    finally:
        for pair in reversed(pairs):
            _autograd._push_saved_tensors_default_hooks(*pair)
    return [pack for pack, _ in pairs]


def _variables(hook: Any) -> dict[str, Any]:
    """Return the variables that a pack hook of torch.utils.checkpoint holds; none for any other hook.

    ``frame`` in forward; ``target_frame_ref`` and ``gid`` in its repetition (torch 2.11 to 2.15).
    """
    function = inspect.unwrap(hook)  # from torch 2.13 on, one of them is wrapped in ``torch._dynamo.disable``
    if getattr(function, "__module__", None) != "torch.utils.checkpoint" or function.__closure__ is None:
        return {}
    cells = zip(function.__code__.co_freevars, function.__closure__, strict=True)
    return {name: cell.cell_contents for name, cell in cells}
