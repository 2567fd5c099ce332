"""Let GEMMs of few rows take forms of their operands that the device multiplies in smaller tiles: decoding.

    y = scaled_mm(qx, w, sx, sw, tiles 128x128)         ->  s = repeat_scales(sw)  [k / 128, n]
                                                            y = scaled_mm(qx, w, sx, s, tiles 1x128)
    y = scaled_mm(qx, w, sx [m, 1], sw [n, 1])          ->  r = scaled_mm(qx, w, 1, 1) in FP32
        (only with ``small_tiles=True``)                    y = (r * (sx * sw.t()) + bias) rounded once

With m of 16, tiles of 128 x 128 leave most of the multiprocessors idle, and most of each tile is not read. cuBLASLt has
tiles of 64 x 8 for one scale per tensor and for tiles of 1x128 on both sides, and for no other scaling. Repeated scales
are the same numbers; ``hoist_weights`` keeps them, 1 / 32 of the weight's bytes. Scales of rows that multiply the
result round in another order than the GEMM's epilogue does, so that only the user's option asks for it.

Refuses (leaves alone, and says so) a number of rows that is small now and may be larger in another call; scales that
would be repeated in each call; and, under the option, graphs with a backward.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import torch
from torch import fx

from fp8graph.compat.ops import named_arguments
from fp8graph.ir import ops
from fp8graph.ir.compilation import Compilation, GraphFacts
from fp8graph.ir.edit import insert, inserted, set_argument
from fp8graph.ir.nodes import CONVERT, GEMM_KEY, aten, known_at_most, nodes, size_hint, value
from fp8graph.ir.sites import Foreseen
from fp8graph.ir.weight_graphs import computed_from, inputs_to_keep
from fp8graph.numerics.scalings import SCALINGS
from fp8graph.numerics.tiles import TRANSPOSED

_REPEATED: Final = "the weight's scales are repeated to 1x128, for smaller tiles"
_SCALED: Final = "its scales multiply an FP32 result, for smaller tiles"


def may_use_small_tiles(graph: fx.Graph, compilation: Compilation) -> bool:
    """Return whether some GEMM of the device has a form with smaller tiles."""
    invariant = compilation.facts.settings.batch_invariant
    return not invariant and any(_most_rows(node, compilation) for node in nodes(graph, (ops.scaled_mm,)))


def wanted_repeats(foreseen: Callable[[], Sequence[Foreseen]], facts: GraphFacts) -> int:
    """Return one for each weight, or those that are multiplied as one, in a GEMM of few rows."""
    if facts.training or not facts.keeps_weights or facts.settings.batch_invariant:
        return 0
    weights: set[Any] = set()
    for each in foreseen():
        scalings = {each.stored} if each.stored else {one.quantizer("weight").scaling for one in each.used("fprop")}
        if any(each.tokens <= each.hardware.most_rows_of_small_tiles(one) for one in scalings if SCALINGS[one].tiled):
            weights.add(each.sibling_key if facts.settings.fuses_linears else each)
    return len(weights)


def use_small_tiles(graph: fx.Graph, compilation: Compilation) -> None:
    kept = inputs_to_keep(graph, compilation.facts)
    reasons: dict[tuple[str, int, str], str] = {}
    ones: list[fx.Node] = []
    for gemm in list(nodes(graph, (ops.scaled_mm,))):
        position, name = gemm.meta[GEMM_KEY]
        site = compilation.sites[position]
        most, given = _most_rows(gemm, compilation), named_arguments(gemm)
        rows = value(site.gemms[0].node).shape[0]  # without padding
        if name != "fprop" or size_hint(rows) > most:
            continue
        of_tiles = SCALINGS[given["scaling"]].tiled
        if (reason := _why_not(gemm, rows, most, compilation, kept if of_tiles else None)) is not None:
            compilation.refuse("small tiles", site, reason)
            continue
        if of_tiles:
            _repeat_scales(graph, gemm)
        else:
            _scale_result(graph, gemm, ones)
        reasons[site.fqn, site.index, name] = _REPEATED if of_tiles else _SCALED
    compilation.amend(reasons)


def _most_rows(gemm: fx.Node, compilation: Compilation) -> int:
    """Return the number of rows up to which a GEMM has smaller tiles in another form; 0: it has none, or is not to have
    it.
    """
    given = named_arguments(gemm)
    kind = SCALINGS[given["scaling"]]
    if kind.tiled:
        forms = (tuple(given["block_a"]), tuple(given["block_b"])) == ((1, 128), (128, 128))
    else:
        forms = not kind.one_scale and compilation.facts.settings.small_tiles
    return compilation.hardware_of(gemm).most_rows_of_small_tiles(given["scaling"]) if forms else 0


def _why_not(
    gemm: fx.Node, rows: int | torch.SymInt, most: int, compilation: Compilation, kept: Mapping[fx.Node, int] | None
) -> str | None:
    """Return the reason why a GEMM keeps its form. ``kept``: the inputs whose scales may be repeated once."""
    given, facts = named_arguments(gemm), compilation.facts
    if not known_at_most(rows, most):
        return (
            f"its rows, {size_hint(rows)} now, may be more than {most} in another call, where other tiles are faster: "
            "compile with dynamic=False, or mark their number with a maximum"
        )
    if kept is not None:
        if not facts.keeps_weights or facts.subgraph:
            return "the weight's scales would be repeated in each call: its copy is not kept"
        if (scales := given["scale_inv_b"]) not in kept and computed_from(scales, kept) is None:
            return "the weight's scales would be repeated in each call: they are computed from more than parameters"
    elif facts.training:
        return "small_tiles=True changes graphs without a backward alone"
    return None


def _repeat_scales(graph: fx.Graph, gemm: fx.Node) -> None:
    given = named_arguments(gemm)
    with graph.inserting_before(gemm):
        args = given["scale_inv_b"], value(given["b"]).shape[0]
        scales = insert(graph, ops.repeat_scales, args, like=gemm, name="repeated_scale_inv")
    set_argument(gemm, "scale_inv_b", scales)
    set_argument(gemm, "block_b", [1, 128])
    set_argument(gemm, "order_b", TRANSPOSED)


def _scale_result(graph: fx.Graph, gemm: fx.Node, ones: list[fx.Node]) -> None:
    """Let ``gemm`` multiply the numbers of its operands as they are, and what it returns be scaled after.

    ``ones``: the scale 1, which all GEMMs read.
    """
    given = named_arguments(gemm)
    if not ones:
        with graph.inserting_before(next(node for node in graph.nodes if node.op != "placeholder")):
            settings = {"dtype": torch.float32, "device": value(gemm).device}
            ones.append(insert(graph, aten.full.default, ([1], 1.0), like=gemm, kwargs=settings, name="one"))
    emit = functools.partial(inserted, like=gemm)
    arguments = (given["a"], given["b"], ones[0], ones[0], None, torch.float32, given["use_fast_accum"])
    result = emit(ops.scaled_mm, *arguments, name=gemm.name)
    scales = emit(aten.mul.Tensor, given["scale_inv_a"], emit(aten.permute.default, given["scale_inv_b"], [1, 0]))
    y = emit(aten.mul.Tensor, result, scales)
    if given["bias"] is not None:
        y = emit(aten.add.Tensor, y, emit(CONVERT, given["bias"], torch.float32))
    y = emit(CONVERT, y, given["out_dtype"])
    gemm.replace_all_uses_with(y)
    graph.erase_node(gemm)
