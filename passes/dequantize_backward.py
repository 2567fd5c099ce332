"""Let backward read what fprop multiplied, decoded, where a recipe says ``backward_override="dequantized"``.

    y  = scaled_mm(qx[0], qw[0], qx[1], qw[1])          ->      y  = scaled_mm(qx[0], qw[0], qx[1], qw[1])
    dx = mm(dy, w)                                              dx = mm(dy, dequantize(qw[0], qw[1]))
    dw = mm(dy.t, x)                                            dw = mm(dy.t, dequantize(qx[0], qx[1]))

The gradient is then that of the forward that ran, as if quantization were the identity: dy is not quantized. The
rowwise copies are saved for backward, and not x; a tensor that several matmuls of backward read is decoded once.

Refuses (reads the program's tensor) where fprop multiplies a matrix of another shape. ``assign`` refuses what is in
high precision in forward, and experts. A weight that arrives quantized is decoded by ``fold``.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, cast

import torch
from torch import fx

from fp8graph.compat.inductor import erase_unused
from fp8graph.compat.ops import named_arguments
from fp8graph.ir import ops
from fp8graph.ir.compilation import Compilation
from fp8graph.ir.edit import Emit, insert
from fp8graph.ir.nodes import (
    GEMM_KEY,
    aten,
    backward_nodes,
    known_equal,
    look_through_transposes,
    matmul_arguments,
    nodes,
    value,
)
from fp8graph.ir.sites import Gemm, OperandView, Site
from fp8graph.recipes import OperandName

_BACKWARD: Final = "must_be_in_backward"  # else the partitioner decodes in forward, and saves the numbers
_WHAT: Final = "dequantized backward"


@dataclass(frozen=True, kw_only=True)
class FpropOperand:
    """An operand as fprop reads it: the arguments of ``fp8graph::dequantize`` but the dtype."""

    data: fx.Node  # rowwise
    scale_inv: fx.Node
    settings: Mapping[str, Any]

    def key(self, wanted: torch.Tensor) -> Any:
        """Equal where they are decoded to the same tensor, of the dtype and the sizes of ``wanted``."""
        return self.data, self.scale_inv, str(self.settings), wanted.dtype, *map(str, wanted.shape)


def dequantizes(graph: fx.Graph, compilation: Compilation) -> bool:
    """Return whether some GEMM of backward reads what fprop multiplies."""
    return any(decision.dequantized for decision in compilation.decisions.values())


def dequantize_backward(graph: fx.Graph, compilation: Compilation) -> None:
    order = {node: place for place, node in enumerate(graph.nodes)}
    gemms = [
        (gemm, position)
        for position, site in enumerate(compilation.sites)
        for gemm in site.gemms
        if compilation.decisions[gemm.node].dequantized
    ]
    read = _read_by_fprops(graph, compilation.sites)
    in_backward = backward_nodes(graph)
    made: dict[Any, fx.Node] = {}
    for gemm, position in sorted(gemms, key=lambda each: order[each[0].node]):
        site = compilation.sites[position]
        views = zip((gemm.a, gemm.b), matmul_arguments(gemm.node), strict=True)
        view, argument = next((view, x) for view, x in views if view.operand != "grad_output")
        source = read.get(position, {}).get(view.operand)
        if view.operand == "weight" and compilation.decisions[site.gemms[0].node].stored is not None:
            continue  # ``fold`` has decoded it
        if source is None:  # nothing runs in FP8 while ``tune`` measures
            continue
        tag = _BACKWARD if gemm.node in in_backward else None
        with graph.inserting_before(gemm.node):
            reason = _replace(gemm, view, argument, source, made, functools.partial(_insert, graph, gemm.node, tag))
        if reason is not None:
            compilation.refuse(_WHAT, site, reason)
            compilation.amend({(site.fqn, site.index, gemm.gemm): reason})
    erase_unused(graph)


def _read_by_fprops(graph: fx.Graph, sites: list[Site]) -> dict[int, dict[OperandName, FpropOperand]]:
    """Return the operands of each fprop in FP8, by the position of its site."""
    by_site: dict[int, dict[OperandName, FpropOperand]] = {}
    for node in nodes(graph, (ops.scaled_mm, aten.mm.default, aten.bmm.default)):
        position, name = node.meta.get(GEMM_KEY, (0, ""))
        if name == "fprop":
            fprop = sites[position].gemms[0]
            a, b = _of_scaled_mm(node) if node.target is ops.scaled_mm else _of_emulated(node)
            by_site[position] = {fprop.a.operand: a, fprop.b.operand: b}
    return by_site


def _of_scaled_mm(node: fx.Node) -> list[FpropOperand]:
    given = named_arguments(node)
    read: list[FpropOperand] = []
    for side in "ab":
        settings: dict[str, Any] = {"scaling": given["scaling"]} if given["scaling"] != "tensor" else {}
        if given[f"block_{side}"]:
            settings["block"] = given[f"block_{side}"]
        if given[f"global_scale_inv_{side}"] is not None:
            settings["global_scale_inv"] = given[f"global_scale_inv_{side}"]
        read.append(FpropOperand(data=given[side], scale_inv=given[f"scale_inv_{side}"], settings=settings))
    return read


def _of_emulated(node: fx.Node) -> list[FpropOperand]:
    a, transposed = cast("tuple[fx.Node, fx.Node]", node.args)
    decoded = (a, transposed.all_input_nodes[0])
    return [FpropOperand(data=x.args[0], scale_inv=x.args[1], settings=x.kwargs) for x in cast("Any", decoded)]


def _replace(
    gemm: Gemm, view: OperandView, argument: fx.Node, source: FpropOperand, made: dict[Any, fx.Node], emit: Emit
) -> str | None:
    """Let ``gemm`` read the decoded numbers of ``source`` in place of ``argument``; the reason if it cannot."""
    wanted = value(argument)
    _, transposed = look_through_transposes(argument)
    turned = view.flipped != transposed  # argument is [..., columns, rows]
    batch, read = ([size for size in x.shape[:-2] if not known_equal(size, 1)] for x in (wanted, value(source.data)))
    if len(batch) != len(read) or not all(map(known_equal, batch, read)):
        return (
            f"fprop multiplies {[*value(source.data).shape]} numbers in another shape: backward reads its own operand"
        )
    key = source.key(wanted), turned
    if key not in made:
        name = f"decoded_{view.operand}"
        result = emit(ops.dequantize, source.data, source.scale_inv, wanted.dtype, name=name, **source.settings)
        for dim in (-2, -1):
            result = _cut(result, dim, argument, -3 - dim if turned else dim, emit)
        if value(result).ndim < wanted.ndim:
            result = emit(aten.unsqueeze.default, result, 0)
        elif value(result).ndim > wanted.ndim:
            result = emit(aten.squeeze.dim, result, 0)
        made[key] = result
    result = made[key]
    if turned:
        dims = list(range(wanted.ndim))
        result = emit(aten.permute.default, result, [*dims[:-2], dims[-1], dims[-2]])
    gemm.node.replace_input_with(argument, result)
    return None


def _cut(x: fx.Node, dim: int, argument: fx.Node, its_dim: int, emit: Emit) -> fx.Node:
    """``x`` without padding: with the size that ``argument`` has in a dim. Dims are counted from the last."""
    size, ndim = value(argument).shape[its_dim], value(x).ndim
    if known_equal(value(x).shape[dim], size):
        return x
    end = size if isinstance(size, int) else emit(aten.sym_size.int, argument, value(argument).ndim + its_dim)
    return emit(aten.slice.Tensor, x, ndim + dim, 0, end)


def _insert(
    graph: fx.Graph, like: fx.Node, tag: str | None, target: Any, *args: Any, name: str | None = None, **kwargs: Any
) -> fx.Node:
    node = insert(graph, target, args, like=like, name=name, kwargs=kwargs)
    if tag is not None:
        node.meta["partitioner_tag"] = tag
    return node
