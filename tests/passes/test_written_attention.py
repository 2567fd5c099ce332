"""Attention that is written out: what may stand between the two matmuls, and what is not attention."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

import fp8graph
from attentions import Attention, qkv, sdpa, written_out
from fp8graph.passes.attention.occurrences import Attention as Found
from fp8graph.passes.attention.occurrences import written_attentions
from helpers import passed

MASK = torch.ones(16, 16, dtype=torch.bool).tril()


def sinks(scores: Tensor) -> Tensor:
    """One more column, for a token that nothing is read from, as gpt-oss has it."""
    return torch.cat([scores, scores.new_zeros(2, 4, 16, 1)], -1)


FOUND: dict[str, tuple[Attention, bool]] = {  # name -> module, masked
    "plain": (written_out(scale=lambda s: s), False),
    "scale": (written_out(), False),
    "mask, added": (written_out(between=lambda s: s + torch.where(MASK, 0.0, -1e9)), True),
    "mask, filled": (written_out(between=lambda s: s.masked_fill(~MASK, -1e9)), True),
    "soft cap": (written_out(between=lambda s: torch.tanh(s / 50) * 50), False),
    "upcast": (written_out(between=lambda s: s.float()), False),
    "dropout": (written_out(after=lambda p: functional.dropout(p, 0.1)), False),
    "sink": (written_out(between=sinks, after=lambda p: p[..., :-1]), False),
    "scaled_dot_product_attention with dropout": (sdpa(dropout_p=0.1, is_causal=True), True),
    "einsum": (
        Attention(
            lambda q, k, v: torch.einsum("bhqk,bhkd->bhqd", torch.einsum("bhqd,bhkd->bhqk", q, k).softmax(-1), v)
        ),
        False,
    ),
    "values on the left": (
        Attention(lambda q, k, v: (v.transpose(-1, -2) @ (q @ k.mT).softmax(-1).transpose(-1, -2)).mT),
        False,
    ),
}
NOT_FOUND: dict[str, Any] = {
    "no softmax": lambda q, k, v: (q @ k.mT).relu() @ v,
    "exponentials that are not divided": lambda q, k, v: (q @ k.mT).exp() @ v,
    "divided by another sum": lambda q, k, v: ((q @ k.mT).exp() / (q @ k.mT).sin().sum(-1, keepdim=True)) @ v,
    "a softmax of no matmul": lambda q, k, v: (q[..., :16] * k[..., :16]).softmax(-1) @ v,
    "scores of two matmuls": lambda q, k, v: (q @ k.mT + q.sin() @ k.mT).softmax(-1) @ v,
    "a matmul beside the softmax": lambda q, k, v: ((q @ k.mT).softmax(-1) * (k @ q.mT)) @ v,
}


def found_in(module: Any, **sizes: Any) -> list[Found]:
    _, compilation = passed(module, *qkv(**sizes), last="match")
    return list(written_attentions(compilation.sites))


@pytest.mark.parametrize("name", FOUND)
def test_written_out_attention_is_found(name: str) -> None:
    module, masked = FOUND[name]
    (attention,) = found_in(module)
    assert (attention.form, attention.masked) == ("written out", masked)
    assert (len(attention.forward), len(attention.backward)) == (2, 4)
    sizes = attention.sizes
    assert (sizes.queries, sizes.keys, sizes.head_size, sizes.value_size) == (16, 16, 64, 64)
    assert int(sizes.batch) * int(sizes.heads) == 8


def test_each_matmul_reads_what_it_should() -> None:
    """dQ reads k, dK reads q, dP reads v, and dV reads the probabilities."""
    (attention,) = found_in(written_out(), keys=32)
    scores, result = attention.forward
    reads = [(read.node in (scores, result), read.operand) for read in attention.reads]
    assert sorted(reads) == sorted([(True, "query"), (True, "key"), (True, "value")] + [
        (False, "query"), (False, "key"), (False, "value")])  # fmt: skip
    for read in attention.reads:
        shape = tuple(read.argument.meta["val"].shape)
        assert sorted(shape) == sorted((8, 16, 64) if read.operand == "query" else (8, 32, 64))


@pytest.mark.parametrize("name", NOT_FOUND)
def test_similar_programs_are_not_attention(name: str) -> None:
    assert found_in(Attention(NOT_FOUND[name])) == []


def test_a_linear_is_not_a_product_of_attention() -> None:
    """A router: the softmax of a linear, multiplied with something."""
    linear = torch.nn.Linear(64, 16)

    class Router(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = linear

        def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return self.linear(q).softmax(-1) @ v

    assert found_in(Router()) == []
    assert {gemm.op for gemm in fp8graph.explain(Router(), *qkv()).gemms} == {"linear", "matmul"}
