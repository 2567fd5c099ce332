"""find_attention: every attention has a name and stands in the report, and no GEMM count changes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.attention.flex_attention import flex_attention

import fp8graph
from attentions import FORMS_IN_TRAINING, OPS, Attention, qkv, sdpa, written_out
from fp8graph import Policy, Rule
from fp8graph.compat.attention import VARLEN, varlen
from fp8graph.passes.attention.find import LENGTHS
from fp8graph.recipes.policy import LEFT_ALONE
from helpers import NONE, around, view_of
from tiny_models import TINY


@pytest.mark.parametrize("form", FORMS_IN_TRAINING)
def test_each_op_has_a_row_for_forward_and_one_for_backward(form: str) -> None:
    body, causal, masked, dropout = OPS[form]
    report = fp8graph.explain(Attention(body), *qkv(), training=True, policy=NONE)
    flops = 4 * 2 * 4 * 16 * 16 * 64 // (2 if causal else 1)
    assert [(row.form, row.direction, row.flops) for row in report.attention] == [
        (form, "forward", flops),
        (form, "backward", 2.5 * flops),
    ]
    assert {(row.causal, row.masked, row.dropout) for row in report.attention} == {(causal, masked, dropout)}
    assert {(row.recipe, row.execution) for row in report.attention} == {(None, "high precision")}
    assert report.gemms == []


def test_inference_has_no_backward() -> None:
    grouped = qkv(kv_heads=2, keys=32, gradients=False)
    (row,) = fp8graph.explain(sdpa(enable_gqa=True), *grouped, training=False).attention
    assert (row.direction, row.batch, row.heads, row.kv_heads, row.queries, row.keys) == ("forward", 2, 4, 2, 16, 32)
    assert row.dtypes == ("fp32", "fp32")


@pytest.mark.filterwarnings("ignore:.*flex_attention called without torch.compile")
def test_flex_attention() -> None:
    def body(q: Tensor, k: Tensor, v: Tensor) -> Any:
        return flex_attention(q, k, v, score_mod=lambda s, b, h, i, j: s / 2)  # pyright: ignore[reportDeprecated]

    (row,) = fp8graph.explain(Attention(body), *qkv(queries=128, gradients=False), training=False).attention
    assert (row.form, row.masked, row.flops) == ("flex", True, 4 * 2 * 4 * 128 * 128 * 64)


class Packed(nn.Module):
    def __init__(self, window: tuple[int, int] = (-1, -1)) -> None:
        super().__init__()
        self.window = window

    def forward(self, q: Tensor, k: Tensor, v: Tensor, ends: Tensor) -> Any:
        assert varlen is not None
        return varlen.varlen_attn(q, k, v, ends, ends, 16, 16, window_size=self.window)


def packed() -> list[Tensor]:
    ends = torch.tensor([0, 16, 24, 40], dtype=torch.int32)
    return [*(torch.randn(40, 4, 64).bfloat16().requires_grad_() for _ in range(3)), ends]


@pytest.mark.skipif(VARLEN is None, reason="this torch has no attention of packed sequences")
@pytest.mark.parametrize(
    ("window", "causal", "masked"),
    [((-1, -1), False, False), ((-1, 0), True, False), ((4, 0), False, True)],
)
def test_packed_sequences(window: tuple[int, int], causal: bool, masked: bool) -> None:
    """Traced on any device; torch runs it on GPUs. The lengths are known when it runs, the longest before."""
    forward, backward = fp8graph.explain(Packed(window), *packed(), training=True).attention
    flops = 4 * 4 * 40 * 16 * 64 // (2 if causal else 1)
    assert (forward.form, forward.flops, forward.causal, forward.masked) == ("packed", flops, causal, masked)
    assert (backward.direction, backward.flops) == ("backward", 2.5 * flops)
    sizes = (forward.batch, forward.heads, forward.queries, forward.keys, forward.head_size, forward.value_size)
    assert sizes == (1, 4, 40, 16, 64, 64)
    assert forward.reason.startswith(LEFT_ALONE)
    assert forward.reason.endswith(LENGTHS)


@pytest.mark.skipif(VARLEN is None, reason="this torch has no attention of packed sequences")
def test_packed_sequences_are_not_quantized() -> None:
    policy = Policy([Rule("*", "tensorwise", op="attention")], default=None)
    report = fp8graph.explain(Packed(), *packed(), training=True, policy=policy)
    assert "attention of packed sequences is found, not quantized" in report.attention[0].reason
    assert "fp8graph." not in report.graphs[0].after
    with pytest.raises(fp8graph.Fp8CoverageError, match="attention: not in FP8: attention of packed"):
        report.check()


def test_the_graph_is_not_changed() -> None:
    view = view_of(sdpa(), *qkv())
    before, after = around(view, "find_attention")
    assert before == after


def test_attention_that_is_written_out_is_one_attention_and_two_matmuls() -> None:
    report = fp8graph.explain(written_out(), *qkv(), training=True)
    forward, backward = report.attention
    assert len(report.gemms) == 6
    assert forward.flops == sum(gemm.flops for gemm in report.gemms if gemm.gemm == "fprop")
    assert backward.flops == sum(gemm.flops for gemm in report.gemms if gemm.gemm != "fprop")


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([sdpa(), Attention(lambda q, k, v: sdpa()(sdpa()(q, k, v), k, v))])

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        for layer in self.layers:
            q = layer(q, k, v)
        return q


def test_names_are_those_of_modules() -> None:
    rows = fp8graph.explain(Layers(), *qkv(), training=False).attention
    assert [row.name for row in rows] == ["layers.0", "layers.1", "layers.1[1]"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "written", "form"),
    [
        ("llama", False, "CPU flash"),
        pytest.param("llama", True, "written out", marks=pytest.mark.slow),
        pytest.param("gpt2", False, "CPU flash", marks=pytest.mark.slow),
        ("gpt2", True, "written out"),
    ],
)
def test_models(family: str, written: bool, form: str) -> None:
    with torch.device("meta"):
        model = TINY[family].build(1).bfloat16()
    if written:
        model.set_attn_implementation("eager")
    ids = torch.zeros(2, 16, dtype=torch.long)
    report = fp8graph.explain(model, input_ids=ids, labels=ids, training=True)
    assert {row.form for row in report.attention} == {form}
    assert [row.direction for row in report.attention] == ["forward", "backward"]
    layers = {"llama": "model.layers.{}.self_attn", "gpt2": "transformer.h.{}.attn"}[family]
    assert {row.name for row in report.attention} == {layers.format(0)}
    assert sum(gemm.op == "matmul" for gemm in report.gemms) == (6 if written else 0)
    report.check()
