"""Quantize before an all-gather, not after it: FP8 is sent, and all ranks quantize with one scale.

    x = wait(all_gather(shard, ranks, group))   ->   scales = scales(wait(all_reduce(amax(shard), "max", group)), ...)
    q = quantize(x, rowwise, columnwise)             q = quantize(shard, rowwise, scales=scales)
                                                     rowwise = view(wait(all_gather(view(q.rowwise, uint8), ...)), e4m3)
                                                     columnwise = columnwise(rowwise)

Every number is the same as with quantizing after the gather. Delayed scaling knows its scales beforehand: it needs no
all-reduce, and each rank records the amax of its shard. Scales of rows and of tiles are sent along with the data; if
each layout has tiles of its own, both layouts are sent. FP8 is sent as bytes, which every backend of torch.distributed
can send; but as FP8 if Inductor is to fuse the gather with its GEMM (asynchronous tensor parallelism,
``_micro_pipeline_tp``), which multiplies the parts that it receives. Between gather and quantize there may be casts,
and ops that move whole rows (a gather along the sequence of several batches).

Refuses (gathers in high precision, with the reason in the report) tensors that other nodes or several quantize nodes
read; a dynamic number of rows; delayed scaling whose amaxes are not reduced over all ranks of the gather; padding or
tiles that cross the border of two shards; nvfp4 and experts; and gathers that would not send fewer bytes (two layouts
in FP8 are as many bytes as bf16).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from operator import getitem
from typing import Any, Final, cast

import torch
from torch import fx

from fp8graph.analysis.gather_path import Path, cast_rows, path_of, replay, row_sizes, scale_may_differ
from fp8graph.compat.inductor import erase_unused
from fp8graph.ir import collectives, ops
from fp8graph.ir.collectives import Gathered
from fp8graph.ir.compilation import Compilation
from fp8graph.ir.edit import Emit, insert
from fp8graph.ir.nodes import (
    BACKWARD,
    GATHERED_KEY,
    GEMM_KEY,
    OPERAND_KEY,
    PURPOSE_KEY,
    USES_KEY,
    aten,
    backward_nodes,
    known_contiguous,
    nodes,
    size_hint,
    static_size,
    value,
)
from fp8graph.ir.quantize_node import QuantizeNode, call
from fp8graph.recipes import FP8_MAX

_SETTINGS: Final = frozenset({"scaling", "block"})


def gathers(graph: fx.Graph, compilation: Compilation) -> bool:
    """Return whether something is gathered from other ranks."""
    return any(nodes(graph, (collectives.ALL_GATHER,)))


def gather_in_fp8(graph: fx.Graph, compilation: Compilation) -> None:
    in_backward = backward_nodes(graph)
    for node in list(nodes(graph, (ops.quantize,))):
        path = path_of(QuantizeNode(node).arguments.x)
        if path is None:
            continue
        site, _ = node.meta[GEMM_KEY]
        tensor = f"{compilation.sites[site].fqn} {node.meta[OPERAND_KEY]}".strip()
        reason, sent = why_not_sent_in_fp8(QuantizeNode(node), path, compilation), [path.gathered]
        if reason is None:
            reason = f"quantized before it is sent, {_bytes_of_gather(path.gathered)} bytes otherwise"
            tag = BACKWARD if path.gathered in in_backward else None
            sent = _rewrite(graph, node, path, tag, as_bytes=not compilation.facts.settings.pipelines_gathers)
        for gathered in sent:
            gathered.meta[GATHERED_KEY] = Gathered(tensor=tensor, reason=reason)
    erase_unused(graph)
    collectives.erase_unread(graph)


def why_not_sent_in_fp8(quantized: QuantizeNode, path: Path, compilation: Compilation) -> str | None:
    """Reason why the tensor of the quantize node cannot be quantized before it is gathered; None if it can."""
    arguments, kind = quantized.arguments, quantized.kind
    others = path.other_readers(quantized.node)
    if any(other.target is aten.sym_size.int for other in others):
        return "the number of its rows is dynamic"
    if others:
        again = any(other.target is ops.quantize for other in others)
        return f"{'quantized in another way' if again else 'read in high precision'} too, by {others[0].name}"
    if kind.not_sent is not None:
        return kind.not_sent
    if unknown := set(quantized.node.kwargs) - _SETTINGS:
        return f"quantized with {', '.join(sorted(unknown))}"
    *leading, columns = value(path.shard).shape
    rows = math.prod(leading)  # not Size.numel(), which makes a dynamic size a number
    tile_rows, tile_columns = arguments.block or (1, 1)
    if static_size(columns) is None:
        return "the size of its rows is dynamic"
    multiple_of_rows, multiple_of_columns = arguments.rowwise or (1, 1)
    if not _fits(columns, multiple_of_columns) or not _fits(rows, multiple_of_rows):
        return f"shards of {rows} x {columns} are padded"
    if kind.has_state and scale_may_differ(quantized.node, path.group, compilation):
        return "its amaxes are not reduced over the ranks that gather: their scales may differ"
    if arguments.columnwise and kind.columns_not_sent is not None:
        return kind.columns_not_sent
    if tile_rows > 1 and not (path.keeps_shape and _fits(rows, tile_rows)):
        return f"shards of {rows} rows are not a multiple of the {tile_rows}-row tile, or are reshaped after the gather"
    if arguments.columnwise:
        _, contracted = arguments.columnwise
        if quantized.columnwise_differs and not (path.is_plain and _fits(rows, math.lcm(tile_columns, contracted))):
            return (
                f"shards of {rows} rows are not a multiple of the {tile_columns}-row tile, or come in several batches"
            )
        if tile_rows > 1 and not _fits(whole := rows * cast(int, path.gathered.args[1]), contracted):
            return f"{whole} rows, contracted in backward, are padded"  # but the scales are those of unpadded shards
    before, after = _bytes_of_gather(path.gathered), _bytes_after(quantized, path)
    return None if after < before else f"no fewer bytes: {after} in both directions, {before} as it is"


def _fits(size: Any, multiple: int) -> bool:
    fixed = static_size(size)
    return multiple == 1 or (fixed is not None and fixed % multiple == 0)


def _bytes_of_gather(gathered: fx.Node) -> int:
    x = value(gathered)
    return collectives.bytes_sent("all_gather", size_hint(x.numel()) * x.itemsize, cast(int, gathered.args[1]))


def _bytes_after(quantized: QuantizeNode, path: Path) -> int:
    """Return the bytes that are sent after the rewrite: data, scales, and the all-reduce of the amax."""
    ranks, kind = cast(int, path.gathered.args[1]), quantized.kind
    if kind.one_scale:
        data = size_hint(value(path.gathered).numel())
        amax = collectives.bytes_sent("all_reduce", 4, ranks) if kind.own_scale else 0
        return collectives.bytes_sent("all_gather", data, ranks) + amax
    outputs, both = quantized.values, quantized.columnwise_differs
    travels = [name for name in outputs if both or name.startswith("rowwise")]
    payloads = (size_hint(outputs[name].numel()) * outputs[name].itemsize for name in travels)
    return sum(collectives.bytes_sent("all_gather", payload, ranks) for payload in payloads)


def _rewrite(graph: fx.Graph, node: fx.Node, path: Path, tag: str | None, *, as_bytes: bool) -> list[fx.Node]:
    """Rewrite one gather and return the new all-gathers. ``tag`` marks all new nodes; None: the gather's own tag."""
    sent: list[fx.Node] = []

    def emit(target: Any, *args: Any, name: str | None = None, **kwargs: Any) -> fx.Node:
        new = insert(graph, target, args, like=path.gathered, name=name, kwargs=kwargs)
        new.meta.update({"partitioner_tag": tag} if tag is not None else {})
        return new

    def collect(x: fx.Node, name: str, *, rows: bool) -> fx.Node:
        """All-gather ``x``, FP8 as bytes; if it holds ``rows`` of the shard, move them as the program moved them."""
        dtype, last = value(x).dtype, value(x).shape[-1]
        erased = as_bytes and dtype in FP8_MAX
        if rows and value(path.shard).ndim != 2:
            x = emit(aten.view.default, x, [*row_sizes(path.shard, emit), last])
        if erased:
            x = emit(aten.view.dtype, x, torch.uint8)
        sent.append(emit(collectives.ALL_GATHER, x, *path.gathered.args[1:], name=f"gather_{name}"))
        x = emit(collectives.WAIT, sent[-1])
        if rows:
            *_, x = replay(path.steps, path.waited, x, last, emit).values()
        if erased:
            x = emit(aten.view.dtype, x, dtype)
        return x if known_contiguous(value(x)) else _contiguous(x, emit)

    with graph.inserting_before(path.gathered):
        made = _quantized_shard(node, path, emit)
        results = _gathered(node, made, collect, emit)
    QuantizeNode(node).replace(results)
    return sent


