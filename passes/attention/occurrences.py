"""Every attention of a graph: one op of torch, or two matmuls of activations and a softmax.

    s = bmm(q, permute(k));  p = softmax(s * scale + mask);  y = bmm(dropout(p), v)     ->      one attention

Between the two matmuls stand any elementwise ops, casts, views, copies, and a part of the softmax's result (a column
for an attention sink is cut off). A softmax is what Inductor's decompositions make of it: ``exp``, divided by its own
sum. Attention whose scores add up several matmuls of activations (DeBERTa's) is not found.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from operator import getitem
from typing import Any, Final, Literal, cast

import torch
from torch import fx

from fp8graph.compat.attention import FORMS, VARLEN
from fp8graph.compat.ops import OpOverload, named_arguments
from fp8graph.ir.naming import place_of
from fp8graph.ir.nodes import (
    CONVERT,
    SAME_VALUES,
    aten,
    is_view,
    look_through_transposes,
    matmul_arguments,
    nodes,
    value,
    value_key,
)
from fp8graph.ir.sites import Decision, Site
from fp8graph.recipes.autocast import REGION_KEY

Operand = Literal["query", "key", "value", "probabilities", "grad_output", "grad_scores"]
Size = int | torch.SymInt


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """The sizes of softmax(q @ k.T) @ v: q [batch, heads, queries, head_size], k and v [batch, kv_heads, keys, ...]."""

    batch: Size
    heads: Size
    kv_heads: Size
    queries: Size
    keys: Size
    head_size: Size
    value_size: Size  # v's head size


@dataclass(frozen=True, kw_only=True)
class Read:
    """One argument of an op that is q, k or v, maybe transposed; or another operand of a matmul."""

    node: fx.Node
    position: int  # among the arguments of the node
    operand: Operand

    @property
    def argument(self) -> fx.Node:
        """The argument as it is now."""
        argument = self.node.args[self.position]
        assert isinstance(argument, fx.Node)
        return argument


@dataclass(kw_only=True, eq=False)
class Attention:
    """One attention of the user's program: one op forward and one backward, or the matmuls that it is written with."""

    site: Site  # its name and region; without GEMMs
    form: str  # the op, in words: "flash", "flex", ...; "written out" as matmuls and a softmax
    forward: tuple[fx.Node, ...]  # one op, or the matmuls q @ k.T and p @ v
    backward: tuple[fx.Node, ...]  # the ops that compute the gradients; () in inference
    reads: tuple[Read, ...]  # of q, k and v, by all of these
    inner: tuple[Read, ...] = ()  # of probabilities and gradients, by matmuls
    sizes: Sizes
    causal: bool = False  # the op is told so; a mask that is a tensor may be causal, too
    masked: bool = False  # a tensor is added to the scores, or a function changes them
    dropout: bool = False
    packed: bool = False  # sequences of different lengths follow each other: [tokens, heads, size]
    decision: Decision | None = field(default=None)

    @property
    def written_out(self) -> bool:
        """Whether it consists of matmuls, which are sites of their own."""
        return len(self.forward) > 1

    @property
    def result(self) -> fx.Node:
        """The node that computes the result, or of which it is the first output."""
        return self.forward[-1]


_OPERANDS: Final[tuple[Operand, ...]] = ("query", "key", "value")
_SAME: Final = (aten.alias.default, aten.detach.default)
_WHOLE_SEQUENCES: Final = (None, [-1, -1], [-1, 0])  # windows: none, or causal
# What may stand between the matmuls beside elementwise ops and views.
_BETWEEN: Final = (
    CONVERT,
    aten.clone.default,
    aten.amax.default,
    aten.sum.dim_IntList,
    aten._softmax.default,
    aten._safe_softmax.default,
    aten.cat.default,  # attention sinks
    aten.any.dim,
)


def _new_site(node: fx.Node) -> Site:
    """Return the site of the attention whose result ``node`` computes."""
    custom = cast("dict[str, Any] | None", node.meta.get("custom"))
    region = custom.get(REGION_KEY) if custom else None
    return Site(place=place_of(node, None, {}), op="attention", region=region)


