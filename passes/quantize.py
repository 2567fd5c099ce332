"""Rewrite every GEMM that has a recipe into the dialect, naively: each operand is quantized where it is used.

    y = mm(x, permute(w))       ->      qx = quantize(x, rowwise=[1, 16]);  qw = quantize(w, rowwise=[16, 16])
                                        y  = scaled_mm(qx[0], qw[0], qx[1], qw[1], None, bf16, fast_accum)

    y = grouped_mm(x, permute(w), offs)    ->    qx = quantize(x, offs=offs);  qw = quantize(w, per_matrix=True)
                                        y  = scaled_grouped_mm(qx[0], qw[0], qx[1], qw[1], offs, bf16, ...)

    y = bmm(a, b)               ->      qa = quantize(a); qb = quantize(b)                    (emulated)
                                        y  = to(bmm(dequantize(qa), dequantize(qb)), bf16)

Sizes that cuBLAS does not accept (``Hardware.alignment``) are padded inside the quantize, and the result is sliced
(and copied if it leaves the graph, or if a view is impossible: ``edit.take_place``). A bias goes into the GEMM if
cuBLAS can add it (bf16 or fp16 result, n not padded), else it is added afterwards. A batch of one is a plain GEMM.
GEMMs without a recipe are not changed.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass
from operator import getitem
from typing import Any, cast

import torch
from torch import fx

from fp8graph.compat.inductor import erase_unused
from fp8graph.hardware import Hardware
from fp8graph.ir import ops
from fp8graph.ir.compilation import Compilation
from fp8graph.ir.edit import Emit, inserted, take_place
from fp8graph.ir.nodes import (
    CASTS,
    CONVERT,
    GEMM_KEY,
    GROUPED,
    OPERAND_KEY,
    SITES,
    USES_KEY,
    aten,
    is_view,
    known_equal,
    matmul_arguments,
    nodes,
    value,
)
from fp8graph.ir.quantize_node import QuantizeNode
from fp8graph.ir.sites import Decision, Gemm, OperandView, Site, Use
from fp8graph.numerics import quantization
from fp8graph.recipes import Quantizer, Recipe


def quantize(graph: fx.Graph, compilation: Compilation) -> None:
    results: dict[fx.Node, fx.Node] = {}  # matmul -> its FP8 form: its result may be an operand of the next
    gemms = {gemm.node: (gemm, site, i) for i, site in enumerate(compilation.sites) for gemm in site.gemms}
    for node in list(nodes(graph, SITES)):
        decision = compilation.decisions.get(node)
        if decision is not None and decision.recipe is not None:
            gemm, site, position = gemms[node]
            node.meta[GEMM_KEY] = position, gemm.gemm
            results[node] = _rewrite(graph, gemm, site, decision, results, compilation.hardware_of(node))
    erase_unused(graph)  # the transposes that only the replaced matmuls used


def _rewrite(
    graph: fx.Graph,
    gemm: Gemm,
    site: Site,
    decision: Decision,
    results: Mapping[fx.Node, fx.Node],
    device: Hardware,
) -> fx.Node:
    node = gemm.node

    emit = functools.partial(inserted, like=node)
    recipe = cast(Recipe, decision.recipe)
    native = decision.execution == "native"
    grouped = node.target in GROUPED
    quantizers = [device.quantizer(recipe, view.operand) for view in (gemm.a, gemm.b)]
    m, n, k = device.alignment(*quantizers) if native else (1, 1, 1)
    if grouped and value(gemm.b.tensor).ndim == 2:  # wgrad: groups of columns consist of whole tiles
        k = math.lcm(k, *(quantizer.block[1] or 1 for quantizer in quantizers))
    with graph.inserting_before(node):
        quantized: list[QuantizedOperand] = []
        for view, quantizer, multiples in zip((gemm.a, gemm.b), quantizers, ([m, k], [n, k]), strict=True):
            settings = _of_groups(view, node) if grouped else {}
            quantized.append(
                quantize_operand(
                    view, results, recipe, quantizer, site, emit, native and not grouped, multiples, **settings
                )
            )
        if grouped:
            result = _grouped(gemm, recipe, emit, *quantized, native=native, multiple=k)
        else:
            result = _native(gemm, recipe, emit, *quantized) if native else _emulated(gemm, device, emit, *quantized)
    return take_place(result, node)


def _native(gemm: Gemm, recipe: Recipe, emit: Emit, a: QuantizedOperand, b: QuantizedOperand) -> fx.Node:
    out = value(gemm.node)
    padded_n = value(b.data).shape[0]  # a [m, k], b [n, k]
    bias = gemm.bias if _bias_fits(gemm) and known_equal(out.shape[-1], padded_n) else None
    args = (a.data, b.data, a.scale_inv, b.scale_inv, bias, out.dtype, recipe.fast_accum(gemm.gemm))
    result = emit(ops.scaled_mm, *args, name=gemm.gemm, **_gemm_settings(a, b))  # [m_padded, n_padded]
    result = _without_padding(gemm, result, emit)
    if out.ndim == 3:
        result = emit(aten.unsqueeze.default, result, 0)
    return result if bias is not None else _add_bias(gemm, result, emit)


def _grouped(
    gemm: Gemm,
    recipe: Recipe,
    emit: Emit,
    a: QuantizedOperand,
    b: QuantizedOperand,
    *,
    native: bool,
    multiple: int,
) -> fx.Node:
    args = (a.data, b.data, a.scale_inv, b.scale_inv, gemm.node.args[2], value(gemm.node).dtype)
    settings = _gemm_settings(a, b) | ({"multiple": multiple} if multiple != 1 else {})
    name = f"grouped_{gemm.gemm}"
    result = emit(ops.scaled_grouped_mm, *args, recipe.fast_accum(gemm.gemm), native, name=name, **settings)
    return _without_padding(gemm, result, emit)


def _of_groups(view: OperandView, node: fx.Node) -> dict[str, Any]:
    """Return the keyword arguments of a quantize node that say that its operand is one of a grouped matmul."""
    return {"per_matrix": True} if value(view.tensor).ndim == 3 else {"offs": node.args[2]}


def _gemm_settings(a: QuantizedOperand, b: QuantizedOperand) -> dict[str, Any]:
    """Return the keyword arguments of a scaled matmul, without those that equal their defaults."""
    settings: dict[str, Any] = {}
    if a.quantizer.scaling != Quantizer.scaling:
        settings["scaling"] = a.quantizer.scaling
    for side, operand in (("a", a), ("b", b)):
        if any(operand.quantizer.block):
            settings[f"block_{side}"] = list(operand.quantizer.block)
        if operand.global_scale_inv is not None:
            settings[f"global_scale_inv_{side}"] = operand.global_scale_inv
    return settings


def _emulated(gemm: Gemm, device: Hardware, emit: Emit, *operands: QuantizedOperand) -> fx.Node:
    out = value(gemm.node)
    dtype = device.emulation_dtype([operand.quantizer for operand in operands], out.dtype)
    a, b = (_dequantized(operand, dtype, emit) for operand in operands)  # [..., m, k], [..., n, k]
    if value(a).ndim == 3:
        result = emit(aten.bmm.default, a, emit(aten.permute.default, b, [0, 2, 1]))  # [b, n, k] -> [b, k, n]
    else:
        result = emit(aten.mm.default, a, emit(aten.permute.default, b, [1, 0]))  # [n, k] -> [k, n]
    if out.ndim > value(result).ndim:
        result = emit(aten.unsqueeze.default, result, 0)
    if out.dtype != dtype:
        result = emit(CONVERT, result, out.dtype)
    return _add_bias(gemm, result, emit)


def _without_padding(gemm: Gemm, result: fx.Node, emit: Emit) -> fx.Node:
    """``result`` [..., m_padded, n_padded], sliced to the size of the matmul that it replaces."""
    sizes, padded = value(gemm.node).shape[-2:], value(result).shape[-2:]
    first = value(result).ndim - 2
    for dim, (size, padded_size) in enumerate(zip(sizes, padded, strict=True)):
        if not known_equal(size, padded_size):
            result = emit(aten.slice.Tensor, result, first + dim, 0, _symbolic(dim, gemm.node, emit))
    return result


def _dequantized(operand: QuantizedOperand, dtype: torch.dtype, emit: Emit) -> fx.Node:
    settings = quantization.decoding_kwargs(operand.quantizer)
    if operand.global_scale_inv is not None:
        settings["global_scale_inv"] = operand.global_scale_inv
    return emit(ops.dequantize, operand.data, operand.scale_inv, dtype, **settings)


def _bias_fits(gemm: Gemm) -> bool:
    """Return whether cuBLAS can add the bias: a [n] vector of the result's own 16-bit dtype, unscaled."""
    if gemm.bias is None or gemm.node.kwargs:  # kwargs: alpha, beta
        return False
    bias, out = value(gemm.bias), value(gemm.node)
    return bias.ndim == 1 and bias.dtype == out.dtype and out.dtype in (torch.bfloat16, torch.float16)


