"""Sums in a graph: the terms that reach a tensor through views and additions alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import torch
from torch import fx

from fp8graph.ir.nodes import aten, is_view, value

_CONVERT: Final = torch.ops.prims.convert_element_type.default


def _chain(term: fx.Node) -> tuple[list[fx.Node], list[fx.Node]]:
    """``term`` and the views, casts and sums that follow it, as long as each has one reader."""
    chain: list[fx.Node] = [term]
    sums: list[fx.Node] = []
    while len((node := (chain + sums)[-1]).users) == 1:
        (user,) = node.users
        if user.target is aten.add.Tensor and not user.kwargs:
            sums.append(user)
        elif (is_view(user) or user.target is _CONVERT) and not sums:
            chain.append(user)
        else:
            break
    return chain, sums


def are_summed(terms: Sequence[fx.Node]) -> bool:
    """Whether the terms are only viewed (and cast) in the same way and added up to one tensor."""
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
