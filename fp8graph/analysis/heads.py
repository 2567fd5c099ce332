"""Which linears are a model's output heads, by what the graph does with them. Names play no part.

Three signals, of which the first that holds is the reason:

- the weight is an embedding's: the graph reads the same parameter with aten.embedding (tied weights);
- the loss reads its output: log_softmax or cross-entropy, which comes right behind it;
- its output is a result of the graph, its weight is as large as an embedding's, and the model does not go on with it:
  logits over that vocabulary.

"Right behind" means through views, casts, chosen rows, scaling, soft caps and biases alone. A model goes on with keys
and values that it also returns for a cache, and with hidden states that it returns: a later matmul or attention depends
on them. What depends on probabilities or on the choice of a token does not count. Being the last linear of a graph is
no signal: so is the last one of a block that is compiled alone.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any, Final, cast

import torch
from torch import fx

from fp8graph.analysis.attention import FORMS
from fp8graph.ir.nodes import SITES, aten, is_view, nodes, static_size, value

TIED: Final = "its weight is the embedding's"
LOSS: Final = "the loss reads its output"
LOGITS: Final = "its output is the result, one number for each row of the embedding"

_LOSSES: Final = ("aten._log_softmax", "aten.log_softmax", "aten.cross_entropy_loss")
_PROBABILITIES: Final = ("aten._softmax", "aten.softmax")
_MULTIPLY: Final = (*SITES, *FORMS)
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
        return LOGITS if alike and self._reaches(matmul, loss=False) and not self._goes_on(matmul) else ""

    def _reaches(self, node: fx.Node, *, loss: bool) -> bool:
        """Whether the loss, or else the graph's result, comes right behind ``node``."""
        return any(_is_of(reader, _LOSSES) if loss else reader.op == "output" for reader in self._right_behind(node))

    def _goes_on(self, node: fx.Node) -> bool:
        """Whether forward multiplies, or attends to, what it computes from ``node``."""
        found, waiting = {node}, [node]
        while waiting:
            for reader in waiting.pop().users:
                if reader in found or reader in self._backward or _ends_logits(reader):
                    continue
                if reader.target in _MULTIPLY:
                    return True
                found.add(reader)
                waiting.append(reader)
        return False

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
        if _is_of(node, _LOSSES):
            return False
        if is_view(node):
            return True
        if node.target not in _QUIET:
            return False
        others = [x for x in node.all_input_nodes if x not in found]
        return node.target in _CHOOSE or all(_source(other) in self._parameters for other in others)


def _is_of(node: fx.Node, ops: Collection[str]) -> bool:
    """Whether ``node`` is one of ``ops`` or a part of one: Inductor's decompositions take log_softmax apart."""
    op = node.meta.get("original_aten") or node.target
    return str(op).rpartition(".")[0] in ops


def _ends_logits(node: fx.Node) -> bool:
    """Whether ``node`` is a loss, probabilities, or integers: tokens that were chosen."""
    val = node.meta.get("val")
    is_number = not isinstance(val, torch.Tensor) or val.dtype.is_floating_point or val.dtype.is_complex
    return not is_number or _is_of(node, (*_LOSSES, *_PROBABILITIES))


def _source(node: fx.Node) -> fx.Node:
    """The graph input that ``node`` is computed from, or the node with several inputs before it."""
    while len(node.all_input_nodes) == 1:
        (node,) = node.all_input_nodes
    return node


def _sizes(node: fx.Node) -> tuple[int | None, ...]:
    return tuple(static_size(size) for size in value(node).shape)