def _add_bias(gemm: Gemm, result: fx.Node, emit: Emit) -> fx.Node:
    """``beta * bias + alpha * result``, as addmm and baddbmm define it."""
    if gemm.bias is None:
        return result
    alpha, beta = gemm.node.kwargs.get("alpha", 1), gemm.node.kwargs.get("beta", 1)
    if alpha != 1:
        result = emit(aten.mul.Tensor, result, alpha)
    if beta == 0:  # by definition the bias is not read then, and may be uninitialized
        return result
    bias = gemm.bias if beta == 1 else emit(aten.mul.Tensor, gemm.bias, beta)
    return emit(aten.add.Tensor, result, bias)


def _symbolic(dim: int, node: fx.Node, emit: Emit) -> int | fx.Node:
    """Size 0 (m) or 1 (n) of a matmul's result as a graph argument: the number, or the node that computes it."""
    size = value(node).shape[dim - 2]
    if isinstance(size, int):
        return size
    argument = matmul_arguments(node)[dim]  # a [..., m, k], b [..., k, n]
    return emit(aten.sym_size.int, argument, value(argument).ndim - 2 + dim)


@dataclass(frozen=True, kw_only=True)
class QuantizedOperand:
    """One operand in the layout that the GEMM needs, as nodes."""

    quantizer: Quantizer
    data: fx.Node
    scale_inv: fx.Node
    global_scale_inv: fx.Node | None


