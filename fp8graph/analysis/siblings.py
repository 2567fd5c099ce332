"""Decide from the program which linears may be fused into one GEMM: q, k and v; gate and up.

The pass ``fuse_linears`` fuses them once they are quantized. ``assign`` asks earlier, since fused GEMMs pay, or do not
pay, as one. Both use the questions here. A group has one dgrad only if backward adds up those of all: the terms reach
one tensor through views and additions alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Final

from torch import fx

from fp8graph.ir.nodes import (
    CONVERT,
    aten,
    is_backward,
    is_view,
    readers,
    runs_without_gradients,
    static_size,
    strides_matter,
    value,
)
from fp8graph.ir.sites import Site

FORWARD_APART: Final = "in forward: slices of one result would be copied, or would keep all of it for backward"


def sibling_key(site: Site) -> tuple[Any, ...]:
    """Return a key equal for linears that may be fused if they read one tensor: their module, region, and when they
    run.
    """
    node = site.gemms[0].node
    same_run = runs_without_gradients(node), str(node.meta.get("recompute")), node.meta.get("ac_graph_id")
    return site.fqn.rpartition(".")[0], site.region, *same_run


def size_in_group(site: Site, blocks: Iterable[Sequence[int]]) -> int | str:
    """N of a linear that may be fused, or the reason why it may not.

    Reasons are a product of activations, a weight on the left (``w @ x``), and an N that is dynamic or not a multiple
    of 16 and of the ``blocks`` (scale tiles of its weight and gradient).
    """
    fprop = site.gemms[0]
    if site.op != "linear" or fprop.gemm != "fprop":
        return "it does not multiply by a weight"
    if fprop.a.operand != "input":
        return "its weight is on the left: write x @ w.T in place of w @ x"
    weight = value(fprop.b.tensor)
    size = static_size(weight.shape[-1 if fprop.b.flipped else -2])
    if size is None:
        return "its output size is dynamic"
    multiple = _multiple(blocks)
    return size if size % multiple == 0 else f"its output size {size} is not a multiple of {multiple}: pad it"


def fits_in_group(size: int, blocks: Iterable[Sequence[int]]) -> bool:
    """Return whether a weight of ``size`` rows can lie between others: it fills whole scale tiles and is 16-byte
    aligned.
    """
    return size % _multiple(blocks) == 0


def _multiple(blocks: Iterable[Sequence[int]]) -> int:
    return max([16, *(max(block or (1,)) for block in blocks)])


def can_be_slices(fprops: Sequence[fx.Node]) -> bool:
    """Return whether no copy is needed when the results are slices of one tensor.

    A copy is needed for results that leave the graph or that an op of another library reads, as both expect the strides
    that they had; and if backward keeps one result and not the others, since a slice keeps all of them alive.
    """
    all_readers = [list(readers(node)) for node in fprops]
    kept = {
        any(map(is_backward, own)) and "recompute" not in node.meta
        for node, own in zip(fprops, all_readers, strict=True)
    }
    return len(kept) == 1 and not any(map(strides_matter, fprops))


def _chain(term: fx.Node) -> tuple[list[fx.Node], list[fx.Node]]:
    """``term`` and the views, casts and sums that follow it, as long as each has one reader."""
    chain: list[fx.Node] = [term]
    sums: list[fx.Node] = []
    while len((node := (chain + sums)[-1]).users) == 1:
        (user,) = node.users
        if user.target is aten.add.Tensor and not user.kwargs:
            sums.append(user)
        elif (is_view(user) or user.target is CONVERT) and not sums:
            chain.append(user)
        else:
            break
    return chain, sums


def are_summed(terms: Sequence[fx.Node]) -> bool:
    """Return whether the terms are only viewed (and cast) in the same way and added up to one tensor."""
    if not terms:
        return True
    chains, sums = zip(*map(_chain, terms), strict=True)
    views = [[(node.target, str(node.args[1:])) for node in chain[1:]] for chain in chains]
    shapes = [[value(x).shape for x in node.all_input_nodes] for several in sums for node in several]
    plain = all(len(several) == 2 and several[0] == several[1] for several in shapes)  # nothing is broadcast
    return plain and all(view == views[0] for view in views) and bool(set.intersection(*map(set, sums)))


def take_out_of_sum(term: fx.Node) -> None:
    """Erase ``term`` and its views from its sum, which becomes the sum of the other terms."""
    chain, sums = _chain(term)
    (rest,) = (node for node in sums[0].all_input_nodes if node is not chain[-1])
    sums[0].replace_all_uses_with(rest)
    for node in (sums[0], *reversed(chain)):
        node.graph.erase_node(node)
