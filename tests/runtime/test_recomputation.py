"""recomputation: a checkpointed forward that runs again reads the scales that it read before."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from fp8graph import DelayedScaling
from fp8graph.ir.extra_inputs import PageLayout
from fp8graph.numerics.history import HEADER, page_shape
from fp8graph.runtime.recomputation import Recomputations

RECIPE = DelayedScaling(amax_history_len=3)


def layout(*, backward: bool = False) -> PageLayout:
    return PageLayout(recipe=RECIPE, fp8_max=448.0, backward=backward, device=torch.device("cpu"), rows=())


class Calls:
    """What ``torch.utils.checkpoint`` calls twice: reads a page's scales, then writes new ones."""

    def __init__(self, *, backward: bool = False) -> None:
        self.recomputations = Recomputations()
        self.page = torch.ones(page_shape(RECIPE.amax_history_len, 1))
        self.layout = layout(backward=backward)
        self.seen: list[Tensor] = []

    def __call__(self, x: Tensor) -> Tensor:
        (page,) = self.recomputations.pages([self.layout], [self.page], [x, 5])
        self.seen.append(page.clone())
        page.add_(1)
        return x.sin()


def run(calls: Calls, *inputs: Tensor) -> None:
    results: list[Any] = [checkpoint(calls, x, use_reentrant=False) for x in inputs]
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


def test_a_call_is_known_by_its_inputs() -> None:
    calls = Calls()
    run(calls, *inputs(2))
    assert [page[0, 0].item() for page in calls.seen] == [1.0, 2.0, 2.0, 1.0]  # backward goes the other way


def test_pages_of_backward_are_as_they_are() -> None:
    calls = Calls(backward=True)
    run(calls, *inputs(1))
    assert [page[0, 0].item() for page in calls.seen] == [1.0, 2.0]


def test_what_is_not_recomputed_is_not_remembered() -> None:
    calls = Calls()
    calls(torch.randn(4))
    assert calls.seen[0].unique().tolist() == [1.0]
    assert calls.recomputations._scales == {}


def test_the_oldest_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hooks that save tensors on a CPU recompute nothing: their calls must not add up."""
    monkeypatch.setattr(Recomputations, "LIMIT", 2)
    calls, kept = Calls(), inputs(4)
    with torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x):
        for x in kept:
            calls(x)
    assert len(calls.recomputations._scales) == 2
