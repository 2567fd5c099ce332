"""Pages of scaling state: tokens of parameters, and which graph a page fits."""

from __future__ import annotations

import torch
from torch import nn

from fp8graph.ir.sites import Use
from fp8graph.numerics.history import HEADER
from fp8graph.passes.connect_scales import PageLayout
from fp8graph.passes.connect_scales.pages import Page, Tokens
from fp8graph.passes.connect_scales.scaling_state import ScalingState
from fp8graph.recipes import DelayedScaling
from fp8graph.runtime.staleness import Epoch

RECIPE = DelayedScaling(amax_history_len=4)


def test_a_parameter_keeps_its_token() -> None:
    tokens = Tokens(lambda _: None)
    a, b = nn.Parameter(torch.zeros(1)), nn.Parameter(torch.zeros(1))
    assert tokens.of(a) != tokens.of(b)
    assert tokens.of(a) == tokens.of(a)
    assert tokens.alive() == {tokens.of(a), tokens.of(b)}


def test_a_token_does_not_come_again() -> None:
    """An id does, as soon as the memory of a parameter is another's."""
    gone: list[int] = []
    tokens = Tokens(gone.append)
    given: list[int] = []
    for _ in range(20):
        parameter = nn.Parameter(torch.zeros(1))
        given.append(tokens.of(parameter))
        del parameter  # nothing else refers to it
    assert len(set(given)) == 20
    assert gone == given
    assert tokens.alive() == set()


def layout(rows: int = 2, group: str | None = None, device: str = "cpu") -> PageLayout:
    row = Use(fqn="a", index=0, use=0, parameter=0, operand="input", recipe=RECIPE)
    return PageLayout(
        recipe=RECIPE, fp8_max=448.0, backward=False, device=torch.device(device), rows=((row,),) * rows, group=group
    )


def test_which_graph_a_page_fits() -> None:
    page = Page(tensor=torch.zeros(2, 6), layout=layout())
    assert page.fits(layout())
    assert not page.fits(layout(rows=3))
    assert not page.fits(layout(group="data parallel"))
    assert not page.fits(layout(device="meta"))  # the model has moved


def test_who_has_no_token_gets_none_by_a_question() -> None:
    tokens, parameter = Tokens(lambda _: None), nn.Parameter(torch.zeros(1))
    assert tokens.known(parameter) is None
    assert tokens.of(parameter) == tokens.known(parameter)


def test_an_amax_that_was_staged_for_ranks_that_are_gone_is_dropped() -> None:
    """The group is gone, and the rows move to a page of this rank alone. What was recorded stays."""
    state, owner = ScalingState(Epoch()), nn.Parameter(torch.zeros(1))
    (page,) = state.tensors([layout(rows=1, group="data parallel")], [owner])
    page[0, HEADER:] = torch.tensor([8.0, 1.0, 2.0, 4.0])  # the first slot is that of the step that has begun
    (moved,) = state.tensors([layout(rows=1)], [owner])
    assert moved[0, HEADER:].tolist() == [0.0, 1.0, 2.0, 4.0]
