"""why_not_kept: the text of every reason why no copy of a weight is kept."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

from fp8graph import Backend, Policy, Rule
from fp8graph.compat.fsdp import Shard
from fp8graph.ir import ops
from fp8graph.ir.compilation import Compilation
from fp8graph.ir.nodes import GEMM_KEY, OPERAND_KEY, nodes
from fp8graph.passes.gather_weights import GatheredWeight
from fp8graph.passes.hoist_weights import why_not_kept
from gathers import Sharded, report_of, two_ranks
from helpers import Weight, passed, view_of


def x() -> Tensor:
    return torch.randn(16, 32, requires_grad=True)


def quantized(module: nn.Module, operand: str, last: str = "share", **known: Any) -> tuple[fx.Node, Compilation]:
    """The node that quantizes ``operand`` of the one linear, before weights leave the graph."""
    graph, compilation = passed(module, x(), last=last, **known)
    (node,) = [node for node in nodes(graph, (ops.quantize,)) if node.meta[OPERAND_KEY] == operand]
    return node, compilation


def sharded(reason: str | None) -> dict[str, Any]:
    """The facts about the one parameter, if FSDP2 gathers it."""
    return {"gathered": frozenset({0}), "parameter_facts": {GatheredWeight.store: {0: Shard(24, reason)}}}


def test_a_plain_weight_has_no_reason() -> None:
    node, compilation = quantized(nn.Linear(32, 48, bias=False), "weight")
    assert why_not_kept(node, compilation) == ""


@pytest.mark.parametrize("operand", ["input", "grad_output"])
def test_only_weights_have_a_reason(operand: str) -> None:
    node, compilation = quantized(nn.Linear(32, 48, bias=False), operand)
    assert why_not_kept(node, compilation) == ""


def test_weights_gathered_by_fsdp2_are_not_cached() -> None:
    """The weight is a parameter that is whole only while the graph runs; the backend knows which."""
    memory = "a copy of all of it would take the memory that sharding saves"
    linear = nn.Linear(32, 48, bias=False)
    node, compilation = quantized(linear, "weight", gathered=frozenset({0}))
    assert why_not_kept(node, compilation) == f"it is whole while the graph runs, and no longer: {memory}"
    node, compilation = quantized(linear, "weight", "gather_weights", **sharded(None))
    reason = "FSDP2 gathers it for each use, in FP8 from the first step of its optimizer on"
    assert why_not_kept(node, compilation) == reason
    node, compilation = quantized(linear, "weight", "gather_weights", **sharded("it is padded"))
    reason = f"FSDP2 gathers it for each use, in high precision: it is padded; {memory}"
    assert why_not_kept(node, compilation) == reason


@pytest.mark.skipif(not torch.distributed.is_available(), reason="torch without torch.distributed")
def test_weights_gathered_in_the_graph_are_not_cached() -> None:
    """In high precision, that is: a shard that is quantized before it travels is kept."""
    reason = (
        "it is gathered from several ranks in the graph: a copy of all of it would take the memory that sharding saves"
    )
    with two_ranks():
        sent_as_it_is = report_of(Sharded(), torch.randn(32, 128, requires_grad=True), "rowwise").refusals
        torch._dynamo.reset()
        sent_in_fp8 = report_of(Sharded(), torch.randn(32, 128, requires_grad=True), "tensorwise").refusals
    assert {(refusal.what, refusal.reason) for refusal in sent_as_it_is} == {("kept weight", reason)}
    assert sent_in_fp8 == []


def test_the_site_is_whose_gemm_reads_it() -> None:
    node, compilation = quantized(nn.Linear(32, 48, bias=False), "weight")
    assert compilation.site_of(node) is compilation.sites[0]


def test_an_emulated_gemm_reads_it_through_what_decodes_it() -> None:
    everything = Policy(default="mxfp8", min_speedup=0)
    node, compilation = quantized(nn.Linear(32, 48, bias=False), "weight", policy=everything)
    assert compilation.decisions[compilation.sites[0].gemms[0].node].execution == "emulated"
    assert compilation.site_of(node) is compilation.sites[0]


def test_weights_that_no_gemm_reads_have_no_site() -> None:
    node, compilation = quantized(nn.Linear(32, 48, bias=False), "weight")
    for output in node.users:
        for reader in output.users:
            reader.meta.pop(GEMM_KEY, None)
    assert compilation.site_of(node) is None


PARTS = [
    pytest.param(
        lambda w, a: a @ nn.functional.dropout(w, 0.5).t(),
        "computed with random numbers, which change with each call",
        id="random",
    ),
    pytest.param(
        lambda w, a: a @ (w + a[0]).t(),
        r"also computed from .*, which is not a parameter and may change with each call; .* make it a parameter",
        id="an input",
    ),
]


@pytest.mark.parametrize(("body", "reason"), PARTS)
def test_weights_that_are_not_kept(body: Any, reason: str) -> None:
    policy = Policy([Rule("*", "tensorwise", op="*")])
    (found,) = view_of(Weight(body, 48, 32), x(), policy=policy, cache_weights="update").refusals
    assert found.what == "kept weight"
    assert re.search(reason, found.reason)


def test_a_weight_of_dynamic_size_is_not_kept() -> None:
    backend = Backend(Policy([Rule("*", "tensorwise", op="*")]), compiler="eager", cache_weights="update")
    module = Weight(lambda w, a: a @ w[: a.shape[0]].t(), 48, 32)
    torch.compile(module, backend=backend, dynamic=True)(x())
    (found,) = backend.report.refusals
    assert (found.what, found.reason) == (
        "kept weight",
        "its size is dynamic: compile with dynamic=False, or mark that size static",
    )


def test_activations_are_not_weights() -> None:
    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.q, self.k = nn.Linear(32, 32), nn.Linear(32, 32)

        def forward(self, x: Tensor) -> Tensor:
            return self.q(x) @ (self.k(x) * 2).t()

    view = view_of(Attention(), x(), policy=Policy([Rule("*", "tensorwise", op="*")]), cache_weights="update")
    assert [refusal for refusal in view.refusals if refusal.what == "kept weight"] == []
