"""Quantize tokens before they are copied, permuted and sent to their experts, not after it.

    x2 = index(x, [rows])                                  q = quantize(x, rowwise)
    x3 = wait(all_to_all(x2, out, in, group))         ->   data, scale_inv = (wait(all_to_all(index(y, [rows]), ...))
    q  = quantize(x3, rowwise, columnwise, offs)                              for y in (q.rowwise, q.rowwise_scale_inv))
                                                           columnwise = columnwise(data, offs)    # with one scale
                                                           columnwise = quantize(x3, columnwise, offs)      # else
                                                           columnwise = quantize(dequantize(data, scale_inv), ...)
                                                               # with columnwise_from_rowwise

A token with k experts is quantized once, not k times, and half the bytes are moved, among them those of an all-to-all,
in which FP8 travels as bytes beside its scales. Every number is the same as with quantizing afterwards, with one
exception: delayed scaling records the amax of all tokens, those included that no expert takes.

Refuses (quantizes afterwards, with the reason in the report) tensors whose rows do not have scales of their own
(tensorwise: each expert's is that of its tokens; tiles of several rows; nvfp4); padding; rows that are read in high
precision, too; an all-to-all of rows that are needed columnwise with other scales, unless the recipe makes that copy
from the rowwise one (``MXFP8BlockScaling(columnwise_from_rowwise=True)``); delayed scaling whose amaxes are not
reduced over all ranks of the all-to-all; and, without an all-to-all, moves that would not become fewer bytes.

Each row, all numbers of the last dim, stays together on the way. So what is done to each row by itself may be done
before.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from operator import getitem
from typing import Any, Final, cast

import torch
from torch import fx

from fp8graph.analysis.gather_path import cast_rows, keeps_rows, replay, row_sizes, scale_may_differ
from fp8graph.compat.inductor import erase_unused
from fp8graph.ir import collectives, ops
from fp8graph.ir.collectives import Gathered
from fp8graph.ir.compilation import Compilation
from fp8graph.ir.edit import Emit, insert
from fp8graph.ir.nodes import (
    CONVERT,
    GATHERED_KEY,
    GEMM_KEY,
    OPERAND_KEY,
    USES_KEY,
    aten,
    known_contiguous,
    nodes,
    size_hint,
    value,
)
from fp8graph.ir.quantize_node import QuantizeNode, call

_SETTINGS: Final = frozenset({"scaling", "block", "offs", "columnwise_from_rowwise"})
_MOVES: Final = (collectives.ALL_TO_ALL, aten.index.Tensor, aten.index_select.default)


def moves_rows(graph: fx.Graph, compilation: Compilation) -> bool:
    """Return whether rows are moved in this graph at all."""
    return any(nodes(graph, _MOVES))


def route_in_fp8(graph: fx.Graph, compilation: Compilation) -> None:
    for node in list(nodes(graph, (ops.quantize,))):
        quantized = QuantizeNode(node)
        moves = moves_of(quantized.arguments.x)
        if moves is None or not quantized.arguments.rowwise or not (moves.exchanges or _copies(moves, node)):
            continue
        reason = _check(quantized, moves, compilation)
        exchanges = moves.exchanges
        if reason is None:
            exchanges = _rewrite(graph, quantized, moves)
        elif (site := compilation.site_of(node)) is not None:
            compilation.refuse("quantized before it is routed", site, reason)
        fqn = compilation.sites[node.meta[GEMM_KEY][0]].fqn
        for exchange in exchanges:
            exchange.meta[GATHERED_KEY] = Gathered(
                tensor=f"{fqn} {node.meta[OPERAND_KEY]}", reason=reason or "quantized before it is sent"
            )
    erase_unused(graph)
    collectives.erase_unread(graph)


def _copies(moves: Moves, node: fx.Node) -> bool:
    """Return whether rows are copied, and not only chosen or put into another order."""
    rows, rows_after = value(moves.source).shape[:-1], value(QuantizeNode(node).arguments.x).shape[0]
    return size_hint(rows_after) > size_hint(math.prod(rows))


def _check(quantized: QuantizeNode, moves: Moves, compilation: Compilation) -> str | None:
    """Return the reason why the rows cannot be quantized before they are moved; None if they can."""
    arguments, kind = quantized.arguments, quantized.kind
    if unknown := set(quantized.node.kwargs) - _SETTINGS:
        return f"quantized with {', '.join(sorted(unknown))}"
    if kind.own_scale:
        return "each expert has one scale, that of the tokens which it takes"
    if kind.not_sent is not None:
        return kind.not_sent
    if (arguments.block or (1,))[0] > 1:
        return f"{arguments.block[0]} rows share the scale of a tile"
    if others := moves.other_readers(quantized.node):
        return f"the moved rows are read in high precision, too, by {others[0].name}"
    before, after = value(moves.source), value(arguments.x)
    for multiple, size in zip(arguments.rowwise, after.shape, strict=True):
        if multiple > 1 and not (isinstance(size, int) and size % multiple == 0):
            return f"{after.shape[0]} x {after.shape[1]} is padded"
    if not moves.exchanges:
        if arguments.columnwise and not (kind.one_scale or kind.columns_again or arguments.columnwise_from_rowwise):
            return "the same pass over the permuted rows makes their columnwise copy"
        rows, rows_after = size_hint(math.prod(before.shape[:-1])), size_hint(after.shape[0])
        # both write FP8; the permutation then reads and writes it
        if before.itemsize * (rows_after - rows) <= rows + rows_after:
            return f"no fewer bytes: {rows_after} rows are made from {rows}"
        return None
    if arguments.columnwise and not (kind.one_scale or arguments.columnwise_from_rowwise):
        return "backward needs copies with the scales of columns, from high precision: both would have to be sent"
    groups = [exchange.args[-1] for exchange in moves.exchanges]
    if kind.has_state and any(scale_may_differ(quantized.node, group, compilation) for group in groups):
        return "its amaxes are not reduced over the ranks of the all-to-all: their scales may differ"
    return None


def _rewrite(graph: fx.Graph, quantized: QuantizeNode, moves: Moves) -> list[fx.Node]:
    """Rewrite one quantize node, and return the new all-to-alls."""
    node, arguments = quantized.node, quantized.arguments
    exchanges: list[fx.Node] = []

    def emit(target: Any, *args: Any, name: str | None = None, **kwargs: Any) -> fx.Node:
        new = insert(graph, target, args, like=moves.steps[0], name=name, kwargs=kwargs)
        if target is collectives.ALL_TO_ALL:
            exchanges.append(new)
        return new

    def move(x: fx.Node) -> fx.Node:
        """Move the rows of ``x`` [rows, ...] as the program moved those of the tensor. FP8 is moved as bytes."""
        dtype, last = value(x).dtype, value(x).shape[-1]
        moved_as = torch.uint8 if dtype.itemsize == 1 else dtype
        if value(moves.source).ndim != 2:
            x = emit(aten.view.default, x, [*row_sizes(moves.source, emit), last])
        if moved_as != dtype:
            x = emit(aten.view.dtype, x, moved_as)
        moved = replay(moves.steps, moves.source, x, last, emit)
        for step in moves.steps:
            step.prepend(moved[step])  # at its place: what follows may need its size
        for reader in moves.size_readers():
            reader.update_arg(0, moved[moves.step_of(cast(fx.Node, reader.args[0]))])
        x = moved[moves.steps[-1]]
        with graph.inserting_before(node):
            if not known_contiguous(value(x)):
                x = emit(aten.clone.default, x, memory_format=torch.contiguous_format)
            return emit(aten.view.dtype, x, dtype) if moved_as != dtype else x

    with graph.inserting_before(moves.steps[0]):
        made = _quantized_source(node, moves, emit)
        results = {name: x if name == "scale_inv" else move(x) for name, x in made.items()}
    with graph.inserting_before(node):
        if arguments.columnwise and quantized.kind.one_scale:
            settings: dict[str, Any] = {} if arguments.offs is None else {"offs": arguments.offs}
            results["columnwise"] = emit(ops.columnwise, results["rowwise"], arguments.columnwise, **settings)
        elif arguments.columnwise:
            x = arguments.x
            if arguments.columnwise_from_rowwise:
                moved = (results["rowwise"], results["rowwise_scale_inv"], torch.float32)
                x = emit(
                    ops.dequantize, *moved, name="moved_rowwise", scaling=arguments.scaling, block=list(arguments.block)
                )
            args, kwargs = call(dataclasses.replace(arguments, x=x, rowwise=[], columnwise_from_rowwise=False))
            again = _like(node, emit(ops.quantize, *args, **kwargs))
            names = enumerate(QuantizeNode(again).names)
            results |= {name: emit(getitem, again, i, name=f"moved_{name}") for i, name in names}
    quantized.replace(results)
    return exchanges


def _quantized_source(node: fx.Node, moves: Moves, emit: Emit) -> dict[str, fx.Node]:
    """Return the rowwise outputs of a quantize node of the tokens, [tokens, columns], by name."""
    x = cast_rows(moves.source, moves.casts, emit)
    args, kwargs = call(dataclasses.replace(QuantizeNode(node).arguments, x=x, columnwise=[], offs=None))
    made = _like(node, emit(ops.quantize, *args, name=node.name, **kwargs))
    names = enumerate(QuantizeNode(made).names)
    return {name: emit(getitem, made, i, name=f"tokens_{name}") for i, name in names if name != "amax"}


def _like(node: fx.Node, made: fx.Node) -> fx.Node:
    made.meta.update({key: node.meta[key] for key in (OPERAND_KEY, USES_KEY, GEMM_KEY) if key in node.meta})
    return made


@dataclass(frozen=True, kw_only=True)
class Moves:
    """The way from the rows of one tensor to those of another."""

    source: fx.Node
    steps: Sequence[fx.Node]  # from there to the tensor, in order, without casts
    casts: Sequence[torch.dtype]  # on the way, in order
    exchanges: Sequence[fx.Node]  # the all-to-alls among the steps
    nodes: frozenset[fx.Node]  # all of them

    def other_readers(self, reader: fx.Node) -> list[fx.Node]:
        """Return the nodes, except ``reader``, that read numbers of the tensor or of anything on the way."""
        return [user for user in self._users() if user is not reader and user not in self.size_readers()]

    def size_readers(self) -> list[fx.Node]:
        """Return the nodes that read only how many rows there are."""
        readers = (user for user in self._users() if user.target is aten.sym_size.int)
        return [user for user in readers if cast(int, user.args[1]) < value(cast(fx.Node, user.args[0])).ndim - 1]

    def step_of(self, node: fx.Node) -> fx.Node:
        """Return the step whose result ``node``, on the way, is, perhaps cast; or the source."""
        while node not in self.steps and node is not self.source:
            node = cast(fx.Node, node.args[0])
        return node

    def _users(self) -> list[fx.Node]:
        return [user for node in self.nodes for user in node.users if user not in self.nodes]


def moves_of(tensor: fx.Node) -> Moves | None:
    """Return the moves that lead to ``tensor``, as far back as rows stay together; None if no row is moved."""
    walked: list[fx.Node] = []
    node = tensor
    while node.op == "call_function" and (node.target is CONVERT or _moves(node) or keeps_rows(node)):
        walked.append(node)
        node = cast(fx.Node, node.args[0])
    while walked and not _moves(walked[-1]):  # casts and views before the first move
        walked.pop()
    if not walked:
        return None
    walked.reverse()
    return Moves(
        source=cast(fx.Node, walked[0].args[0]),
        steps=[node for node in walked if node.target is not CONVERT],
        casts=[cast(torch.dtype, node.args[1]) for node in walked if node.target is CONVERT],
        exchanges=[node for node in walked if node.target is collectives.ALL_TO_ALL],
        nodes=frozenset(walked),
    )


def _moves(node: fx.Node) -> bool:
    """Return whether ``node`` takes whole rows of its first argument to other places, or to other ranks."""
    if node.target is collectives.ALL_TO_ALL:
        return value(node).ndim > 1
    if node.target is collectives.WAIT:
        return cast(fx.Node, node.args[0]).target is collectives.ALL_TO_ALL
    if node.target is aten.index.Tensor:
        indices = cast("list[Any]", node.args[1])
        return (
            len(indices) == 1 and value(cast(fx.Node, node.args[0])).ndim > 1 and value(indices[0]).dtype != torch.bool
        )
    if node.target is aten.index_select.default:
        return cast(int, node.args[1]) == 0 and value(node).ndim > 1
    return False
