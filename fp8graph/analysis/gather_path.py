"""The ops between an all-gather and the tensor that is used: casts, and ops that move whole rows.

DTensor gathers along the first dim. If the shards are of another dim (the sequence of [batch, sequence, hidden]), it
splits the result afterwards and concatenates the parts along that dim; a linear then reads [batch * sequence, hidden].
A row, which is all numbers of the last dim, stays together. So an operation on each row by itself may be done before
the gather.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from operator import getitem
from typing import Any, cast

import torch
from torch import fx

from fp8graph.ir import collectives
from fp8graph.ir.compilation import Compilation
from fp8graph.ir.decisions import InitialScales
from fp8graph.ir.edit import Emit
from fp8graph.ir.nodes import CONVERT, SAME_VALUES, USES_KEY, aten, known_equal, value
from fp8graph.ir.sites import Use

_COPIES = (aten.clone.default, aten.alias.default, aten.detach.default)


@dataclass(frozen=True, kw_only=True)
class Path:
    """The way from the shards of all ranks to one tensor."""

    gathered: fx.Node  # the all-gather
    waited: fx.Node
    steps: Sequence[fx.Node]  # ops from there to the tensor, in order, without casts and views of the same shape
    casts: Sequence[torch.dtype]  # on the way, in order
    nodes: frozenset[fx.Node]  # all of them

    @property
    def shard(self) -> fx.Node:
        """The shard that this rank sends."""
        return cast(fx.Node, self.gathered.args[0])

    @property
    def group(self) -> Any:
        return self.gathered.args[2]

    @property
    def is_plain(self) -> bool:
        """Whether the rows stay in the order in which they arrive."""
        return all(node.target in (*SAME_VALUES, *_COPIES) for node in self.steps)

    @property
    def keeps_shape(self) -> bool:
        """Whether the shards are matrices, which the gather stacks, and nothing else is done."""
        return value(self.shard).ndim == 2 and all(node.target in _COPIES for node in self.steps)

    def other_readers(self, reader: fx.Node) -> list[fx.Node]:
        """Return the nodes, except ``reader``, that read the tensor or anything on its path."""
        return [user for node in self.nodes for user in node.users if user not in self.nodes and user is not reader]


def path_of(tensor: fx.Node) -> Path | None:
    """Return the path from an all-gather to ``tensor``; None if there is none, or if there are other ops on it."""
    steps: list[fx.Node] = []
    casts: list[torch.dtype] = []
    on_path: list[fx.Node] = []
    node = tensor
    while node.op == "call_function":
        on_path.append(node)
        if node.target is collectives.WAIT:
            gathered = cast(fx.Node, node.args[0])
            if gathered.target is not collectives.ALL_GATHER or value(gathered).ndim < 2:  # vectors: parts of one row
                return None
            all_nodes = frozenset((*on_path, gathered))
            return Path(gathered=gathered, waited=node, steps=steps[::-1], casts=casts[::-1], nodes=all_nodes)
        if node.target is CONVERT:
            casts.append(cast(torch.dtype, node.args[1]))
        elif _changes_nothing(node):
            pass
        elif node.target is aten.cat.default:
            parts = _parts_of_one_split(node)
            if parts is None:
                return None
            split = cast(fx.Node, parts[0].args[0])
            on_path += [*parts, split]
            steps += [node, *reversed(parts), split]
            node = split
        elif keeps_rows(node):
            steps.append(node)
        else:
            return None
        node = cast(fx.Node, node.args[0])
    return None


def _changes_nothing(node: fx.Node) -> bool:
    """Return whether ``node`` is a view of all of its first argument in the same shape, as DTensor leaves them."""
    return node.target in (*SAME_VALUES, aten.slice.Tensor) and _keeps_shape(node)


def _keeps_shape(node: fx.Node) -> bool:
    before, after = value(cast(fx.Node, node.args[0])).shape, value(node).shape
    return len(before) == len(after) and all(map(known_equal, before, after))


def keeps_rows(node: fx.Node) -> bool:
    """Return whether ``node`` is a view or copy of its first argument in which all numbers of the last dim stay
    together.
    """
    if node.target in _COPIES:
        return True
    if node.target in SAME_VALUES:
        source = value(cast(fx.Node, node.args[0]))
        return source.ndim > 0 and known_equal(source.shape[-1], value(node).shape[-1])
    if node.target is aten.expand.default:  # to the size that it has
        return _keeps_shape(node)
    if node.target is aten.permute.default:
        return cast("list[int]", node.args[1])[-1] in (-1, value(node).ndim - 1)
    return False


def _parts_of_one_split(node: fx.Node) -> list[fx.Node] | None:
    """Return the parts that ``cat`` joins, if they are all parts of one split, in order; neither op is along the last
    dim.
    """
    parts = cast("list[fx.Node]", node.args[0])
    splits = {cast(fx.Node, part.args[0]) for part in parts if part.target is getitem}
    if len(splits) != 1 or any(part.target is not getitem for part in parts):
        return None
    split = splits.pop()
    if split.target is not aten.split.Tensor or [part.args[1] for part in parts] != [*range(len(split.meta["val"]))]:
        return None
    last = value(node).ndim - 1
    dims = [cast(int, n.args[where] if len(n.args) > where else 0) for n, where in ((node, 1), (split, 2))]
    return None if any(dim % (last + 1) == last for dim in dims) else parts


def replay(steps: Sequence[fx.Node], first: fx.Node, start: fx.Node, last: Any, emit: Emit) -> dict[fx.Node, fx.Node]:
    """Repeat on ``start``, [..., last], the ops that ``steps`` apply to ``first``, [..., its own last dim].

    Returns the new node of each of them, in order; the last one is the result.
    """
    copies: dict[fx.Node, fx.Node] = {first: start}

    def copied(node: fx.Node) -> fx.Node:
        while node not in copies:  # a cast was left out
            node = cast(fx.Node, node.args[0])
        return copies[node]

    for node in steps:
        args = list(node.args)
        if node.target in (*SAME_VALUES, aten.expand.default):
            args[1] = [*cast("list[Any]", args[1])[:-1], last]
        if node.target is aten.cat.default:
            args[0] = [copied(part) for part in cast("list[fx.Node]", args[0])]
        else:
            args[0] = copied(cast(fx.Node, args[0]))
        copies[node] = emit(node.target, *args, **node.kwargs)
    return copies


def cast_rows(x: fx.Node, casts: Sequence[torch.dtype], emit: Emit) -> fx.Node:
    """Return ``x`` after ``casts``, as [rows, columns]."""
    for dtype in casts:
        x = emit(CONVERT, x, dtype)
    return x if value(x).ndim == 2 else emit(aten.reshape.default, x, [-1, value(x).shape[-1]])


def row_sizes(tensor: fx.Node, emit: Emit) -> list[Any]:
    """Return the sizes of ``tensor`` but the last, as arguments of nodes."""
    sizes = value(tensor).shape[:-1]
    return [s if isinstance(s, int) else emit(aten.sym_size.int, tensor, dim) for dim, s in enumerate(sizes)]


def scale_may_differ(node: fx.Node, group: Any, compilation: Compilation) -> bool:
    """Return whether the ranks of ``group`` may have different delayed scales for the tensor of a quantize node."""
    use: Use = node.meta[USES_KEY][0]
    begins = use.recipe.starts_from_own_amax and compilation.facts.decisions.condition(InitialScales) is not None
    if begins and not use.is_weight:  # that is whole where its amax is taken, before the call
        return True
    wanted, reduced = collectives.ranks_of(group), collectives.ranks_of(compilation.facts.decisions.amax_group)
    return not use.recipe.reduces_amax or not wanted or not wanted <= reduced
