"""Which parts of a quantized tensor an all-gather would send, how many bytes, and whether it is allowed."""

from __future__ import annotations

import math
from typing import Any, Final, cast

from torch import fx

from fp8graph.analysis.gather_path import Path
from fp8graph.ir import collectives, ops
from fp8graph.ir.compilation import Compilation
from fp8graph.ir.nodes import USES_KEY, aten, size_hint, static_size, value
from fp8graph.ir.quantize_node import QuantizeNode
from fp8graph.ir.sites import Use

_SETTINGS: Final = frozenset({"scaling", "block"})


def why_not_sent_in_fp8(quantized: QuantizeNode, path: Path, compilation: Compilation) -> str | None:
    """Reason why the tensor of the quantize node cannot be quantized before it is gathered; None if it can."""
    asked, kind = quantized.asked, quantized.kind
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
    tile_rows, tile_columns = asked.block or (1, 1)
    if static_size(columns) is None:
        return "the size of its rows is dynamic"
    multiple_of_rows, multiple_of_columns = asked.rowwise or (1, 1)
    if not _fits(columns, multiple_of_columns) or not _fits(rows, multiple_of_rows):
        return f"shards of {rows} x {columns} are padded"
    if kind.has_state and scale_may_differ(quantized.node, path.group, compilation):
        return "its amaxes are not reduced over the ranks that gather: their scales may differ"
    if asked.columnwise and kind.columns_not_sent is not None:
        return kind.columns_not_sent
    if tile_rows > 1 and not (path.keeps_shape and _fits(rows, tile_rows)):
        return f"shards of {rows} rows are not a multiple of the {tile_rows}-row tile, or are reshaped after the gather"
    if asked.columnwise:
        _, contracted = asked.columnwise
        if columnwise_travels(quantized) and not (path.is_plain and _fits(rows, math.lcm(tile_columns, contracted))):
            return (
                f"shards of {rows} rows are not a multiple of the {tile_columns}-row tile, or come in several batches"
            )
        if tile_rows > 1 and not _fits(whole := rows * cast(int, path.gathered.args[1]), contracted):
            return f"{whole} rows, contracted in backward, are padded"  # but the scales are those of unpadded shards
    before, after = bytes_of_gather(path.gathered), _bytes_after(quantized, path)
    return None if after < before else f"no fewer bytes: {after} in both directions, {before} as it is"


def scale_may_differ(node: fx.Node, group: Any, compilation: Compilation) -> bool:
    """Whether the ranks of ``group`` may have different delayed scales for the tensor of a quantize node."""
    use: Use = node.meta[USES_KEY][0]
    wanted, reduced = collectives.ranks_of(group), collectives.ranks_of(compilation.known.amax_group)
    return not use.recipe.reduces_amax or not wanted or not wanted <= reduced


def _fits(size: Any, multiple: int) -> bool:
    fixed = static_size(size)
    return multiple == 1 or (fixed is not None and fixed % multiple == 0)


def columnwise_travels(quantized: QuantizeNode) -> bool:
    """Whether the columnwise data differ from the rowwise ones, transposed."""
    asked = quantized.asked
    tile_rows, _ = asked.block or (1, 1)
    return bool(asked.columnwise) and not quantized.kind.one_scale and (tile_rows == 1 or not asked.rowwise)


def bytes_of_gather(gathered: fx.Node) -> int:
    x = value(gathered)
    return collectives.bytes_sent("all_gather", size_hint(x.numel()) * x.itemsize, cast(int, gathered.args[1]))


def _bytes_after(quantized: QuantizeNode, path: Path) -> int:
    """The bytes that are sent after the rewrite: data, scales, and the all-reduce of the amax."""
    ranks, kind = cast(int, path.gathered.args[1]), quantized.kind
    if kind.one_scale:
        data = size_hint(value(path.gathered).numel())
        amax = collectives.bytes_sent("all_reduce", 4, ranks) if kind.own_scale else 0
        return collectives.bytes_sent("all_gather", data, ranks) + amax
    outputs, both = quantized.values, columnwise_travels(quantized)
    travels = [name for name in outputs if both or name.startswith("rowwise")]
    payloads = (size_hint(outputs[name].numel()) * outputs[name].itemsize for name in travels)
    return sum(collectives.bytes_sent("all_gather", payload, ranks) for payload in payloads)
