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

Where a recipe asks for it (``hadamard_qk=True``), q and k are transformed before, and their gradients after:

    qq = quantize(q)                            ->      qq = quantize(rotate(q, h))
    dq = flash_backward(...)[0]                 ->      dq = rotate(flash_backward(...)[0], permute(h))

With ``attention_backward=True`` the probabilities and the gradients are quantized like q, k and v where matmuls read
them, and an emulated op is replaced by one that does the same inside:

    o, logsumexp = flash(dequantize(qq), ...)   ->      o = rounded_attention(dequantize(qq), ...)
    dq, dk, dv = flash_backward(do, ...)        ->      dq, dk, dv = rounded_attention_backward(do, ...)
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from operator import getitem
from typing import Any, Final, cast

import torch
from torch import fx

from fp8graph.compat.inductor import erase_unused
from fp8graph.compat.ops import OpOverload, named_arguments
from fp8graph.ir import ops, transforms
from fp8graph.ir.compilation import Compilation
from fp8graph.ir.edit import Emit, inserted, take_place, update_value, update_views
from fp8graph.ir.nodes import (
    OPERAND_KEY,
    aten,
    known_equal,
    look_through_transposes,
    size_hint,
    static_size,
    value,
    value_key,
)
from fp8graph.numerics import quantization
from fp8graph.numerics.scalings import SCALINGS
from fp8graph.passes.attention.occurrences import Attention, Operand, Read, Sizes
from fp8graph.passes.attention.ops import rounded_attention, rounded_attention_backward, scaled_attention
from fp8graph.recipes import HADAMARD_SIGNS, Quantizer

_ROTATED: Final = ("query", "key")


def is_attention_quantized(graph: fx.Graph, compilation: Compilation) -> bool:
    """Return whether some attention has a recipe."""
    decisions = (attention.decision for attention in compilation.results(Attention))
    return any(decision is not None and decision.recipe is not None for decision in decisions)


def quantize_attention(graph: fx.Graph, compilation: Compilation) -> None:
    order = {node: position for position, node in enumerate(graph.nodes)}
    for attention in compilation.results(Attention):
        decision = attention.decision
        if decision is not None and decision.recipe is not None:
            device, recipe = compilation.hardware_of(attention.reads[0].argument), decision.recipe
            quantizer, of_gradients = (device.quantizer(recipe, operand) for operand in ("input", "grad_output"))
            if decision.execution == "native":
                _multiply(attention, quantizer, recipe.rotates_qk)
                continue
            reads = list(attention.reads)  # those of forward come first
            if recipe.quantizes_attention_backward:
                reads += sorted(attention.inner, key=lambda read: order[read.node])
            _emulate(attention, reads, quantizer, of_gradients, recipe.rotates_qk)
            if recipe.rotates_qk:
                _rotate_gradients(attention)
            if recipe.quantizes_attention_backward and not attention.written_out:
                _round_all(attention, quantizer, of_gradients)
    erase_unused(graph)


def _multiply(attention: Attention, quantizer: Quantizer, rotates: bool) -> None:
    """Replace the op by one that reads FP8."""
    (node,) = attention.forward
    emit, sizes = functools.partial(inserted, like=node), attention.sizes
    matrix = emit(transforms.hadamard_matrix, attention.reads[0].argument, HADAMARD_SIGNS) if rotates else None
    made, own = dict[Any, AttentionOperand](), list[AttentionOperand]()
    for read in attention.reads:
        rotation = (matrix, 3) if matrix is not None and read.operand in _ROTATED else None
        if (key := (read.argument, rotation)) not in made:
            made[key] = quantized_tensor(read.argument, read.operand, sizes, quantizer, emit, rotation)
        own.append(made[key])
    batch = static_size(sizes.batch)
    batch = emit(aten.sym_size.int, attention.reads[0].argument, 0) if batch is None else batch
    scales = [quantized.scale_per_head(sizes, batch, emit) for quantized in own]
    data = [quantized.in_place(quantized.data, emit) for quantized in own]
    scale = named_arguments(node).get("scale")
    result = emit(scaled_attention, *data, *scales, attention.causal, scale, name="attention")
    for output in [user for user in node.users if user.target is getitem and user.args[1] == 0]:
        take_place(result, output)


