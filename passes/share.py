"""Merge the quantize nodes of one tensor: one amax per tensor, one cast per tensor and layout.

    q1 = quantize(view(h, [M, K]), rowwise)     # q_proj, forward
    q2 = quantize(view(h, [M, K]), rowwise)     # k_proj, forward        ->   q = quantize(h, rowwise, columnwise)
    q3 = quantize(view(h, [M, K]), columnwise)  # wgrad, backward

Nodes are merged if they have the same tensor (seen through views and repeated casts, ``value_key``), the
same quantizer and, for a layout that both ask for, the same padding. The merged node takes the place of the first one,
so the layout of a forward tensor that backward needs is made in forward, in the same pass over the data, and saved as
FP8. Refuses (keeps apart) quantize nodes of different recipes, and with different paddings of one layout.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field
from operator import getitem
from typing import Any, cast

from torch import fx

from fp8graph.compat.inductor import erase_unused
from fp8graph.ir import ops
from fp8graph.ir.compilation import Compilation
from fp8graph.ir.edit import insert, update_value
from fp8graph.ir.nodes import NO_GRAD_KEY, OPERAND_KEY, USES_KEY, nodes, runs_without_gradients, value_key
from fp8graph.ir.quantize_node import QuantizeNode
from fp8graph.ir.sites import Use


@dataclass
class Group:
    """Quantize nodes that become one. ``layouts``: rowwise and columnwise multiples, empty if not needed."""

    members: list[fx.Node] = field(default_factory=list[fx.Node])
    layouts: list[list[int]] = field(default_factory=lambda: [[], []])

    def takes(self, layouts: Sequence[Sequence[int]]) -> bool:
        return all(not own or not other or own == other for own, other in zip(self.layouts, layouts, strict=True))

    def add(self, member: fx.Node, layouts: Sequence[list[int]]) -> None:
        self.members.append(member)
        self.layouts = [own or other for own, other in zip(self.layouts, layouts, strict=True)]


def share(graph: fx.Graph, compilation: Compilation) -> None:
    groups: dict[Any, list[Group]] = {}
    for node in nodes(graph, (ops.quantize,)):
        candidates = groups.setdefault(_key(node), [])
        arguments = QuantizeNode(node).arguments
        layouts = [list(arguments.rowwise), list(arguments.columnwise)]
        group = next((g for g in candidates if g.takes(layouts)), None)
        if group is None:
            candidates.append(group := Group())
        group.add(node, layouts)
    for candidates in groups.values():
        for group in candidates:
            if len(group.members) > 1:
                _merge(graph, group)
    erase_unused(graph)


def _key(node: fx.Node) -> Any:
    """Equal for nodes that may become one: tensor, quantizer and, with a state, the recipe that updates it."""
    arguments = QuantizeNode(node).arguments
    uses = cast(list[Use], node.meta.get(USES_KEY, []))
    recipes = {use.recipe for use in uses}
    return value_key(arguments.x), repr(dataclasses.replace(arguments, x=None, rowwise=[], columnwise=[])), *recipes


def _merge(graph: fx.Graph, group: Group) -> None:
    """Give the first node all layouts, and the other nodes' users its outputs."""
    first, *others = group.members
    merged = QuantizeNode(first)
    before = merged.names
    rowwise, columnwise = group.layouts
    merged.ask(rowwise=rowwise, columnwise=columnwise)
    update_value(first)
    after = merged.names
    outputs: dict[str, fx.Node] = {}  # output name -> its getitem
    for user in list(first.users):
        outputs[name := before[cast(int, user.args[1])]] = user
        user.args = (first, after.index(name))
    last = next(reversed(outputs.values()))
    with graph.inserting_after(last):
        for position, name in reversed(list(enumerate(after))):
            if name not in outputs and name != "amax":
                label = f"{first.meta[OPERAND_KEY]}_{name}"
                outputs[name] = insert(graph, getitem, (first, position), like=first, name=label)
    if USES_KEY in first.meta:  # the first one's row is used; the others become further names for it
        rows = [row for member in group.members for row in member.meta[USES_KEY]]
        first.meta[USES_KEY] = list(dict.fromkeys(rows))
    if not all(runs_without_gradients(member) for member in group.members):
        first.meta["custom"] = {**(first.meta.get("custom") or {}), NO_GRAD_KEY: False}
    for other in others:
        for name, user in QuantizeNode(other).outputs.items():
            user.replace_all_uses_with(outputs[name])
            graph.erase_node(user)
        graph.erase_node(other)
