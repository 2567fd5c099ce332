"""Attention in the report: the table, the share of the FLOPs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from fp8graph.records import AttentionRecord, GemmRecord
from fp8graph.report.tables import any_layer, percent


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
