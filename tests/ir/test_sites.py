"""sites: the bias of a GEMM, the weight of a site."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import nn

from fp8graph.ir.edit import insert
from fp8graph.ir.nodes import aten
from fp8graph.ir.sites import Decision, Site
from helpers import Weight, passed


def sites(module: nn.Module, *shape: int) -> list[Site]:
    return passed(module, torch.randn(shape, requires_grad=True), last="assign")[1].sites


@pytest.mark.parametrize(
    ("module", "shape", "bias"),
    [
        (nn.Linear(32, 48), (16, 32), True),
        (nn.Linear(32, 48, bias=False), (16, 32), False),
        (Weight(lambda w, x: torch.baddbmm(x[:, :1].sum(), x, w), 3, 32, 16), (3, 8, 32), True),
        (Weight(lambda w, x: torch.bmm(x, w), 3, 32, 16), (3, 8, 32), False),
    ],
    ids=["addmm", "mm", "baddbmm", "bmm"],
)
def test_bias_is_recognised(module: nn.Module, shape: tuple[int, ...], bias: bool) -> None:
    fprop, *others = sites(module, *shape)[0].gemms
    assert (fprop.bias is not None) == bias
    assert [gemm.bias for gemm in others] == [None, None]


def test_a_bias_that_was_rewritten_is_the_new_one() -> None:
    (fprop, *_) = sites(nn.Linear(32, 48), 16, 32)[0].gemms
    old: Any = fprop.bias
    with old.graph.inserting_after(old):
        new = insert(old.graph, aten.neg.default, (old,), like=old)
    fprop.node.replace_input_with(old, new)
    assert fprop.bias is new


def test_the_weight_is_an_input_of_the_graph() -> None:
    (site,) = sites(nn.Linear(32, 48), 16, 32)
    assert site.parameter == site.place.parameter == 0
    (site,) = sites(Weight(lambda w, x: w.sum() * (x @ x.t()), 4, 4), 16, 32)
    assert site.parameter is None


def test_a_decision_is_not_changed_in_place() -> None:
    _, found = passed(nn.Linear(32, 48), torch.randn(16, 32, requires_grad=True), last="assign")
    decision: Decision = next(iter(found.decisions.values()))
    with pytest.raises(dataclasses.FrozenInstanceError):
        decision.recipe = None  # pyright: ignore[reportAttributeAccessIssue]
