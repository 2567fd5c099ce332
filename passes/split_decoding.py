"""Split an op that decodes a weight and multiplies by it, so that the multiplication is a GEMM like any other.

    y = gemm_4bit(x, codes, sizes, absmax, bias)         ->      w = dequantize_4bit(codes, absmax, sizes)
                                                                 y = addmm(bias, x, permute(w))
    dx = mm(dy, dequantize_4bit(codes, absmax, sizes))   ->      dx = mm(dy, w)

These are the ops of bitsandbytes' ``Linear4bit`` (NF4 and FP4, with absmaxes in FP32 or in 8 bits), the base of QLoRA.
The codes are read as they are. The decoded weight is never saved: backward decodes it again, as the library does.

:func:`join_decoding` puts the library's op back where the GEMM of forward stays in high precision: it may have a kernel
that reads 4 bits per number.

Refuses (puts together again) products of few rows, for which the library has such a kernel on each GPU, where the graph
is for that number alone. It leaves alone the dgrad of a weight that backward decodes in another way than the library's
own backward.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import fx
from torch.utils.checkpoint import CheckpointPolicy

from fp8graph.analysis.products import Whole
from fp8graph.compat.inductor import erase_unused
from fp8graph.compat.ops import named_arguments
from fp8graph.ir.compilation import Compilation
from fp8graph.ir.edit import insert, set_direction
from fp8graph.ir.nodes import BACKWARD, CONVERT, aten, known_contiguous, value, value_key
from fp8graph.ir.sites import Decision
from fp8graph.libraries.products import decodes
from fp8graph.recipes.rules import SOURCE
from fp8graph.records import GemmRecord

_PRODUCT: Final = "bitsandbytes.gemm_4bit.default"  # by name: bitsandbytes may not be installed
_NESTED_BLOCK: Final = 256  # absmaxes in 8 bits that share one in FP32
_FEW: Final = 4  # rows that bitsandbytes 0.50 multiplies by its own kernel on each GPU (_GEMM_4BIT_CUSTOM_FLOOR_M)


@dataclass(frozen=True, kw_only=True, eq=False)
class Split:
    """A product that was split: the matmul, the result in its place, and the op that it was."""

    matmul: fx.Node
    result: fx.Node
    target: Any
    args: tuple[Any, ...]


def multiplies_codes(graph: fx.Graph, compilation: Compilation) -> bool:
    """Return whether some op of the graph is one that decodes a weight and multiplies by it."""
    return any(str(node.target) == _PRODUCT for node in graph.nodes)


def is_split(graph: fx.Graph, compilation: Compilation) -> bool:
    """Return whether an op was split."""
    return bool(compilation.results(Split))


def split_decoding(graph: fx.Graph, compilation: Compilation) -> None:
    exact = not compilation.facts.decisions.may_rewrite
    for node in list(graph.nodes):
        if node.op == "call_function" and str(node.target) == _PRODUCT:
            compilation.results(Split).append(_split(graph, node, exact=exact))
    erase_unused(graph)


def join_decoding(graph: fx.Graph, compilation: Compilation) -> None:
    """Put an op back that was split for nothing.

    y = mm(x, permute(dequantize_4bit(codes, ...))), in high precision      ->      y = gemm_4bit(x, codes, ...)
    """
    joined: dict[fx.Node, fx.Node] = {}
    for split in compilation.results(Split):
        decision = compilation.decisions[split.matmul]
        if (reason := _why_whole(split, decision)) is None:
            continue
        site = next(site for site in compilation.sites if site.gemms[0].node is split.matmul)
        with graph.inserting_before(split.result):
            args = fx.map_arg(split.args, lambda x: joined.get(x, x))
            whole = joined[split.result] = insert(graph, split.target, args, like=split.result)
        split.result.replace_all_uses_with(whole)
        del compilation.decisions[split.matmul], site.gemms[0]
        of_fprop = site.fqn, site.index, "fprop"
        compilation.rows = [
            row
            for row in compilation.rows
            if not isinstance(row, GemmRecord) or (row.fqn, row.index, row.gemm) != of_fprop
        ]
        compilation.results(Whole).append(Whole(node=whole, reason=reason, site=dataclasses.replace(site)))
    compilation.sites = [site for site in compilation.sites if site.gemms]
    erase_unused(graph)


def _why_whole(split: Split, decision: Decision) -> str | None:
    """Return the reason why an op that was split is put together again; None: it stays split."""
    if decision.recipe is None:  # an obstacle to a rule of the user's is an error, with a row as any linear has
        return None if decision.required and not decision.by_profitability else decision.reason
    rows = value(split.matmul).shape[:-1]
    if all(isinstance(size, int) for size in rows) and math.prod(rows) <= _FEW:
        why = f"for up to {_FEW} rows the library has a kernel that reads 4 bits per number"
        return f"{why} ({SOURCE} asked for {decision.recipe.name})"
    return None


def _split(graph: fx.Graph, node: fx.Node, *, exact: bool) -> Split:
    """Split one op. ``exact``: a batched dgrad stays batched, as it may add up in another order."""
    given = named_arguments(node)
    x: fx.Node = given["A"]
    again = _decoded_again(node, given)
    with graph.inserting_before(node):
        weight = _decoded(graph, node, given, again[0] if again else None)  # [n, k]
        turned = insert(graph, aten.permute.default, (weight, [1, 0]), like=node)
        bias = () if given["bias"] is None else (given["bias"],)
        op = aten.addmm.default if bias else aten.mm.default
        matmul = insert(graph, op, (*bias, _as_matrix(x, node), turned), like=node)
        result = _as(matmul, x, node)
    split = Split(matmul=matmul, result=result, target=node.target, args=node.args)
    node.replace_all_uses_with(result)
    graph.erase_node(node)
    for read in again:
        batched = [] if exact else [*_batched(read)]
        read.replace_all_uses_with(weight)
        for dgrad in batched:
            with graph.inserting_before(dgrad):
                dy: Any = dgrad.args[0]
                product = insert(graph, aten.mm.default, (_as_matrix(dy, dgrad), weight), like=dgrad)
                dgrad.replace_all_uses_with(_as(product, dy, dgrad))
            graph.erase_node(dgrad)
    for dgrad in weight.users:
        if dgrad.target is aten.mm.default:
            # that of a custom autograd function has no tag, and its number is that of a later forward node
            dgrad.meta |= {"partitioner_tag": BACKWARD, "seq_nr": matmul.meta.get("seq_nr")}
    return split


def _as_matrix(x: fx.Node, node: fx.Node) -> fx.Node:
    """``x`` [..., k] with one dim of rows."""
    if value(x).ndim == 2:
        return x
    if not known_contiguous(value(x)):
        x = insert(x.graph, aten.clone.default, (x,), like=node, kwargs=_CONTIGUOUS)
    return insert(x.graph, aten.view.default, (x, [-1, value(x).shape[-1]]), like=node)


def _as(matrix: fx.Node, x: fx.Node, node: fx.Node) -> fx.Node:
    """Return the result of a matmul with the rows of ``x``, in the dims of ``x``."""
    if value(x).ndim == 2:
        return matrix
    sizes = [
        size if isinstance(size, int) else insert(x.graph, aten.sym_size.int, (x, dim), like=node)
        for dim, size in enumerate(value(x).shape[:-1])
    ]
    return insert(x.graph, aten.view.default, (matrix, [*sizes, value(matrix).shape[1]]), like=node)


_CONTIGUOUS: Final[dict[str, Any]] = {"memory_format": torch.contiguous_format}


def _decoded(graph: fx.Graph, node: fx.Node, given: dict[str, Any], again: fx.Node | None) -> fx.Node:
    """Give the weight [n, k] in the dtype of x, rounded first as backward does, if that decodes it to another dtype."""
    library, dtype = torch.ops.bitsandbytes, value(given["A"]).dtype
    made: list[fx.Node] = []

    def emit(target: Any, *args: Any) -> fx.Node:
        made.append(insert(graph, target, args, like=node))
        return made[-1]

    absmax = given["absmax"]
    if given["absmax_8bit"] is not None:
        nested = given["absmax_8bit"], absmax, given["absmax_code"], _NESTED_BLOCK, torch.float32
        absmax = emit(aten.add.Tensor, emit(library.dequantize_blockwise.default, *nested), given["absmax_offset"])
    first = dtype if again is None or again.target is not CONVERT else value(again.all_input_nodes[0]).dtype
    settings = given["blocksize"], given["quant_type"], given["shapeB"], first
    weight = emit(library.dequantize_4bit.default, given["B"], absmax, *settings)
    if first != dtype:
        weight = emit(CONVERT, weight, dtype)
    for each in made:
        set_direction(each, None)
        each.meta["recompute"] = CheckpointPolicy.MUST_RECOMPUTE
    return weight


def _decoded_again(node: fx.Node, given: dict[str, Any]) -> list[fx.Node]:
    """Return the weights, in the dtype of x, that the graph decodes after ``node`` from the same codes and absmaxes."""
    dtype, weights = value(given["A"]).dtype, list[fx.Node]()
    names = ("absmax", "absmax_8bit", "absmax_code", "absmax_offset")
    absmaxes = {x for name in names if given[name] is not None for x in _inputs(given[name])}
    for decoded in node.graph.nodes:
        if not decodes(decoded) or decoded < node:
            continue
        own = named_arguments(decoded)
        same = all(own[other] == given[name] for other, name in _SAME) and value_key(own["A"]) == value_key(given["B"])
        if same and _inputs(own["absmax"]) == absmaxes:
            casts = [user for user in decoded.users if user.target is CONVERT and user.args[1] == dtype]
            weights += [decoded] if value(decoded).dtype == dtype else casts
    return weights


_SAME: Final = (("blocksize", "blocksize"), ("quant_type", "quant_type"), ("shape", "shapeB"))


def _batched(weight: fx.Node) -> Iterator[fx.Node]:
    """Yield the batched matmuls by ``weight``, the same for each matrix: so torch multiplies a gradient with gaps."""
    for user in weight.users:
        if user.target in (aten.expand.default, aten.view.default):
            yield from _batched(user)
        elif user.target is aten.bmm.default and user.args[1] is weight:
            yield user


def _inputs(node: fx.Node) -> set[fx.Node]:
    """Return the inputs of the graph that ``node`` is computed from."""
    pending, inputs = [node], set[fx.Node]()
    while pending:
        first = pending.pop()
        if first.op == "placeholder":
            inputs.add(first)
        pending += first.all_input_nodes
    return inputs
