"""compilation: what is known cannot change, what is found adds up."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import nn

from fp8graph import DelayedScaling, Policy
from fp8graph.ir.compilation import Compilation, Findings, Known
from fp8graph.ir.extra_inputs import PageLayout, StateRow
from fp8graph.ir.places import Place
from fp8graph.ir.settings import Settings
from fp8graph.ir.sites import Site
from helpers import passed

RECIPE = DelayedScaling(amax_history_len=4)


def compilation(**known: Any) -> Compilation:
    return Compilation(known=dataclasses.replace(Known(policy=Policy()), **known))


def site(fqn: str) -> Site:
    return Site(place=Place(root="self", path=fqn, parameter=None), fqn=fqn, op="linear", region=None)


def page(rows: int) -> PageLayout:
    named = tuple(
        (StateRow(fqn=str(i), index=0, use=0, parameter=None, operand="input", recipe=RECIPE),) for i in range(rows)
    )
    return PageLayout(recipe=RECIPE, fp8_max=448.0, backward=False, device=torch.device("cpu"), rows=named)


def test_what_is_known_stays() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        compilation().known.subgraph = True  # pyright: ignore[reportAttributeAccessIssue]


def test_a_refusal_is_said_once() -> None:
    found = compilation()
    found.refuse("kept weight", site("up"), "too large")
    found.refuse("kept weight", site("up"), "too large")
    found.refuse("one GEMM", site("up"), "too large")
    assert [(r.what, r.fqn, r.index, r.reason) for r in found.refusals] == [
        ("kept weight", "up", 0, "too large"),
        ("one GEMM", "up", 0, "too large"),
    ]


@pytest.mark.parametrize(("target", "name"), [(None, "cpu"), ("sm_90", "sm_90")])
def test_the_target_decides_else_where_the_result_is(target: str | None, name: str) -> None:
    x = torch.randn(16, 32, requires_grad=True)
    _, found = passed(nn.Linear(32, 48), x, last="match", settings=Settings(target=target))
    assert found.hardware_of(found.sites[0].gemms[0].node).name == name


def test_findings_of_a_graph_are_what_it_takes() -> None:
    found = compilation()
    found.sites, found.pages = [site("up")], (page(3),)
    findings = Findings().and_those_of(found)
    assert [s.fqn for s in findings.sites] == ["up"]
    assert (findings.inputs, findings.has_subgraphs) == (1, False)
    assert [x.shape for x in findings.stand_ins()] == [(3, 2 + 4)]


def test_a_subgraph_adds_its_sites_and_no_inputs() -> None:
    outer, inner = compilation(), compilation(subgraph=True)
    outer.sites, outer.pages, inner.sites = [site("up")], (page(1),), [site("inner")]
    findings = Findings().and_those_of(outer).and_those_of(inner)
    assert [s.fqn for s in findings.sites] == ["up", "inner"]
    assert (findings.inputs, findings.has_subgraphs) == (1, True)
    assert not Findings().and_those_of(compilation(subgraph=True)).has_subgraphs  # nothing is multiplied in it
