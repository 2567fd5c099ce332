"""torch's attention ops: the arguments that are relied on."""

from __future__ import annotations

import inspect

import pytest
import torch

from fp8graph.compat.attention import (
    FLEX,
    FLEX_BACKWARD,
    HAS_QUANTIZED_ATTENTION,
    VARLEN,
    VARLEN_BACKWARD,
    active_implementation,
)
from fp8graph.compat.ops import schema

aten = torch.ops.aten


@pytest.mark.parametrize(
    ("op", "first"), [(FLEX, "query key value"), (FLEX_BACKWARD, "query key value out logsumexp grad_out")]
)
def test_the_first_arguments_of_flex_attention(op: object, first: str) -> None:
    names = list(inspect.signature(type(op).__call__).parameters)[1:]
    assert names[: len(first.split())] == first.split()


@pytest.mark.skipif(VARLEN is None, reason="this torch has no attention of packed sequences")
def test_the_first_arguments_of_packed_attention() -> None:
    forward, backward = ([argument.name for argument in schema(op).arguments] for op in (VARLEN, VARLEN_BACKWARD))
    assert forward[:8] == "query key value cu_seq_q cu_seq_k max_q max_k is_causal".split()
    assert "window_size" in forward
    assert backward[:6] == "grad_out query key value out lse".split()


@pytest.mark.skipif(not HAS_QUANTIZED_ATTENTION, reason="this torch has no op for FP8 attention")
def test_the_arguments_of_the_op_that_reads_fp8() -> None:
    names = [argument.name for argument in schema(aten._scaled_dot_product_flash_attention.quantized).arguments]
    scales = ["q_descale", "k_descale", "v_descale"]
    rest = ["dropout_p", "is_causal", "return_debug_mask", "scale"]
    assert names == ["query", "key", "value", *scales, *rest]


def test_nothing_is_active_unless_a_program_asks_for_it() -> None:
    assert active_implementation() is None
