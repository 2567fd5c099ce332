"""Quantize q, k and v of each attention that has a recipe; softmax and accumulation stay in FP32.

    o, logsumexp = flash(q, k, v)               ->      qq = quantize(q);  qk = quantize(k);  qv = quantize(v)
    dq, dk, dv = flash_backward(do, q, k, v,            o, logsumexp = flash(dequantize(qq), dequantize(qk), ...)
                                o, logsumexp)           dq, dk, dv = flash_backward(do, dequantize(qq), ..., logsumexp)

This is emulated: the op itself, or the matmuls of an attention that is written out, read the decoded numbers, rounded
to the program's dtype. Backward runs in high precision from the same numbers, and its gradients go to q, k and v as if
nothing had been rounded (straight through). It decodes anew, so that FP8 is saved for it, except in code that
torch.utils.checkpoint runs again.

With a recipe of one scale per tensor q, k and v have one each. With one scale per row it is one per head: per (batch,
head of k and v), as FlashAttention-3 takes them. Strides stay as they are. `find_attention` decides; nothing is refused
here.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass, field
from operator import getitem
from typing import Any, cast

import torch
from torch import fx

from fp8graph.analysis.same_value import look_through_transposes, value_key
from fp8graph.compat.ops import OpOverload
from fp8graph.ir import ops
from fp8graph.ir.attention import Attention, Read
from fp8graph.ir.compilation import Compilation
from fp8graph.ir.edit import insert, update_value, update_views
from fp8graph.ir.keys import OPERAND_KEY
from fp8graph.ir.nodes import aten, known_equal, size_hint, static_size, value
from fp8graph.numerics import quantization
from fp8graph.numerics.scalings import SCALINGS
from fp8graph.recipes import Quantizer

_NAME = "quantize_attention"


@dataclass(kw_only=True)
class _Quantized:
    """q, k or v in FP8."""

    tensor: fx.Node
    order: list[int]  # its dims as they lie in memory
    per_head: bool
    data: fx.Node  # [.., in that order], or [heads, elements]
    scale_inv: fx.Node
    numbers: dict[bool, fx.Node] = field(default_factory=dict[bool, fx.Node])  # decoded, for forward and for backward


def quantize_attention(graph: fx.Graph, compilation: Compilation) -> None:
    for attention in compilation.attention:
        decision = attention.decision
        if decision is not None and decision.recipe is not None:
            device = compilation.hardware_of(attention.reads[0].argument)
            _emulate(attention, device.quantizer(decision.recipe, "input"))
    graph.eliminate_dead_code()


def _emulate(attention: Attention, quantizer: Quantizer) -> None:
    made: dict[Any, _Quantized] = {}
    for read in attention.reads:  # those of forward come first
        tensor, _ = look_through_transposes(argument := read.argument)
        key = value_key(tensor)
        emit = functools.partial(_emit, like=read.node)
        if key not in made:
            made[key] = _quantize(tensor, read, attention, quantizer, emit)
        quantized = made[key]
        backward = read.node in attention.backward and "recompute" not in read.node.meta
        if backward not in quantized.numbers:
            quantized.numbers[backward] = _decode(quantized, quantizer, emit, backward=backward)
        read.node.update_arg(read.position, _transposed(argument, tensor, quantized.numbers[backward], emit))
        if not all(map(known_equal, value(argument).stride(), value(read.argument).stride())):
            _update(read.node)


def _emit(target: Any, *args: Any, like: fx.Node, name: str | None = None, **kwargs: Any) -> fx.Node:
    with like.graph.inserting_before(like):
        return insert(like.graph, target, args, like=like, made_by=_NAME, name=name, kwargs=kwargs)


def _quantize(tensor: fx.Node, read: Read, attention: Attention, quantizer: Quantizer, emit: Any) -> _Quantized:
    x = value(tensor)
    order = _order_in_memory(x)
    per_head = not SCALINGS[quantizer.scaling].one_scale
    if per_head:
        source = _contiguous(tensor, emit)
        source = emit(aten.view.default, source, _heads(attention, x))  # [batch * kv_heads, elements]
    else:
        source = tensor if order == sorted(order) else emit(aten.permute.default, tensor, order)
    args = (source, *quantization.quantizer_args(quantizer), [1, 1], [])
    name = f"quantize_{read.operand}"
    outputs = emit(ops.quantize, *args, name=name, **quantization.quantizer_kwargs(quantizer))
    outputs.meta[OPERAND_KEY] = read.operand
    data, scale_inv = (
        emit(getitem, outputs, i, name=f"{read.operand}_{output}") for i, output in enumerate(("data", "scale_inv"))
    )
    return _Quantized(tensor=tensor, order=order, per_head=per_head, data=data, scale_inv=scale_inv)


def _decode(quantized: _Quantized, quantizer: Quantizer, emit: Any, *, backward: bool) -> fx.Node:
    """The numbers of q, k or v in the dtype and with the strides that it had."""
    x, order = value(quantized.tensor), quantized.order
    settings = quantization.quantizer_kwargs(quantizer)
    if backward:
        settings["block"] = []  # the default, by name: torch would merge equal nodes, and save decoded numbers
    numbers = emit(ops.dequantize, quantized.data, quantized.scale_inv, x.dtype, **settings)
    if backward:
        numbers.meta["partitioner_tag"] = "must_be_in_backward"
    if quantized.per_head:
        numbers = emit(aten.view.default, numbers, [-1 if static_size(size) is None else size for size in x.shape])
        if order != sorted(order):
            numbers = _contiguous(emit(aten.permute.default, numbers, order), emit)
    if order == sorted(order):
        return numbers
    return emit(aten.permute.default, numbers, [order.index(dim) for dim in range(len(order))])


def _order_in_memory(x: torch.Tensor) -> list[int]:
    """The dims of ``x`` from the largest stride to the smallest; as they are for an expanded tensor."""
    strides = [size_hint(stride) for stride in x.stride()]
    dims = list(range(x.ndim))
    return dims if 0 in strides else sorted(dims, key=lambda dim: -strides[dim])


def _heads(attention: Attention, x: torch.Tensor) -> list[int]:
    """The shape [heads, elements per head] of q, k or v, with one head for each head of k and v; -1 where dynamic."""
    groups = [attention.sizes.batch, attention.sizes.kv_heads] if x.ndim == 4 else list(x.shape[:-2])
    sizes = [static_size(size) for size in groups]
    if None not in sizes:
        return [math.prod(cast("list[int]", sizes)), -1]
    others = math.prod(size for size in x.shape if static_size(size) is not None)
    return [-1, others // math.prod(size for size in sizes if size is not None)]


def _contiguous(node: fx.Node, emit: Any) -> fx.Node:
    """``node``, copied unless it is known to be contiguous (a question about dynamic sizes would add a guard)."""
    x = value(node)
    if all(static_size(size) is not None for size in x.shape) and x.is_contiguous():
        return node
    return emit(aten.clone.default, node, memory_format=torch.contiguous_format)


def _transposed(argument: fx.Node, tensor: fx.Node, numbers: fx.Node, emit: Any) -> fx.Node:
    """``numbers`` in place of ``tensor``, of which ``argument`` is a transpose."""
    if argument is tensor:
        return numbers
    source, *more = argument.args
    return emit(argument.target, _transposed(cast(fx.Node, source), tensor, numbers, emit), *more)


def _update(node: fx.Node) -> None:
    """Compute the fake values of an op whose arguments have other strides than before."""
    if not isinstance(node.target, OpOverload):
        return
    update_value(node)
    for user in node.users:
        if user.target is getitem:
            update_value(user)
            update_views(user, _NAME)
