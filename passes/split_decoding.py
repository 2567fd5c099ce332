"""Split an op that decodes a weight and multiplies by it, so that the multiplication is a GEMM like any other.

    y = gemm_4bit(x, codes, sizes, absmax, bias)         ->      w = dequantize_4bit(codes, absmax, sizes)
                                                                 y = addmm(bias, x, permute(w))
    dx = mm(dy, dequantize_4bit(codes, absmax, sizes))   ->      dx = mm(dy, w)

These are the ops of bitsandbytes' ``Linear4bit`` (NF4 and FP4, with absmaxes in FP32 or in 8 bits), the base of QLoRA.
The codes are read as they are. The decoded weight is never saved: backward decodes it again, as the library does.

:func:`join_decoding` puts the library's op back where the GEMM of forward stays in high precision: it may have a kernel
that reads 4 bits per number.

Refuses (leaves unchanged) products of few rows, for which the library has such a kernel on each GPU, and weights that
backward decodes in another way than the library's own backward: their dgrad stays as it is.
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

from fp8graph.compat.inductor import erase_unused
from fp8graph.compat.ops import named_arguments
from fp8graph.ir.compilation import Compilation
from fp8graph.ir.edit import insert, set_direction
from fp8graph.ir.nodes import BACKWARD, aten, backward_nodes, known_contiguous, size_hint, value, value_key
from fp8graph.ir.sites import Site
from fp8graph.libraries.products import decodes
from fp8graph.records import GemmRecord

_PRODUCT: Final = "bitsandbytes.gemm_4bit.default"  # by name: bitsandbytes may not be installed
_CONVERT: Final = torch.ops.prims.convert_element_type.default
_NESTED_BLOCK: Final = 256  # absmaxes in 8 bits that share one in FP32
_FEW: Final = 4  # rows that bitsandbytes 0.50 multiplies by its own kernel on each GPU (_GEMM_4BIT_CUSTOM_FLOOR_M)


@dataclass(frozen=True, kw_only=True, eq=False)
class Split:
    """A product that was split: the matmul, the result in its place, and the op that it was."""

    matmul: fx.Node
    result: fx.Node
    target: Any
    args: tuple[Any, ...]


@dataclass(frozen=True, kw_only=True, eq=False)
class Whole:
    """An op that decodes and multiplies, and stays as it is: the reason, and the site of the matmul that it was."""

    node: fx.Node
    reason: str
    site: Site | None = None


def multiplies_codes(graph: fx.Graph, compilation: Compilation) -> bool:
    """Whether some op of the graph is one that decodes a weight and multiplies by it."""
    return any(str(node.target) == _PRODUCT for node in graph.nodes)


def is_split(graph: fx.Graph, compilation: Compilation) -> bool:
    """Whether an op was split."""
    return bool(compilation.results(Split))


def split_decoding(graph: fx.Graph, compilation: Compilation) -> None:
    backward, splits = backward_nodes(graph), compilation.results(Split)
    for node in list(graph.nodes):
        if node.op == "call_function" and str(node.target) == _PRODUCT:
            rows = math.prod(map(size_hint, value(node).shape[:-1]))
            if rows <= _FEW:
                reason = f"one kernel of the library reads the 4-bit weight for up to {_FEW} rows"
                compilation.results(Whole).append(Whole(node=node, reason=reason))
            else:
                splits.append(_split(graph, node, backward))
    erase_unused(graph)


def join_decoding(graph: fx.Graph, compilation: Compilation) -> None:
    """Put an op back that was split for nothing.

    y = mm(x, permute(dequantize_4bit(codes, ...))), in high precision      ->      y = gemm_4bit(x, codes, ...)
    """
    for split in compilation.results(Split):
        decision = compilation.decisions[split.matmul]
        if decision.recipe is not None or decision.required:
            continue
        site = next(site for site in compilation.sites if site.gemms[0].node is split.matmul)
        with graph.inserting_before(split.result):
            whole = insert(graph, split.target, split.args, like=split.result)
        split.result.replace_all_uses_with(whole)
        del compilation.decisions[split.matmul], site.gemms[0]
        of_fprop = site.fqn, site.index, "fprop"
        compilation.rows = [
            row
            for row in compilation.rows
            if not isinstance(row, GemmRecord) or (row.fqn, row.index, row.gemm) != of_fprop
        ]
        compilation.results(Whole).append(Whole(node=whole, reason=decision.reason, site=dataclasses.replace(site)))
    compilation.sites = [site for site in compilation.sites if site.gemms]
    erase_unused(graph)


def _split(graph: fx.Graph, node: fx.Node, backward: set[fx.Node]) -> Split:
    given, args = named_arguments(node), (*node.args,)
    x: fx.Node = given["A"]
    again = [read for read in _decoded_in_backward(node, given) if not backward.isdisjoint(read.users)]

    def emit(target: Any, *args: Any) -> fx.Node:
        return insert(graph, target, args, like=node)

    with graph.inserting_before(node):
        weight = _decoded(given, again[0] if again else None, emit)  # [n, k]
        rows = x
        if value(x).ndim != 2:
            if not known_contiguous(value(x)):
                rows = insert(graph, aten.clone.default, (x,), like=node, kwargs=_CONTIGUOUS)
            rows = emit(aten.view.default, rows, [-1, value(weight).shape[1]])
        turned = emit(aten.permute.default, weight, [1, 0])
        if given["bias"] is None:
            matmul = emit(aten.mm.default, rows, turned)
        else:
            matmul = emit(aten.addmm.default, given["bias"], rows, turned)
        result = matmul
        if value(x).ndim != 2:
            leading = [
                size if isinstance(size, int) else emit(aten.sym_size.int, x, dim)
                for dim, size in enumerate(value(x).shape[:-1])
            ]
            result = emit(aten.view.default, matmul, [*leading, value(weight).shape[0]])
    target = node.target
    node.replace_all_uses_with(result)
    graph.erase_node(node)
    for read in again:
        for user in [user for user in read.users if user in backward]:
            user.replace_input_with(read, weight)
            # that of a custom autograd function has no tag, and its number is that of a later forward node
            user.meta |= {"partitioner_tag": BACKWARD, "seq_nr": matmul.meta.get("seq_nr")}
    return Split(matmul=matmul, result=result, target=target, args=args)


_CONTIGUOUS: Final[dict[str, Any]] = {"memory_format": torch.contiguous_format}


def _decoded(given: dict[str, Any], again: fx.Node | None, emit: Any) -> fx.Node:
    """The weight [n, k] in the dtype of x, rounded first as backward does, if that decodes it to another dtype."""
    library, dtype = torch.ops.bitsandbytes, value(given["A"]).dtype
    made: list[fx.Node] = []

    def emitted(target: Any, *args: Any) -> fx.Node:
        made.append(emit(target, *args))
        return made[-1]

    absmax = given["absmax"]
    if given["absmax_8bit"] is not None:
        nested = given["absmax_8bit"], absmax, given["absmax_code"], _NESTED_BLOCK, torch.float32
        absmax = emitted(library.dequantize_blockwise.default, *nested)
        absmax = emitted(aten.add.Tensor, absmax, given["absmax_offset"])
    kept = dtype if again is None else value(_source(again)).dtype
    how = given["blocksize"], given["quant_type"], given["shapeB"], kept
    weight = emitted(library.dequantize_4bit.default, given["B"], absmax, *how)
    if kept != dtype:
        weight = emitted(_CONVERT, weight, dtype)
    for node in made:
        set_direction(node, None)
        node.meta["recompute"] = CheckpointPolicy.MUST_RECOMPUTE
    return weight


def _decoded_in_backward(node: fx.Node, given: dict[str, Any]) -> Iterator[fx.Node]:
    """The weights, in the dtype of x, that the graph decodes from the codes and absmaxes of ``node``."""
    dtype = value(given["A"]).dtype
    absmaxes = [given[name] for name in ("absmax", "absmax_8bit", "absmax_code", "absmax_offset")]
    for decoded in node.graph.nodes:
        if not decodes(decoded):
            continue
        own = named_arguments(decoded)
        same = all(own[other] == given[name] for other, name in _SAME) and value_key(own["A"]) == value_key(given["B"])
        if same and _inputs(own["absmax"]) == {x for each in absmaxes if each is not None for x in _inputs(each)}:
            if value(decoded).dtype == dtype:
                yield decoded
            else:
                yield from (cast for cast in decoded.users if cast.target is _CONVERT and cast.args[1] == dtype)


_SAME: Final = (("blocksize", "blocksize"), ("quant_type", "quant_type"), ("shape", "shapeB"))


def _source(node: fx.Node) -> fx.Node:
    return node.all_input_nodes[0] if node.target is _CONVERT else node


def _inputs(node: fx.Node) -> set[fx.Node]:
    """The inputs of the graph that ``node`` is computed from."""
    pending, inputs = [node], set[fx.Node]()
    while pending:
        first = pending.pop()
        if first.op == "placeholder":
            inputs.add(first)
        pending += first.all_input_nodes
    return inputs
