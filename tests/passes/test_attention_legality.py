"""Attention that is not quantized: reasons that need graphs of their own. The others: test_quantize_attention.py."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor

import fp8graph
from attentions import Attention, qkv, sdpa, written_out
from fp8graph import Policy, Rule
from fp8graph.ir.compilation import Compilation
from fp8graph.passes.attention.find import why_not_quantized
from fp8graph.passes.attention.occurrences import Attention as Found
from fp8graph.recipes import resolve_recipe
from helpers import first_fast, passed

aten = torch.ops.aten


def why_not(module: Any, recipe: str = "tensorwise") -> str | None:
    _, compilation = passed(module, *qkv(), last="find_attention")
    return reason(compilation, recipe)


def reason(compilation: Compilation, recipe: str = "tensorwise") -> str | None:
    (attention,) = compilation.results(Found)
    found = resolve_recipe(recipe)
    assert found is not None
    return why_not_quantized(attention, found, compilation)


@first_fast("recipe", ["tensorwise", "rowwise"])
@pytest.mark.parametrize("module", [sdpa(is_causal=True), written_out()])
def test_nothing_speaks_against_it(module: Any, recipe: str) -> None:
    assert why_not(module, recipe) is None


def test_a_result_that_the_program_reads_speaks_not_against_it() -> None:
    """The logsumexp is then that of the quantized q and k."""

    def body(q: Any, k: Any, v: Any) -> Any:
        out, logsumexp = aten._scaled_dot_product_flash_attention_for_cpu(q, k, v)
        return out.sum(-1) + logsumexp.detach()

    assert why_not(Attention(body)) is None


@torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True)
def test_tokens_that_the_data_choose() -> None:
    """There may be none, and no scale then."""

    def chosen(q: Tensor, mask: Tensor) -> Tensor:
        k = q[mask].permute(1, 2, 0, 3)  # [batch, heads, tokens, size]
        return torch.softmax(k @ k.transpose(-1, -2) * 0.2, -1) @ k

    backend = fp8graph.Backend(Policy([Rule("*", "tensorwise", op="attention")]), compiler="eager")
    compiled, q = torch.compile(chosen, backend=backend, fullgraph=True), torch.randn(16, 2, 4, 32)
    # torch 2.11 takes a token for granted, under Inductor, too
    refused = pytest.raises(RuntimeError, match="u0 >= 1") if torch.__version__.startswith("2.11.") else nullcontext()
    for tokens, context in ((5, nullcontext()), (0, refused)):
        mask = torch.arange(16) < tokens
        with context:
            torch.testing.assert_close(compiled(q, mask), chosen(q, mask))
    (record,) = backend.report.attention
    assert "a size is known at run time only, and may be 0: [" in record.reason


def test_a_backward_of_other_tensors() -> None:
    graph, compilation = passed(sdpa(), *qkv(), last="find_attention")
    (backward,) = compilation.results(Found)[0].backward
    backward.update_arg(1, next(node for node in graph.nodes if str(node.target).startswith("tangents")))
    assert reason(compilation) == "its backward does not read the same q, k and v as its forward"


def region(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attention in a region that is compiled once: forward and backward come in one graph."""
    compiled: Any = torch.compiler.nested_compile_region(lambda q, k, v: sdpa()(q, k, v).relu())
    return compiled(q, k, v)


def branches(q: Tensor, k: Tensor, v: Tensor) -> Any:
    """The backward of torch.cond runs its forward again, in the same graph."""
    bodies: Any = lambda q, k, v: sdpa()(q, k, v).relu(), lambda q, k, v: sdpa()(q, k, v).sin()
    cond: Any = torch.cond
    return cond(q.sum() > 0, *bodies, (q, k, v))


@first_fast("training", [True, False])
@first_fast("body", [region, branches])
def test_the_bodies_of_higher_order_ops(body: Any, training: bool) -> None:
    policy = Policy([Rule("*", "tensorwise", op="attention")], default=None)
    given = qkv(gradients=training)
    rows = fp8graph.explain(Attention(body), *given, policy=policy, training=training).attention
    assert {row.recipe for row in rows if row.direction == "forward"} == {"tensorwise"}
    assert any(row.direction == "backward" for row in rows) == training


def test_a_body_whose_backward_is_a_graph_of_its_own() -> None:
    _, alone = passed(sdpa(), *qkv(), last="find_attention", subgraph=True)
    assert reason(alone) is None
    alone.results(Found)[0].backward = ()  # in another graph, to which the logsumexp goes
    assert str(reason(alone)).startswith("the backward of a higher-order op is a graph of its own")
