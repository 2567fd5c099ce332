"""Fake tensors, and the contexts in which they are traced."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any, cast

import torch
from torch import fx
from torch._guards import TracingContext as TracingContext
from torch._guards import detect_fake_mode as detect_fake_mode
from torch._guards import tracing as tracing
from torch._subclasses.fake_tensor import FakeTensor as FakeTensor
from torch._subclasses.fake_tensor import FakeTensorMode as FakeTensorMode
from torch.utils._python_dispatch import _disable_current_modes


def contiguous_fake(mode: FakeTensorMode, device: torch.device, shape: Sequence[int], dtype: torch.dtype) -> FakeTensor:
    """``torch.empty(shape)`` in a fake mode, without its dispatch, which takes a hundred times as long."""
    with torch._C._DisableTorchDispatch():  # the mode may be on
        return FakeTensor(mode, torch.empty(shape, dtype=dtype, device="meta"), device)


def fake_input(node: fx.Node, example: Any, context: TracingContext | None) -> Any:
    """What stands for the graph input ``node`` when its graph is traced again later, in ``context``.

    With ``dynamic=True`` Dynamo turns Python floats into tensors of one element, and the graph calls ``.item()`` on
    them. A fake tensor knows that item as a symbol, but forgets it when it is taken into another fake mode.
    """
    fake = node.meta.get("example_value", example)
    if context is None or not isinstance(fake, FakeTensor) or fake.item_memo is None:
        return fake
    copy = cast(FakeTensorMode, context.fake_mode).from_tensor(fake)
    copy.item_memo = fake.item_memo
    return copy


def called_to_trace(args: Sequence[Any]) -> bool:
    """Whether compiled code is called on fake tensors, while Dynamo still compiles: DDPOptimizer does that."""
    return TracingContext.try_get() is not None and any(isinstance(x, FakeTensor) for x in args)


def is_fake_of(fake: FakeTensor, tensor: torch.Tensor) -> bool:
    """Whether Dynamo made ``fake`` of ``tensor``: what DDPOptimizer hands a backend in place of parameters.

    The fake mode remembers, in both directions; only privately.
    """
    return cast(Any, fake.fake_mode).fake_tensor_converter._get_memo(tensor) is fake


def without_modes() -> AbstractContextManager[Any]:
    """No fake mode, and no other, inside a ``with``."""
    return _disable_current_modes()
