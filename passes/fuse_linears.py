"""Fuse linears of one module that share their input into one GEMM: q, k and v; gate and up.

    q = scaled_mm(qx, qwq)                              qw = quantize(wq, more=[wk], dim=-2)
    k = scaled_mm(qx, qwk)                      ->      qk = scaled_mm(qx, qw);  q, k = slices of its columns
    dx = scaled_mm(qdq, qwq.columnwise)                 qdy = quantize(dq, more=[dk], dim=-1)
       + scaled_mm(qdk, qwk.columnwise)         ->      dx = scaled_mm(qdy, qw.columnwise)
    dwq = scaled_mm(qdq.columnwise, qx.columnwise)      dw = scaled_mm(qdy.columnwise, qx.columnwise)
    dwk = scaled_mm(qdk.columnwise, qx.columnwise) ->   dwq, dwk = slices of its rows

The joined weight is quantized as one tensor, and so is the joined gradient: its parts share a scale where one scale
spans them (one per tensor; one per row that is contracted), as in Transformer Engine's fused projections. The GEMM's
accumulator adds up the gradients of the input. If slices of fprop's result would have to be copied, or would keep
more memory alive for backward than they need, fprop multiplies slices of the weight one by one
(``siblings.can_be_slices``).

Refuses (multiplies one by one) linears whose recipes, layouts or biases differ from their neighbours'; output sizes
that are not multiples of the tile; weights and gradients with further uses; gradients of the input that are used for
more than their sum.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, cast

from torch import fx

from fp8graph.analysis.linears import Linear, key_of, linears_of, why_apart
from fp8graph.analysis.siblings import can_be_slices, kin
from fp8graph.analysis.sums import are_summed, take_out_of_sum
from fp8graph.compat.inductor import stable_topological_sort
from fp8graph.compat.ops import named_arguments
from fp8graph.ir.compilation import Compilation
from fp8graph.ir.edit import insert, set_argument, update_value, update_views
from fp8graph.ir.keys import OPERAND_KEY, ROWS_KEY
from fp8graph.ir.nodes import aten, value
from fp8graph.ir.quantize_node import QuantizeNode
from fp8graph.recipes import GemmName

_NAME = "fuse_linears"
_FORWARD_APART = "in forward: slices of one result would be copied, or would keep all of it for backward"
_JOINED_DIM = {"weight": -2, "grad_output": -1}  # of [N, K] and of [M, N]


def fuse_linears(graph: fx.Graph, compilation: Compilation) -> None:
    if not compilation.known.settings.fuse_linears:
        return
    found: dict[Any, list[Linear]] = {}
    siblings: dict[Any, list[Linear]] = {}
    for linear in linears_of(graph, compilation):
        siblings.setdefault((kin(linear.site)[0], linear.x), []).append(linear)
        if not linear.refusal:
            found.setdefault(tuple(key_of(linear).values()), []).append(linear)
    joined = [linears for linears in found.values() if len(linears) > 1 and are_summed(_dgrads(linears))]
    for linears in siblings.values():
        for linear in linears:
            if len(linears) > 1 and not any(linear in several for several in joined):
                compilation.refuse("one GEMM", linear.site, linear.refusal or why_apart(linear, linears))
    for linears in joined:
        multiplied = list(_group(graph, linears, compilation))
        for linear in linears:
            others = tuple(x.site.fqn.rpartition(".")[2] for x in linears if x is not linear)
            for gemm in multiplied:
                compilation.fused[linear.site.fqn, linear.site.index, gemm] = others
            if "fprop" not in multiplied:
                compilation.refuse("one GEMM", linear.site, _FORWARD_APART)
    if joined:
        compilation.amend({key: f"one GEMM with {', '.join(others)}" for key, others in compilation.fused.items()})
        stable_topological_sort(graph)  # the joined tensors are needed where the first linear runs
        graph.eliminate_dead_code()


def _dgrads(linears: Sequence[Linear]) -> list[fx.Node]:
    return [linear.gemms["dgrad"] for linear in linears if "dgrad" in linear.gemms]


def _group(graph: fx.Graph, linears: Sequence[Linear], compilation: Compilation) -> Iterator[GemmName]:
    """Turn the first linear's nodes into those of the group. Yields the GEMMs that are now fused."""
    sizes = [linear.size for linear in linears]
    for place, quantized in linears[0].quantized().items():
        if QuantizeNode(quantized).asked.more is None:  # else already joined for another GEMM
            _join(quantized, [linear.quantized()[place] for linear in linears[1:]])
    for gemm, first in linears[0].gemms.items():
        others = [linear.gemms[gemm] for linear in linears[1:]]
        if gemm == "fprop" and not can_be_slices([first, *others]):
            _multiply_apart(graph, [first, *others], sizes, "b")
            continue
        if gemm == "wgrad" and compilation.known.settings.accumulate_wgrad:  # each is added to a gradient of its own
            _multiply_apart(graph, [first, *others], sizes, "a")
            continue
        biases = [named_arguments(node)["bias"] for node in (first, *others)]
        if None not in biases:
            with graph.inserting_before(first):
                bias = insert(graph, aten.cat.default, (biases,), like=first, made_by=_NAME, name="bias")
            set_argument(first, "bias", bias)
        update_value(first)
        if gemm == "dgrad":
            for other in others:
                take_out_of_sum(other)
        else:
            _slice(graph, [first, *others], sizes, dim=1 if gemm == "fprop" else 0)
        yield gemm


