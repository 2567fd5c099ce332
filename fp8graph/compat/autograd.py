"""Autograd and optimizers: backward, hooks, the versions of tensors."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from operator import attrgetter
from typing import Any, Final, cast

import torch
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_post_hook

_hooks_of_the_dead: Final[list[Any]] = []

# The number of writes to a tensor (an inference tensor has no version). Called for each parameter in each call.
version: Final[Callable[[Tensor], int]] = attrgetter("_version")


def after_optimizer_steps(owner: object, hook: Callable[..., None]) -> None:
    """Call ``hook(optimizer, args, kwargs)`` after each step of any optimizer, until ``owner`` is gone.

    Torch iterates over its dict of hooks. The garbage collector may find ``owner`` while one of them runs, when no
    hook may be removed: the hook is then removed when the next one is added.
    """
    while _hooks_of_the_dead:
        _hooks_of_the_dead.pop().remove()
    weakref.finalize(owner, _hooks_of_the_dead.append, register_optimizer_step_post_hook(hook))


def has_gradient_hooks(parameter: Tensor) -> bool:
    """Whether hooks of Python wait for the gradient of a leaf. (Those of DDP are C++, and cannot be seen.)"""
    return bool(parameter._backward_hooks or getattr(parameter, "_post_accumulate_grad_hooks", None))


def in_backward() -> bool:
    """Whether autograd runs a backward on this thread: a forward that is called now is a recomputation."""
    return torch._C._current_graph_task_id() != -1


def in_transform() -> bool:
    """Whether a transform of torch.func (vmap, grad, ...) runs the caller. Compiled code runs in eager there."""
    return cast(Any, torch._C)._functorch.peek_interpreter_stack() is not None


def saved_tensors_hooks() -> bool:
    """Whether hooks for saved tensors are set, as torch.utils.checkpoint (not the reentrant one) does."""
    return cast(Any, torch._C)._autograd._top_saved_tensors_default_hooks(True) is not None


def unnoticed_writes(tensors: Tensor | Sequence[Tensor]) -> AbstractContextManager[None]:
    """Hide writes to ``tensors`` from autograd inside a ``with``: saved tensors may read the new values in backward."""
    tensors = tensors if isinstance(tensors, Tensor) else tuple(tensors)
    return cast(AbstractContextManager[None], torch.autograd._unsafe_preserve_version_counter(tensors))


def without_autocast() -> AbstractContextManager[None]:
    """No autocast of any device inside a ``with``; ``torch.autocast`` turns off one."""
    return cast(AbstractContextManager[None], torch._C._DisableAutocast())
