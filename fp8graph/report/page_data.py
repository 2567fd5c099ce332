"""A report as plain data for the page: the shares of FP8, the tables, the graphs, the statistics."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

from fp8graph.offline import KernelRecord
from fp8graph.records import CollectiveRecord, GemmRecord, RefusalRecord, StatisticRecord
from fp8graph.report.graph_view import GraphView
from fp8graph.report.page_graph import distinct_graphs, graph_data
from fp8graph.report.page_statistics import Losses, statistics_data
from fp8graph.report.tables import collective_rows, gemm_groups, refusal_rows


class Shown(Protocol):
    """What the page shows of a :class:`~fp8graph.report.Report`."""

    @property
    def graphs(self) -> list[GraphView]: ...
    @property
    def gemms(self) -> list[GemmRecord]: ...
    @property
    def collectives(self) -> list[CollectiveRecord]: ...
    @property
    def refusals(self) -> list[RefusalRecord]: ...
    @property
    def load_kernels(self) -> Callable[[], list[KernelRecord]] | None: ...
    def summary(self) -> str: ...
    def notes(self) -> list[str]: ...


def page_data(
    report: Shown, statistics: Iterable[StatisticRecord] | None = None, losses: Losses | None = None
) -> dict[str, Any]:
    """All that the page shows, ready for JSON. Kernels are listed if they were generated before."""
    distinct = distinct_graphs(report.graphs)
    kernels: list[KernelRecord] | None = vars(report).get("kernels")  # reading the property would generate them
    return {
        "summary": report.summary(),
        "notes": report.notes(),
        "shares": _shares(report.gemms),
        "gemms": _gemms(report, distinct),
        "collectives": collective_rows(report.collectives) if report.collectives else [],
        "refusals": refusal_rows(report.refusals) if report.refusals else [],
        "graphs": [
            graph_data([report.graphs[position] for position in positions], _kernels_of(positions[0], kernels or ()))
            for positions in distinct
        ],
        "kernels": None if kernels is None else [_kernel(kernel, distinct) for kernel in kernels],
        "has_target": report.load_kernels is not None,
        "statistics": None if statistics is None else statistics_data(statistics, losses),
    }


def _shares(gemms: Sequence[GemmRecord]) -> list[dict[str, Any]]:
    """What part of the GEMMs' work is in FP8: natively, emulated, of all."""
    predicted = all(gemm.seconds is not None for gemm in gemms)
    why = "this report's device has no speed model, or FP8 is emulated there: explain(..., target=...) names a GPU"
    shares: list[dict[str, Any]] = [
        _share("FLOPs of GEMMs", "FLOP", gemms, lambda gemm: gemm.flops),
        _share("bytes of operands that GEMMs read", "B", gemms, lambda gemm: gemm.bytes_read),
        _share("predicted time of GEMMs", "s", gemms, _seconds)
        if predicted and gemms
        else {"what": "predicted time of GEMMs", "missing": f"not predicted: {why}" if gemms else "there are no GEMMs"},
    ]
    if predicted and gemms:
        before = sum(gemm.seconds or 0.0 for gemm in gemms)
        shares[-1]["before"] = before  # all of them in high precision
    return shares


def _seconds(gemm: GemmRecord) -> float:
    """As it was decided: GEMMs that are multiplied as one share their speedup."""
    seconds = gemm.seconds or 0.0
    return seconds / gemm.speedup if gemm.recipe is not None and gemm.speedup else seconds


def _share(what: str, unit: str, gemms: Sequence[GemmRecord], amount: Callable[[GemmRecord], float]) -> dict[str, Any]:
    parts = {"native": 0.0, "emulated": 0.0, "high precision": 0.0}
    for gemm in gemms:
        parts[gemm.execution] += amount(gemm)
    return {"what": what, "unit": unit, "parts": parts}


def _gemms(report: Shown, distinct: Sequence[Sequence[int]]) -> list[dict[str, Any]]:
    graph_of = {
        id(gemm): number
        for number, positions in enumerate(distinct)
        for position in positions
        for gemm in report.graphs[position].gemms
    }
    return [
        {
            "site": group.site,
            "op": group.op,
            "gemm": group.gemm,
            "size": group.size,
            "recipe": group.recipe,
            "dtypes": group.dtypes,
            "execution": group.execution,
            "reason": group.reason,
            "flops": sum(gemm.flops for gemm in group.gemms),
            "names": [gemm.name for gemm in group.gemms],
            "graph": graph_of[id(group.gemms[0])],
        }
        for group in gemm_groups(report.gemms)
    ]


def _kernels_of(graph: int, kernels: Sequence[KernelRecord]) -> dict[int, KernelRecord]:
    """By its place in the page's list."""
    return {place: kernel for place, kernel in enumerate(kernels) if kernel.number == graph}


def _kernel(kernel: KernelRecord, distinct: Sequence[Sequence[int]]) -> dict[str, Any]:
    return {
        "drawn": next((number for number, (first, *_) in enumerate(distinct) if kernel.number == first), None),
        "name": kernel.name,
        "graph": kernel.graph,
        "kind": kernel.kind,
        "ops": list(kernel.ops),
        "bytes": kernel.bytes,
    }
