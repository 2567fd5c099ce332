"""Decide what backward keeps: FP8 copies (``save="speed"``), or the means to make them again (``save="memory"``).

    qh = quantize(h, rowwise, columnwise)       ->      qh = quantize(h, rowwise)                       (forward)
    dw = scaled_mm(qdy, qh.columnwise)                  qh_again = quantize(h, columnwise)              (backward)
                                                        dw = scaled_mm(qdy, qh_again.columnwise)

With "speed" this is done only where it costs no traffic: under scales of rows, which read a tensor once more for those
of its columns, an activation function's columnwise copy is made next to the function's own backward, which reads the
same inputs. Else the partitioner, to which the dialect is opaque, saves the FP8 copy. With "memory" backward quantizes
everything once more, from what is kept anyway (the inputs of a norm, of an activation function, of attention); the
partitioner finds out what that is. One scale per tensor is forward's, bit for bit: it is saved.

With ``save_activations_in_fp8``, the inputs of an activation function between two FP8 GEMMs (SwiGLU's gate and up)
are kept in E4M3 with one scale per tensor, and backward recomputes the function from them:

    h = silu(g) * u;  qh = quantize(h)          ->      h, qh as before; qg = quantize(g), qu = quantize(u)  (forward)
    dg = silu_backward(dh * u, g)                       dg = silu_backward(dh * dequantize(qu), dequantize(qg))

Weights that FSDP2 gathers for each direction are always quantized in each: FP8 copies that wait for backward would take
the memory that sharding saves.

Refuses (keeps as it is) what torch.utils.checkpoint recomputes, the operands of grouped GEMMs, and functions whose
inputs are not GEMM results or whose values go anywhere but into an FP8 GEMM.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Mapping, Sequence
from operator import getitem

import torch
from torch import fx

from fp8graph.ir import ops
from fp8graph.ir.compilation import Compilation
from fp8graph.ir.edit import insert
from fp8graph.ir.keys import CACHED_KEY, OPERAND_KEY, ROWS_KEY
from fp8graph.ir.nodes import aten, is_backward, nodes, readers, value
from fp8graph.ir.quantize_node import Asked, QuantizeNode, call

_NAME = "save_for_backward"
_BACKWARD = "must_be_in_backward"  # else the partitioner runs in forward whatever needs no gradient, to save less
_GEMMS = (ops.scaled_mm, aten.mm.default, aten.addmm.default)
_VIEWS = (aten.view.default, aten._unsafe_view.default, aten.reshape.default, aten.slice.Tensor)


def save_for_backward(graph: fx.Graph, compilation: Compilation) -> None:
    gemms = [node for node in nodes(graph, _GEMMS) if not is_backward(node)]
    functions = _activation_functions(gemms)
    free = {node for function in functions if _is_read_by_backward(function, gemms) for node in function}
    for node in list(nodes(graph, (ops.quantize,))):
        if not is_backward(node) and not {"recompute", CACHED_KEY} & {*node.meta} and "offs" not in node.kwargs:
            quantized = QuantizeNode(node)
            by_row = quantized.kind.columns_again and quantized.asked.x in free
            sharded = compilation.gathered and node.meta[OPERAND_KEY] == "weight"
            if compilation.settings.save == "memory" or by_row or sharded:
                _quantize_again(graph, node)
    if compilation.settings.save_activations_in_fp8:
        _keep_in_fp8(graph, functions, gemms, compilation)
    graph.eliminate_dead_code()


def _quantize_again(graph: fx.Graph, node: fx.Node) -> None:
    """Let backward make the columnwise copy itself, if only backward reads it."""
    quantized = QuantizeNode(node)
    asked, outputs = quantized.asked, quantized.outputs
    copy = outputs.get("columnwise")
    if not asked.rowwise or copy is None or not copy.users or not all(map(is_backward, copy.users)):
        return
    with graph.inserting_before(node):
        rows_only = dataclasses.replace(asked, columnwise=[], keep_scales=quantized.kind.own_scale)
        forward = _insert(graph, rows_only, node, like=node)
        made = {name: _output(graph, forward, name) for name in outputs if name in forward.names}
        if quantized.kind.own_scale:
            asked = dataclasses.replace(asked, scales=_output(graph, forward, "scales"), row=0)
    first = next(user for user in graph.nodes if user in copy.users)
    with graph.inserting_before(first):
        # The partitioner saves what an op reads that it cannot fuse; it can fuse a clamp (which changes nothing), and
        # so finds out what is cheapest to keep. A clone would be removed before it looks.
        source = insert(graph, aten.clamp_min.default, (asked.x, -math.inf), like=first, made_by=_NAME)
        source.meta["partitioner_tag"] = _BACKWARD
        again = _insert(graph, dataclasses.replace(asked, x=source, rowwise=[]), node, like=first)
        again.node.meta.pop(ROWS_KEY, None)  # recorded in forward
        again.node.meta["partitioner_tag"] = _BACKWARD
        remade = {name: _output(graph, again, name) for name in outputs if name in again.names and name != "amax"}
    for name, output in outputs.items():
        for user in list(output.users):
            source = remade if name in remade and is_backward(user) else made
            user.replace_input_with(output, source[name])
        graph.erase_node(output)
    graph.erase_node(node)


def _is_read_by_backward(function: Sequence[fx.Node], gemms: Sequence[fx.Node]) -> bool:
    """Whether backward reads all inputs of an activation function: it can compute the function again for no traffic."""
    inputs = [node for node in function if node in gemms]
    return all(any(map(is_backward, readers(x))) for x in inputs)


def _keep_in_fp8(
    graph: fx.Graph, functions: Sequence[Sequence[fx.Node]], gemms: Sequence[fx.Node], compilation: Compilation
) -> None:
    """Let backward compute activation functions from FP8 copies of their inputs."""
    for function in functions:
        inputs = [node for node in function if node in gemms]
        users = {user for node in function for user in node.users if is_backward(user)}
        if not users:
            continue
        first = next(node for node in graph.nodes if node in users)
        again: dict[fx.Node, fx.Node] = {}
        for node in inputs:
            with graph.inserting_after(node):
                dtype = compilation.hardware_of(node).own_type(torch.float8_e4m3fn)
                args = node, dtype, False, 0.0, [1, 1], []
                quantized = insert(graph, ops.quantize, args, like=node, made_by=_NAME, name="kept")
            quantized.meta[OPERAND_KEY] = "kept"
            with graph.inserting_after(quantized):
                data, scale_inv = (insert(graph, getitem, (quantized, i), like=node, made_by=_NAME) for i in (0, 1))
            with graph.inserting_before(first):
                args = (data, scale_inv, value(node).dtype)
                again[node] = insert(graph, ops.dequantize, args, like=first, made_by=_NAME)
                again[node].meta["partitioner_tag"] = _BACKWARD
        with graph.inserting_before(first):
            for node in function:
                if node not in again:
                    again[node] = graph.node_copy(node, functools.partial(_replaced, again))
                    again[node].meta["partitioner_tag"] = first.meta.get("partitioner_tag")
        for user in users:
            for node in function:
                user.replace_input_with(node, again[node])


def _replaced(replacements: Mapping[fx.Node, fx.Node], node: fx.Node) -> fx.Node:
    return replacements.get(node, node)


def _activation_functions(gemms: Sequence[fx.Node]) -> list[list[fx.Node]]:
    """Elementwise functions of GEMM results whose values go into quantize nodes only: their nodes, inputs first."""
    found: list[list[fx.Node]] = []
    taken: set[fx.Node] = set()
    for gemm in gemms:
        if gemm in taken:
            continue
        function, pending = {gemm}, [gemm]
        closed = True
        while pending:
            node = pending.pop()
            for other in (*(u for u in node.users if not is_backward(u)), *_operands(node, gemms)):
                if other.target is ops.quantize or other in function:
                    continue
                if other.op != "call_function" or not (_elementwise(other) or other in gemms):
                    closed = False
                    continue
                function.add(other)
                pending.append(other)
        taken |= function
        if closed and len(function) > 1 and not any("recompute" in node.meta for node in function):
            found.append([node for node in gemm.graph.nodes if node in function])
    return found


def _operands(node: fx.Node, gemms: Sequence[fx.Node]) -> list[fx.Node]:
    """What an elementwise node reads; a GEMM's operands are not part of the function."""
    return [] if node in gemms else node.all_input_nodes


def _elementwise(node: fx.Node) -> bool:
    tags = getattr(node.target, "tags", ())
    convert = node.target is torch.ops.prims.convert_element_type.default
    return torch.Tag.pointwise in tags or convert or node.target in _VIEWS


def _insert(graph: fx.Graph, asked: Asked, old: fx.Node, *, like: fx.Node) -> QuantizeNode:
    name = f"quantize_{old.meta[OPERAND_KEY]}"
    args, kwargs = call(asked)
    node = insert(graph, ops.quantize, args, like=like, made_by=_NAME, name=name, kwargs=kwargs)
    node.meta.update({key: old.meta[key] for key in (OPERAND_KEY, ROWS_KEY) if key in old.meta})
    return QuantizeNode(node)


def _output(graph: fx.Graph, quantized: QuantizeNode, name: str) -> fx.Node:
    node = quantized.node
    label = f"{node.meta[OPERAND_KEY]}_{name}"
    return insert(graph, getitem, (node, quantized.names.index(name)), like=node, made_by=_NAME, name=label)
