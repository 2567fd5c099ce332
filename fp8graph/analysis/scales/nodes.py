"""Questions about the nodes of a graph in which scales are followed: shapes and types, and whether one is a scale."""

from __future__ import annotations

import math
from typing import Any, cast

import torch
from torch import Tensor, fx

from fp8graph.analysis.scales.exponents import LARGEST
from fp8graph.analysis.scales.ops import (
    CLAMPS,
    DIVIDES,
    LARGEST_OF,
    MEASURES,
    MOVES,
    MULTIPLIES,
    PRODUCTS,
    REDUCTIONS,
    SAME,
    SCALED,
    WRITES,
    aten,
)
from fp8graph.analysis.scales.states import E8M0, FP8, Source
from fp8graph.compat.ops import named_arguments
from fp8graph.compat.products import Operation, operation_of


def dtype_of(node: Any) -> torch.dtype | None:
    val = node.meta.get("val") if isinstance(node, fx.Node) else None
    return val.dtype if isinstance(val, Tensor) else None


def shape_of(node: fx.Node) -> tuple[int, ...]:
    return tuple(node.meta["val"].shape)


def numel(node: fx.Node) -> int:
    val = node.meta.get("val")
    return math.prod(int(s) if isinstance(s, int) else 1 << 20 for s in val.shape) if isinstance(val, Tensor) else 0


def ndim(node: fx.Node) -> int:
    val = node.meta.get("val")
    return val.ndim if isinstance(val, Tensor) else 0


def operands_of(product: fx.Node) -> list[fx.Node]:
    """Return both operands of one of ``PRODUCTS``."""
    arguments = list(named_arguments(product).values())
    return [arguments[place] for place in cast(Operation, operation_of(product.target)).operands]


def name_of(dtype: torch.dtype | None) -> str:
    return str(dtype).removeprefix("torch.")


def is_small(node: fx.Node) -> bool:
    vals = node.meta.get("val")
    vals = vals if isinstance(vals, (tuple, list)) else [vals]
    return all(
        not isinstance(val, Tensor)
        or all(isinstance(s, int) for s in val.shape)
        and math.prod(val.shape) <= LARGEST >> 4
        for val in vals
    )


def takes_largest(node: fx.Node) -> bool:
    if node.target in (aten.linalg_vector_norm.default, aten.norm.ScalarOpt_dim):
        return len(node.args) > 1 and bool(node.args[1] == math.inf)
    return True


def decodes(node: Any, *, product: bool = False) -> bool:
    """Return whether a node has the numbers of FP8 bytes, or of a ``product`` of such, to which a scale is still
    applied.
    """
    while isinstance(node, fx.Node):
        if not product and dtype_of(node) in FP8:
            return True
        if node.op != "call_function":
            return False
        if product and node.target in PRODUCTS:
            return any(map(decodes, operands_of(node)))
        followed = node.target in SAME or node.target in MOVES
        if not followed and not (product and (node.target in MULTIPLIES or node.target in DIVIDES)):
            return False
        node = node.args[0]
    return False


def is_table(node: fx.Node) -> bool:
    return any(user.target in (aten.slice.Tensor, aten.select.int, aten.index.Tensor) for user in node.users)


def measures_behind(scale: fx.Node) -> set[fx.Node]:
    """Return the reductions of tensors that a scale is computed from, other than their largest magnitudes."""
    waiting, measures, met = [scale], set[fx.Node](), set[fx.Node]()
    while waiting:
        node = waiting.pop()
        if node in met or node.op != "call_function" or node.target in LARGEST_OF:
            continue
        met.add(node)
        if node.target in REDUCTIONS and numel(node) < numel(node.all_input_nodes[0]):
            measures.add(node)
        else:
            waiting.extend(each for each in node.all_input_nodes if numel(each) <= numel(node))
    return measures


def measured(argument: fx.Node) -> set[fx.Node]:
    """Return the tensors whose largest magnitude that of ``argument`` is: behind views, joins, squares and maxima."""
    waiting, met = [argument], set[fx.Node]()
    while waiting:
        node = waiting.pop()
        if node not in met:
            met.add(node)
            waiting.extend(node.all_input_nodes if passes_magnitudes(node) else ())
    return met


def holds_amaxes(source: Source) -> bool:
    """Return whether an input holds amaxes of the steps before: by its name, or by what the graph writes to it."""
    named, update = "amax" in source.leaf or "hist" in source.leaf, source.update
    if named or update is None:
        return named
    largest = (node for node in measured(update) if node.target in LARGEST_OF)
    return any(numel(update) < numel(node.all_input_nodes[0]) for node in largest)


def passes_magnitudes(node: fx.Node) -> bool:
    """Return whether the magnitudes of a node are those of its inputs, or some of them."""
    return node.target in MEASURES or node.target in WRITES or getattr(node.target, "__name__", "") == "getitem"


def lies_in_tiles(scale: fx.Node) -> bool:
    """Return whether a scaled product reads the numbers of an input as E8M0, which lie in tiles of 128x4."""
    waiting = [scale]
    while waiting:
        node = waiting.pop()
        for user in node.users:
            if user.target in SCALED and dtype_of(node) is E8M0:
                return True
            if user.target in MOVES or user.target is aten.view.dtype:
                waiting.append(user)
    return False


def leads_to_cast(node: fx.Node) -> bool:
    """Return whether nothing but a cast to FP8 reads a node, through clamps, views and casts."""
    waiting, casts = [node], 0
    while waiting:
        for user in waiting.pop().users:
            if user.op != "call_function" or not (
                user.target in SAME or user.target in CLAMPS or user.target in MOVES or user.target is aten.add.Tensor
            ):
                return False
            if dtype_of(user) in FP8:
                casts += 1
            else:
                waiting.append(user)
    return casts > 0
