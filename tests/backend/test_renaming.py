"""renaming: one compiled graph under the names of another layer, where names decide nothing."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor

from attentions import sdpa
from fp8graph import DelayedScaling, Policy, Rule
from fp8graph.backend.compiling import Variant
from fp8graph.ir.naming import split_source
from fp8graph.passes.connect_scales import PageLayout
from fp8graph.passes.hoist_weights import CachedWeight
from fp8graph.records import AttentionRecord
from helpers import Two, eager_backend, first_fast


class Compiled:
    """The code of a layer that was called "0", and of others that share it."""

    def __init__(self, policy: Policy, layer: torch.nn.Module | None = None) -> None:
        backend, model = eager_backend(policy, cache_weights="update"), torch.nn.Sequential(layer or Two(72))
        backend.bind(model)
        model[0].compile(backend=backend)
        model(torch.randn(16, 32, requires_grad=True)).sum().backward()
        (graph,) = backend.programs
        ((self._key, self._variant),) = graph._compiled
        (((situation, bound), self.first),) = graph._variants.items()
        self._graph, self._decisions = graph._graph, graph._decisions(situation, bound)
        self._names = bound.names

    def under(self, layer: str, *, last: str = "", has_subgraphs: bool = False) -> Variant | None:
        """As the code of ``layer``; None if it needs its own. ``last``: the layer of its last parameter, if another."""
        sources = [split_source(self._graph.sources[index])[1] for index in self._graph.positions]
        names = [f"{layer}.{source}" for source in sources]
        names[-1] = f"{last or layer}.{sources[-1]}"
        findings = dataclasses.replace(self._variant.findings, has_subgraphs=has_subgraphs)
        variant, parameters = dataclasses.replace(self._variant, findings=findings), self._graph.parameters(names)
        key = variant.key_under(self._decisions, self._graph.parameters(self._names))
        assert has_subgraphs or key == self._key
        shares = variant.key_under(self._decisions, parameters) == key
        return variant.under(self._decisions, parameters) if shares else None


def test_everything_that_has_a_name_gets_the_new_one() -> None:
    policy = Policy(default=DelayedScaling(amax_history_len=4), min_speedup=0)
    compiled = Compiled(policy)
    old = compiled.first
    assert {site.fqn for site in old.findings.sites} == {"0.gate", "0.up"}
    new = compiled.under("7")
    assert new is not None
    assert [site.fqn for site in new.findings.sites] == ["7.gate", "7.up"]
    assert {gemm.fqn for gemm in new.view.gemms} == {"7.gate", "7.up"}
    assert {refusal.fqn for refusal in new.view.refusals} == {"7.gate", "7.up"}
    weights = new.findings.of(CachedWeight)
    beside = [each for weight in weights for each in weight.extra_inputs if isinstance(each, PageLayout)]
    pages = [*new.findings.of(PageLayout), *beside]
    assert {row.fqn for page in pages for rows in page.rows for row in rows} == {"7.gate", "7.up"}
    assert new.findings.places == old.findings.places
    assert new.view.after is old.view.after


def test_another_rule_that_asks_for_the_same_is_named_in_the_reason() -> None:
    policy = Policy([Rule("0.*", "tensorwise"), Rule("7.*", "tensorwise")], default=None, min_speedup=0)
    compiled = Compiled(policy)
    old = compiled.first
    new = compiled.under("7")
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
    compiled = Compiled(policy, Attending())
    old = compiled.first
    new = compiled.under("7")
    assert new is not None
    for found, layer, rule in ((old, 0, 0), (new, 7, 1)):
        assert [site.fqn for site in found.findings.others[AttentionRecord]] == [f"{layer}.attention"]
        forward, backward = found.view.attention
        assert (forward.fqn, forward.rule, backward.fqn) == (f"{layer}.attention", rule, f"{layer}.attention")
        assert forward.reason.startswith(f'rule "{layer}.*" (op attention) -> tensorwise')
    assert compiled.under("8") is None  # another recipe
    assert compiled.under("9") is None  # none


OTHERWISE: list[Any] = [
    pytest.param([Rule("7.up", None)], id="in high precision"),
    pytest.param([Rule("7.up", "rowwise")], id="another recipe"),
    pytest.param([Rule("7.up", "tensorwise", wgrad=None)], id="one GEMM otherwise"),
    pytest.param([Rule("7.up", "tensorwise")], id="asked for by the user, who strict mode listens to"),
]


@first_fast("rules", OTHERWISE)
def test_a_layer_that_is_decided_otherwise_has_code_of_its_own(rules: list[Rule]) -> None:
    policy = Policy(rules, default="tensorwise", min_speedup=0)
    compiled = Compiled(policy)
    assert compiled.under("7") is None
    assert compiled.under("8") is not None


def test_other_modules_and_subgraphs_have_code_of_their_own() -> None:
    """Linears of one module may be joined; those of two are not."""
    compiled = Compiled(Policy(default="tensorwise", min_speedup=0))
    assert compiled.under("7") is not None
    assert compiled.under("7", last="8") is None
    assert compiled.under("7", has_subgraphs=True) is None
    assert compiled.under("0", has_subgraphs=True) is not None
