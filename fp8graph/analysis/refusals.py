"""Reasons that several passes give in the report: sizes, and weights that are quantized in each call."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import fx

from fp8graph.ir import collectives, ops
from fp8graph.ir.compilation import Compilation
from fp8graph.ir.naming import graph_inputs, split_source
from fp8graph.ir.nodes import GEMM_KEY, NOT_SENT_KEY, SITES, known_at_run_time_only, static_size, value
from fp8graph.ir.quantize_node import QuantizeNode
from fp8graph.ir.sites import Site

_GEMMS = (*SITES, ops.scaled_mm, ops.scaled_grouped_mm)
_SHARDED = "a copy of all of it would take the memory that sharding saves"


def why_not_of_size(shape: Sequence[int | torch.SymInt], *, grouped: bool = False) -> str | None:
    """Return the reason why no operand of this shape is quantized, or None if one is.

    A maximum of nothing has no value, and kernels and tiles depend on a size; groups of rows may all be empty.
    """
    if any(static_size(size) == 0 for size in shape):
        return f"an operand is empty: {list(shape)}"
    if not grouped and any(map(known_at_run_time_only, shape)):
        return f"a size is known at run time only, and may be 0: {list(shape)}"
    return None


def site_of(quantized: fx.Node, compilation: Compilation) -> Site | None:
    """The site whose GEMM (or, if that is emulated, what decodes for it) reads a quantize node; None if none does."""
    for output in quantized.users:
        for reader in output.users:
            if GEMM_KEY in reader.meta:
                return compilation.sites[reader.meta[GEMM_KEY][0]]
    return None


def why_not_cached(quantized: fx.Node, compilation: Compilation) -> str:
    """Reason why the copy of a weight is not kept; "" for tensors that are not weights (results of GEMMs, ...).

    It is not called for weights that could be kept.
    """
    asked, not_sent = QuantizeNode(quantized).asked, quantized.meta.get(NOT_SENT_KEY)
    inputs = dict(graph_inputs(quantized.graph))
    pending, seen, reasons, is_weight = [asked.x, *(asked.more or ())], set[fx.Node](), list[str](), False
    while pending:
        node = pending.pop()
        if node in seen:
            continue
        seen.add(node)
        if node.op == "placeholder":
            index = inputs.get(node)
            is_weight |= index in compilation.known.parameters and value(node).ndim > 1
            reasons.append(_why_not_input(node, index, compilation, not_sent))
        elif node.target in _GEMMS:
            return ""
        else:
            if node.target is collectives.ALL_GATHER:
                reasons.append(f"it is gathered from several ranks in the graph: {_SHARDED}")
            if torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ()):
                reasons.append("it is computed with random numbers, which change with each call")
            pending.extend(node.all_input_nodes)
    if any(static_size(size) is None for size in value(asked.x).shape):
        reasons.insert(0, "its size is dynamic: compile with dynamic=False, or mark that size static")
    return next(filter(None, reasons), "") if is_weight else ""


def _why_not_input(node: fx.Node, index: int | None, compilation: Compilation, not_sent: str | None) -> str:
    if index in compilation.known.gathered:
        if not_sent is None:
            return "FSDP2 gathers it for each use, in FP8 from the first step of its optimizer on"
        return f"FSDP2 gathers it for each use, in high precision: {not_sent}; {_SHARDED}"
    if index in compilation.known.parameters:
        return ""
    known = index is not None and index < len(compilation.known.sources)
    name = split_source(compilation.known.sources[index])[1] if known and index is not None else node.name
    return (
        f"it is also computed from {name or node.name!r}, which is not a parameter and may change with each call; if "
        "it does not change, make it a parameter (requires_grad=False)"
    )
