"""operands: the quantization of one operand, written as nodes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import fx, nn

from fp8graph import DelayedScaling, Float8CurrentScaling, Float8RowwiseScaling, NVFP4BlockScaling, Recipe
from fp8graph.ir.edit import insert
from fp8graph.ir.nodes import OPERAND_KEY, USES_KEY, aten, value
from fp8graph.ir.quantize_node import QuantizeNode
from fp8graph.ir.sites import Gemm, Site
from fp8graph.passes.quantize import QuantizedOperand, quantize_operand
from helpers import Weight, passed

MULTIPLES = [1, 16]


def written(
    which: str, *, recipe: Recipe | None = None, module: nn.Module | None = None, shape: Any = (16, 32), **more: Any
) -> tuple[QuantizedOperand, QuantizeNode, list[str]]:
    """``which``, like "wgrad a", of the first site: the operand, its quantize node, the targets of the new nodes."""
    module = module or nn.Linear(32, 48, bias=False)
    graph, compilation = passed(module, torch.randn(shape, requires_grad=True), last="match")
    site: Site = compilation.sites[0]
    gemm: Gemm = next(gemm for gemm in site.gemms if gemm.gemm == which.split()[0])
    view = gemm.a if which.endswith("a") else gemm.b
    recipe, new = recipe or Float8CurrentScaling(), list[str]()

    def emit(target: Any, *args: Any, name: str | None = None, **kwargs: Any) -> fx.Node:
        new.append(getattr(target, "__name__", str(target)))
        with graph.inserting_before(gemm.node):
            return insert(graph, target, args, like=gemm.node, name=name, kwargs=kwargs)

    quantizer = recipe.quantizer(view.operand)
    squeeze = more.pop("squeeze", False)
    made = quantize_operand(view, more.pop("results", {}), recipe, quantizer, site, emit, squeeze, MULTIPLES, **more)
    return made, QuantizeNode(made.data.all_input_nodes[0]), new


def test_an_input_is_quantized_rowwise() -> None:
    made, quantized, new = written("fprop a")
    assert new == ["quantize.default", "getitem", "getitem"]
    assert (quantized.arguments.rowwise, quantized.arguments.columnwise) == (MULTIPLES, [])
    assert quantized.arguments.dtype == torch.float8_e4m3fn
    assert quantized.node.meta[OPERAND_KEY] == "input"
    assert (made.data.name, made.scale_inv.name, made.global_scale_inv) == ("input_rowwise", "input_scale_inv", None)
    assert USES_KEY not in quantized.node.meta


def test_a_gradient_is_e5m2_in_the_default_recipe() -> None:
    _, quantized, _ = written("dgrad a")
    assert quantized.arguments.dtype == torch.float8_e5m2
    assert quantized.node.meta[OPERAND_KEY] == "grad_output"


def test_a_columnwise_operand() -> None:
    made, quantized, _ = written("wgrad b")
    assert (quantized.arguments.rowwise, quantized.arguments.columnwise) == ([], MULTIPLES)
    assert made.data.name == "input_columnwise"
    assert value(made.data).shape == (32, 16)


@pytest.mark.parametrize(("flipped", "targets"), [(True, ["permute.default"]), (False, [])])
def test_a_weight_that_is_stored_transposed_is_turned(flipped: bool, targets: list[str]) -> None:
    body = (lambda w, x: x @ w) if flipped else (lambda w, x: x @ w.t())
    _, quantized, new = written("fprop b", module=Weight(body, *((32, 48) if flipped else (48, 32))))
    assert new[: len(targets) + 1] == [*targets, "quantize.default"]
    assert value(quantized.arguments.x).shape == (48, 32)


@pytest.mark.parametrize("squeeze", [True, False])
def test_a_batch_of_one_may_be_a_matrix(squeeze: bool) -> None:
    module = Weight(lambda w, x: torch.bmm(x, w), 1, 32, 48)
    made, _, new = written("fprop a", module=module, shape=(1, 16, 32), squeeze=squeeze)
    assert (new[0] == "squeeze.dim") == squeeze
    assert value(made.data).shape == ((16, 32) if squeeze else (1, 16, 32))


def test_scales_of_rows_are_those_of_the_layout() -> None:
    made, _, _ = written("wgrad a", recipe=Float8RowwiseScaling())
    assert made.scale_inv.name == "grad_output_columnwise_scale_inv"
    assert value(made.scale_inv).shape == (48, 1)


def test_delayed_scaling_knows_whose_scale_it_is_and_leaves_the_amax() -> None:
    recipe = DelayedScaling()
    _, quantized, new = written("fprop b", recipe=recipe)
    (row,) = quantized.node.meta[USES_KEY]
    assert (row.operand, row.recipe, row.parameter, row.use) == ("weight", recipe, 0, 0)
    assert quantized.names == ["rowwise", "scale_inv", "amax"]
    assert new.count("getitem") == 2


def test_two_levels_of_scales() -> None:
    made, _, _ = written("fprop a", recipe=NVFP4BlockScaling())
    assert made.global_scale_inv is not None
    assert value(made.global_scale_inv).shape == ()


def test_a_tensor_that_was_rewritten_is_its_fp8_form() -> None:
    module = Weight(lambda w, x: (x @ w.t()) @ w, 48, 32)
    graph, compilation = passed(module, torch.randn(16, 32, requires_grad=True), last="match")
    first, second = (site.gemms[0] for site in compilation.sites)
    with graph.inserting_before(first.node):
        other = insert(graph, aten.neg.default, (first.node.args[0],), like=first.node)

    def emit(target: Any, *args: Any, name: str | None = None, **kwargs: Any) -> fx.Node:
        with graph.inserting_before(second.node):
            return insert(graph, target, args, like=second.node, name=name, kwargs=kwargs)

    recipe = Float8CurrentScaling()
    quantizer, site = recipe.quantizer("input"), compilation.sites[1]
    made = quantize_operand(second.a, {first.node: other}, recipe, quantizer, site, emit, False, MULTIPLES)
    assert QuantizeNode(made.data.all_input_nodes[0]).arguments.x is other
