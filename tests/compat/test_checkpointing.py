"""checkpointing: which forwards are checkpointed, and which one runs again, without a guess."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx
from torch.utils.checkpoint import checkpoint

from fp8graph.compat import checkpointing
from fp8graph.compat.checkpointing import Checkpointing
from helpers import first_fast, in_one_test


class Recompute(torch.autograd.Function):
    """Reentrant checkpointing as libraries write their own."""

    @staticmethod
    def forward(ctx: Any, function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        ctx.function = function
        ctx.save_for_backward(x)
        with torch.no_grad():
            return function(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # pyright: ignore
        (x,) = ctx.saved_tensors
        x = x.detach().requires_grad_()
        with torch.enable_grad():
            y = ctx.function(x)
        torch.autograd.backward(y, grad)
        return None, x.grad


def checkpointed(function: Callable[[Tensor], Tensor], how: str) -> Callable[[Tensor], Tensor]:
    if how == "own":
        return lambda x: Recompute.apply(function, x)  # pyright: ignore
    return lambda x: checkpoint(function, x, use_reentrant=how == "reentrant")  # pyright: ignore


class Seen(list[Checkpointing]):
    """The positions at which it was called."""

    def __call__(self, x: Tensor) -> Tensor:
        assert checkpointing.matters()
        self.append(checkpointing.now())
        return x.sin()


WAYS = ("not reentrant", "reentrant", "own")


@pytest.mark.parametrize("how", WAYS)
def test_a_repetition_is_that_of_its_forward(how: str) -> None:
    seen, one = Seen(), torch.ones(3, requires_grad=True)
    ys = [checkpointed(seen, how)(one) for _ in range(2)]
    (a,), (b,) = (position.running for position in seen)
    assert a is not b
    assert [position.repeats for position in seen] == [None, None]
    ys[0].sum().backward(retain_graph=True)
    ys[0].sum().backward()
    ys[1].sum().backward()
    repeats = [position.repeats for position in seen[2:] if position.repeats is not None]
    assert [repetition.forward is a for repetition in repeats] == [True, True, False]
    assert repeats[2].forward is b
    assert len({repetition.number for repetition in repeats}) == 3
    assert [position.running for position in seen[2:]] == [[], [], []]


@in_one_test("outer", WAYS)
@in_one_test("inner", WAYS)
def test_nested(outer: str, inner: str) -> None:
    """A part that runs again in backward was seen before; a part that is checkpointed again is one more forward."""
    seen, x = Seen(), torch.ones(3, requires_grad=True)
    checkpointed(lambda x: checkpointed(seen, inner)(x).sin(), outer)(x).sum().backward()
    assert len(seen) == 3
    without_gradients = outer != "not reentrant"  # there is nothing to checkpoint for the inner one
    assert len(seen[0].running) == (1 if without_gradients and inner == "not reentrant" else 2)
    known = list(seen[0].running)
    for position in seen[1:]:
        assert position.repeats is not None
        assert any(position.repeats.forward is forward for forward in known)
        known += position.running
    assert [len(position.running) for position in seen[1:]] == [1, 0]


def test_hooks_of_the_user_hide_nothing_and_stay() -> None:
    seen, packed, x = Seen(), list[Tensor](), torch.ones(3, requires_grad=True)

    def pack(x: Tensor) -> Tensor:
        packed.append(x)
        return x

    def hooked(x: Tensor) -> Tensor:
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
            x = seen(x)
        return x.sin()

    checkpoint(hooked, x, use_reentrant=False).sum().backward()  # pyright: ignore
    first, again = seen
    assert again.repeats is not None
    assert again.repeats.forward is first.running[0]
    assert len(packed) == 2  # the hooks were on the stack again after each look at it


def test_hooks_that_are_switched_off_stay() -> None:
    """Torch does so while it traces."""
    packed, x = list[Tensor](), torch.ones(3, requires_grad=True)
    switches: Any = torch._C._autograd  # pyright: ignore
    with torch.autograd.graph.saved_tensors_hooks(lambda x: (packed.append(x), x)[1], lambda x: x):
        switches._saved_tensors_hooks_disable("not now", False)
        found = checkpointing.now()
        switches._saved_tensors_hooks_enable()
        x.sin()
    assert found == Checkpointing(None, [])
    assert len(packed) == 1


def test_a_saved_tensor_may_be_read_outside_of_backward() -> None:
    seen, x = Seen(), torch.ones(3, requires_grad=True)
    y = checkpoint(seen, x, use_reentrant=False)
    _ = y.grad_fn._saved_self  # pyright: ignore
    assert seen[1].repeats is not None
    assert seen[1].repeats.forward is seen[0].running[0]


def test_a_backward_in_a_recomputation_is_a_recomputation_of_its_own() -> None:
    """The hooks of the outer one are still there when the inner one runs."""
    seen, x = Seen(), torch.ones(3, requires_grad=True)

    def outer(x: Tensor) -> Tensor:
        y: Any = x.detach().requires_grad_()
        checkpointed(seen, "reentrant")(y).sum().backward()
        return x.sin() * y.grad

    checkpoint(outer, x, use_reentrant=False).sum().backward()  # pyright: ignore
    *_, before, last = seen
    (context,) = before.running
    assert isinstance(context, FunctionCtx)
    assert before.repeats is not None
    assert last.repeats is not None
    assert before.repeats.forward is seen[0].running[0]  # the frame of torch.utils.checkpoint
    assert last.repeats.forward is context


@first_fast("how", WAYS)
def test_nothing_is_kept_alive(how: str) -> None:
    seen, x = Seen(), torch.ones(3, requires_grad=True)
    y = checkpointed(seen, how)(x)
    forward = weakref.ref(seen.pop().running[0])
    assert forward() is not None
    del y
    gc.collect()
    assert forward() is None


def test_other_calls_do_not_matter() -> None:
    found: list[bool] = []

    def call(x: Tensor) -> Tensor:
        found.append(checkpointing.matters())
        return x * 2

    x = torch.ones(3, requires_grad=True)
    call(x).sum().backward()
    with torch.no_grad():
        call(x)
    with torch.inference_mode():
        call(x)
    assert found == [False] * 3
    x.register_hook(call)
    x.sum().backward()
    assert found[3:] == [True]
    assert checkpointing.now() == Checkpointing(None, [])
