"""Which linears are a model's output heads, by what the graph does with them. Names play no part.

Three signals, of which the first that holds is the reason:

- the weight is an embedding's: the graph reads the same parameter with aten.embedding (tied weights);
- the loss reads its output: log_softmax or cross-entropy, which comes right behind it;
- its output is a result of the graph, and its weight is as large as an embedding's: logits over that vocabulary.

"Right behind" means through views, casts, chosen rows, scaling, soft caps and biases alone. Being the last linear of a
graph is no signal: so is the last one of a block that is compiled alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final, cast

import torch
from torch import fx

from fp8graph.ir.nodes import aten, is_view, nodes, static_size, value

TIED: Final = "its weight is the embedding's"
LOSS: Final = "the loss reads its output"
LOGITS: Final = "its output is the result, one number for each row of the embedding"

_LOSSES: Final = ("aten._log_softmax", "aten.log_softmax", "aten.cross_entropy_loss")
# ops that keep logits logits; what else they read may only be parameters and indices
_CHOOSE: Final = (aten.index.Tensor, aten.index_select.default)
_QUIET: Final = (
    *_CHOOSE, aten.clone.default, aten.tanh.default, aten._to_copy.default,
    aten.mul.Tensor, aten.mul.Scalar, aten.div.Tensor, aten.div.Scalar, aten.add.Tensor,
    torch.ops.prims.convert_element_type.default,
)  # fmt: skip


class Heads:
    """The output heads of one graph.

    Args:
        parameters: the placeholders that are parameters.
        backward: the nodes of backward.
    """

    def __init__(self, graph: fx.Graph, parameters: Mapping[fx.Node, Any], backward: set[fx.Node]) -> None:
        self._parameters = parameters
        self._backward = backward
        tables = [_source(cast(fx.Node, node.args[0])) for node in nodes(graph, (aten.embedding.default,))]
        self._embeddings = {table for table in tables if table in parameters}

    def why(self, matmul: fx.Node, weight: fx.Node) -> str:
        """Why the linear ``matmul`` by ``weight`` is an output head; "" if nothing says that it is one."""
        weight = _source(weight)
        if weight not in self._parameters or not self._embeddings:
            return LOSS if self._reaches(matmul, loss=True) else ""
        if weight in self._embeddings:
            return TIED
        if self._reaches(matmul, loss=True):
            return LOSS
        alike = any(_sizes(weight) == _sizes(table) for table in self._embeddings)  # [vocabulary, hidden]
        return LOGITS if alike and self._reaches(matmul, loss=False) else ""

    def _reaches(self, node: fx.Node, *, loss: bool) -> bool:
        """Whether the loss, or else the graph's result, comes right behind ``node``."""
        return any(_computes_loss(reader) if loss else reader.op == "output" for reader in self._right_behind(node))

    def _right_behind(self, node: fx.Node) -> Iterator[fx.Node]:
        """The forward nodes that read ``node``, directly or through what keeps logits logits."""
        found, waiting = {node}, [node]
        while waiting:
            for reader in waiting.pop().users:
                if reader in found or (reader in self._backward and reader.op != "output"):
                    continue
                found.add(reader)
                yield reader
                if self._is_quiet(reader, found):
                    waiting.append(reader)

    def _is_quiet(self, node: fx.Node, found: set[fx.Node]) -> bool:
        if _computes_loss(node):
            return False
        if is_view(node):
            return True
        if node.target not in _QUIET:
            return False
        others = [x for x in node.all_input_nodes if x not in found]
        return node.target in _CHOOSE or all(_source(other) in self._parameters for other in others)


def _computes_loss(node: fx.Node) -> bool:
    """Whether ``node`` is a log_softmax or a part of one: Inductor's decompositions take it apart."""
    op = node.meta.get("original_aten") or node.target
    return str(op).rpartition(".")[0] in _LOSSES


def _source(node: fx.Node) -> fx.Node:
    """The graph input that ``node`` is computed from, or the node with several inputs before it."""
    while len(node.all_input_nodes) == 1:
        (node,) = node.all_input_nodes
    return node


def _sizes(node: fx.Node) -> tuple[int | None, ...]:
    return tuple(static_size(size) for size in value(node).shape)
