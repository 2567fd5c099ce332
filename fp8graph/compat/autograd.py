"""Autograd and optimizers: backward, hooks, the versions of tensors."""

from __future__ import annotations

import functools
import sys
import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
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
    """Return whether hooks of Python wait for the gradient of a leaf. (Those of DDP are C++, and cannot be seen.)"""
    return bool(parameter._backward_hooks or getattr(parameter, "_post_accumulate_grad_hooks", None))


def has_tensor_hooks(tensor: Tensor) -> bool:
    """Say whether hooks wait for the gradient of ``tensor`` on its way (those for when it has arrived do not count)."""
    return bool(tensor._backward_hooks)


def running_node() -> Any:
    """Return the node that the backward of this thread runs, also in its hooks; None outside of one, in compiled
    autograd.
    """
    return torch._C._current_autograd_node()


def accumulator(parameter: Tensor) -> Any:
    """Return the node that adds to the ``.grad`` of a leaf."""
    return torch.autograd.graph.get_gradient_edge(parameter).node


def accumulates(parameter: Tensor) -> bool:
    """Return whether the backward that runs adds to the ``.grad`` of a leaf.

    It does not if it was called for other tensors (``inputs=``), or by ``torch.autograd.grad``.
    """
    if torch._C._current_graph_task_id() == -1 or not parameter.requires_grad:  # compiled autograd runs it
        return True
    try:
        return torch._C._will_engine_execute_node(accumulator(parameter))
    except RuntimeError:  # torch.autograd.grad returns this gradient, about which the engine does not answer
        return False


def uses(owner: object, name: str) -> tuple[int, ...]:
    """Return the number of references to a tensor, an attribute of ``owner``: of Python, of C++, and those to its
    memory.

    Only the difference from the same tensor at another time, or from another one that is held alike, means something.
    """
    tensor: Tensor = getattr(owner, name)
    return sys.getrefcount(tensor), cast(Any, tensor)._use_count(), _uses_of_memory(tensor)


def _uses_of_memory(tensor: Tensor) -> int:
    return cast(Any, torch._C)._storage_Use_Count(tensor.untyped_storage()._cdata)


@functools.cache
def _uses_of_own_memory() -> int:
    """Return the uses of the memory of a tensor that nothing else reads."""
    return _uses_of_memory(torch.ones(1))


def has_memory_alone(tensor: Tensor) -> bool:
    """Return whether no other tensor, and no array of another library that was made of it, has the memory of
    ``tensor``.
    """
    return _uses_of_memory(tensor) == _uses_of_own_memory() and tensor.nbytes == tensor.untyped_storage().nbytes()


@functools.cache
def uses_of_a_grad() -> tuple[int, ...]:
    """Return the ``uses`` of the ``.grad`` of a parameter that nobody else has."""
    parameter = torch.nn.Parameter(torch.ones(1))
    parameter.grad = torch.ones(1)
    return uses(parameter, "grad")


def in_backward() -> bool:
    """Return whether autograd runs a backward on this thread: a forward that is called now is a recomputation."""
    return torch._C._current_graph_task_id() != -1


def in_transform() -> bool:
    """Return whether a transform of torch.func (vmap, grad, ...) runs the caller. Compiled code runs in eager there."""
    return cast(Any, torch._C)._functorch.peek_interpreter_stack() is not None


def saved_tensors_hooks() -> bool:
    """Return whether hooks for saved tensors are set, as torch.utils.checkpoint (not the reentrant one) does."""
    return cast(Any, torch._C)._autograd._top_saved_tensors_default_hooks(True) is not None


@dataclass(frozen=True)
class _Kept:
    tensor: Tensor


def saved_as_they_are(tensors: Sequence[Tensor]) -> AbstractContextManager[None]:
    """Keep ``tensors`` from the hooks for saved tensors that are set, inside a ``with``; other tensors they get."""
    pack, unpack = cast(Any, torch._C)._autograd._top_saved_tensors_default_hooks(True)
    memory = {tensor.data_ptr() for tensor in tensors}

    def keep(tensor: Tensor) -> Any:
        return _Kept(tensor) if tensor.data_ptr() in memory else pack(tensor)

    def give(saved: Any) -> Tensor:
        return saved.tensor if isinstance(saved, _Kept) else unpack(saved)

    return cast(AbstractContextManager[None], torch.autograd.graph.saved_tensors_hooks(keep, give))


def unnoticed_writes(tensors: Tensor | Sequence[Tensor]) -> AbstractContextManager[None]:
    """Hide writes to ``tensors`` from autograd inside a ``with``: saved tensors may read the new values in backward."""
    tensors = tensors if isinstance(tensors, Tensor) else tuple(tensors)
    return cast(AbstractContextManager[None], torch.autograd._unsafe_preserve_version_counter(tensors))


def without_autocast() -> AbstractContextManager[None]:
    """No autocast of any device inside a ``with``; ``torch.autocast`` turns off one."""
    return cast(AbstractContextManager[None], torch._C._DisableAutocast())
