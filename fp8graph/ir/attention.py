"""Attention: the ops that compute it, and what `find_attention` finds and decides. Plain data between passes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Literal

import torch
from torch import fx

from fp8graph.compat.attention import FLEX, FLEX_BACKWARD, VARLEN, VARLEN_BACKWARD
from fp8graph.ir.nodes import aten
from fp8graph.ir.sites import Decision, Site

Operand = Literal["query", "key", "value", "probabilities", "grad_output", "grad_scores"]
Size = int | torch.SymInt


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
        found = self.node.args[self.position]
        assert isinstance(found, fx.Node)
        return found


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
