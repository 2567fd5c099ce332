"""recomputation: a checkpointed forward that runs again finds everything as it was the first time."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from fp8graph import DelayedScaling, Fp8GraphError
from fp8graph.compat import autograd, checkpointing
from fp8graph.numerics.history import HEADER, page_shape
from fp8graph.passes.connect_scales import PageLayout
from fp8graph.passes.connect_scales.pages import as_first, keep_scales
from fp8graph.runtime.recomputation import Recomputations
from helpers import eager_backend

RECIPE = DelayedScaling(amax_history_len=3)


def layout(*, backward: bool = False) -> PageLayout:
    return PageLayout(recipe=RECIPE, fp8_max=448.0, backward=backward, device=torch.device("cpu"), rows=())


class Calls:
    """The function that a checkpoint calls twice: reads a page's scales, and with gradients writes new ones."""

    def __init__(self, *, backward: bool = False, amax: float = 1.0) -> None:
        self.amax = amax
        self.recomputations = Recomputations()
        self.page = torch.ones(page_shape(RECIPE.amax_history_len, 1))
        self.layout = layout(backward=backward)
        self.now = "first"
        self.situations: list[Any] = []
        self.seen: list[Tensor] = []

    def __call__(self, x: Tensor) -> Tensor:
        records, layouts, pages = torch.is_grad_enabled(), [self.layout], [self.page]
        if not checkpointing.matters():
            self.seen.append(self.page.clone())
            return x.sin()
        call = self.recomputations.of_call()
        situation = call.first.situation if call.first is not None else (self.now, None)
        call.keep(situation, records=records)
        keep_scales(call, layouts, pages)
        with as_first(call, layouts, pages, records=records) as (page,):
            self.situations.append(situation[0])
            self.seen.append(page.clone())
            if records:
                page.add_(self.amax)
        return x.sin()

    @property
    def scales(self) -> list[float]:
        return [page[0, 0].item() for page in self.seen]


def run(calls: Callable[[Tensor], Tensor], *inputs: Tensor, reentrant: bool = False) -> None:
    results: list[Any] = [checkpoint(calls, x, use_reentrant=reentrant) for x in inputs]
    torch.stack([y.sum() for y in results]).sum().backward()


def inputs(count: int) -> list[Tensor]:
    return [torch.randn(4, requires_grad=True) for _ in range(count)]


def test_scales_are_those_of_the_first_call_and_nothing_is_recorded() -> None:
    calls = Calls()
    run(calls, *inputs(1))
    first, again = calls.seen
    assert torch.equal(first[:, :HEADER], again[:, :HEADER])
    assert again[0, HEADER:].unique().tolist() == [2.0]  # histories are today's
    assert calls.page.unique().tolist() == [2.0]  # the second call wrote into a copy


def test_a_call_is_that_of_its_forward() -> None:
    calls = Calls()
    run(calls, *inputs(2))
    assert calls.scales == [1.0, 2.0, 2.0, 1.0]  # backward goes the other way


def test_later_calls_of_a_forward_whose_inputs_are_recomputed() -> None:
    calls = Calls()
    run(lambda x: calls(calls(x) * 2) * 2, *inputs(1))
    assert calls.scales == [1.0, 2.0, 1.0, 2.0]
    assert calls.page.unique().tolist() == [3.0]


def test_one_layer_twice_where_only_the_recomputation_records() -> None:
    """The second recomputation reads the scale of its forward, not that of the first recomputation."""
    calls = Calls()
    run(calls, *inputs(2), reentrant=True)
    assert calls.scales == [1.0, 1.0, 1.0, 1.0]
    assert calls.page[0].tolist() == [2.0] * HEADER + [3.0] * 3  # the second began with the scales of forward


def test_a_recomputation_that_records_nothing_leaves_newer_scales() -> None:
    calls, (x,) = Calls(amax=0.0), inputs(1)
    y = checkpoint(calls, x, use_reentrant=True)
    calls.page.add_(5)
    y.sum().backward()  # pyright: ignore
    assert calls.scales == [1.0, 1.0]
    assert calls.page.unique().tolist() == [6.0]


def test_pages_of_backward_are_as_they_are() -> None:
    calls = Calls(backward=True)
    run(calls, *inputs(1))
    assert calls.scales == [1.0, 2.0]


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_situation_is_that_of_the_first_call(reentrant: bool) -> None:
    calls, (a, b) = Calls(), inputs(2)
    first = checkpoint(calls, a, use_reentrant=reentrant)
    calls.now = "second"
    second = checkpoint(calls, b, use_reentrant=reentrant)
    calls.now = "backward"
    (first + second).sum().backward()  # pyright: ignore
    assert calls.situations == ["first", "second", "second", "first"]


def test_a_recomputation_that_trains_is_observed_where_its_forward_was_an_evaluation() -> None:
    """The first call of the reentrant variant has no gradients: the conditions of its repetition are those of now."""
    torch._dynamo.reset()
    backend, linear = eager_backend(), nn.Linear(32, 32, bias=False)
    statistics, compiled = backend.observe(every=1, stats=["cur_amax"]), torch.compile(linear, backend=backend)
    for _ in range(2):
        run(compiled, torch.randn(16, 32, requires_grad=True), reentrant=True)
        statistics.step()
    seen = {(record.step, record.operand) for record in statistics}
    assert seen >= {(step, operand) for step in (0, 1) for operand in ("input", "weight", "grad_output")}


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_graph_may_be_run_backward_again(reentrant: bool) -> None:
    calls, (x,) = Calls(), inputs(1)
    y: Any = checkpoint(lambda x: calls(x.sin()).sin(), x, use_reentrant=reentrant)
    calls.now = "backward"
    y.sum().backward(retain_graph=True)
    y.sum().backward()
    assert calls.situations == ["first"] * 3
    assert calls.scales == [1.0] * 3


def test_a_call_too_many() -> None:
    calls, (x,) = Calls(), inputs(1)

    def more_and_more(x: Tensor) -> Tensor:
        for _ in range(2 if autograd.in_backward() else 1):
            x = calls(x)
        return x

    run(more_and_more, x, reentrant=True)  # it can only be as the others
    assert calls.situations == ["first"] * 3

    def of_different_situations(x: Tensor) -> Tensor:
        for situation in ["first", "second", "third"][: 3 if autograd.in_backward() else 2]:
            calls.now = situation
            x = calls(x)
        return x

    with pytest.raises(Fp8GraphError, match=r"2 calls, under different regions or policies.* call 3 repeats"):
        run(of_different_situations, x, reentrant=True)


def test_forward_without_recomputation_is_forgotten() -> None:
    calls = Calls()
    calls(torch.randn(4))
    with torch.autograd.graph.save_on_cpu():
        calls(torch.randn(4, requires_grad=True))
    assert [page.unique().tolist() for page in calls.seen] == [[1.0], [1.0]]
    run(calls, *inputs(1))
    gc.collect()
    assert len(calls.recomputations._forwards) == 0


def test_an_unknown_recomputation_of_forwards_in_regions() -> None:
    """Of a library that works in a way of its own: it cannot be known, but it may be harmless."""
    recomputations, x = Recomputations(), torch.ones(3, requires_grad=True)
    x.register_hook(lambda _: recomputations.check(None))
    x.sum().backward()
    recomputations.check("rowwise")
    with pytest.raises(Fp8GraphError, match=r"cannot be known which.*\(rowwise\).*inside the checkpointed function"):
        x.sum().backward()
    recomputations.check(None)  # outside of backward