def _join(first: fx.Node, others: Sequence[fx.Node]) -> None:
    """Let ``first`` quantize the tensors of ``others`` together with its own, as one."""
    dim = _JOINED_DIM[first.meta[OPERAND_KEY]]
    QuantizeNode(first).ask(more=[QuantizeNode(node).asked.x for node in others], dim=dim)
    for node in (first, *first.users):
        update_value(node)
    if ROWS_KEY in first.meta:  # one amax: the rows of the others become further names of its row
        rows = [row for node in (first, *others) for row in node.meta[ROWS_KEY]]
        first.meta[ROWS_KEY] = list(dict.fromkeys(rows))


def _slice(graph: fx.Graph, results: Sequence[fx.Node], sizes: Sequence[int], *, dim: int) -> None:
    """Give each linear's users their part of the first result, which now is the result of all linears."""
    users = [list(node.users) for node in results]
    for node, own, part in zip(results, users, _parts(graph, results[0], results, sizes, dim), strict=True):
        for user in own:
            user.replace_input_with(node, part)
        update_views(part, _NAME)
    for node in results[1:]:
        graph.erase_node(node)


def _parts(
    graph: fx.Graph, joined: fx.Node, like: Sequence[fx.Node], sizes: Sequence[int], dim: int
) -> Iterator[fx.Node]:
    end = 0
    for node, size in zip(like, sizes, strict=True):
        args = (joined, dim, end, end := end + size)
        with graph.inserting_after(joined):
            yield insert(graph, aten.slice.Tensor, args, like=node, made_by=_NAME, name=f"{node.name}_part")


def _multiply_apart(graph: fx.Graph, gemms: Sequence[fx.Node], sizes: Sequence[int], side: str) -> None:
    """Let each GEMM take its rows of the joined weight, or of the joined gradient's columnwise copy."""
    for name in (side, f"scale_inv_{side}"):  # data [N, K], scales [N / tile, K / tile] or one
        joined = cast(fx.Node, named_arguments(gemms[0])[name])
        rows = value(joined).shape[0] if value(joined).ndim == 2 else 0
        parts = _parts(graph, joined, gemms, [size * rows // sum(sizes) for size in sizes], 0) if rows else ()
        for node, part in zip(gemms, parts or [joined] * len(gemms), strict=True):
            set_argument(node, name, part)
