"""wrappers: the module and the backend behind what torch.compile made, and what lives as long as it."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from typing import Any, cast

import pytest
import torch
from torch import fx, nn

from fp8graph.compat import wrappers
from helpers import MLP, eager_backend, in_one_test


def test_the_module_behind_a_wrapper() -> None:
    model = MLP()
    assert wrappers.original_module(torch.compile(model, backend="eager")) is model  # pyright: ignore
    assert wrappers.original_module(model) is model
    assert wrappers.name_in_original("_orig_mod.layers.0._orig_mod.w") == "layers.0.w"
    assert wrappers.name_in_original("layers.0._checkpoint_wrapped_module.w.") == "layers.0.w."
    inner = torch.nn.Sequential(torch.compile(model, backend="eager"))  # pyright: ignore
    assert wrappers.submodule(inner, "0") is model
    assert wrappers.submodule(torch.compile(inner, backend="eager"), "") is inner  # pyright: ignore


@in_one_test("kind", ["module", "in place", "forward", "function", "of torch.nn"])
def test_the_backend_behind_what_was_compiled(kind: str) -> None:
    backend = eager_backend()
    model: Any = nn.Linear(4, 4) if kind == "of torch.nn" else MLP()
    if kind == "module":
        model = torch.compile(model, backend=backend)
    elif kind == "forward":
        model.forward = torch.compile(model.forward, backend=backend)
    elif kind == "function":
        model = torch.compile(lambda x: x, backend=backend)
    else:
        wrappers.compile_in_place(model, lambda: True, lambda by: None, lambda: None, lambda: None, backend=backend)
    assert wrappers.fp8graph_backends(wrappers.orig_backend(model)) is backend


@pytest.mark.parametrize("what", [MLP(), torch.sin, lambda x: x])
def test_there_is_none_behind_anything_else(what: Any) -> None:
    assert wrappers.orig_backend(what) is None
    assert wrappers.fp8graph_backends(None) is None
    assert wrappers.fp8graph_backends(what) is None


def test_compiling_in_place_can_be_undone() -> None:
    seen: list[int | str] = []

    def backend(module: fx.GraphModule, _: Any) -> Any:
        seen.append(1)
        return module.forward

    linear = nn.Linear(4, 4)
    wrappers.compile_in_place(
        linear,
        lambda: bool(seen.append(2)) or len(seen) > 2,
        seen.append,
        lambda: seen.append(4),
        lambda: seen.append(8),
        backend=backend,
    )
    for _ in range(3):
        linear(torch.ones(2, 4))
    assert seen == [1, 2, 2]  # after each call, until it returns True
    torch.export.export(linear, (torch.ones(2, 4),))
    assert seen == [1, 2, 2, "torch.export"]
    torch.vmap(linear)(torch.ones(3, 2, 4))
    assert seen[-1] == 8
    wrappers.undo_compile_in_place(linear)
    assert wrappers.orig_backend(linear) is None


def test_a_compilation_around_one_in_place() -> None:
    """Dynamo calls the note, without tracing it; it does not look at torch.nn's classes and at inner modules."""
    for model, inside, noted in ((MLP(), False, True), (MLP(), True, False), (nn.Linear(32, 32), False, False)):
        torch._dynamo.reset()
        seen: list[int] = []
        within = cast(Any, lambda seen=seen: seen.append(1))
        wrappers.compile_in_place(model, lambda: True, lambda by: None, within, lambda: None, backend="eager")
        outer = nn.Sequential(model) if inside else model
        torch.compile(outer, backend="eager")(torch.ones(2, 32))
        assert bool(seen) == noted


def test_held_object_lives_with_its_owner_and_is_not_copied() -> None:
    class Owner:
        pass

    owner, value = Owner(), Owner()
    wrappers.hold(owner, value)
    wrappers.hold(owner, owner)  # nothing holds itself
    reference = weakref.ref(value)
    del value
    gc.collect()
    assert reference() is not None
    assert copy.deepcopy(owner)._fp8graph_held.value is None  # pyright: ignore[reportAttributeAccessIssue]
    held: Any = owner._fp8graph_held  # pyright: ignore[reportAttributeAccessIssue]
    assert pickle.loads(pickle.dumps(held)).value is None
    del owner, held
    gc.collect()
    assert reference() is None
