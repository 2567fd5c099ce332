"""renaming: one compiled graph under the names of another layer, where names decide nothing."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor

from attentions import sdpa
from fp8graph import DelayedScaling, Policy, Rule
from fp8graph.backend.compiling import Decided
from fp8graph.ir.compilation import Known
from fp8graph.ir.naming import Parameter
from fp8graph.passes.connect_scales import PageLayout
from fp8graph.passes.hoist_weights import KeptWeight
from fp8graph.records import AttentionRecord
from helpers import Two, eager_backend, first_fast


def decided(policy: Policy, layer: torch.nn.Module | None = None) -> Decided:
    """Of a layer that is called "0"."""
    backend, model = eager_backend(policy, cache_weights="update"), torch.nn.Sequential(layer or Two(72))
    backend.bind(model)
    model[0].compile(backend=backend)
    model(torch.randn(16, 32, requires_grad=True)).sum().backward()
    (program,) = backend.programs
    (variant,) = program._variants.values()
    return variant.decided


def known(found: Decided, policy: Policy, layer: str) -> Known:
    """The known facts of the same graph for another layer."""
    parameters: dict[int, Parameter] = {}
    for site in found.findings.sites:
        assert site.parameter is not None
        name = site.fqn.rpartition(".")[2]
        source = f"L['self']._modules['{name}']._parameters['weight']"
        bound = f"{layer}.{name}.weight"
        parameters[site.parameter] = Parameter(source=source, index=site.parameter, bound=bound)
    return Known(policy=policy, parameters=parameters)


def test_everything_that_has_a_name_gets_the_new_one() -> None:
    policy = Policy(default=DelayedScaling(amax_history_len=4), min_speedup=0)
    old = decided(policy)
    assert {site.fqn for site in old.findings.sites} == {"0.gate", "0.up"}
    new = old.under(known(old, policy, "7"))
    assert new is not None
    assert [site.fqn for site in new.findings.sites] == ["7.gate", "7.up"]
    assert {gemm.fqn for gemm in new.view.gemms} == {"7.gate", "7.up"}
    assert {refusal.fqn for refusal in new.view.refusals} == {"7.gate", "7.up"}
    weights = new.findings.of(KeptWeight)
    beside = [each for weight in weights for each in weight.asked if isinstance(each, PageLayout)]
    pages = [*new.findings.of(PageLayout), *beside]
    assert {row.fqn for page in pages for rows in page.rows for row in rows} == {"7.gate", "7.up"}
    assert new.findings.places == old.findings.places
    assert new.view.after is old.view.after


def test_another_rule_that_asks_for_the_same_is_named_in_the_reason() -> None:
    policy = Policy([Rule("0.*", "tensorwise"), Rule("7.*", "tensorwise")], default=None, min_speedup=0)
    old = decided(policy)
    new = old.under(known(old, policy, "7"))
    assert new is not None
    assert {(gemm.rule, gemm.reason.partition(";")[0]) for gemm in old.view.gemms} == {(0, 'rule "0.*" -> tensorwise')}
    assert {(gemm.rule, gemm.reason.partition(";")[0]) for gemm in new.view.gemms} == {(1, 'rule "7.*" -> tensorwise')}


class Attending(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.attention = torch.nn.Linear(32, 32, bias=False), sdpa()

    def forward(self, x: Tensor) -> Tensor:
        q = self.q(x).unsqueeze(0).unsqueeze(0)
        return self.attention(q, q, q)[0, 0]


def test_attention_is_decided_and_named_anew() -> None:
    rules = [Rule(f"{layer}.*", "tensorwise", op="attention") for layer in (0, 7)]
    policy = Policy([*rules, Rule("8.*", "rowwise", op="attention")], default=None)
    old = decided(policy, Attending())
    new = old.under(known(old, policy, "7"))
    assert new is not None
    for found, layer, rule in ((old, 0, 0), (new, 7, 1)):
        assert [site.fqn for site in found.findings.others[AttentionRecord]] == [f"{layer}.attention"]
        forward, backward = found.view.attention
        assert (forward.fqn, forward.rule, backward.fqn) == (f"{layer}.attention", rule, f"{layer}.attention")
        assert forward.reason.startswith(f'rule "{layer}.*" (op attention) -> tensorwise')
    assert old.under(known(old, policy, "8")) is None  # another recipe
    assert old.under(known(old, policy, "9")) is None  # none


OTHERWISE: list[Any] = [
    pytest.param([Rule("7.up", None)], id="in high precision"),
    pytest.param([Rule("7.up", "rowwise")], id="another recipe"),
    pytest.param([Rule("7.up", "tensorwise", wgrad=None)], id="one GEMM otherwise"),
    pytest.param([Rule("7.up", "tensorwise")], id="asked for by the user, who strict mode listens to"),
]


@first_fast("rules", OTHERWISE)
def test_a_layer_that_is_decided_otherwise_has_code_of_its_own(rules: list[Rule]) -> None:
    policy = Policy(rules, default="tensorwise", min_speedup=0)
    old = decided(policy)
    assert old.under(known(old, policy, "7")) is None
    assert old.under(known(old, policy, "8")) is not None


def test_other_modules_and_subgraphs_have_code_of_their_own() -> None:
    """Linears of one module may be joined; those of two are not."""
    policy = Policy(default="tensorwise", min_speedup=0)
    old = decided(policy)
    told = known(old, policy, "7")
    first, second = told.parameters.values()
    apart = {first.index: first, second.index: dataclasses.replace(second, bound="8.up.weight")}
    assert old.under(dataclasses.replace(told, parameters=apart)) is None
    nested = dataclasses.replace(old, findings=dataclasses.replace(old.findings, has_subgraphs=True))
    assert nested.under(told) is None
