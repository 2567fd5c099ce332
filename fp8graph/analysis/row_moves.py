"""The ops by which rows are copied, permuted and sent to other ranks on the way to a tensor, for experts above all.

Each row, all numbers of the last dim, stays together. So what is done to each row by itself may be done before.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import fx

from fp8graph.analysis.gather_path import keeps_rows
from fp8graph.ir import collectives
from fp8graph.ir.nodes import aten, value

_CAST = torch.ops.prims.convert_element_type.default


@dataclass(frozen=True, kw_only=True)
class Moves:
    """How the rows of a tensor are made from those of another one."""

    source: fx.Node
    steps: Sequence[fx.Node]  # from there to the tensor, in order, without casts
    casts: Sequence[torch.dtype]  # on the way, in order
    exchanges: Sequence[fx.Node]  # the all-to-alls among the steps
    nodes: frozenset[fx.Node]  # all of them

    def other_readers(self, reader: fx.Node) -> list[fx.Node]:
        """The nodes, except ``reader``, that read numbers of the tensor or of anything on the way."""
        return [user for user in self._users() if user is not reader and user not in self.size_readers()]

    def size_readers(self) -> list[fx.Node]:
        """The nodes that read only how many rows there are."""
        found = (user for user in self._users() if user.target is aten.sym_size.int)
        return [user for user in found if cast(int, user.args[1]) < value(cast(fx.Node, user.args[0])).ndim - 1]

    def step_of(self, node: fx.Node) -> fx.Node:
        """The step whose result ``node``, on the way, is, perhaps cast; or the source."""
        while node not in self.steps and node is not self.source:
            node = cast(fx.Node, node.args[0])
        return node

    def _users(self) -> list[fx.Node]:
        return [user for node in self.nodes for user in node.users if user not in self.nodes]


def moves_of(tensor: fx.Node) -> Moves | None:
    """The moves that lead to ``tensor``, as far back as rows stay together; None if no row is moved."""
    walked: list[fx.Node] = []
    node = tensor
    while node.op == "call_function" and (node.target is _CAST or _moves(node) or keeps_rows(node)):
        walked.append(node)
        node = cast(fx.Node, node.args[0])
    while walked and not _moves(walked[-1]):  # casts and views before the first move
        walked.pop()
    if not walked:
        return None
    walked.reverse()
    return Moves(
        source=cast(fx.Node, walked[0].args[0]),
        steps=[node for node in walked if node.target is not _CAST],
        casts=[cast(torch.dtype, node.args[1]) for node in walked if node.target is _CAST],
        exchanges=[node for node in walked if node.target is collectives.ALL_TO_ALL],
        nodes=frozenset(walked),
    )


def _moves(node: fx.Node) -> bool:
    """Whether ``node`` takes whole rows of its first argument to other places, or to other ranks."""
    if node.target is collectives.ALL_TO_ALL:
        return value(node).ndim > 1
    if node.target is collectives.WAIT:
        return cast(fx.Node, node.args[0]).target is collectives.ALL_TO_ALL
    if node.target is aten.index.Tensor:
        taken = cast("list[Any]", node.args[1])
        return len(taken) == 1 and value(cast(fx.Node, node.args[0])).ndim > 1 and value(taken[0]).dtype != torch.bool
    if node.target is aten.index_select.default:
        return cast(int, node.args[1]) == 0 and value(node).ndim > 1
    return False
