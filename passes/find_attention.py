"""Find every attention of the program, a site of a second kind beside matmuls, and decide whether it is quantized.

    o, logsumexp = _scaled_dot_product_flash_attention(q, k, v, ...)        ->      attention "layers.0.self_attn"
    o, logsumexp, _ = flex_attention(q, k, v, score_mod, ...)               ->      the same
    o, logsumexp, _ = _varlen_attn(q, k, v, cu_seq_q, cu_seq_k, ...)        ->      the same, of packed sequences
    o = bmm(softmax(bmm(q, permute(k)) + mask), v)                          ->      the same; the two matmuls stay sites

The graph is not changed. Attentions are not counted as GEMMs: the report has rows of their own for them
(``Report.attention``). They stay in high precision unless a rule with ``op="attention"`` asks for a recipe. Refuses
recipes that keep amaxes or have a scale per tile, packed sequences, attention whose matmuls are quantized themselves,
and attention whose backward could not read the same quantized q, k and v (``analysis/attention_legality.py``).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

import torch
from torch import fx

from fp8graph.analysis.attention import attention_ops
from fp8graph.analysis.attention_legality import why_backward_not_quantized, why_emulated, why_not_quantized
from fp8graph.analysis.naming import names_of
from fp8graph.analysis.written_attention import written_attentions
from fp8graph.ir.attention import Attention
from fp8graph.ir.compilation import Compilation
from fp8graph.ir.nodes import backward_nodes, size_hint, value
from fp8graph.ir.sites import Decision
from fp8graph.ir.text import short
from fp8graph.passes.assign import resolve
from fp8graph.recipes.autocast import DISABLED
from fp8graph.records import AttentionRecord

LEFT_ALONE: Final = 'attention stays in high precision unless a rule with op="attention" asks for it'
LENGTHS: Final = "; its FLOPs are an upper bound: as if each sequence had as many keys as the longest"

# Backward computes dQ, dK, dV and dP, and the scores once more unless they are kept: five or four products, not two.
_BACKWARD: Final = {False: 2.5, True: 2}  # written out or not


def find_attention(graph: fx.Graph, compilation: Compilation) -> None:
    order = {node: position for position, node in enumerate(graph.nodes)}
    found = [*attention_ops(graph, backward_nodes(graph)), *written_attentions(compilation.sites)]
    found.sort(key=lambda attention: order[attention.result])
    names = names_of([attention.site.place for attention in found], compilation.known.parameters.values())
    for attention, (fqn, index) in zip(found, names, strict=True):
        attention.site.fqn, attention.site.index = fqn, index
        attention.decision = _decide(attention, compilation)
    compilation.attention = found
    compilation.rows += [row for attention in found for row in _rows(attention, compilation)]


def _decide(attention: Attention, compilation: Compilation) -> Decision:
    resolution = resolve(attention.site, compilation.known)
    recipe = resolution.recipes["fprop"]

    def left_alone(reason: str, **more: Any) -> Decision:
        reason += LENGTHS if attention.packed else ""
        return Decision(recipe=None, reason=reason, execution="high precision", resolution=resolution, **more)

    if recipe is None:
        by_rule = resolution.source.startswith("rule")
        asked_for = by_rule or resolution.source == DISABLED
        reason = f"{resolution.source} -> high precision" if by_rule else resolution.source
        return left_alone(reason if asked_for else LEFT_ALONE)
    obstacle = why_not_quantized(attention, recipe, compilation)
    emulated = why_emulated(attention, compilation.hardware_of(attention.reads[0].argument))
    if obstacle is None and emulated and recipe.quantizes_attention_backward:
        obstacle = why_backward_not_quantized(attention, recipe)
    if obstacle is not None:
        asked = f"{obstacle} ({resolution.source} asked for {recipe.name})"
        return left_alone(asked, required=resolution.by_user)
    return Decision(
        recipe=recipe,
        reason="; ".join(
            [
                f"{resolution.source} -> {recipe.name}",
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
    """The rows of the report: one for forward, and one for backward."""
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
