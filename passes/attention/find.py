"""Find every attention of the program, a site of a second kind beside matmuls, and decide whether it is quantized.

    o, logsumexp = _scaled_dot_product_flash_attention(q, k, v, ...)        ->      attention "layers.0.self_attn"
    o, logsumexp, _ = flex_attention(q, k, v, score_mod, ...)               ->      the same
    o, logsumexp, _ = _varlen_attn(q, k, v, cu_seq_q, cu_seq_k, ...)        ->      the same, of packed sequences
    o = bmm(softmax(bmm(q, permute(k)) + mask), v)                          ->      the same; the two matmuls stay sites

The graph is not changed. Attentions are not counted as GEMMs: the report has rows of their own for them
(``Report.attention``). They stay in high precision unless a rule with ``op="attention"`` asks for a recipe. Refuses
recipes that keep amaxes or have a scale per tile, packed sequences, attention whose matmuls are quantized themselves,
and attention whose backward could not read the same quantized q, k and v.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

import torch
from torch import fx

from fp8graph.compat.attention import FORMS
from fp8graph.compat.ops import OpOverload
from fp8graph.hardware import Hardware
from fp8graph.ir.compilation import Compilation
from fp8graph.ir.naming import names_of
from fp8graph.ir.nodes import (
    backward_nodes,
    known_equal,
    look_through_transposes,
    nodes,
    size_hint,
    static_size,
    value,
    value_key,
)
from fp8graph.ir.sites import Decision, why_not_of_size
from fp8graph.ir.text import short
from fp8graph.numerics import transforms
from fp8graph.numerics.scalings import SCALINGS
from fp8graph.passes.attention.occurrences import (
    Attention,
    attention_ops,
    extra_results,
    has_gradient_of_mask,
    read_elsewhere,
    written_attentions,
)
from fp8graph.passes.attention.ops import why_no_kernel
from fp8graph.recipes import Recipe
from fp8graph.recipes.rules import DECISION, SOURCE
from fp8graph.records import AttentionRecord

LENGTHS: Final = "; its FLOPs are an upper bound: as if each sequence had as many keys as the longest"

# Backward computes dQ, dK, dV and dP, and the scores once more unless they are kept: five or four products, not two.
_BACKWARD: Final = {False: 2.5, True: 2}  # written out or not
_HIGH_PRECISION_DTYPES: Final = (torch.bfloat16, torch.float16, torch.float32)


def may_have_attention(graph: fx.Graph, compilation: Compilation) -> bool:
    """Return whether the graph has an op for attention, or products of activations."""
    return any(nodes(graph, FORMS)) or any(site.op == "matmul" for site in compilation.sites)


def find_attention(graph: fx.Graph, compilation: Compilation) -> None:
    order = {node: position for position, node in enumerate(graph.nodes)}
    attentions = [*attention_ops(graph, backward_nodes(graph)), *written_attentions(compilation.sites)]
    attentions.sort(key=lambda attention: order[attention.result])
    names = names_of([attention.site.place for attention in attentions], compilation.facts.parameters.values())
    for attention, (fqn, index) in zip(attentions, names, strict=True):
        attention.site.fqn, attention.site.index = fqn, index
        attention.decision = _decide(attention, compilation)
    compilation.results(Attention).extend(attentions)
    compilation.others[AttentionRecord] = [attention.site for attention in attentions]
    compilation.rows += [row for attention in attentions for row in _rows(attention, compilation)]


def _decide(attention: Attention, compilation: Compilation) -> Decision:
    resolution = compilation.facts.decisions.of(attention.site)
    recipe = resolution.recipes["fprop"]

    def left_alone(reason: str, **more: Any) -> Decision:
        reason += LENGTHS if attention.packed else ""
        return Decision(recipe=None, reason=reason, execution="high precision", resolution=resolution, **more)

    if recipe is None:
        return left_alone(DECISION)
    obstacle = why_not_quantized(attention, recipe, compilation)
    emulated = _why_emulated(attention, compilation.hardware_of(attention.reads[0].argument))
    if obstacle is None and emulated and recipe.quantizes_attention_backward:
        obstacle = _why_backward_not_quantized(attention, recipe)
    if obstacle is not None:
        text = f"{obstacle} ({SOURCE} asked for {recipe.name})"
        return left_alone(text, required=resolution.by_user)
    return Decision(
        recipe=recipe,
        reason="; ".join(
            [
                DECISION,
                *(["q and k are transformed"] if recipe.rotates_qk else []),
                *(["the probabilities are quantized, too"] if emulated and recipe.quantizes_attention_backward else []),
                *([f"emulated: {emulated}"] if emulated else []),
            ]
        ),
        execution="emulated" if emulated else "native",
        resolution=resolution,
        required=resolution.by_user,
    )


def _rows(attention: Attention, compilation: Compilation) -> Iterator[AttentionRecord]:
    """Yield the rows of the report: one for forward, and one for backward."""
    decision = attention.decision
    assert decision is not None
    sizes = vars(attention.sizes)
    b, h, _, q, k, d, v = map(size_hint, sizes.values())
    flops = 2 * b * h * q * k * (d + v) // (2 if attention.causal else 1)
    operands = value(attention.reads[0].argument)
    out = attention.result.meta["val"]
    out = out if isinstance(out, torch.Tensor) else out[0]
    common: dict[str, Any] = {
        "fqn": attention.site.fqn,
        "index": attention.site.index,
        "form": attention.form,
        **{name: size if isinstance(size, int) else str(size) for name, size in sizes.items()},
        "causal": attention.causal,
        "masked": attention.masked,
        "dropout": attention.dropout,
        "rule": decision.resolution.rule,
    }
    own, result = short(operands.dtype), short(out.dtype)
    device = compilation.hardware_of(attention.reads[0].argument)
    yield AttentionRecord(
        **common,
        direction="forward",
        flops=flops,
        recipe=decision.recipe.name if decision.recipe is not None else None,
        reason=decision.reason,
        dtypes=(own if decision.recipe is None else short(device.quantizer(decision.recipe, "input").dtype), result),
        execution=decision.execution,
        required=decision.required,
    )
    if attention.backward and decision.recipe is not None and decision.recipe.quantizes_attention_backward:
        of_gradients = short(device.quantizer(decision.recipe, "grad_output").dtype)
        yield AttentionRecord(
            **common,
            direction="backward",
            flops=int(_BACKWARD[attention.written_out] * flops),
            recipe=decision.recipe.name,
            reason="its products read quantized probabilities and gradients, too; emulated: torch has no FP8 backward",
            dtypes=(of_gradients, own),
            execution="emulated",
            required=decision.required,
        )
    elif attention.backward:
        read = "; it reads the quantized q, k and v" if decision.recipe is not None else ""
        yield AttentionRecord(
            **common,
            direction="backward",
            flops=int(_BACKWARD[attention.written_out] * flops),
            recipe=None,
            reason=f"backward stays in high precision{read}" if read else decision.reason,
            dtypes=(own, own),
            execution="high precision",
            required=False,
        )


def why_not_quantized(attention: Attention, recipe: Recipe, compilation: Compilation) -> str | None:
    """Return the reason why q, k and v are not quantized with ``recipe``, or None if they are."""
    if attention.packed:
        return "attention of packed sequences is found, not quantized"
    kind = SCALINGS[recipe.quantizer("input").scaling]
    if kind.has_state:
        return f"{recipe.name} has no scales for attention: the amaxes that it keeps are those of GEMMs"
    if kind.tiled:
        return "attention takes one scale per tensor or per head, not one per tile"
    if recipe.rotates_qk:
        if (static_size(size := attention.sizes.head_size) or 1) % transforms.SIZE:
            return f"hadamard_qk transforms {transforms.SIZE} elements of a head at a time, these heads have {size}"
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


def _why_emulated(attention: Attention, device: Hardware) -> str | None:
    """Get the reason why no kernel of ``device`` reads the quantized q, k and v of this attention; None if one does."""
    if (obstacle := why_no_kernel(device, static_size(attention.sizes.head_size))) is not None:
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


def _why_backward_not_quantized(attention: Attention, recipe: Recipe) -> str | None:
    """Return the reason why not all products of this emulated attention read FP8 numbers, or None if they can."""
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
    """Return the reason why this attention cannot be rewritten on its own; None: it can."""
    if attention.written_out:
        own = [compilation.decisions[node] for node in (*attention.forward, *attention.backward)]
        # without the rule: layers that share this code may have it by another
        return "its matmuls are in FP8 already" if any(decision.recipe is not None for decision in own) else None
    if compilation.facts.subgraph and not attention.backward and extra_results(attention):
        return "the backward of a higher-order op is a graph of its own, which would read q, k and v unquantized"
    return None


def _why_not_together(attention: Attention) -> str | None:
    """Backward reads the tensors that forward reads: both read the quantized ones, or none."""
    keys = [value_key(look_through_transposes(read.argument)[0]) for read in attention.reads]
    forward = [key for key, read in zip(keys, attention.reads, strict=True) if read.node in attention.forward]
    if any(key not in forward for key in keys):
        return "its backward does not read the same q, k and v as its forward"
    return None