def _emulate(
    attention: Attention, reads: Iterable[Read], quantizer: Quantizer, of_gradients: Quantizer, rotates: bool
) -> None:
    """Let the ops read decoded numbers."""
    made, matrix = dict[Any, AttentionOperand](), None
    for read in reads:
        tensor, flipped = look_through_transposes(argument := read.argument)
        key = value_key(tensor), rotates and read.operand in _ROTATED
        emit = functools.partial(inserted, like=read.node)
        if key not in made:
            rotation = None
            if key[1]:
                matrix = emit(transforms.hadamard_matrix, tensor, HADAMARD_SIGNS) if matrix is None else matrix
                transposed = attention.written_out and read.position == len(read.node.args) - 1  # q @ k.T
                rotation = matrix, value(tensor).ndim - 1 - (transposed != flipped)
            own = of_gradients if read.operand.startswith("grad") else quantizer
            made[key] = quantized_tensor(tensor, read.operand, attention.sizes, own, emit, rotation)
        quantized, backward = made[key], read.node in attention.backward
        if backward not in quantized.numbers:
            quantized.numbers[backward] = quantized.decoded(emit, backward=backward)
        read.node.update_arg(read.position, _transposed(argument, tensor, quantized.numbers[backward], emit))
        if not all(map(known_equal, value(argument).stride(), value(read.argument).stride())):
            _update(read.node)


def _rotate_gradients(attention: Attention) -> None:
    """Transform the gradients of the transformed q and k back, for all who read them."""
    dims: dict[fx.Node, int] = {}  # the dim along which the elements of a head lie
    for read in attention.reads:
        if read.node not in attention.backward or read.operand not in _ROTATED:
            continue
        if attention.written_out:  # that of q is ds @ k, that of k is ds.T @ q, or it is their transpose
            dims[read.node] = -1 if read.position == len(read.node.args) - 1 else -2
        else:
            index = _ROTATED.index(read.operand)
            dims |= {user: -1 for user in read.node.users if user.target is getitem and user.args[1] == index}
    matrix: fx.Node | None = None
    for node in filter(dims.__contains__, list(attention.result.graph.nodes)):
        readers, emit = list(node.users), functools.partial(inserted, like=node, before=node.next)
        if matrix is None:
            matrix = emit(aten.permute.default, emit(transforms.hadamard_matrix, node, HADAMARD_SIGNS), [1, 0])
        result = rotated(node, matrix, value(node).ndim + dims[node], emit)
        for reader in readers:
            reader.replace_input_with(node, result)


def _round_all(attention: Attention, quantizer: Quantizer, of_gradients: Quantizer) -> None:
    """Replace the ops, which read decoded numbers, by those that also round what is between their products."""
    (node,) = attention.forward
    given = named_arguments(node)
    mask = next((given[name] for name in ("attn_mask", "attn_bias") if given.get(name) is not None), None)
    shared = mask, attention.causal, given.get("scale"), quantizer.dtype
    how = quantizer.power_2_scale, quantizer.amax_epsilon, quantizer.scaling
    for backward in attention.backward:
        args = *backward.args[:4], *shared, of_gradients.dtype, *how  # the gradient, q, k and v
        results = inserted(rounded_attention_backward, *args, like=backward)
        for user in sorted(backward.users, key=lambda user: cast(int, user.args[1])):
            if user.users:
                emit = functools.partial(inserted, like=user)
                take_place(_in_memory_as(emit(getitem, results, user.args[1]), user, emit), user)
        _erase(backward)
    emit = functools.partial(inserted, like=node)
    result = emit(rounded_attention, *node.args[:3], *shared, *how, name="attention")
    for output in [user for user in node.users if user.args[1] == 0]:
        take_place(_in_memory_as(result, output, emit), output)
    _erase(node)


def _erase(node: fx.Node) -> None:
    for user in list(node.users):
        _erase(user)
    node.graph.erase_node(node)


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
            update_views(user)


@dataclass(kw_only=True)
class AttentionOperand:
    """q, k or v in FP8, with one scale, or one per head of k and v; or another operand of attention."""

    tensor: fx.Node
    quantizer: Quantizer
    order: list[int]  # its dims as they lie in memory, from the largest stride to the smallest
    per_head: bool
    data: fx.Node  # the tensor with its dims in that order; per head [heads, elements]
    scale_inv: fx.Node  # []; per head [heads, 1]
    numbers: dict[bool, fx.Node] = field(default_factory=dict[bool, fx.Node])  # decoded, for forward and for backward

    def in_place(self, node: fx.Node, emit: Emit) -> fx.Node:
        """``node``, of the shape of ``data``, in the shape and with the strides of the tensor."""
        if self.per_head:
            shape = value(self.tensor).shape
            node = emit(aten.view.default, node, [-1 if static_size(size) is None else size for size in shape])
            if self.order != sorted(self.order):
                node = _contiguous(emit(aten.permute.default, node, self.order), emit)
        return _permuted(node, list(map(self.order.index, sorted(self.order))), emit)

    def decoded(self, emit: Emit, *, backward: bool) -> fx.Node:
        """Return the numbers in the dtype and with the strides of the tensor."""
        settings = quantization.decoding_kwargs(self.quantizer)
        if backward:
            settings["block"] = []  # the default, by name: torch would merge equal nodes, and save decoded numbers
        numbers = emit(ops.dequantize, self.data, self.scale_inv, value(self.tensor).dtype, **settings)
        if backward:
            numbers.meta["partitioner_tag"] = "must_be_in_backward"
        return self.in_place(numbers, emit)

    def scale_per_head(self, sizes: Sizes, batch: int | fx.Node, emit: Emit) -> fx.Node:
        """[batch, kv_heads]: the scales as FlashAttention-3 takes them."""
        if self.per_head:
            return emit(aten.view.default, self.scale_inv, [-1, cast(int, sizes.kv_heads)])
        scale = emit(aten.view.default, self.scale_inv, [1, 1])
        return emit(aten.expand.default, scale, [batch, cast(int, sizes.kv_heads)])


