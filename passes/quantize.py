"""Rewrite every planned GEMM into the dialect, naively: each operand is quantized where it is used.

    y = mm(x, permute(w))       ->      qx = quantize(x, rowwise=[1, 16]);  qw = quantize(w, rowwise=[16, 16])
                                        y  = scaled_mm(qx[0], qw[0], qx[1], qw[1], None, bf16, fast_accum)

    y = bmm(a, b)               ->      qa = quantize(a); qb = quantize(b)                    (emulated)
                                        y  = to(bmm(dequantize(qa), dequantize(qb)), bf16)

Sizes that cuBLAS cannot take (k and n must be multiples of 16) are padded inside the quantize, and the result
is sliced. A bias goes into the GEMM where cuBLAS adds it (bf16 or fp16 result, n not padded), else it is
added after. A batch of one is a plain GEMM. GEMMs without a recipe in the plan are not touched.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from operator import getitem
from typing import Any, cast

import torch
from torch import fx

from fp8graph import numerics, ops
from fp8graph.graph import MATMULS, aten, insert, known_equal, matmul_arguments, nodes, value
from fp8graph.passes.assign import ALIGNMENT
from fp8graph.recipes import Recipe
from fp8graph.sites import Compilation, Decision, Gemm, OperandView

_NAME = "quantize"
OPERAND_KEY = "fp8graph_operand"  # node.meta of a quantize node: the operand's name
_CONVERT = torch.ops.prims.convert_element_type.default


def quantize(graph: fx.Graph, compilation: Compilation) -> None:
    results: dict[fx.Node, fx.Node] = {}  # matmul -> its FP8 form: one matmul's result is the next one's operand
    gemms = {gemm.node: gemm for site in compilation.sites for gemm in site.gemms}
    for node in list(nodes(graph, MATMULS)):
        decision = compilation.plan.get(node)
        if decision is not None and decision.recipe is not None:
            results[node] = _rewrite(graph, gemms[node], decision, results)
    graph.eliminate_dead_code()  # the transposes that only the replaced matmuls used


def _rewrite(graph: fx.Graph, gemm: Gemm, decision: Decision, results: Mapping[fx.Node, fx.Node]) -> fx.Node:
    node = gemm.node

    def emit(target: Any, *args: Any, name: str | None = None) -> fx.Node:
        return insert(graph, target, args, like=node, made_by=_NAME, name=name)

    recipe = cast(Recipe, decision.recipe)
    native = decision.execution == "native"
    with graph.inserting_before(node):
        quantized = [
            # b is padded along n too; a's m is free
            _quantize_operand(view, results, recipe, emit, native, [1 if view is gemm.a else ALIGNMENT, ALIGNMENT])
            for view in (gemm.a, gemm.b)
        ]
        result = (_native if native else _emulated)(gemm, recipe, emit, quantized)
    node.replace_all_uses_with(result)
    graph.erase_node(node)
    return result


def _quantize_operand(
    view: OperandView,
    results: Mapping[fx.Node, fx.Node],
    recipe: Recipe,
    emit: Callable[..., fx.Node],
    native: bool,
    multiples: list[int],
) -> tuple[fx.Node, fx.Node]:
    """``(data, scale_inv)`` of one operand, in the layout that the GEMM wants."""
    tensor = results.get(view.tensor, view.tensor)
    if native and value(tensor).ndim == 3:
        tensor = emit(aten.squeeze.dim, tensor, 0)  # [1, r, c]: a batch of one
    if view.flipped:
        dims = list(range(value(tensor).ndim))
        tensor = emit(aten.permute.default, tensor, [*dims[:-2], dims[-1], dims[-2]])
    multiples = multiples if native else [1, 1]
    rowwise, columnwise = (multiples, []) if view.layout == "rowwise" else ([], multiples)
    quantizer = numerics.quantizer_args(recipe.quantizer(view.operand))
    operand = view.operand
    outputs = emit(ops.quantize, tensor, *quantizer, rowwise, columnwise, name=f"quantize_{operand}")
    outputs.meta[OPERAND_KEY] = operand
    data = emit(getitem, outputs, 0, name=f"{operand}_{view.layout}")
    return data, emit(getitem, outputs, 1, name=f"{operand}_scale_inv")


def _native(
    gemm: Gemm, recipe: Recipe, emit: Callable[..., fx.Node], quantized: list[tuple[fx.Node, fx.Node]]
) -> fx.Node:
    (a, scale_inv_a), (b, scale_inv_b) = quantized  # [m, k], [n, k]
    out = value(gemm.node)
    n, n_padded = out.shape[-1], value(b).shape[0]
    bias = gemm.bias if _bias_fits(gemm) and known_equal(n, n_padded) else None
    fast = recipe.fast_accum(gemm.gemm)
    args = (a, b, scale_inv_a, scale_inv_b, bias, out.dtype, fast)
    result = emit(ops.scaled_mm, *args, name=gemm.gemm)  # [m, n_padded]
    if not known_equal(n, n_padded):
        result = emit(aten.slice.Tensor, result, 1, 0, _symbolic(n, gemm.node, emit))
    if out.ndim == 3:
        result = emit(aten.unsqueeze.default, result, 0)
    return result if bias is not None else _add_bias(gemm, result, emit)


def _emulated(
    gemm: Gemm, recipe: Recipe, emit: Callable[..., fx.Node], quantized: list[tuple[fx.Node, fx.Node]]
) -> fx.Node:
    a, b = (emit(ops.dequantize, data, scale_inv, torch.float32) for data, scale_inv in quantized)
    out = value(gemm.node)
    if value(a).ndim == 3:
        result = emit(aten.bmm.default, a, emit(aten.permute.default, b, [0, 2, 1]))  # [b, n, k] -> [b, k, n]
    else:
        result = emit(aten.mm.default, a, emit(aten.permute.default, b, [1, 0]))  # [n, k] -> [k, n]
    if out.ndim > value(result).ndim:
        result = emit(aten.unsqueeze.default, result, 0)
    if out.dtype != torch.float32:
        result = emit(_CONVERT, result, out.dtype)
    return _add_bias(gemm, result, emit)


def _bias_fits(gemm: Gemm) -> bool:
    """Whether cuBLAS can add the bias: a [n] vector of the result's own 16-bit dtype, unscaled."""
    if gemm.bias is None or gemm.node.kwargs:  # kwargs: alpha, beta
        return False
    bias, out = value(gemm.bias), value(gemm.node)
    return bias.ndim == 1 and bias.dtype == out.dtype and out.dtype in (torch.bfloat16, torch.float16)


def _add_bias(gemm: Gemm, result: fx.Node, emit: Callable[..., fx.Node]) -> fx.Node:
    """``beta * bias + alpha * result``, as addmm and baddbmm define it."""
    if gemm.bias is None:
        return result
    alpha, beta = gemm.node.kwargs.get("alpha", 1), gemm.node.kwargs.get("beta", 1)
    if alpha != 1:
        result = emit(aten.mul.Tensor, result, alpha)
    if beta == 0:  # by definition the bias is then not read: it may be uninitialized
        return result
    bias = gemm.bias if beta == 1 else emit(aten.mul.Tensor, gemm.bias, beta)
    return emit(aten.add.Tensor, result, bias)


def _symbolic(size: int | torch.SymInt, node: fx.Node, emit: Callable[..., fx.Node]) -> int | fx.Node:
    """A size as a graph argument: the number, or the node that computes it."""
    if isinstance(size, int):
        return size
    _, b = matmul_arguments(node)
    return emit(aten.sym_size.int, b, value(b).ndim - 1)
