"""Compiled graphs as plain data for the page: stages as numbers of lines, identical graphs and layers once, packed."""

from __future__ import annotations

import base64
import json
import zlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from fp8graph.offline import KernelRecord
from fp8graph.report.folding import folded, name_of
from fp8graph.report.graph_view import GraphView


def packed(content: bytes) -> str:
    """Bytes that the page unpacks when they are needed: deflated, as base64."""
    return base64.b64encode(zlib.compress(content, 9)).decode()


def distinct_graphs(views: Sequence[GraphView]) -> list[list[int]]:
    """Positions of graphs, those with equal texts together: layers that share code have one each."""
    groups: dict[tuple[str, ...], list[int]] = {}
    for position, view in enumerate(views):
        groups.setdefault((view.before, *view.stages.values()), []).append(position)
    return list(groups.values())


def graph_data(views: Sequence[GraphView], kernels: Mapping[int, KernelRecord] | None = None) -> dict[str, Any]:
    """One graph, which has the name and the layers of each of ``views``, and its kernels by their places in a list."""
    first = views[0]
    layers = sorted({gemm.fqn for view in views[1:] for gemm in view.gemms})
    return {
        "name": first.name,
        "training": first.training,
        "summary": first.summary(),
        "count": len(views),
        "others": layers,  # GEMMs of the graphs that are alike
        "stages": ["before", *first.stages],
        "content": packed(json.dumps(_content(first, kernels or {}), separators=(",", ":")).encode()),
    }


def _content(view: GraphView, kernels: Mapping[int, KernelRecord]) -> dict[str, Any]:
    found = folded({"before": view.before, **view.stages}, view.origins)
    numbers: dict[str, int] = {}  # of lines
    texts = [[numbers.setdefault(line, len(numbers)) for line in lines] for lines in found.stages.values()]
    names = dict.fromkeys(name for line in numbers if (name := name_of(line)) in view.origins)
    modules: dict[str, int] = {}
    sources: dict[str, int] = {}
    origins = {
        name: [
            modules.setdefault(view.origins[name].module, len(modules)),
            sources.setdefault(view.origins[name].source, len(sources)),
            int(view.origins[name].backward),
        ]
        for name in names
    }
    return {
        "lines": list(numbers),
        "texts": texts,
        "modules": list(modules),
        "sources": list(sources),
        "origins": origins,
        "saved": [name for name in view.saved if name in names],
        "kernels": list(_drawn(kernels, {name: number for number, name in enumerate(names)})),
        "alike": found.alike,
        "emulated": sorted({gemm.name for gemm in view.gemms if gemm.execution == "emulated"}),
    }


def _drawn(kernels: Mapping[int, KernelRecord], numbers: Mapping[str, int]) -> Iterator[list[Any]]:
    """Of each kernel: its place, and the numbers of the nodes that it computes, reads and writes. Of kept layers."""
    for place, kernel in kernels.items():
        nodes, *others = (
            [numbers[name] for name in names if name in numbers]
            for names in (kernel.nodes, kernel.reads, kernel.writes)
        )
        if nodes:
            yield [place, nodes, *others]