def quantized_tensor(
    tensor: fx.Node,
    operand: Operand,
    sizes: Sizes,
    quantizer: Quantizer,
    emit: Emit,
    rotation: tuple[fx.Node, int] | None = None,
) -> AttentionOperand:
    """``tensor`` as ``quantizer`` quantizes it. ``emit``: inserts a node.

    ``rotation``: the matrix that transforms it before, and the dim along which it does.
    """
    x = value(tensor)
    order = _order_in_memory(x)
    per_head = not SCALINGS[quantizer.scaling].one_scale
    source = _contiguous(tensor, emit) if per_head else _permuted(tensor, order, emit)
    if rotation is not None:
        matrix, dim = rotation
        source = emit(transforms.rotate, source, matrix, dim if per_head else order.index(dim))
    if per_head:
        source = emit(aten.view.default, source, _heads(sizes, x))
    args = (source, *quantization.quantizer_args(quantizer), [1, 1], [])
    settings = quantization.quantizer_kwargs(quantizer)
    outputs = emit(ops.quantize, *args, name=f"quantize_{operand}", **settings)
    outputs.meta[OPERAND_KEY] = operand
    data, scale_inv = (
        emit(getitem, outputs, i, name=f"{operand}_{output}") for i, output in enumerate(("data", "scale_inv"))
    )
    return AttentionOperand(
        tensor=tensor, quantizer=quantizer, order=order, per_head=per_head, data=data, scale_inv=scale_inv
    )


def rotated(tensor: fx.Node, matrix: fx.Node, dim: int, emit: Emit) -> fx.Node:
    """``tensor``, transformed along ``dim``, with its strides."""
    order = _order_in_memory(value(tensor))
    result = emit(transforms.rotate, _permuted(tensor, order, emit), matrix, order.index(dim))
    return _permuted(result, [order.index(dim) for dim in range(len(order))], emit)


def _in_memory_as(node: fx.Node, like: fx.Node, emit: Emit) -> fx.Node:
    """``node``, copied if its dims do not lie in memory as those of ``like`` do."""
    order = _order_in_memory(value(like))
    if _order_in_memory(value(node)) == order:
        return node
    copy = emit(aten.clone.default, _permuted(node, order, emit), memory_format=torch.contiguous_format)
    return _permuted(copy, [order.index(dim) for dim in range(len(order))], emit)


def _permuted(node: fx.Node, dims: list[int], emit: Emit) -> fx.Node:
    return node if dims == sorted(dims) else emit(aten.permute.default, node, dims)


def _order_in_memory(x: torch.Tensor) -> list[int]:
    """Return the dims of ``x`` from the largest stride to the smallest; as they are for an expanded tensor."""
    strides = [size_hint(stride) for stride in x.stride()]
    dims = list(range(x.ndim))
    return dims if 0 in strides else sorted(dims, key=lambda dim: -strides[dim])


def _heads(sizes: Sizes, x: torch.Tensor) -> list[int]:
    """[heads, elements per head] of q, k or v, with one head for each head of k and v; -1 where dynamic."""
    groups = [x.shape[0], sizes.kv_heads] if x.ndim == 4 else list(x.shape[:-2])  # [batch * heads, tokens, size]
    static_sizes = [size for size in map(static_size, groups) if size is not None]
    if len(static_sizes) == len(groups):
        return [math.prod(static_sizes), -1]
    others = math.prod(size for size in map(static_size, x.shape) if size is not None)
    return [-1, others // math.prod(static_sizes)]


def _contiguous(node: fx.Node, emit: Emit) -> fx.Node:
    """``node``, copied unless it is known to be contiguous (a question about dynamic sizes would add a guard)."""
    x = value(node)
    if all(static_size(size) is not None for size in x.shape) and x.is_contiguous():
        return node
    return emit(aten.clone.default, node, memory_format=torch.contiguous_format)