def _quantized_shard(node: fx.Node, path: Path, emit: Emit) -> dict[str, fx.Node]:
    """Return the outputs of a quantize node of the shard, [rows, columns], by name."""
    x = cast_rows(path.shard, path.casts, emit)
    quantized = QuantizeNode(node)
    arguments = dataclasses.replace(quantized.arguments, x=x)
    if quantized.kind.own_scale:
        amax = emit(ops.amax, x)
        sent = emit(collectives.ALL_REDUCE, amax, "max", path.group)
        sent.meta[PURPOSE_KEY] = "one scale on all ranks that gather"
        reduced = emit(collectives.WAIT, sent, name="reduced_amax")
        settings = (arguments.dtype, arguments.power_2_scale, arguments.amax_epsilon)
        scales = emit(ops.scales, reduced, *settings, name="scales")
        arguments = dataclasses.replace(arguments, scales=scales)
    if not quantized.columnwise_differs:
        arguments = dataclasses.replace(arguments, rowwise=arguments.rowwise or [1, 1], columnwise=[])
    args, kwargs = call(arguments)
    made = emit(ops.quantize, *args, name=node.name, **kwargs)
    made.meta.update({key: node.meta[key] for key in (OPERAND_KEY, USES_KEY, GEMM_KEY) if key in node.meta})
    names = enumerate(QuantizeNode(made).names)
    return {name: emit(getitem, made, i, name=f"shard_{name}") for i, name in names if name != "amax"}


