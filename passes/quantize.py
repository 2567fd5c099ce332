"""Rewrite every planned GEMM into the dialect, naively: each operand is quantized where it is used.

    y = mm(x, permute(w))       ->      qx = quantize(x, rowwise=[1, 16]);  qw = quantize(w, rowwise=[16, 16])
                                        y  = scaled_mm(qx[0], qw[0], qx[1], qw[1], None, bf16, fast_accum)

    y = bmm(a, b)               ->      qa = quantize(a); qb = quantize(b)                    (emulated)
                                        y  = to(bmm(dequantize(qa), dequantize(qb)), bf16)

Sizes that cuBLAS cannot take (``hardware.ALIGNMENT``) are padded inside the quantize, and the result is sliced. A
bias goes into the GEMM where cuBLAS adds it (bf16 or fp16 result, n not padded), else it is added after. Gradients
carry overflow: an inf in dy reaches the weight's gradient. A batch of one is a plain GEMM. GEMMs without a recipe in
the plan are not touched.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from operator import getitem
from typing import Any, cast

import torch
from torch import fx

from fp8graph import numerics, ops
from fp8graph.graph import GEMM_KEY, MATMULS, aten, insert, known_equal, matmul_arguments, nodes, value
from fp8graph.hardware import ALIGNMENT
from fp8graph.recipes import Quantizer, Recipe
from fp8graph.sites import Compilation, Decision, Gemm, OperandView, Site, StateRow

_NAME = "quantize"
OPERAND_KEY = "fp8graph_operand"  # node.meta of a quantize node: the operand's name
ROWS_KEY = "fp8graph_rows"  # node.meta of a delayed quantize node: its StateRows
_CONVERT = torch.ops.prims.convert_element_type.default


def quantize(graph: fx.Graph, compilation: Compilation) -> None:
    results: dict[fx.Node, fx.Node] = {}  # matmul -> its FP8 form: one matmul's result is the next one's operand
    gemms = {gemm.node: (gemm, site, i) for i, site in enumerate(compilation.sites) for gemm in site.gemms}
    for node in list(nodes(graph, MATMULS)):
        decision = compilation.plan.get(node)
        if decision is not None and decision.recipe is not None:
            gemm, site, position = gemms[node]
            node.meta[GEMM_KEY] = position, gemm.gemm
            results[node] = _rewrite(graph, gemm, site, decision, results)
    graph.eliminate_dead_code()  # the transposes that only the replaced matmuls used


@dataclass(frozen=True, kw_only=True)
class _Quantized:
    """One operand in the layout that the GEMM wants, as nodes."""

    quantizer: Quantizer
    data: fx.Node
    scale_inv: fx.Node
    global_scale_inv: fx.Node | None


def _rewrite(
    graph: fx.Graph, gemm: Gemm, site: Site, decision: Decision, results: Mapping[fx.Node, fx.Node]
) -> fx.Node:
    node = gemm.node

    def emit(target: Any, *args: Any, name: str | None = None, **kwargs: Any) -> fx.Node:
        return insert(graph, target, args, like=node, made_by=_NAME, name=name, kwargs=kwargs)

    recipe = cast(Recipe, decision.recipe)
    native = decision.execution == "native"
    m, n, k = ALIGNMENT[recipe.quantizer(gemm.a.operand).scaling] if native else (1, 1, 1)
    with graph.inserting_before(node):
        quantized: list[_Quantized] = []
        for view, multiples in ((gemm.a, [m, k]), (gemm.b, [n, k])):
            quantized.append(_quantize_operand(view, results, recipe, site, emit, native, multiples))
        result = (_native if native else _emulated)(gemm, recipe, emit, *quantized)
    node.replace_all_uses_with(result)
    graph.erase_node(node)
    return result


def _quantize_operand(
    view: OperandView,
    results: Mapping[fx.Node, fx.Node],
    recipe: Recipe,
    site: Site,
    emit: Callable[..., fx.Node],
    native: bool,
    multiples: list[int],
) -> _Quantized:
    tensor = results.get(view.tensor, view.tensor)
    if native and value(tensor).ndim == 3:
        tensor = emit(aten.squeeze.dim, tensor, 0)  # [1, r, c]: a batch of one
    if view.flipped:
        dims = list(range(value(tensor).ndim))
        tensor = emit(aten.permute.default, tensor, [*dims[:-2], dims[-1], dims[-2]])
    layouts: tuple[list[int], list[int]] = (multiples, []) if view.layout == "rowwise" else ([], multiples)
    operand, quantizer = view.operand, recipe.quantizer(view.operand)
    settings = numerics.quantizer_kwargs(quantizer)
    if operand == "grad_output":
        settings["carry_overflow"] = True  # torch.amp.GradScaler must see an inf
    args = (tensor, *numerics.quantizer_args(quantizer), *layouts)
    outputs = emit(ops.quantize, *args, name=f"quantize_{operand}", **settings)
    outputs.meta[OPERAND_KEY] = operand
    if quantizer.scaling == "delayed":
        whose: dict[str, Any] = {"fqn": site.fqn, "index": site.index, "use": site.use, "parameter": site.parameter}
        outputs.meta[ROWS_KEY] = [StateRow(**whose, operand=operand, recipe=recipe)]
    named: dict[str, fx.Node] = {}
    for position, name in enumerate(numerics.output_names(quantizer.scaling, *layouts)):
        if name != "amax":  # pass `state` asks for it
            named[name] = emit(getitem, outputs, position, name=f"{operand}_{name}")
    return _Quantized(
        quantizer=quantizer,
        data=named[view.layout],
        scale_inv=named.get("scale_inv") or named[f"{view.layout}_scale_inv"],
        global_scale_inv=named.get("global_scale_inv"),
    )


def _native(gemm: Gemm, recipe: Recipe, emit: Callable[..., fx.Node], a: _Quantized, b: _Quantized) -> fx.Node:
    out = value(gemm.node)
    padded_n = value(b.data).shape[0]  # a [m, k], b [n, k]
    bias = gemm.bias if _bias_fits(gemm) and known_equal(out.shape[-1], padded_n) else None
    args = (a.data, b.data, a.scale_inv, b.scale_inv, bias, out.dtype, recipe.fast_accum(gemm.gemm))
    settings: dict[str, Any] = {}
    if a.quantizer.scaling != "tensor":
        settings["scaling"] = a.quantizer.scaling
    for side, operand in (("a", a), ("b", b)):
        if any(operand.quantizer.block):
            settings[f"block_{side}"] = list(operand.quantizer.block)
        if operand.global_scale_inv is not None:
            settings[f"global_scale_inv_{side}"] = operand.global_scale_inv
    result = emit(ops.scaled_mm, *args, name=gemm.gemm, **settings)  # [m_padded, n_padded]
    result = _without_padding(gemm, result, emit)
    if out.ndim == 3:
        result = emit(aten.unsqueeze.default, result, 0)
    return result if bias is not None else _add_bias(gemm, result, emit)


def _emulated(gemm: Gemm, _recipe: Recipe, emit: Callable[..., fx.Node], *operands: _Quantized) -> fx.Node:
    a, b = (_dequantized(operand, emit) for operand in operands)  # [..., m, k], [..., n, k]
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


def _without_padding(gemm: Gemm, result: fx.Node, emit: Callable[..., fx.Node]) -> fx.Node:
    """``result`` [m_padded, n_padded] cut to the size of the matmul that it replaces."""
    sizes, padded = value(gemm.node).shape[-2:], value(result).shape[-2:]
    for dim, (size, padded_size) in enumerate(zip(sizes, padded, strict=True)):
        if not known_equal(size, padded_size):
            result = emit(aten.slice.Tensor, result, dim, 0, _symbolic(dim, gemm.node, emit))
    return result


def _dequantized(operand: _Quantized, emit: Callable[..., fx.Node]) -> fx.Node:
    settings = numerics.quantizer_kwargs(operand.quantizer)
    if operand.global_scale_inv is not None:
        settings["global_scale_inv"] = operand.global_scale_inv
    return emit(ops.dequantize, operand.data, operand.scale_inv, torch.float32, **settings)


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


def _symbolic(dim: int, node: fx.Node, emit: Callable[..., fx.Node]) -> int | fx.Node:
    """Size 0 (m) or 1 (n) of a matmul's result as a graph argument: the number, or the node that computes it."""
    size = value(node).shape[dim - 2]
    if isinstance(size, int):
        return size
    argument = matmul_arguments(node)[dim]  # a [..., m, k], b [..., k, n]
    return emit(aten.sym_size.int, argument, value(argument).ndim - 2 + dim)
