"""Records as tables of text."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from fp8graph.records import CollectiveRecord, GemmRecord, OtherRecord, RefusalRecord, percent, shares


def summary(gemms: Sequence[GemmRecord], others: Sequence[OtherRecord] = (), graphs: int | None = None) -> str:
    """Get one line that says how many GEMMs run in FP8, and how much of the multiplying that is, whoever multiplies."""
    fp8 = [gemm for gemm in gemms if gemm.recipe is not None]
    emulated = sum(gemm.execution == "emulated" for gemm in fp8)
    of_all = shares(gemms, others)
    share = f", {percent(of_all.fp8 / of_all.total)} of the FLOPs of all products" if of_all.total else ""
    if of_all.opaque:
        share += (
            f" but {of_all.opaque} of unknown FLOPs" if share else f", and {of_all.opaque} products of unknown FLOPs"
        )
    text = f"{len(fp8)} of {len(gemms)} GEMMs in FP8{share}"
    text += f", in {graphs} graph{'s' * (graphs != 1)}" if graphs is not None else ""
    return text + (f" ({emulated} emulated)" if emulated else "")


def left_alone(gemms: Iterable[GemmRecord]) -> list[str]:
    """Return one line per kind of GEMM in high precision: site, GEMM, number and reason."""
    _, *rows = gemm_rows(gemm for gemm in gemms if gemm.recipe is None)
    return [f"{site} {gemm} ({count}): {reason}" for site, count, _, gemm, *_, reason in rows]


def size_text(number: int) -> str:
    """Return a number of bytes as text for people."""
    unit, name = (2**10, "KiB") if number < 2**20 else (2**20, "MiB") if number < 2**30 else (2**30, "GiB")
    return f"{number / unit:.1f} {name}"


HEADER = ("site", "count", "op", "gemm", "m x n x k", "recipe", "dtypes", "execution", "reason")


class GemmGroup(NamedTuple):
    """GEMMs of one kind: those of layers whose names differ only in numbers."""

    site: str
    op: str
    gemm: str
    size: str  # m x n x k
    recipe: str
    dtypes: str
    execution: str
    reason: str
    gemms: Sequence[GemmRecord]


def gemm_groups(gemms: Iterable[GemmRecord]) -> list[GemmGroup]:
    """Return one group per kind of GEMM, in the order of their first ones."""
    groups: dict[tuple[str, ...], list[GemmRecord]] = {}
    for gemm in gemms:
        a, b, out = gemm.dtypes
        key = (
            any_layer(gemm.name) or "(root)",
            gemm.op,
            gemm.gemm,
            f"{gemm.m} x {gemm.n} x {gemm.k}",
            gemm.recipe or "-",
            f"{a} x {b} -> {out}",
            gemm.execution,
            gemm.reason,
        )
        groups.setdefault(key, []).append(gemm)
    # where two rows of one GEMM would have one name, the numbers of their layers are in it
    several = Counter((site, gemm) for site, _, gemm, *_ in groups)
    rows: list[GemmGroup] = []
    for (site, op, gemm, *rest), records in groups.items():
        name = these_layers(site, [record.name for record in records]) if several[site, gemm] > 1 else site
        rows.append(GemmGroup(name, op, gemm, *rest, gemms=records))
    return rows


def gemm_rows(gemms: Iterable[GemmRecord]) -> list[tuple[str, ...]]:
    """Return one row per kind of GEMM: layers whose names differ only in numbers share a row."""
    rows = ((group.site, str(len(group.gemms)), *group[1:8]) for group in gemm_groups(gemms))
    return [HEADER, *rows]


def by_kind(others: Iterable[OtherRecord]) -> list[list[OtherRecord]]:
    """Return the rows of each kind of site, in the order of their first ones."""
    kinds: dict[type[OtherRecord], list[OtherRecord]] = {}
    for row in others:
        kinds.setdefault(type(row), []).append(row)
    return list(kinds.values())


def other_rows(rows: Sequence[OtherRecord]) -> list[tuple[str, ...]]:
    """Return one row per kind of decision, as in :func:`gemm_rows`. ``rows``: one or more, of one class."""
    groups = Counter((any_layer(row.name) or "(root)", *row.cells()) for row in rows)
    first, *header = rows[0].header
    return [(first, "count", *header), *_counted(groups)]


def _counted(groups: Counter[tuple[str, ...]]) -> Iterator[tuple[str, ...]]:
    """Rows with the number of each as their second cell."""
    for (first, *cells), count in groups.items():
        yield first, str(count), *cells


def collective_rows(collectives: Iterable[CollectiveRecord]) -> list[tuple[str, ...]]:
    """Return one row per kind of collective, as in :func:`gemm_rows`."""
    groups: Counter[tuple[str, ...]] = Counter()
    for c in collectives:
        tensor = any_layer(c.tensor) or "(root)"
        key = (c.kind, c.direction, tensor, f"{c.dtype}{list(c.shape)}", str(c.ranks), str(c.bytes_sent), c.reason)
        groups[key] += 1
    header = ("collective", "count", "direction", "tensor", "of each rank", "ranks", "bytes sent", "reason")
    return [header, *_counted(groups)]


def refusal_rows(refusals: Iterable[RefusalRecord]) -> list[tuple[str, ...]]:
    """Return one row per reason, with the sites that it holds for."""
    groups: dict[tuple[str, str], list[str]] = {}
    for refusal in refusals:
        groups.setdefault((refusal.what, refusal.reason), []).append(refusal.fqn)
    rows: list[tuple[str, ...]] = [("not done", "sites", "count", "reason")]
    for (what, reason), names in groups.items():
        rows.append((what, sites(names), str(len(names)), reason))
    return rows


def sites(names: Iterable[str]) -> str:
    """Return the first names, as in :func:`gemm_rows`."""
    layers = list(dict.fromkeys(any_layer(name) or "(root)" for name in names))
    return ", ".join(layers[:4]) + (", ..." if len(layers) > 4 else "")


def any_layer(name: str) -> str:
    """Return a name with * in place of each number."""
    return re.sub(r"(^|(?<=\.))\d+(?=\.)", "*", name)


def these_layers(site: str, names: Iterable[str]) -> str:
    """``site``, with the numbers that ``names`` have in the place of its first ``*`` that they differ in."""
    several = [sorted(set(numbers)) for numbers in zip(*(_numbers(name) for name in names), strict=True)]
    differ = [len(numbers) > 1 for numbers in several]
    parts = site.split("*")
    if sum(differ) > 1:  # of several places: which numbers go together is not said in one row
        return site
    texts = [_ranges(numbers) for numbers in several]
    return parts[0] + "".join(text + part for text, part in zip(texts, parts[1:], strict=True))


def _numbers(name: str) -> list[int]:
    return [int(part) for part in name.split(".")[:-1] if part.isdecimal()]


def _ranges(numbers: Sequence[int]) -> str:
    """[0, 1, 2, 5] -> "{0-2,5}"; a single number as it is."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    texts = [str(first) if first == last else f"{first}-{last}" for first, last in runs]
    return texts[0] if len(numbers) == 1 else f"{{{','.join(texts)}}}"


def aligned(rows: Sequence[tuple[str, ...]], *, ruled: bool = False) -> list[str]:
    """Rows as text with aligned columns; ``ruled``: with a line under the first row."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)).rstrip() for row in rows]
    return [lines[0], "  ".join("-" * w for w in widths), *lines[1:]] if ruled else lines
