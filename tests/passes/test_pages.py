"""Pages of scaling state: which graph a page fits, and what moves with its rows."""

from __future__ import annotations

import torch
from torch import nn

from fp8graph import Backend
from fp8graph.ir.sites import Use
from fp8graph.numerics.history import HEADER
from fp8graph.passes.connect_scales import PageLayout
from fp8graph.passes.connect_scales.pages import Page
from fp8graph.passes.connect_scales.scaling_state import ScalingState
from fp8graph.recipes import DelayedScaling

RECIPE = DelayedScaling(amax_history_len=4)


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


def test_an_amax_that_was_staged_for_ranks_that_are_gone_is_dropped() -> None:
    """The group is gone, and the rows move to a page of this rank alone. What was recorded stays."""
    state, owner = Backend().store(ScalingState), nn.Parameter(torch.zeros(1))
    page = state.pages([layout(rows=1, group="data parallel")], [owner])[0].tensor
    page[0, HEADER:] = torch.tensor([8.0, 1.0, 2.0, 4.0])  # the first slot is that of the step that has begun
    moved = state.pages([layout(rows=1)], [owner])[0].tensor
    assert moved[0, HEADER:].tolist() == [0.0, 1.0, 2.0, 4.0]
