"""Attention in the report: the rows of one graph, the table, the share of the FLOPs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Final

import torch

from fp8graph.ir.attention import Attention
from fp8graph.ir.compilation import Compilation
from fp8graph.ir.nodes import size_hint, value
from fp8graph.records import AttentionRecord, GemmRecord
from fp8graph.report.build import short
from fp8graph.report.tables import any_layer, percent

# Backward computes dQ, dK, dV and dP, and the scores once more unless they are kept: five or four products, not two.
_BACKWARD: Final = {False: 2.5, True: 2}  # written out or not


def attention_records(compilation: Compilation) -> list[AttentionRecord]:
    """The rows of one graph: one for each attention forward, and one for its backward."""
    return [record for attention in compilation.attention for record in _records(attention, compilation)]


def _records(attention: Attention, compilation: Compilation) -> Iterator[AttentionRecord]:
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


def attention_share(attention: Sequence[AttentionRecord], gemms: Sequence[GemmRecord]) -> list[str]:
    """One line: how many attentions there are, and their share of the FLOPs; none where there is none."""
    if not attention:
        return []
    inside = sum(record.flops for record in gemms)
    apart = sum(record.flops for record in attention if not record.written_out)
    own = sum(record.flops for record in attention)
    fp8 = [record for record in attention if record.recipe is not None and record.direction == "forward"]
    back = sum(record.recipe is not None and record.direction == "backward" for record in attention)
    forward = [record for record in attention if record.direction == "forward"]
    line = f"{len(forward)} attention{'s' * (len(forward) != 1)}{' with backward' * (len(attention) > len(forward))}: "
    line += f"{percent(own / (inside + apart))} of the FLOPs of GEMMs and attention" if inside + apart else "no FLOPs"
    emulated = sum(record.execution == "emulated" for record in fp8)
    line += f"; {len(fp8)} in FP8" + f" ({emulated} emulated)" * bool(emulated) if fp8 else "; in high precision"
    line += f", {back} of them in backward, too" if back else ""
    written = sum(record.written_out for record in forward)
    line += f"; {written} written out as matmuls, which are GEMMs above" if written else ""
    return [line]


def attention_rows(attention: Iterable[AttentionRecord]) -> list[tuple[str, ...]]:
    """One row per kind of attention: layers whose names differ only in numbers share a row."""
    groups: dict[tuple[str, ...], int] = {}
    for record in attention:
        heads = str(record.heads) if record.heads == record.kv_heads else f"{record.heads}:{record.kv_heads}"
        size = (
            str(record.head_size)
            if record.head_size == record.value_size
            else f"{record.head_size}:{record.value_size}"
        )
        more = [name for name in ("causal", "masked", "dropout") if getattr(record, name)]
        key = (
            any_layer(record.name) or "(root)",
            ", ".join([record.form, *more]),
            record.direction,
            f"{record.batch} x {heads} x {record.queries} x {record.keys} x {size}",
            record.recipe or "-",
            " -> ".join(record.dtypes),
            record.execution,
            record.reason,
        )
        groups[key] = groups.get(key, 0) + 1
    header = "attention", "count", "form", "direction", "batch x heads x queries x keys x size"
    header = (*header, "recipe", "dtypes", "execution", "reason")
    return [header, *((key[0], str(count), *key[1:]) for key, count in groups.items())]
