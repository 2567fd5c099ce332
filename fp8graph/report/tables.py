"""Reports as tables of text."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from fp8graph.records import CollectiveRecord, GemmRecord, RefusalRecord


def summary(gemms: Sequence[GemmRecord], graphs: int | None = None) -> str:
    """One line that says how many GEMMs run in FP8."""
    fp8 = [gemm for gemm in gemms if gemm.recipe is not None]
    emulated = sum(gemm.execution == "emulated" for gemm in fp8)
    text = f"{len(fp8)} of {len(gemms)} GEMMs in FP8" + (f", in {graphs} graph(s)" if graphs is not None else "")
    return text + (f" ({emulated} emulated)" if emulated else "")


def left_alone(gemms: Iterable[GemmRecord]) -> list[str]:
    """One line per kind of GEMM in high precision: site, GEMM, number and reason."""
    _, *rows = gemm_rows(gemm for gemm in gemms if gemm.recipe is None)
    return [f"{site} {gemm} ({count}): {reason}" for site, count, _, gemm, *_, reason in rows]


def size_text(number: int) -> str:
    """A number of bytes as text for people."""
    return f"{number / 2**10:.1f} KiB" if number < 2**20 else f"{number / 2**20:.1f} MiB"


HEADER = ("site", "count", "op", "gemm", "m x n x k", "recipe", "dtypes", "execution", "reason")


def gemm_rows(gemms: Iterable[GemmRecord]) -> list[tuple[str, ...]]:
    """One row per kind of GEMM: layers whose names differ only in numbers share a row."""
    groups: dict[tuple[str, ...], int] = {}
    for gemm in gemms:
        a, b, out = gemm.dtypes
        key = (
            _any_layer(gemm.name) or "(root)",
            gemm.op,
            gemm.gemm,
            f"{gemm.m} x {gemm.n} x {gemm.k}",
            gemm.recipe or "-",
            f"{a} x {b} -> {out}",
            gemm.execution,
            gemm.reason,
        )
        groups[key] = groups.get(key, 0) + 1
    return [HEADER, *((key[0], str(count), *key[1:]) for key, count in groups.items())]


def collective_rows(collectives: Iterable[CollectiveRecord]) -> list[tuple[str, ...]]:
    """One row per kind of collective, as in :func:`gemm_rows`."""
    groups: dict[tuple[str, ...], int] = {}
    for c in collectives:
        tensor = _any_layer(c.tensor) or "(root)"
        key = (c.kind, c.direction, tensor, f"{c.dtype}{list(c.shape)}", str(c.ranks), str(c.bytes_sent), c.reason)
        groups[key] = groups.get(key, 0) + 1
    header = ("collective", "count", "direction", "tensor", "of each rank", "ranks", "bytes sent", "reason")
    return [header, *((key[0], str(count), *key[1:]) for key, count in groups.items())]


def refusal_rows(refusals: Iterable[RefusalRecord]) -> list[tuple[str, ...]]:
    """One row per reason, with the sites that it holds for."""
    groups: dict[tuple[str, str], list[str]] = {}
    for refusal in refusals:
        groups.setdefault((refusal.what, refusal.reason), []).append(_any_layer(refusal.fqn) or "(root)")
    rows: list[tuple[str, ...]] = [("not done", "sites", "count", "reason")]
    for (what, reason), names in groups.items():
        sites = list(dict.fromkeys(names))
        some = ", ".join(sites[:4]) + (", ..." if len(sites) > 4 else "")
        rows.append((what, some, str(len(names)), reason))
    return rows


def _any_layer(name: str) -> str:
    """A name with * in place of each number."""
    return re.sub(r"(^|(?<=\.))\d+(?=\.)", "*", name)


def aligned(rows: Sequence[tuple[str, ...]], *, ruled: bool = False) -> list[str]:
    """Rows as text with aligned columns; ``ruled``: with a line under the first row."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)).rstrip() for row in rows]
    return [lines[0], "  ".join("-" * w for w in widths), *lines[1:]] if ruled else lines
