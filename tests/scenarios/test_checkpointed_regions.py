"""Activation checkpointing around compiled code: a recomputation is the forward again, whatever surrounds backward."""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

import fp8graph
from fp8graph import Backend, Policy
from helpers import first_fast, same_bits

POLICY = Policy(default="blockwise")
Way = Callable[[Any, Tensor], Any]


def ways() -> dict[str, Way]:
    selective = functools.partial(create_selective_checkpoint_contexts, [torch.ops.aten.mm.default])
    return {
        "not reentrant": functools.partial(checkpoint, use_reentrant=False),
        "reentrant": functools.partial(checkpoint, use_reentrant=True),
        "not reentrant in itself": lambda f, x: checkpoint(ways()["not reentrant"], f, x, use_reentrant=False),
        "reentrant in not reentrant": lambda f, x: checkpoint(ways()["reentrant"], f, x, use_reentrant=False),
        "not reentrant in reentrant": lambda f, x: checkpoint(ways()["not reentrant"], f, x, use_reentrant=True),
        "selective": functools.partial(checkpoint, use_reentrant=False, context_fn=selective),
        "offloaded": offloaded,
    }


def offloaded(function: Any, x: Tensor) -> Any:
    with torch.autograd.graph.save_on_cpu():
        return checkpoint(function, x, use_reentrant=False)


WAYS = sorted(ways())
BOTH = ("not reentrant", "reentrant")


def plainly(function: Any, x: Tensor) -> Any:
    return function(x)


def backward_in(surroundings: str, loss: Tensor) -> None:
    if surroundings == "another thread":
        errors: list[BaseException] = []

        def run() -> None:
            try:
                loss.backward()
            except BaseException as error:
                errors.append(error)

        thread = threading.Thread(target=run)
        thread.start()
        thread.join()
        for error in errors:
            raise error
    else:
        region = {"nothing": contextlib.nullcontext(), "a region": fp8graph.autocast(recipe="tensorwise")}[surroundings]
        with region:
            loss.backward()


class Run:
    """A model, compiled, and the gradients that it had."""

    def __init__(self, way: Way, backend: Backend | None = None) -> None:
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(32, 32), nn.ReLU())
        self.backend = backend if backend is not None else Backend(POLICY, compiler="eager")
        self.compiled = torch.compile(self.net, backend=self.backend)
        self.x = torch.randn(16, 32, requires_grad=True)
        self.way = way

    def __call__(self, x: Tensor | None = None, **region: Any) -> Tensor:
        with fp8graph.autocast(**region) if region else contextlib.nullcontext():
            return self.way(self.compiled, self.x if x is None else x)

    @property
    def gradients(self) -> list[Tensor]:
        return [x.grad for x in [*self.net.parameters(), self.x] if x.grad is not None]


def assert_same_gradients(one: Run, other: Run) -> None:
    assert len(one.gradients) == 3
    assert all(map(same_bits, one.gradients, other.gradients))


@functools.cache
def plain_run(**region: Any) -> Run:
    run = Run(plainly)
    run(**region).square().mean().backward()
    return run


@first_fast("way", WAYS)
def test_a_recomputation_has_the_regions_of_its_forward(way: str) -> None:
    run = Run(ways()[way])
    run(recipe="delayed").square().mean().backward()
    assert_same_gradients(run, plain_run(recipe="delayed"))


@pytest.mark.parametrize("way", BOTH)
@first_fast("region", [{"enabled": False}, {"recipe": "rowwise"}], ids=str)
def test_whatever_the_region_says(way: str, region: dict[str, Any]) -> None:
    run = Run(ways()[way])
    run(**region).square().mean().backward()
    assert_same_gradients(run, plain_run(**region))


@first_fast("way", BOTH)
@first_fast("surroundings", ["a region", "another thread"])
def test_whatever_surrounds_backward(way: str, surroundings: str) -> None:
    run = Run(ways()[way])
    for region in (True, False):
        for x in (*run.net.parameters(), run.x):
            x.grad = None
        loss = run(recipe="rowwise") if region else run()
        backward_in(surroundings, loss.square().mean())
        assert_same_gradients(run, plain_run(recipe="rowwise") if region else plain_run())


