"""Find the sites: every matmul of the program, with its name, its three GEMMs, and the role of each operand.

    y  = mm(x, permute(w))                                      site "mlp.up_proj", op "linear"
    dx = mm(dy, permute(permute(w)))              ->              fprop  x rowwise   @ w rowwise
    dw = mm(permute(dy), x)                                        dgrad  dy rowwise  @ w columnwise
                                                                   wgrad  dy columnwise @ x columnwise

Finds mm, addmm, bmm, baddbmm and grouped_mm, through permutes, views and the bias. The graph is not changed. A backward
matmul belongs to the forward matmul with the same ``seq_nr`` (bmm and code outside modules have no module stack in
backward); the operand that the two have in common shows which GEMM it is. A backward matmul without a forward one (in
a custom autograd function) is a site by itself, with a dgrad only; ``assign`` leaves it in high precision.

A linear is the model's output head by what the graph does with it. Names play no part. Three signals, of which the
first that holds is the reason:

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

from collections import Counter, defaultdict
from collections.abc import Collection, Iterator, Mapping
from typing import Any, Final, cast

import torch
from torch import fx

from fp8graph.compat.attention import FORMS
from fp8graph.ir import ops
from fp8graph.ir.compilation import Compilation
from fp8graph.ir.naming import Parameter, names_of, parameters_of, place_of
from fp8graph.ir.nodes import (
    CONVERT,
    GROUPED,
    SITES,
    aten,
    backward_nodes,
    is_view,
    look_through_transposes,
    matmul_arguments,
    nodes,
    runs_without_gradients,
    static_size,
    takes_gradient,
    value,
    value_key,
    written_as_linear,
)
from fp8graph.ir.sites import Gemm, OperandView, Site
from fp8graph.libraries.products import decodes
from fp8graph.recipes import GEMMS, OperandName
from fp8graph.recipes.autocast import REGION_KEY


def match(graph: fx.Graph, compilation: Compilation) -> None:
    parameters = parameters_of(graph, compilation.facts.parameters)
    from_parameter = _only_from_parameters(graph, set(parameters))
    backward = backward_nodes(graph)
    heads = Heads(graph, parameters, backward)
    sites: dict[fx.Node, Site] = {}
    by_seq_nr: defaultdict[Any, list[Site]] = defaultdict(list)
    for node in nodes(graph, SITES):
        if node not in backward:
            sites[node] = _forward_site(node, from_parameter, parameters, compilation.facts.subgraph)
            if sites[node].op == "linear":
                sites[node].head = heads.why(node, _weight(sites[node]))
            by_seq_nr[node.meta.get("seq_nr")].append(sites[node])
    for node in nodes(graph, SITES):
        if node in backward:
            for site in by_seq_nr.get(node.meta.get("seq_nr"), []):
                if (gemm := _backward_gemm(node, site)) is not None:
                    site.gemms.append(gemm)
                    break
            else:
                sites[node] = _backward_only_site(node)
    for site in sites.values():
        site.gemms.sort(key=lambda gemm: GEMMS.index(gemm.gemm))
    compilation.sites = list(sites.values())
    names = names_of([site.place for site in compilation.sites], parameters.values())
    for site, (fqn, index) in zip(compilation.sites, names, strict=True):
        site.fqn, site.index = fqn, index
    uses: Counter[Any] = Counter()
    for site in compilation.sites:
        owner = site.fqn if site.parameter is None else site.parameter, runs_without_gradients(site.gemms[0].node)
        site.use, uses[owner] = uses[owner], uses[owner] + 1


def _forward_site(
    node: fx.Node, from_parameter: set[fx.Node], parameters: dict[fx.Node, Parameter], in_body: bool
) -> Site:
    a, b = matmul_arguments(node)
    a_is_weight = a in from_parameter and b not in from_parameter  # w @ x: roles swap sides
    views: list[OperandView] = []
    for side, argument in (("a", a), ("b", b)):
        tensor, transposed = look_through_transposes(argument)
        is_weight = (side == "a") == a_is_weight
        # Rowwise means contiguous along k: argument a itself, argument b transposed.
        views.append(
            OperandView(
                operand="weight" if is_weight else "input",
                tensor=tensor,
                flipped=transposed if side == "a" else not transposed,
                layout="rowwise",
                data=_data_of(tensor),
            )
        )
    is_gradient = bool(takes_gradient(node))  # a dgrad multiplies by a parameter too: by dy, which is no input
    has_weight = (a in from_parameter or b in from_parameter) and not is_gradient
    linear = has_weight or written_as_linear(node)
    weight = a if a_is_weight else b
    custom = cast("dict[str, Any] | None", node.meta.get("custom"))
    return Site(
        place=place_of(node, weight if has_weight else None, parameters),
        op="grouped_mm" if node.target in GROUPED and not is_gradient else "linear" if linear else "matmul",
        why_no_linear="" if linear else _why_no_linear(node, in_body),
        region=custom.get(REGION_KEY) if custom else None,
        gemms=[Gemm(node=node, gemm="fprop", a=views[0], b=views[1])],
    )


def _data_of(tensor: fx.Node) -> fx.Node | None:
    return cast(fx.Node, tensor.args[0]) if tensor.target is ops.stored_weight else None


def _weight(site: Site) -> fx.Node:
    fprop = site.gemms[0]
    return next(view.tensor for view in (fprop.a, fprop.b) if view.operand == "weight")


def _why_no_linear(node: fx.Node, in_body: bool) -> str:
    """Return the reason why a matmul that may have been written as a linear is not known as one; "" if nothing hides
    that.
    """
    if library := takes_gradient(node):
        return f"it computes a gradient that {library} takes inside the graph"
    if in_body:
        return "only F.linear, Linear and addmm with w.t() are known as linears in the body of a higher-order op"
    return ""


def _backward_only_site(node: fx.Node) -> Site:
    views = [
        OperandView(operand="grad_output", tensor=argument, flipped=side == "b", layout="rowwise")
        for side, argument in zip("ab", matmul_arguments(node), strict=True)
    ]
    gemm = Gemm(node=node, gemm="dgrad", a=views[0], b=views[1])
    return Site(place=place_of(node, None, {}), op="matmul", region=None, gemms=[gemm])


def _backward_gemm(node: fx.Node, site: Site) -> Gemm | None:
    """dgrad or wgrad of ``site``, if ``node`` contracts one of its forward operands with the gradient."""
    a, b = matmul_arguments(node)
    fprop = site.gemms[0]
    arguments = [look_through_transposes(a), look_through_transposes(b)]
    gemm_names = {gemm.gemm for gemm in site.gemms}
    # y = left @ right.T with left, right rowwise: dleft = dy @ right, dright = dy.T @ left
    for view, other_is_input in ((fprop.b, fprop.a.operand), (fprop.a, fprop.b.operand)):
        gemm = "dgrad" if other_is_input == "input" else "wgrad"
        if gemm in gemm_names:
            continue
        for position in (1, 0):
            tensor, transposed = arguments[position]
            if value_key(tensor) != value_key(view.tensor):
                continue
            # dy @ b.T or b @ dy.T, a.T @ dy or dy.T @ a; of x @ x only this tells one from the other
            written_transposed = view.flipped if view is fprop.a else not view.flipped
            if (transposed != written_transposed) != ((view is fprop.b) == (position == 1)):
                continue
            grad, grad_transposed = arguments[1 - position]
            # Is the other argument dy of `y` as the forward node wrote it, or its transpose?
            argument_is_dy_transposed = (view is fprop.b) == (position == 0)
            # rowwise dy is [M, N]; when the weight was on the left the node's y is [N, M]
            swapped = fprop.a.operand == "weight"
            flipped = grad_transposed ^ argument_is_dy_transposed ^ swapped
            pair: list[tuple[OperandName, fx.Node, bool, bool]] = [
                (view.operand, tensor, view.flipped, transposed),
                ("grad_output", grad, flipped, grad_transposed),
            ]
            if position == 1:  # in the order of the node's arguments
                pair.reverse()
            view_a, view_b = (
                OperandView(
                    operand=operand,
                    tensor=base,
                    flipped=flip,
                    # a must be contiguous as it is, b as its transpose
                    layout="rowwise" if (trans ^ flip) == (side == "b") else "columnwise",
                    data=_data_of(base),
                )
                for side, (operand, base, flip, trans) in zip("ab", pair, strict=True)
            )
            return Gemm(node=node, gemm=gemm, a=view_a, b=view_b)
    return None


def _only_from_parameters(graph: fx.Graph, parameters: set[fx.Node]) -> set[fx.Node]:
    """Forward nodes computed from parameters (and constants) alone: weights, in any shape."""
    result = set(parameters)
    constants: set[fx.Node] = set()
    for node in graph.nodes:
        if node.op in ("placeholder", "output"):
            continue
        sources = node.all_input_nodes
        if all(s in constants for s in sources):
            constants.add(node)
        elif all(s in result or s in constants for s in sources):
            result.add(node)
        elif (node.target is ops.stored_weight or decodes(node)) and sources[0] in result:  # its scales may be a buffer
            result.add(node)
    return result


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
    CONVERT,
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
        """Return the reason why the linear ``matmul`` by ``weight`` is an output head; "" if nothing says that it is
        one.
        """
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
        """Return whether the loss, or else the graph's result, comes right behind ``node``."""
        return any(_is_of(reader, _LOSSES) if loss else reader.op == "output" for reader in self._right_behind(node))

    def _goes_on(self, node: fx.Node) -> bool:
        """Return whether forward multiplies, or attends to, what it computes from ``node``."""
        reach, waiting = {node}, [node]
        while waiting:
            for reader in waiting.pop().users:
                if reader in reach or reader in self._backward or _ends_logits(reader):
                    continue
                if reader.target in _MULTIPLY:
                    return True
                reach.add(reader)
                waiting.append(reader)
        return False

    def _right_behind(self, node: fx.Node) -> Iterator[fx.Node]:
        """Yield the forward nodes that read ``node``, directly or through what keeps logits logits."""
        reach, waiting = {node}, [node]
        while waiting:
            for reader in waiting.pop().users:
                if reader in reach or (reader in self._backward and reader.op != "output"):
                    continue
                reach.add(reader)
                yield reader
                if self._is_quiet(reader, reach):
                    waiting.append(reader)

    def _is_quiet(self, node: fx.Node, reach: set[fx.Node]) -> bool:
        if _is_of(node, _LOSSES):
            return False
        if is_view(node):
            return True
        if node.target not in _QUIET:
            return False
        others = [x for x in node.all_input_nodes if x not in reach]
        return node.target in _CHOOSE or all(_source(other) in self._parameters for other in others)


def _is_of(node: fx.Node, ops: Collection[str]) -> bool:
    """Return whether ``node`` is one of ``ops`` or a part of one: Inductor's decompositions take log_softmax apart."""
    op = node.meta.get("original_aten") or node.target
    return str(op).rpartition(".")[0] in ops


def _ends_logits(node: fx.Node) -> bool:
    """Return whether ``node`` is a loss, probabilities, or integers: tokens that were chosen."""
    val = node.meta.get("val")
    is_number = not isinstance(val, torch.Tensor) or val.dtype.is_floating_point or val.dtype.is_complex
    return not is_number or _is_of(node, (*_LOSSES, *_PROBABILITIES))


def _source(node: fx.Node) -> fx.Node:
    """Return the graph input that ``node`` is computed from, or the node with several inputs before it."""
    while len(node.all_input_nodes) == 1:
        (node,) = node.all_input_nodes
    return node


def _sizes(node: fx.Node) -> tuple[int | None, ...]:
    return tuple(static_size(size) for size in value(node).shape)
