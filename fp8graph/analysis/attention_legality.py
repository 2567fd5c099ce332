"""Attention that is not quantized although a rule asks for it, or emulated: the reasons, in words for the report."""

from __future__ import annotations

from typing import Final

import torch

from fp8graph.analysis.attention import extra_results, has_gradient_of_mask, read_elsewhere
from fp8graph.analysis.refusals import why_not_of_size
from fp8graph.analysis.same_value import look_through_transposes, value_key
from fp8graph.compat.ops import OpOverload
from fp8graph.hardware import Hardware
from fp8graph.ir.attention import Attention
from fp8graph.ir.compilation import Compilation
from fp8graph.ir.nodes import known_equal, static_size, value
from fp8graph.numerics import hadamard
from fp8graph.numerics.scalings import SCALINGS
from fp8graph.recipes import Recipe

_HIGH_PRECISION_DTYPES: Final = (torch.bfloat16, torch.float16, torch.float32)


def why_not_quantized(attention: Attention, recipe: Recipe, compilation: Compilation) -> str | None:
    """Why q, k and v are not quantized with ``recipe``, or None if they are."""
    if attention.packed:
        return "attention of packed sequences is found, not quantized"
    kind = SCALINGS[recipe.quantizer("input").scaling]
    if recipe.smooths:
        return "smooth_input is for linears, whose weight takes the inverse scales"
    if kind.has_state:
        return f"{recipe.name} has no scales for attention: the amaxes that it keeps are those of GEMMs"
    if kind.tiled:
        return "attention takes one scale per tensor or per head, not one per tile"
    if recipe.rotates_qk:
        if (static_size(size := attention.sizes.head_size) or 1) % hadamard.SIZE:
            return f"hadamard_qk transforms {hadamard.SIZE} elements of a head at a time, these heads have {size}"
        if value(attention.reads[0].argument).dtype == torch.float16:
            return "hadamard_qk: fp16 has no room for sums of 16 elements"
    for read in attention.reads:
        tensor = value(read.argument)
        if tensor.dtype not in _HIGH_PRECISION_DTYPES:
            return f"FP8 cannot multiply {str(tensor.dtype).removeprefix('torch.')}"
        if (size := why_not_of_size(tensor.shape)) is not None:
            return size
        dynamic = [dim for dim, size in enumerate(tensor.shape) if static_size(size) is None]
        if not kind.one_scale and (len(dynamic) > 1 or (dynamic == [1] and tensor.ndim == 4)):
            return f"one scale per head needs to know how many there are: {list(tensor.shape)}"
    return _why_not_alone(attention, compilation) or _why_not_together(attention)


def why_emulated(attention: Attention, device: Hardware) -> str | None:
    """Why no kernel of ``device`` reads the quantized q, k and v of this attention; None if one does."""
    if (obstacle := device.attention_obstacle(static_size(attention.sizes.head_size))) is not None:
        return obstacle
    if attention.backward:
        return "FP8 attention in torch is forward only, this is training"
    if attention.written_out or not isinstance(attention.result.target, OpOverload):
        return f"FP8 attention in torch takes the place of scaled_dot_product_attention, this is {attention.form}"
    if attention.masked or attention.dropout:
        return f"FP8 attention in torch takes no {'mask that is a tensor' if attention.masked else 'dropout'}"
    if extra_results(attention):
        return "its logsumexp or its random state is read"
    if (dtype := value(attention.reads[0].argument).dtype) != torch.bfloat16:
        return f"FP8 attention in torch returns bf16, the program's is {str(dtype).removeprefix('torch.')}"
    sizes = attention.sizes
    if not known_equal(sizes.head_size, sizes.value_size) or static_size(sizes.kv_heads) is None:
        return f"heads of {sizes.head_size} and {sizes.value_size}, {sizes.kv_heads} of them"
    if attention.causal and not known_equal(sizes.queries, sizes.keys):
        return f"{sizes.queries} queries and {sizes.keys} keys: a causal mask starts at another corner there"
    return None


def why_backward_not_quantized(attention: Attention, recipe: Recipe) -> str | None:
    """Why not all products of this emulated attention can read FP8 numbers, or None if they can."""
    what, sizes = "attention_backward", attention.sizes
    if attention.written_out:
        per_head = not SCALINGS[recipe.quantizer("input").scaling].one_scale
        for shape in (value(read.argument).shape for read in attention.inner if per_head):
            if sum(static_size(size) is None for size in shape) > 1:  # [batch, heads, queries, keys]
                return f"{what}: one scale per head needs to know how many there are: {list(shape)}"
        return None
    if not isinstance(attention.result.target, OpOverload):
        return f"{what}: the functions that change the scores are inside of flex_attention"
    if attention.dropout:
        return f"{what}: the dropped elements are not known outside of the op"
    if read_elsewhere(attention):
        return f"{what}: its logsumexp or its random state is read"
    if has_gradient_of_mask(attention):
        return f"{what}: its mask has a gradient"
    if static_size(sizes.heads) is None or static_size(sizes.kv_heads) is None:
        return f"{what} needs to know how many heads there are: {sizes.heads} and {sizes.kv_heads}"
    if attention.causal and not known_equal(sizes.queries, sizes.keys):
        return f"{what}: {sizes.queries} queries and {sizes.keys} keys: a causal mask starts at another corner there"
    return None


def _why_not_alone(attention: Attention, compilation: Compilation) -> str | None:
    """What else decides about the ops of this attention, or reads their results."""
    if attention.written_out:
        own = [compilation.decisions[node] for node in (*attention.forward, *attention.backward)]
        sources = [decision.resolution.source for decision in own if decision.recipe is not None]
        return f"its matmuls are in FP8 already ({sources[0]})" if sources else None
    if compilation.known.subgraph and not attention.backward and extra_results(attention):
        return "the backward of a higher-order op is a graph of its own, which would read q, k and v unquantized"
    return None


def _why_not_together(attention: Attention) -> str | None:
    """Backward reads the tensors that forward reads: both read the quantized ones, or none."""
    keys = [value_key(look_through_transposes(read.argument)[0]) for read in attention.reads]
    forward = [key for key, read in zip(keys, attention.reads, strict=True) if read.node in attention.forward]
    if any(key not in forward for key in keys):
        return "its backward does not read the same q, k and v as its forward"
    return None
