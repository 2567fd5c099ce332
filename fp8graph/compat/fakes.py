"""Fake tensors, and the contexts for tracing them."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import types
from collections.abc import Callable, Generator, Sequence
from typing import Any, Final, cast
from unittest import mock

import torch
from torch import fx
from torch._decomp import decomposition_table
from torch._guards import TracingContext as TracingContext
from torch._guards import detect_fake_mode as detect_fake_mode
from torch._guards import tracing as tracing
from torch._subclasses.fake_tensor import FakeTensor as FakeTensor
from torch._subclasses.fake_tensor import FakeTensorMode as FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.fx.passes.fake_tensor_prop import FakeTensorProp
from torch.fx.passes.runtime_assert import insert_deferred_runtime_asserts
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack, is_traceable_wrapper_subclass

from fp8graph.compat.ops import pytree

_WATCH: Final = "_fp8graph_watch"


@dataclasses.dataclass
class _Watch:
    """Whether what runs is compiled code, or a part of an op that was reported."""

    in_graph: bool = False


def watchful_fake_mode(tell: Callable[[Any], object]) -> FakeTensorMode:
    """Return a fake mode that tells which ops run outside of compiled code, where Dynamo did not trace.

    Not a subclass: higher-order ops have rules for modes of this very class.

    Args:
        tell: called with such an op before it runs.
    """
    mode: Any = FakeTensorMode(shape_env=ShapeEnv(), allow_non_fake_inputs=True)
    watch, dispatch = _Watch(), mode.__torch_dispatch__

    def watched(_mode: Any, func: Any, of_types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if watch.in_graph or TracingContext.try_get() is not None:
            return dispatch(func, of_types, args, kwargs)
        tell(func)
        watch.in_graph = True  # the ops that this one consists of
        try:
            return dispatch(func, of_types, args, kwargs)
        finally:
            watch.in_graph = False

    mode.__torch_dispatch__ = types.MethodType(watched, mode)  # torch wants a method of the mode
    setattr(mode, _WATCH, watch)
    return mode


@contextlib.contextmanager
def running_a_graph() -> Generator[None]:
    """Note that what runs inside is compiled code, for a :func:`watchful_fake_mode` that is active."""
    modes: list[Any] = [
        watch for mode in _get_current_dispatch_mode_stack() if (watch := getattr(mode, _WATCH, None)) is not None
    ]
    for mode in modes:
        mode.in_graph = True
    try:
        yield
    finally:
        for mode in modes:
            mode.in_graph = False


def contiguous_fake(mode: FakeTensorMode, device: torch.device, shape: Sequence[int], dtype: torch.dtype) -> FakeTensor:
    """``torch.empty(shape)`` in a fake mode, without its dispatch, which takes a hundred times as long."""
    with torch._C._DisableTorchDispatch():  # the mode may be active already
        return FakeTensor(mode, torch.empty(shape, dtype=dtype, device="meta"), device)


def later(context: TracingContext | None) -> contextlib.AbstractContextManager[Any]:
    """Dynamo's context of a graph, for what is compiled after Dynamo has finished with it.

    DDPOptimizer counts in the context how many parts of the graph have been compiled forward and not yet backward.
    """
    if context is None:
        return contextlib.nullcontext()
    context = copy.copy(context)
    context.ddp_optimizer_ctx = None
    return tracing(context)


def fake_input(node: fx.Node, example: Any, context: TracingContext | None) -> Any:
    """Return the stand-in for the graph input ``node`` when its graph is traced again later, in ``context``.

    With ``dynamic=True`` Dynamo turns Python floats into tensors of one element, and the graph calls ``.item()`` on
    them. A fake tensor knows that item as a symbol, but loses it when it is moved to another fake mode.
    """
    fake = node.meta.get("example_value", example)
    if context is None or not isinstance(fake, FakeTensor) or fake.item_memo is None:
        return fake
    copy = cast(FakeTensorMode, context.fake_mode).from_tensor(fake)
    copy.item_memo = fake.item_memo
    return copy


def called_to_trace(args: Sequence[Any]) -> bool:
    """Return whether compiled code is called on fake tensors, while Dynamo still compiles: DDPOptimizer does that."""
    return TracingContext.try_get() is not None and any(isinstance(x, FakeTensor) for x in args)


def is_fake_of(fake: FakeTensor, tensor: torch.Tensor) -> bool:
    """Return whether Dynamo made ``fake`` from ``tensor``: DDPOptimizer gives a backend such fakes in place of
    parameters.

    The fake mode remembers it, in both directions, but only privately.
    """
    return cast(Any, fake.fake_mode).fake_tensor_converter._get_memo(tensor) is fake


def fake_values(module: fx.GraphModule, inputs: Sequence[Any]) -> None:
    """Give each node of ``module`` a fake value, all in one mode, unless the tracer did. ``inputs``: of one call."""
    vals = [node.meta.get("val", node) for node in module.graph.nodes if node.op != "output"]
    modes = {x.fake_mode for x in pytree.tree_leaves(vals) if isinstance(x, FakeTensor)}
    if len(modes) != 1 or any(isinstance(val, fx.Node) and val.op == "call_function" for val in vals):
        mode = detect_fake_mode(list(inputs)) or FakeTensorMode(allow_non_fake_inputs=True)
        FakeTensorProp(module, mode).propagate(*inputs)


def assert_sizes(module: fx.GraphModule, inputs: Sequence[Any]) -> None:
    """Check in ``module`` what tracing took for granted of sizes that are known at run time only, as Inductor does.

    A kernel may rely on it: torch's flash attention for a CPU divides by the number of tokens.
    """
    mode = detect_fake_mode(inputs)
    if mode is not None and mode.shape_env is not None and mode.shape_env.deferred_runtime_asserts:
        insert_deferred_runtime_asserts(module, mode.shape_env, "fp8graph")
        module.recompile()


class _Operators(TorchFunctionMode):
    """Call the operator where Python calls the method."""

    _OPERATORS: Final = {torch.Tensor.copy_: torch.ops.aten.copy_.default}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        run: Any = self._OPERATORS.get(func, func)
        return run(*args, **(kwargs or {}))


@contextlib.contextmanager
def without_device_guards() -> Generator[None]:
    """Let Inductor generate code of fake CUDA tensors where torch has no CUDA.

    ``x.copy_(y)``, ``~mask`` and ``x[i]`` then fail: the methods ask for a guard of the device, which the operators do
    not. An Inductor pass copies; a fake mode decomposes two operators, of an embedding's backward, into the others.
    Only the shapes of their results are needed: Inductor generates code for the operators themselves.
    """
    aten = torch.ops.aten

    def masked_index(x: torch.Tensor, _mask: torch.Tensor, indices: Any, _fill: Any) -> torch.Tensor:
        return aten._unsafe_index.Tensor(x, indices)

    def masked_index_put(x: torch.Tensor, _mask: torch.Tensor, _indices: Any, _values: torch.Tensor) -> torch.Tensor:
        return aten.clone.default(x)

    shapes = {
        aten._unsafe_masked_index.default: masked_index,
        aten._unsafe_masked_index_put_accumulate.default: masked_index_put,
    }
    with mock.patch.dict(decomposition_table, cast(Any, shapes)), _Operators():
        yield


def wrapped_tensors(tensor: torch.Tensor) -> list[torch.Tensor]:
    """Return the tensors that a subclass like torchao's wraps, to the innermost; none of a plain tensor."""
    if not is_traceable_wrapper_subclass(tensor):
        return []
    parts = [getattr(tensor, name) for name in cast(Any, tensor).__tensor_flatten__()[0]]
    tensors = [part for part in parts if isinstance(part, torch.Tensor)]  # a DTensor has its DeviceMesh among them
    return [x for part in tensors for x in (part, *wrapped_tensors(part))]
