"""compilation: what is known cannot change, what is found adds up."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from fp8graph import Backend, DelayedScaling, Policy
from fp8graph.ir.compilation import Compilation, Findings
from fp8graph.ir.naming import Place
from fp8graph.ir.settings import Settings
from fp8graph.ir.sites import Site, Use
from fp8graph.passes.accumulate_wgrad import Gradient
from fp8graph.passes.connect_scales import JoinsReduction, PageLayout
from fp8graph.passes.gather_weights import ReadWhole
from fp8graph.records import AttentionRecord, GemmRecord, OtherRecord
from helpers import MLP, facts_of, passed

RECIPE = DelayedScaling(amax_history_len=4)


def compilation(**known: Any) -> Compilation:
    return Compilation(facts=facts_of(Policy(), **known))


def site(fqn: str) -> Site:
    return Site(place=Place(root="self", path=fqn, parameter=None), fqn=fqn, op="linear", region=None)


def page(rows: int) -> PageLayout:
    named = tuple(
        (Use(fqn=str(i), index=0, use=0, parameter=None, operand="input", recipe=RECIPE),) for i in range(rows)
    )
    return PageLayout(recipe=RECIPE, fp8_max=448.0, backward=False, device=torch.device("cpu"), rows=named)


def gradient(parameter: int) -> Gradient:
    return Gradient(parameter=parameter, shape=(2, 2), device=torch.device("cpu"))


def test_known_is_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        compilation().facts.subgraph = True  # pyright: ignore[reportAttributeAccessIssue]


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
    found.sites = [site("up")]
    found.extra_inputs = [gradient(0), page(3), JoinsReduction(), gradient(1), ReadWhole(parameters=(0,))]
    findings = Findings().and_those_of(found)
    assert [s.fqn for s in findings.sites] == ["up"]
    assert not findings.has_subgraphs
    assert [tuple(x.shape) for x in findings.stand_ins()] == [(2, 2), (3, 4 + 4), (2, 2)]
    assert findings.titles(["L['self'].up", "L['self'].down"]) == ["up gradient", "scaling state 0", "down gradient"]
    assert findings.places == {"gradients": (0, 2), "scales": (1,), "gathered": ()}
    assert {store: len(asked) for store, asked in findings.by_store.items()} == {
        "gradients": 2,
        "scales": 2,
        "gathered": 1,
    }
    assert findings.by_store["scales"] is findings.by_store["scales"]


def test_each_extra_input_has_a_title_for_each_of_its_tensors() -> None:
    """Places are counted by titles, tensors by stand-ins."""
    backend = Backend(
        Policy(default="delayed", min_speedup=0),
        compiler="eager",
        cache_weights="update",
        accumulate_wgrad=True,
        observe={"every": 1},
    )
    torch.compile(MLP(), backend=backend)(torch.randn(16, 32, requires_grad=True)).sum().backward()
    ((program,),) = [list(backend.programs)]
    kinds: set[str] = set()
    for variant in program._variants.values():
        for each in variant.findings.extra_inputs:
            with FakeTensorMode():
                assert len(each.titles(str)) == len(each.stand_ins())
            kinds.add(each.store)
    assert kinds == {"weights", "scales", "gradients", "statistics"}


def test_a_subgraph_adds_its_sites_and_no_inputs() -> None:
    outer, inner = compilation(), compilation(subgraph=True)
    outer.sites, outer.extra_inputs, inner.sites = [site("up")], [page(1)], [site("inner")]
    findings = Findings().and_those_of(outer).and_those_of(inner)
    assert [s.fqn for s in findings.sites] == ["up", "inner"]
    assert (len(findings.extra_inputs), findings.has_subgraphs) == (1, True)
    assert not Findings().and_those_of(compilation(subgraph=True)).has_subgraphs  # nothing is multiplied in it


def test_findings_of_one_class_are_one_list() -> None:
    found = compilation()
    found.results(Gradient).append(gradient(0))
    assert found.results(Gradient) == [gradient(0)]
    assert found.results(PageLayout) == []


def test_sites_of_other_kinds_add_up_by_the_class_of_their_rows() -> None:
    class SomeRecord(OtherRecord):
        """Of sites of a third kind."""

    outer, inner = compilation(), compilation(subgraph=True)
    outer.sites, outer.others = [site("up")], {AttentionRecord: [site("attention")]}
    inner.others = {AttentionRecord: [site("inner")], SomeRecord: [site("other")]}
    kinds = Findings().and_those_of(outer).and_those_of(inner).by_kind
    assert {kind: [s.fqn for s in sites] for kind, sites in kinds.items()} == {
        GemmRecord: ["up"],
        AttentionRecord: ["attention", "inner"],
        SomeRecord: ["other"],
    }
    assert Findings().and_those_of(inner).has_subgraphs
