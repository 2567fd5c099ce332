"""Quantize q, k and v of each attention that has a recipe; softmax and accumulation stay in FP32.

    o, logsumexp = flash(q, k, v)               ->      qq = quantize(q);  qk = quantize(k);  qv = quantize(v)
    dq, dk, dv = flash_backward(do, q, k, v,            o, logsumexp = flash(dequantize(qq), dequantize(qk), ...)
                                o, logsumexp)           dq, dk, dv = flash_backward(do, dequantize(qq), ..., logsumexp)

    o = flash(q, k, v)[0]                       ->      o = scaled_attention(qq[0], qk[0], qv[0], qq[1], qk[1], qv[1])

The first form is emulated: the op itself, or the matmuls of an attention that is written out, read the decoded numbers,
rounded to the program's dtype. Backward runs in high precision from the same numbers, and its gradients go to q, k and
v as if nothing had been rounded (straight through). It decodes anew, so that FP8 is saved for it. The second form is
native, for inference.

With a recipe of one scale per tensor q, k and v have one each. With one scale per row it is one per head: per (batch,
head of k and v), as FlashAttention-3 takes them. Strides stay as they are. `find_attention` decides; nothing is refused
here.
"""

from __future__ import annotations

import functools
from operator import getitem
from typing import Any, cast

from torch import fx

from fp8graph.analysis.same_value import look_through_transposes, value_key
from fp8graph.compat.ops import OpOverload, named_arguments
from fp8graph.ir import ops
from fp8graph.ir.attention import Attention
from fp8graph.ir.attention_operands import QuantizedTensor, quantized_tensor
from fp8graph.ir.compilation import Compilation
from fp8graph.ir.edit import insert, take_place, update_value, update_views
from fp8graph.ir.nodes import aten, known_equal, static_size, value
from fp8graph.recipes import Quantizer

_NAME = "quantize_attention"


def quantize_attention(graph: fx.Graph, compilation: Compilation) -> None:
    for attention in compilation.attention:
        decision = attention.decision
        if decision is not None and decision.recipe is not None:
            quantizer = compilation.hardware_of(attention.reads[0].argument).quantizer(decision.recipe, "input")
            rewrite = _multiply if decision.execution == "native" else _emulate
            rewrite(attention, quantizer)
    graph.eliminate_dead_code()


def _emit(target: Any, *args: Any, like: fx.Node, name: str | None = None, **kwargs: Any) -> fx.Node:
    with like.graph.inserting_before(like):
        return insert(like.graph, target, args, like=like, made_by=_NAME, name=name, kwargs=kwargs)


def _multiply(attention: Attention, quantizer: Quantizer) -> None:
    """Replace the op by one that reads FP8."""
    (node,) = attention.forward
    emit, sizes = functools.partial(_emit, like=node), attention.sizes
    made: dict[fx.Node, QuantizedTensor] = {}
    for read in attention.reads:
        if read.argument not in made:
            made[read.argument] = quantized_tensor(read.argument, read.operand, sizes, quantizer, emit)
    own = [made[read.argument] for read in attention.reads]
    batch = static_size(sizes.batch)
    batch = emit(aten.sym_size.int, attention.reads[0].argument, 0) if batch is None else batch
    scales = [quantized.scale_per_head(sizes, batch, emit) for quantized in own]
    data = [quantized.in_place(quantized.data, emit) for quantized in own]
    scale = named_arguments(node).get("scale")
    result = emit(ops.scaled_attention, *data, *scales, attention.causal, scale, name="attention")
    for output in [user for user in node.users if user.target is getitem and user.args[1] == 0]:
        take_place(result, output, _NAME)


def _emulate(attention: Attention, quantizer: Quantizer) -> None:
    """Let the ops read decoded numbers."""
    made: dict[Any, QuantizedTensor] = {}
    for read in attention.reads:  # those of forward come first
        tensor, _ = look_through_transposes(argument := read.argument)
        key = value_key(tensor)
        emit = functools.partial(_emit, like=read.node)
        if key not in made:
            made[key] = quantized_tensor(tensor, read.operand, attention.sizes, quantizer, emit)
        quantized, backward = made[key], read.node in attention.backward
        if backward not in quantized.numbers:
            quantized.numbers[backward] = quantized.decoded(emit, backward=backward)
        read.node.update_arg(read.position, _transposed(argument, tensor, quantized.numbers[backward], emit))
        if not all(map(known_equal, value(argument).stride(), value(read.argument).stride())):
            _update(read.node)


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