def attention_ops(graph: fx.Graph, backward: Collection[fx.Node]) -> Iterator[Attention]:
    """Yield each attention of ``graph`` that is one op; ``backward``: the nodes of backward."""
    pairs = _backward_ops(graph)
    for node in nodes(graph, FORMS):
        if node in backward:  # recomputed in the backward of a custom autograd function
            continue
        form, gradients = FORMS[node.target], tuple(pairs.get(node, ()))
        arguments = named_arguments(node) if isinstance(node.target, OpOverload) else {}
        firsts = [(node, 0), *((other, form.first) for other in gradients)]
        yield Attention(
            site=_new_site(node),
            form=form.name,
            forward=(node,),
            backward=gradients,
            reads=tuple(
                Read(node=op, position=first + i, operand=operand)
                for op, first in firsts
                for i, operand in enumerate(_OPERANDS)
            ),
            sizes=_sizes_of_packed(node) if node.target is VARLEN else _sizes_of_op(node),
            packed=node.target is VARLEN,
            causal=bool(arguments.get("is_causal", False)),
            masked=not arguments
            or any(arguments.get(name) is not None for name in ("attn_mask", "attn_bias"))
            or arguments.get("window_size") not in _WHOLE_SEQUENCES,
            dropout=bool(arguments.get("dropout_p", 0.0)),
        )


def extra_results(attention: Attention) -> list[fx.Node]:
    """Return the results of the op beside the first one that something reads: the logsumexp, random states."""
    (node,) = attention.forward
    return [user for user in node.users if user.target is getitem and user.args[1] != 0 and user.users]


def read_elsewhere(attention: Attention) -> bool:
    """Return whether something else than its backward reads a result of the op beside the first one."""
    pending = extra_results(attention)
    for node in pending:
        for user in node.users:
            if user.target in _SAME:
                pending.append(user)
            elif user not in attention.backward:
                return True
    return False


def has_gradient_of_mask(attention: Attention) -> bool:
    """Return whether a backward op also computes the gradient of a mask that something reads."""
    results = [user for node in attention.backward for user in node.users]
    return any(user.target is getitem and cast(int, user.args[1]) > 2 and user.users for user in results)


def _sizes_of_op(node: fx.Node) -> Sizes:
    q, k, v = (value(cast(fx.Node, argument)).shape for argument in node.args[:3])
    return Sizes(
        batch=q[0], heads=q[1], kv_heads=k[1], queries=q[2], keys=k[2], head_size=q[3], value_size=v[3]
    )  # fmt: skip


def _sizes_of_packed(node: fx.Node) -> Sizes:
    """Return those of packed sequences, [tokens, heads, size]: as if each query saw as many keys as the longest has."""
    q, k, v = (value(cast(fx.Node, argument)).shape for argument in node.args[:3])
    longest = node.args[6]
    keys: Size = longest.meta["val"] if isinstance(longest, fx.Node) else cast(int, longest)
    return Sizes(
        batch=1, heads=q[1], kv_heads=k[-2], queries=q[0], keys=keys, head_size=q[2], value_size=v[-1]
    )  # fmt: skip


def _backward_ops(graph: fx.Graph) -> dict[fx.Node, list[fx.Node]]:
    """Return the backward ops of each forward one: those that read its logsumexp."""
    by_target = {form.backward: form for form in FORMS.values()}
    by_forward: dict[fx.Node, list[fx.Node]] = {}
    for node in nodes(graph, by_target):
        source = node.args[by_target[node.target].logsumexp]
        while isinstance(source, fx.Node) and source.target in _SAME:
            source = source.args[0]
        if isinstance(source, fx.Node) and source.target is getitem:
            by_forward.setdefault(cast("Sequence[fx.Node]", source.args)[0], []).append(node)
    return by_forward


def written_attentions(sites: Sequence[Site]) -> Iterator[Attention]:
    """Yield each attention of a graph that consists of two of its ``sites``."""
    products = {site.gemms[0].node: site for site in sites if site.op == "matmul" and site.gemms[0].gemm == "fprop"}
    used: set[fx.Node] = set()
    for node, site in products.items():
        for position, probabilities in enumerate(matmul_arguments(node)):
            scores = _scores(probabilities)
            if scores is None or scores in used:  # a second product with the same probabilities is a matmul
                continue
            if scores in products and value(scores).ndim == value(node).ndim:
                used.add(scores)
                yield _attention(products[scores], site, 1 - position)
                break