def _gathered(
    node: fx.Node, made: Mapping[str, fx.Node], collect: Callable[..., fx.Node], emit: Emit
) -> dict[str, fx.Node]:
    """Return the outputs of ``node``, gathered from those of its shard."""
    results: dict[str, fx.Node] = {}
    for name, x in made.items():
        if name == "scale_inv":
            results[name] = x
        elif name.startswith("rowwise"):
            results[name] = collect(x, name, rows=True)
        else:  # [columns, rows of the shard]: transposed, so that rows are sent
            results[name] = _turned(collect(_turned(x, emit), name, rows=False), emit)
    quantized = QuantizeNode(node)
    columnwise = quantized.arguments.columnwise
    if columnwise and not quantized.columnwise_differs:
        results["columnwise"] = emit(ops.columnwise, results["rowwise"], columnwise, name="columnwise")
        if "rowwise_scale_inv" in results:  # of square tiles
            results["columnwise_scale_inv"] = _turned(results["rowwise_scale_inv"], emit)
    return results


def _turned(x: fx.Node, emit: Emit) -> fx.Node:
    return _contiguous(emit(aten.permute.default, x, [1, 0]), emit)


def _contiguous(x: fx.Node, emit: Emit) -> fx.Node:
    return emit(aten.clone.default, x, memory_format=torch.contiguous_format)