@first_fast("way", BOTH)
def test_one_layer_under_several_regions(way: str) -> None:
    plain, checkpointed = Run(plainly), Run(ways()[way])
    for run in (plain, checkpointed):
        first, second, third = run(recipe="rowwise"), run(enabled=False), run()
        (first * 3 + second * 2 + third).square().mean().backward(retain_graph=True)
        second.sum().backward()
    assert_same_gradients(checkpointed, plain)


@first_fast("way", BOTH)
def test_regions_in_the_checkpointed_function(way: str) -> None:
    def twice(function: Any, x: Tensor) -> Tensor:
        x = function(x).relu()
        with fp8graph.autocast(enabled=False):
            return function(x)

    plain = Run(twice)
    checkpointed = Run(lambda function, x: ways()[way](lambda x: twice(function, x), x))
    for run in (plain, checkpointed):
        run(recipe="rowwise").square().mean().backward()
    assert_same_gradients(checkpointed, plain)


@first_fast("way", BOTH)
def test_a_policy_that_changes_before_backward(way: str) -> None:
    plain, checkpointed = Run(plainly), Run(ways()[way])
    for run in (plain, checkpointed):
        before = run()
        run.backend.set_policy(Policy(default="tensorwise"))
        (before.sum() + run().square().mean()).backward()
    assert_same_gradients(checkpointed, plain)


@pytest.mark.parametrize("way", BOTH)
def test_measurements_that_begin_before_backward(way: str) -> None:
    plain, checkpointed = Run(plainly), Run(ways()[way])
    for run in (plain, checkpointed):
        loss = run().square().mean()
        run.backend.observe(every=1)
        loss.backward()
    assert_same_gradients(checkpointed, plain)


@first_fast("way", BOTH)
def test_scales_of_a_function_of_several_compiled_parts(way: str) -> None:
    """Delayed scales of the second part, whose inputs are recomputed, are read and recorded as without checkpoint."""
    plain, checkpointed = (Run(w, Backend(Policy(default="delayed"), compiler="eager")) for w in (plainly, ways()[way]))
    states: list[dict[str, Tensor]] = []
    for run in (plain, checkpointed):
        torch.manual_seed(1)
        first = nn.Linear(32, 32)
        run.backend.bind(nn.ModuleList([first, run.net]))
        part = torch.compile(first, backend=run.backend)
        for _ in range(3):
            run.way(lambda x, part=part, run=run: run.compiled(part(x)), run.x).square().mean().backward()
        states.append(dict(run.backend.state_dict()))
    assert_same_gradients(checkpointed, plain)
    assert len(states[0]) == 1 + 2 * 2 * 3
    assert states[0].keys() == states[1].keys()
    assert all(torch.equal(value, states[1][name]) for name, value in states[0].items())


@pytest.mark.parametrize("way", BOTH)
def test_nothing_is_compiled_that_does_not_run(way: str) -> None:
    run = Run(ways()[way])
    run(recipe="rowwise").square().mean().backward()
    assert {gemm.recipe for gemm in run.backend.report.gemms} == {"rowwise"}


def of_a_library(function: Any, x: Tensor) -> Tensor:
    """Not reentrant, and with hooks of its own: what runs again cannot be seen."""
    kept = x.detach().requires_grad_()
    saved: list[Tensor] = []

    def pack(y: Tensor) -> int:
        saved.append(y)
        return len(saved) - 1

    def unpack(index: int) -> Tensor:
        again: list[Tensor] = []
        with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(again.append, lambda y: y):
            function(kept)
        return again[index]

    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        return function(x)


def test_unknown_region_of_a_recomputation_is_refused() -> None:
    run = Run(of_a_library)
    with pytest.raises(fp8graph.Fp8GraphError, match="cannot be known which.*Open the region inside"):
        run(recipe="rowwise").sum().backward()

    def inside(function: Any, x: Tensor) -> Tensor:
        def in_region(x: Tensor) -> Tensor:
            with fp8graph.autocast(recipe="rowwise"):
                return function(x)

        return of_a_library(in_region, x)

    helped = Run(inside)
    helped().square().mean().backward()
    assert_same_gradients(helped, plain_run(recipe="rowwise"))


def test_kept_copies_of_weights_serve_a_recomputation() -> None:
    backend = Backend(Policy(default="tensorwise"), compiler="eager", cache_weights="update")
    run = Run(ways()["not reentrant"], backend)
    run().square().mean().backward()
    assert backend.weights.quantized == 1
    assert_same_gradients(run, plain_run(recipe="tensorwise"))