def _scores(probabilities: fx.Node) -> fx.Node | None:
    """Return the matmul whose softmax ``probabilities`` are; None if they are not the softmax of one matmul."""
    pending, seen, matmuls, softmax = [probabilities], set[fx.Node](), list[fx.Node](), False
    while pending:
        node = pending.pop()
        if node in seen or node.op != "call_function":
            continue
        seen.add(node)
        if node.target in (aten.bmm.default, aten.baddbmm.default, aten.mm.default, aten.addmm.default):
            matmuls.append(node)
        elif _is_between(node):
            softmax |= _is_softmax(node)
            pending += node.all_input_nodes
    return matmuls[0] if softmax and len(matmuls) == 1 else None


def _is_between(node: fx.Node) -> bool:
    tags = cast("Sequence[torch.Tag]", getattr(node.target, "tags", ()))
    return torch.Tag.pointwise in tags or is_view(node) or node.target in _BETWEEN


def _is_softmax(node: fx.Node) -> bool:
    """Return whether ``node`` is a softmax, or the division of exponentials by their sum."""
    if node.target in (aten._softmax.default, aten._safe_softmax.default):
        return True
    if node.target is not aten.div.Tensor or len(node.all_input_nodes) != 2:
        return False
    above, below = (_through_casts(source) for source in node.all_input_nodes)
    return below.target is aten.sum.dim_IntList and _through_casts(below.all_input_nodes[0]) is above


def _through_casts(node: fx.Node) -> fx.Node:
    casts = (*SAME_VALUES, CONVERT, aten.clone.default, aten.expand.default)
    while node.target in casts:
        node = node.all_input_nodes[0]
    return node


def _attention(first: Site, second: Site, values: int) -> Attention:
    """Return the attention with the products ``first`` and ``second``; ``values``: whether v is argument a (0) or b
    (1).
    """
    scores, result = first.gemms[0].node, second.gemms[0].node
    q, k = matmul_arguments(scores)
    tensors: dict[Operand, fx.Node] = {"query": q, "key": k, "value": matmul_arguments(result)[values]}
    keys: list[tuple[Any, Operand]] = [
        (value_key(look_through_transposes(tensor)[0]), operand) for operand, tensor in tensors.items()
    ]
    reads: list[Read] = []
    inner: list[Read] = []
    for site in (first, second):
        for gemm in site.gemms:
            arguments = matmul_arguments(gemm.node)
            start = len(gemm.node.args) - 2  # behind the bias of baddbmm
            for i, view in enumerate((gemm.a, gemm.b)):
                key = value_key(look_through_transposes(arguments[i])[0])
                operand: Operand | None = next(
                    (o for other, o in keys if other == key and (o == "value") == (site is second)), None
                )
                group = reads
                if view.operand == "grad_output" or operand is None:
                    group, gradient = inner, view.operand == "grad_output"
                    operand = "probabilities" if not gradient else "grad_output" if site is second else "grad_scores"
                group.append(Read(node=gemm.node, position=start + i, operand=operand))
    backward = itertools.chain(first.gemms[1:], second.gemms[1:])
    return Attention(
        site=_new_site(result),
        form="written out",
        forward=(scores, result),
        backward=tuple(gemm.node for gemm in backward),
        reads=tuple(reads),
        inner=tuple(inner),
        sizes=_sizes_of_matmuls(scores, result, values),
        masked=_adds(scores) or scores.target in (aten.baddbmm.default, aten.addmm.default),
        dropout=False,
    )


def _sizes_of_matmuls(scores: fx.Node, result: fx.Node, values: int) -> Sizes:
    """Return the number of heads is known if the scores are taken apart into [batch, heads, queries, keys]."""
    *batch, queries, keys = value(scores).shape
    shapes = [value(user).shape for user in scores.users if is_view(user)]
    whole = next((shape for shape in shapes if len(shape) == 4), (batch[0] if batch else 1, 1, queries, keys))
    return Sizes(
        batch=whole[0],
        heads=whole[1],
        kv_heads=whole[1],  # keys and values are repeated
        queries=queries,
        keys=keys,
        head_size=value(matmul_arguments(scores)[0]).shape[-1],
        value_size=value(result).shape[-1 if values == 1 else -2],
    )


def _adds(scores: fx.Node) -> bool:
    """Return whether something is added to the scores, or they are replaced in places: a mask."""
    pending, seen = [*scores.users], set[fx.Node]()
    while pending:
        node = pending.pop()
        if node in seen or not (_is_between(node) or node.target in SAME_VALUES):
            continue
        seen.add(node)
        if node.target in (aten.add.Tensor, aten.where.self, aten.masked_fill.Scalar):
            return True
        if node.target not in (aten.amax.default, aten.sub.Tensor, aten.exp.default):
            pending += node.users
    return False
