"""Write the quantization of q, k and v, their transform and their decoding, as dialect nodes."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from operator import getitem
from typing import cast

import torch
from torch import fx

from fp8graph.ir import ops
from fp8graph.ir.attention import Operand, Sizes
from fp8graph.ir.keys import OPERAND_KEY
from fp8graph.ir.nodes import aten, size_hint, static_size, value
from fp8graph.numerics import quantization
from fp8graph.numerics.scalings import SCALINGS
from fp8graph.recipes import Quantizer

Emit = Callable[..., fx.Node]


@dataclass(kw_only=True)
class QuantizedTensor:
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
        """The numbers in the dtype and with the strides of the tensor."""
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
) -> QuantizedTensor:
    """``tensor`` as ``quantizer`` quantizes it. ``emit``: inserts a node.

    ``rotation``: the matrix that transforms it before, and the dim along which it does.
    """
    x = value(tensor)
    order = _order_in_memory(x)
    per_head = not SCALINGS[quantizer.scaling].one_scale
    source = _contiguous(tensor, emit) if per_head else _permuted(tensor, order, emit)
    if rotation is not None:
        matrix, dim = rotation
        source = emit(ops.rotate, source, matrix, dim if per_head else order.index(dim))
    if per_head:
        source = emit(aten.view.default, source, _heads(sizes, x))
    args = (source, *quantization.quantizer_args(quantizer), [1, 1], [])
    settings = quantization.quantizer_kwargs(quantizer)
    outputs = emit(ops.quantize, *args, name=f"quantize_{operand}", **settings)
    outputs.meta[OPERAND_KEY] = operand
    data, scale_inv = (
        emit(getitem, outputs, i, name=f"{operand}_{output}") for i, output in enumerate(("data", "scale_inv"))
    )
    return QuantizedTensor(
        tensor=tensor, quantizer=quantizer, order=order, per_head=per_head, data=data, scale_inv=scale_inv
    )


def rotated(tensor: fx.Node, matrix: fx.Node, dim: int, emit: Emit) -> fx.Node:
    """``tensor``, transformed along ``dim``, with its strides."""
    order = _order_in_memory(value(tensor))
    result = emit(ops.rotate, _permuted(tensor, order, emit), matrix, order.index(dim))
    return _permuted(result, [order.index(dim) for dim in range(len(order))], emit)


def in_memory_as(node: fx.Node, like: fx.Node, emit: Emit) -> fx.Node:
    """``node``, copied if its dims do not lie in memory as those of ``like`` do."""
    order = _order_in_memory(value(like))
    if _order_in_memory(value(node)) == order:
        return node
    copy = emit(aten.clone.default, _permuted(node, order, emit), memory_format=torch.contiguous_format)
    return _permuted(copy, [order.index(dim) for dim in range(len(order))], emit)


def _permuted(node: fx.Node, dims: list[int], emit: Emit) -> fx.Node:
    return node if dims == sorted(dims) else emit(aten.permute.default, node, dims)


def _order_in_memory(x: torch.Tensor) -> list[int]:
    """The dims of ``x`` from the largest stride to the smallest; as they are for an expanded tensor."""
    strides = [size_hint(stride) for stride in x.stride()]
    dims = list(range(x.ndim))
    return dims if 0 in strides else sorted(dims, key=lambda dim: -strides[dim])


def _heads(sizes: Sizes, x: torch.Tensor) -> list[int]:
    """[heads, elements per head] of q, k or v, with one head for each head of k and v; -1 where dynamic."""
    groups = [x.shape[0], sizes.kv_heads] if x.ndim == 4 else list(x.shape[:-2])  # [batch * heads, tokens, size]
    known = [size for size in map(static_size, groups) if size is not None]
    if len(known) == len(groups):
        return [math.prod(known), -1]
    others = math.prod(size for size in map(static_size, x.shape) if size is not None)
    return [-1, others // math.prod(known)]


def _contiguous(node: fx.Node, emit: Emit) -> fx.Node:
    """``node``, copied unless it is known to be contiguous (a question about dynamic sizes would add a guard)."""
    x = value(node)
    if all(static_size(size) is not None for size in x.shape) and x.is_contiguous():
        return node
    return emit(aten.clone.default, node, memory_format=torch.contiguous_format)
