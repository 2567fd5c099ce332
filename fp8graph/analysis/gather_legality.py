"""Which parts of a quantized tensor an all-gather would send, how many bytes, and whether it is allowed."""

from __future__ import annotations

import math
from typing import Any, Final, cast

import torch
from torch import fx

from fp8graph.analysis.gather_path import Path
from fp8graph.ir import collectives, ops
from fp8graph.ir.compilation import Compilation
from fp8graph.ir.keys import ROWS_KEY
from fp8graph.ir.nodes import aten, size_hint, static_size, value
from fp8graph.recipes import DelayedScaling

_OF_TENSORS: Final = ("tensor", "delayed")  # one scale each: columnwise is rowwise, transposed
_SETTINGS: Final = frozenset({"scaling", "block", "carry_overflow"})


def why_not(node: fx.Node, path: Path, compilation: Compilation) -> str | None:
    """Why the tensor of the quantize node is not quantized before it is gathered; None if it is."""
    scaling = cast(str, node.kwargs.get("scaling", "tensor"))
    rowwise, columnwise = (cast("list[int]", layout) for layout in node.args[-2:])
    others = path.other_readers(node)
    if any(other.target is aten.sym_size.int for other in others):
        return "the number of its rows is dynamic"
    if others:
        quantized = [other for other in others if other.target is ops.quantize]
        return f"{'quantized in another way' if quantized else 'read in high precision'} too, by {others[0].name}"
    if unknown := set(node.kwargs) - _SETTINGS:
        return f"quantized with {', '.join(sorted(unknown))}"
    if scaling == "nvfp4":
        return "NVFP4 tensors are never sent quantized: two numbers per byte, and a scale of the whole tensor"
    *leading, columns = value(path.shard).shape
    rows = math.prod(leading)  # not Size.numel(), which makes a dynamic size a number
    block = cast("list[int]", node.kwargs.get("block", [1, 1]))
    if static_size(columns) is None:
        return "the size of its rows is dynamic"
    if not _fits(columns, (rowwise or [1, 1])[1]) or (len(rowwise) and not _fits(rows, rowwise[0])):
        return f"shards of {rows} x {columns} are padded"
    if scaling == "delayed":
        recipe = cast(DelayedScaling, node.meta[ROWS_KEY][0].recipe)
        wanted, reduced = collectives.ranks_of(path.group), collectives.ranks_of(compilation.amax_group)
        if not recipe.reduce_amax or not wanted or not wanted <= reduced:
            return "its amaxes are not reduced over the ranks that gather: their scales may differ"
    if scaling == "row" and columnwise:
        return "scales of columns span the ranks: both directions would have to travel"
    if block[0] > 1 and not (path.keeps_shape and _fits(rows, block[0])):
        return f"shards of {rows} rows are no whole tiles of {block[0]}, or are viewed in other shapes"
    if columnwise_travels(node) and not (path.is_plain and _fits(rows, math.lcm(block[1], columnwise[1]))):
        return f"shards of {rows} rows are no whole tiles of {block[1]}, or come in several batches"
    if block[0] > 1 and columnwise and not _fits(whole := rows * cast(int, path.gathered.args[1]), columnwise[1]):
        return f"{whole} rows, contracted in backward, are padded"  # its scales are those of the shards
    before, after = bytes_sent(path.gathered), _bytes_after(node, path)
    return None if after < before else f"no fewer bytes: {after} in both directions, {before} as it is"


def _fits(size: Any, multiple: int) -> bool:
    fixed = static_size(size)
    return multiple == 1 or (fixed is not None and fixed % multiple == 0)


def columnwise_travels(node: fx.Node) -> bool:
    """Whether the columnwise data are others than the rowwise ones, transposed."""
    scaling, block = node.kwargs.get("scaling", "tensor"), cast("list[int]", node.kwargs.get("block", [1, 1]))
    return bool(node.args[-1]) and scaling not in _OF_TENSORS and (block[0] == 1 or not node.args[-2])


def bytes_sent(gathered: fx.Node) -> int:
    x = value(gathered)
    return collectives.bytes_sent("all_gather", size_hint(x.numel()) * x.itemsize, cast(int, gathered.args[1]))


def _bytes_after(node: fx.Node, path: Path) -> int:
    """Of data, scales, and the amax's all-reduce."""
    ranks, scaling = cast(int, path.gathered.args[1]), node.kwargs.get("scaling", "tensor")
    if scaling in _OF_TENSORS:
        data = size_hint(value(path.gathered).numel())
        amax = collectives.bytes_sent("all_reduce", 4, ranks) if scaling == "tensor" else 0
        return collectives.bytes_sent("all_gather", data, ranks) + amax
    outputs = dict(zip(ops.output_names(node), cast("list[torch.Tensor]", node.meta["val"]), strict=True))
    travels = [name for name in outputs if columnwise_travels(node) or name.startswith("rowwise")]
    payloads = (size_hint(outputs[name].numel()) * outputs[name].itemsize for name in travels)
    return sum(collectives.bytes_sent("all_gather", payload, ranks) for payload in payloads)
