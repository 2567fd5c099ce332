"""q, k and v as dialect nodes: what shares a scale, and the strides of what is decoded."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, fx

from fp8graph.ir.edit import insert
from fp8graph.ir.nodes import value
from fp8graph.passes.attention.occurrences import Sizes
from fp8graph.passes.attention.quantize import AttentionOperand, quantized_tensor
from fp8graph.recipes import resolve_recipe
from helpers import graph_inputs_for, in_one_test

SIZES = Sizes(batch=2, heads=4, kv_heads=2, queries=8, keys=8, head_size=16, value_size=16)


def written(x: Tensor, recipe: str) -> tuple[AttentionOperand, Any, fx.Node]:
    graph = fx.Graph()
    (node,) = graph_inputs_for(graph, [x])
    end = graph.output((node,))

    def emit(target: Any, *args: Any, name: str | None = None, **kwargs: Any) -> fx.Node:
        with graph.inserting_before(end):
            return insert(graph, target, args, like=node, name=name, kwargs=kwargs)

    found = resolve_recipe(recipe)
    assert found is not None
    return quantized_tensor(node, "query", SIZES, found.quantizer("input"), emit), emit, node


LAYOUTS = {
    "contiguous": torch.randn(2, 4, 8, 16),
    "tokens first": torch.randn(2, 8, 4, 16).transpose(1, 2),
    "a part": torch.randn(2, 8, 3, 4, 16)[:, :, 1].transpose(1, 2),
    "expanded": torch.randn(2, 1, 8, 16).expand(2, 4, 8, 16),
}


@in_one_test("recipe", ["tensorwise", "rowwise"])
@in_one_test("name", LAYOUTS)
def test_decoded_operand_keeps_its_strides(name: str, recipe: str) -> None:
    """Dense; torch gives the result of an op that reads q the same strides."""
    x = LAYOUTS[name]
    made, emit, _ = written(x, recipe)
    decoded = value(made.decoded(emit, backward=False))
    expected = x.contiguous() if name == "expanded" else torch.empty_like(x)
    assert (decoded.shape, decoded.stride(), decoded.dtype) == (x.shape, expected.stride(), x.dtype)
    data = value(made.in_place(made.data, emit))
    assert (data.shape, data.stride(), data.dtype) == (x.shape, expected.stride(), torch.float8_e4m3fn)


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise"])
def test_scales_as_flash_attention_takes_them(recipe: str) -> None:
    made, emit, _ = written(LAYOUTS["contiguous"], recipe)
    assert value(made.scale_inv).shape == ((4, 1) if recipe == "rowwise" else ())
    scale = value(made.scale_per_head(SIZES, 2, emit))
    assert (scale.shape, scale.dtype) == ((2, 2), torch.float32)


def test_matrices_of_a_matmul_have_a_scale_each() -> None:
    made, _, _ = written(torch.randn(8, 5, 16), "rowwise")
    assert value(made.data).shape == (8, 80)
    assert value(written(torch.randn(5, 16), "rowwise")[0].data).shape == (1, 80)
