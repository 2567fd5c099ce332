"""Write SiLU by a sigmoid, which its backward has, too: one exponential and one division where there were two.

    y = x / (exp(-x) + 1)                ->      s = logistic(x)
    s = sigmoid(x)                               y = x * s
    dx = dy * s * (x * (1 - s) + 1)              dx = dy * s * (x * (1 - s) + 1)

Inductor decomposes ``silu`` and ``silu_backward`` like this, and sees no function that they share. The amax and the
cast of SwiGLU's gradient compute both for each element: a quarter of their instructions. Forward is written so, too:
where backward computes SwiGLU again, it gets forward's bits. On a CPU they differ from the quotient's by one unit in
the last place, in FP32, where the sigmoid is no subnormal number.

Refuses (leaves as they are) quotients of other forms or types, and graphs without FP8, whose code is plain Inductor's.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch
from torch import fx

from fp8graph.compat.inductor import erase_unused
from fp8graph.ir.edit import insert
from fp8graph.ir.nodes import NAMES_KEY, aten, in_order, nodes, value
from fp8graph.numerics.hints import LOGISTIC
from fp8graph.passes.lower import is_rewritten


def share_sigmoid(graph: fx.Graph) -> None:
    if not is_rewritten(graph):
        return
    quotients = {node: x for node in nodes(graph, (aten.div.Tensor,)) if (x := argument_of_silu(node)) is not None}
    shared: dict[fx.Node, fx.Node] = {}
    for quotient, x in quotients.items():
        if x in shared:
            continue
        first, *_ = in_order(x.users)
        with graph.inserting_before(first):
            shared[x] = insert(graph, LOGISTIC, (x,), like=quotient)
        shared[x].meta[NAMES_KEY] = tuple(name for node in _denominator(quotient) for name in _names(node))
        for user in [user for user in x.users if user.target is aten.sigmoid.default]:
            _replace(user, shared[x])
    for node, x in quotients.items():
        with graph.inserting_before(node):
            _replace(node, insert(graph, aten.mul.Tensor, (x, shared[x]), like=node))
    erase_unused(graph)


def argument_of_silu(node: fx.Node) -> fx.Node | None:
    """``x``, FP32, if ``node`` is ``x / (exp(-x) + 1)``."""
    x, divisor = node.args
    if not isinstance(x, fx.Node) or not isinstance(divisor, fx.Node) or value(x).dtype != torch.float32:
        return None
    return x if argument_of_exponential(divisor) is x else None


def argument_of_exponential(divisor: fx.Node) -> fx.Node | None:
    """``x`` if a node is ``exp(-x) + 1``."""
    if divisor.target is not aten.add.Tensor or divisor.args[1] != 1 or divisor.kwargs:
        return None
    chain = [divisor.args[0]]
    for target in (aten.exp.default, aten.neg.default):
        last = chain[-1]
        if not isinstance(last, fx.Node) or last.target is not target:
            return None
        chain.append(last.args[0])
    return cast(fx.Node, chain[-1])


def _denominator(quotient: fx.Node) -> list[fx.Node]:
    """Return the nodes of ``exp(-x) + 1``, for the report: the sigmoid computes them."""
    (total,) = quotient.args[1:]
    (exponential,) = cast(fx.Node, total).all_input_nodes
    return [*exponential.all_input_nodes, exponential, cast(fx.Node, total)]


def _names(node: fx.Node) -> Sequence[str]:
    return node.meta.get(NAMES_KEY, (node.name,))


def _replace(node: fx.Node, other: fx.Node) -> None:
    """Let ``other`` take the place and the names of ``node``."""
    other.meta[NAMES_KEY] = (*other.meta.get(NAMES_KEY, ()), *_names(node))
    node.replace_all_uses_with(other)
