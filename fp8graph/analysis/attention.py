"""Find attention that is one op: torch's scaled_dot_product_attention in each kernel, flex_attention, varlen_attn.

Attention that is written as two matmuls and a softmax: ``written_attention.py``.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import getitem
from typing import Any, Final, cast

from torch import fx

from fp8graph.analysis.naming import place_of
from fp8graph.compat.attention import FLEX, FLEX_BACKWARD, VARLEN, VARLEN_BACKWARD
from fp8graph.compat.ops import OpOverload, named_arguments
from fp8graph.ir.attention import Attention, Operand, Read, Size, Sizes
from fp8graph.ir.nodes import aten, nodes, value
from fp8graph.ir.sites import Site
from fp8graph.recipes.autocast import REGION_KEY

OPERANDS: Final[tuple[Operand, ...]] = ("query", "key", "value")
_SAME: Final = (aten.alias.default, aten.detach.default)


@dataclass(frozen=True, kw_only=True)
class Form:
    """One op for attention. q, k and v are its first arguments, [batch, heads, tokens, head size] unless packed."""

    name: str
    backward: Any
    first: int = 1  # the position of q among the arguments of ``backward``
    logsumexp: int = 5  # the position of the logsumexp of forward among them


FORMS: Final[Mapping[Any, Form]] = {
    aten._scaled_dot_product_flash_attention.default: Form(
        name="flash", backward=aten._scaled_dot_product_flash_attention_backward.default
    ),
    aten._scaled_dot_product_efficient_attention.default: Form(
        name="memory-efficient", backward=aten._scaled_dot_product_efficient_attention_backward.default, logsumexp=6
    ),
    aten._scaled_dot_product_cudnn_attention.default: Form(
        name="cuDNN", backward=aten._scaled_dot_product_cudnn_attention_backward.default
    ),
    aten._scaled_dot_product_fused_attention_overrideable.default: Form(
        name="device's own",
        backward=aten._scaled_dot_product_fused_attention_overrideable_backward.default,
        logsumexp=7,
    ),
    aten._scaled_dot_product_flash_attention_for_cpu.default: Form(
        name="CPU flash", backward=aten._scaled_dot_product_flash_attention_for_cpu_backward.default
    ),
    FLEX: Form(name="flex", backward=FLEX_BACKWARD, first=0, logsumexp=4),
    **({VARLEN: Form(name="packed", backward=VARLEN_BACKWARD)} if VARLEN is not None else {}),
}
_WHOLE_SEQUENCES: Final = (None, [-1, -1], [-1, 0])  # windows: none, or causal


def new_site(node: fx.Node) -> Site:
    """The site of the attention whose result ``node`` computes."""
    custom = cast("dict[str, Any] | None", node.meta.get("custom"))
    region = custom.get(REGION_KEY) if custom else None
    return Site(place=place_of(node, None, {}), op="attention", region=region)


def attention_ops(graph: fx.Graph, backward: Collection[fx.Node]) -> Iterator[Attention]:
    """Each attention of ``graph`` that is one op; ``backward``: the nodes of backward."""
    pairs = _backward_ops(graph)
    for node in nodes(graph, FORMS):
        if node in backward:  # recomputed in the backward of a custom autograd function
            continue
        form, gradients = FORMS[node.target], tuple(pairs.get(node, ()))
        asked = named_arguments(node) if isinstance(node.target, OpOverload) else {}
        firsts = [(node, 0), *((other, form.first) for other in gradients)]
        yield Attention(
            site=new_site(node),
            form=form.name,
            forward=(node,),
            backward=gradients,
            reads=tuple(
                Read(node=op, position=first + i, operand=operand)
                for op, first in firsts
                for i, operand in enumerate(OPERANDS)
            ),
            sizes=_packed_sizes(node) if node.target is VARLEN else _sizes(node),
            packed=node.target is VARLEN,
            causal=bool(asked.get("is_causal", False)),
            masked=not asked
            or any(asked.get(name) is not None for name in ("attn_mask", "attn_bias"))
            or asked.get("window_size") not in _WHOLE_SEQUENCES,
            dropout=bool(asked.get("dropout_p", 0.0)),
        )


def extra_results(attention: Attention) -> list[fx.Node]:
    """The results of the op beside the first one that something reads: the logsumexp, random states."""
    (node,) = attention.forward
    return [user for user in node.users if user.target is getitem and user.args[1] != 0 and user.users]


def read_elsewhere(attention: Attention) -> bool:
    """Whether something else than its backward reads a result of the op beside the first one."""
    pending = extra_results(attention)
    for node in pending:
        for user in node.users:
            if user.target in _SAME:
                pending.append(user)
            elif user not in attention.backward:
                return True
    return False


def has_gradient_of_mask(attention: Attention) -> bool:
    """Whether a backward op also computes the gradient of a mask that something reads."""
    results = [user for node in attention.backward for user in node.users]
    return any(user.target is getitem and cast(int, user.args[1]) > 2 and user.users for user in results)


def _sizes(node: fx.Node) -> Sizes:
    q, k, v = (value(cast(fx.Node, argument)).shape for argument in node.args[:3])
    return Sizes(
        batch=q[0], heads=q[1], kv_heads=k[1], queries=q[2], keys=k[2], head_size=q[3], value_size=v[3]
    )  # fmt: skip


def _packed_sizes(node: fx.Node) -> Sizes:
    """Those of packed sequences, [tokens, heads, size]: as if each query saw as many keys as the longest has."""
    q, k, v = (value(cast(fx.Node, argument)).shape for argument in node.args[:3])
    longest = node.args[6]
    keys: Size = longest.meta["val"] if isinstance(longest, fx.Node) else cast(int, longest)
    return Sizes(
        batch=1, heads=q[1], kv_heads=k[-2], queries=q[0], keys=keys, head_size=q[2], value_size=v[-1]
    )  # fmt: skip


def _backward_ops(graph: fx.Graph) -> dict[fx.Node, list[fx.Node]]:
    """The backward ops of each forward one: those that read its logsumexp."""
    by_target = {form.backward: form for form in FORMS.values()}
    found: dict[fx.Node, list[fx.Node]] = {}
    for node in nodes(graph, by_target):
        source = node.args[by_target[node.target].logsumexp]
        while isinstance(source, fx.Node) and source.target in _SAME:
            source = source.args[0]
        if isinstance(source, fx.Node) and source.target is getitem:
            found.setdefault(cast("Sequence[fx.Node]", source.args)[0], []).append(node)
    return found