def quantize_operand(
    view: OperandView,
    results: Mapping[fx.Node, fx.Node],
    recipe: Recipe,
    quantizer: Quantizer,
    site: Site,
    emit: Emit,
    squeeze: bool,
    multiples: list[int],
    **settings: Any,
) -> QuantizedOperand:
    """``view`` as ``quantizer`` of ``recipe`` quantizes it, padded to ``multiples``.

    ``results``: matmul -> its FP8 form. ``emit``: inserts a node. ``squeeze``: [1, r, c] is taken as a matrix.
    ``settings``: further ones of ``fp8graph::quantize``.
    """
    tensor = results.get(view.tensor, view.tensor)
    if squeeze and value(tensor).ndim == 3:
        tensor = emit(aten.squeeze.dim, tensor, 0)  # [1, r, c]: a batch of one
    if view.flipped:
        dims = list(range(value(tensor).ndim))
        tensor = emit(aten.permute.default, tensor, [*dims[:-2], dims[-1], dims[-2]])
    rowwise, columnwise = (multiples, list[int]()) if view.layout == "rowwise" else (list[int](), multiples)
    operand = view.operand
    settings |= quantization.quantizer_kwargs(quantizer)
    args = (tensor, *quantization.quantizer_args(quantizer), rowwise, columnwise)
    outputs = emit(ops.quantize, *args, name=f"quantize_{operand}", **settings)
    quantized = QuantizeNode(outputs)
    outputs.meta[OPERAND_KEY] = operand
    if quantized.kind.has_state:
        whose: dict[str, Any] = {"fqn": site.fqn, "index": site.index, "use": site.use, "parameter": site.parameter}
        whose["direct"] = _is_an_input(view.tensor)
        outputs.meta[USES_KEY] = [Use(**whose, operand=operand, recipe=recipe)]
    named: dict[str, fx.Node] = {}
    for position, name in enumerate(quantized.names):
        if name != "amax":  # pass `connect_scales` asks for it
            named[name] = emit(getitem, outputs, position, name=f"{operand}_{name}")
    return QuantizedOperand(
        quantizer=quantizer,
        data=named[view.layout],
        scale_inv=named.get("scale_inv") or named[f"{view.layout}_scale_inv"],
        global_scale_inv=named.get(f"{view.layout}_global_scale_inv"),
    )


def _is_an_input(node: fx.Node) -> bool:
    """Return whether the numbers of ``node`` are those of a graph input: it is one, behind views and casts."""
    while is_view(node) or node.target in CASTS:
        node = node.all_input_nodes[0]
    return node.op == "placeholder"
