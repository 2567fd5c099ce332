"""Multiply weights that arrive quantized as they are: their bytes and scales replace a second quantization.

    w  = stored_weight(data, scale_inv, bf16)           ->      (no bf16 weight)
    qw = quantize(w, rowwise);  y = scaled_mm(.., qw[0], .., qw[1], ..)
                                                        ->      y  = scaled_mm(.., data, .., scale_inv, ..)
    qw = quantize(w, columnwise); dx = scaled_mm(qdy[0], qw[0], qdy[1], qw[1])
                                                        ->      dx = scaled_mm(qdy[0], columnwise(data), qdy[1],
                                                                               columnwise(scale_inv))

A program that stores its weight as [K, N] (``x @ w``, Conv1D, a tied decoder) has it the other way round: fprop reads
the transposed copy, and dgrad the bytes as they are. The transposed copies are made once (``hoist_weights``). With one
scale per row, a GEMM that contracts the rows contracts along the scales: they multiply its other operand before that is
quantized, and the bytes are multiplied with a scale of 1. Sizes that the GEMM pads are padded with zeros, in a copy. A
checkpoint's static scale of activations replaces their amax.

Refuses nothing of its own: ``assign`` leaves GEMMs that cannot take the bytes in high precision, and those of backward
dequantize them anew, so that no copy in high precision is kept. A rule that asks for another recipe has the weight
dequantized and quantized again.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import fx

from fp8graph.analysis.stored import stored_view, stored_weight, transposes
from fp8graph.compat.inductor import erase_unused
from fp8graph.compat.ops import named_arguments
from fp8graph.ir import ops
from fp8graph.ir.compilation import Compilation
from fp8graph.ir.edit import inserted, update_value
from fp8graph.ir.nodes import (
    CONVERT,
    GEMM_KEY,
    OPERAND_KEY,
    aten,
    known_equal,
    look_through_transposes,
    matmul_arguments,
    nodes,
    value,
)
from fp8graph.ir.quantize_node import QuantizeNode
from fp8graph.ir.sites import OperandView
from fp8graph.numerics.formats import SCALE, SCALE_INV


def has_stored_weights(graph: fx.Graph, compilation: Compilation) -> bool:
    """Return whether some weight arrives quantized."""
    return any(nodes(graph, (ops.stored_weight,)))


def fold(graph: fx.Graph, compilation: Compilation) -> None:
    operands: dict[tuple[int, str], dict[str, fx.Node]] = {}  # the quantize nodes of each GEMM
    for node in nodes(graph, (ops.quantize,)):
        if GEMM_KEY in node.meta:
            operands.setdefault(node.meta[GEMM_KEY], {})[node.meta[OPERAND_KEY]] = node
    for (position, name), quantized in operands.items():
        gemm = next(gemm for gemm in compilation.sites[position].gemms if gemm.gemm == name)
        stored = compilation.decisions[gemm.node].stored
        if stored is None:
            continue
        given = named_arguments(stored)
        if "input" in quantized and given["input_scale_inv"] is not None:
            _use_static_scale(quantized["input"], given["input_scale_inv"])
        weight, view = QuantizeNode(quantized["weight"]), cast(OperandView, stored_view(gemm))
        scales_move = view.turned and not transposes(given)  # those of rows, which the GEMM contracts
        if scales_move:
            _scale_rows(quantized["input" if name == "fprop" else "grad_output"], given["scale_inv"])
        _replace(weight, _as_read(weight, given, view, scaled=not scales_move))
    for site in compilation.sites:
        if (weight := stored_weight(site)) is not None:
            for gemm in site.gemms:
                if compilation.decisions[gemm.node].recipe is None and gemm.gemm != "fprop":
                    _dequantize_again(gemm.node, weight)
    erase_unused(graph)


def _dequantize_again(matmul: fx.Node, weight: fx.Node) -> None:
    """Let a backward matmul in high precision dequantize ``weight`` itself: forward's result would be kept for it."""
    for argument in matmul_arguments(matmul):
        tensor, transposed = look_through_transposes(argument)
        if tensor is weight:
            again = inserted(ops.stored_weight, *weight.args, **cast(Any, weight.kwargs), like=matmul)
            if transposed:
                again = inserted(aten.permute.default, again, [*range(value(again).ndim - 2), -1, -2], like=matmul)
            matmul.replace_input_with(argument, again)


def _as_read(
    weight: QuantizeNode, given: dict[str, Any], view: OperandView, *, scaled: bool
) -> dict[str, fx.Node | None]:
    """Return the outputs of the quantize node ``weight`` by name: the stored tensors, or copies, transposed or padded.

    ``scaled``: with its scales, else with scales of 1.
    """
    tensors: dict[str, fx.Node | None] = {}
    for name, val in weight.values.items():
        if name.endswith("global_scale_inv"):
            tensors[name] = given["global_scale_inv"]
        elif name == view.layout:
            tensors[name] = _laid_out(weight.node, given["data"], val.shape, turned=view.turned)
        elif val.ndim < 2:
            tensors[name] = given["scale_inv"]
        elif scaled:
            tensors[name] = _laid_out(weight.node, given["scale_inv"], val.shape, turned=view.turned)
        else:
            ones: dict[str, Any] = {"dtype": val.dtype, "device": val.device}
            tensors[name] = inserted(aten.full.default, [*val.shape], 1.0, **ones, like=weight.node)
    return tensors


def _laid_out(like: fx.Node, x: fx.Node, shape: Sequence[int], *, turned: bool) -> fx.Node:
    """``x``, ``turned`` (transposed) or not, with zeros at the end up to ``shape``; itself if nothing changes."""
    if turned:
        return _transposed(like, x, shape)
    return x if _fits(x, shape) else _transposed(like, _transposed(like, x, shape[::-1]), shape)


def _replace(weight: QuantizeNode, tensors: dict[str, fx.Node | None]) -> None:
    """Give the readers of each output of ``weight`` the one of ``tensors`` with its name."""
    for name, user in weight.outputs.items():
        user.replace_all_uses_with(cast(fx.Node, tensors[name]))
        weight.node.graph.erase_node(user)
    weight.node.graph.erase_node(weight.node)


def _scale_rows(other: fx.Node, scale_inv: fx.Node) -> None:
    """Let ``other`` quantize ``x * scale_inv`` [M, R] in FP32, with one scale [R, 1] per row of the stored weight."""
    quantized = QuantizeNode(other)
    x = quantized.arguments.x
    exact = inserted(CONVERT, x, torch.float32, like=other)
    row = inserted(aten.view.default, scale_inv, [1, value(scale_inv).shape[0]], like=other)
    quantized.ask(x=inserted(aten.mul.Tensor, exact, row, like=other))
    update_value(other)


def _use_static_scale(activations: fx.Node, scale_inv: fx.Node) -> None:
    """Let ``activations`` be quantized with ``scale_inv`` [] or [1], not with a scale of their own amax."""
    one = inserted(aten.view.default, scale_inv, [1, 1], like=activations)
    columns = {SCALE_INV: one, SCALE: inserted(aten.reciprocal.default, one, like=activations)}
    table = [columns[position] for position in sorted(columns)]
    QuantizeNode(activations).ask(scales=inserted(aten.cat.default, table, 1, like=activations))
    for node in (activations, *activations.users):
        update_value(node)


def _transposed(like: fx.Node, x: fx.Node, shape: Sequence[int]) -> fx.Node:
    """``x`` transposed, with zeros at the end up to ``shape``."""
    return inserted(ops.columnwise, x, [*shape], like=like)


def _fits(x: fx.Node, shape: Sequence[int]) -> bool:
    return all(known_equal(*sizes) for sizes in zip(value(x).shape, shape, strict=True))
