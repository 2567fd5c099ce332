"""The report's page: one HTML file with its data, its code and its libraries inside. It needs no network.

The data are plain values: the shares of FP8, the tables, the graphs, the statistics. Stages are numbers of lines; large
data are packed; identical graphs are there once, and so are identical layers of a graph's text::

    add: bf16[8] = aten.add.Tensor(x, y)        # model.layers.0   ->   as it is
    add_1: bf16[8] = aten.add.Tensor(add, z)    # model.layers.1   ->   (left out: it reads as model.layers.0)

A layer is everything under one number in a module's name. Two layers are identical if their lines are the same in all
stages, once nodes are numbered in the order in which each layer makes them. The nodes of other layers count as the
same, those outside of all layers do not: layers that read two different masks stay.
"""

from __future__ import annotations

import array
import base64
import json
import math
import re
import sys
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from importlib import resources
from typing import Any, Final, NamedTuple, Protocol, TypeVar

from fp8graph.errors import ConfigError
from fp8graph.offline import KernelRecord
from fp8graph.records import (
    OPAQUE,
    CollectiveRecord,
    GemmRecord,
    Origin,
    OtherRecord,
    RefusalRecord,
    SiteRecord,
    StatisticRecord,
)
from fp8graph.report.graph_view import GraphView
from fp8graph.report.tables import any_layer, by_kind, collective_rows, gemm_groups, other_rows, refusal_rows

Row = TypeVar("Row", bound=SiteRecord)
Losses = Sequence[float] | Mapping[int, float]  # by step
_SCRIPTS: Final = ("base", "overview", "tables", "model", "drawing", "details", "kernels", "stages", "charts", "page")
_FOLDER: Final = resources.files("fp8graph.report")
_PLANE: Final = ("operand", "layout", "recipe", "what_if", "stat")  # records that differ in these have one matrix each
_LAYER: Final = re.compile(r"(?:[^\s,]*?\.)??\d+(?=\.|$)")  # "model.layers.0" of "model.layers.0.mlp.up"
_NAME: Final = re.compile(r"(?<![\w.])[A-Za-z_]\w*(?![\w=(.])")


def page(data: Mapping[str, Any]) -> str:
    """Return the page that shows ``data``, which is from :func:`page_data`."""
    parts = {
        "style": _text("page/page.css"),
        "libraries": "\n".join(_libraries(charts=data["statistics"] is not None)),
        "data": in_script(json.dumps(_finite(data), allow_nan=False, separators=(",", ":"))),
        "script": "\n".join(_text(f"page/{name}.js") for name in _SCRIPTS),
    }
    before, *pieces = _text("page/page.html").split("<!--")
    text = [before]
    for piece in pieces:
        name, _, more = piece.partition("-->")
        text += [parts[name], more]
    return "".join(text)


def in_script(text: str) -> str:
    """JSON that can stand inside a script element: no tag of a layer's name ends it or opens a comment."""
    return text.replace("<", "\\u003c")


def _libraries(*, charts: bool) -> Iterator[str]:
    for name in ("dagre", "echarts") if charts else ("dagre",):
        lines = _text(f"vendor/{name}/{name}.min.js").splitlines()
        source = "\n".join(line for line in lines if not line.startswith("//# sourceMappingURL"))
        notice = _text(f"vendor/{name}/LICENSE" if name == "dagre" else f"vendor/{name}/NOTICE")
        yield f"<script>\n/*! {name}\n{notice.replace('*/', '* /')}\n*/\n{source}\n</script>"


def _text(name: str) -> str:
    return _FOLDER.joinpath(name).read_text(encoding="utf-8")


def _finite(value: Any) -> Any:
    """JSON has no NaN and no infinity."""
    if isinstance(value, float) and value - value != 0.0:
        return None
    if isinstance(value, Mapping):
        return {key: _finite(one) for key, one in value.items()}
    return [_finite(one) for one in value] if isinstance(value, (list, tuple)) else value


class Shown(Protocol):
    """The part of a :class:`~fp8graph.report.Report` that the page shows."""

    @property
    def graphs(self) -> list[GraphView]: ...
    @property
    def gemms(self) -> list[GemmRecord]: ...
    @property
    def others(self) -> list[OtherRecord]: ...
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
    """Return all that the page shows, ready for JSON. Kernels are listed if they were generated before."""
    distinct = distinct_graphs(report.graphs)
    kernels: list[KernelRecord] | None = vars(report).get("kernels")  # reading the property would generate them
    return {
        "summary": report.summary(),
        "notes": report.notes(),
        "shares": _shares(report.gemms, report.others),
        "gemms": _gemms(report, distinct),
        "others": [other_rows(rows) for rows in by_kind(report.others)],
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


def _shares(gemms: Sequence[GemmRecord], others: Sequence[OtherRecord]) -> list[dict[str, Any]]:
    """Return the part of the work that is in FP8: natively, emulated, of all."""
    apart = [row for row in others if not row.written_out]
    opaque = sum(row.opaque for row in apart)
    title = "FLOPs of all products" + f" but {opaque} of unknown FLOPs" * bool(opaque)
    shares = [
        _share(title, "FLOP", [*gemms, *apart], lambda row: row.flops),
        _share("bytes of operands that GEMMs read", "B", gemms, lambda gemm: gemm.bytes_read),
    ]
    title = "predicted time of GEMMs"
    if gemms and all(gemm.seconds is not None for gemm in gemms):
        in_high_precision = sum(gemm.seconds or 0.0 for gemm in gemms)
        return [*shares, _share(title, "s", gemms, _seconds) | {"before": in_high_precision}]
    why = "this report's device has no speed model, or FP8 is emulated there: explain(..., target=...) names a GPU"
    return [*shares, {"what": title, "missing": f"not predicted: {why}" if gemms else "there are no GEMMs"}]


def _seconds(gemm: GemmRecord) -> float:
    """As it was decided: GEMMs that are multiplied as one share their speedup."""
    seconds = gemm.seconds or 0.0
    return seconds / gemm.speedup if gemm.recipe is not None and gemm.speedup else seconds


def _share(what: str, unit: str, rows: Sequence[Row], amount: Callable[[Row], float]) -> dict[str, Any]:
    parts = {"native": 0.0, "emulated": 0.0, "low precision": 0.0, "high precision": 0.0}
    for row in rows:
        parts["high precision" if row.execution == OPAQUE else row.execution] += amount(row)
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
            **{name: value for name, value in group._asdict().items() if name != "gemms"},
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
    drawn = next((number for number, (first, *_) in enumerate(distinct) if kernel.number == first), None)
    return {"drawn": drawn, **{name: getattr(kernel, name) for name in ("name", "graph", "kind", "ops", "bytes")}}


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
    """Return one graph, which has the name and the layers of each of ``views``, and its kernels by their places in a
    list.
    """
    first = views[0]
    layers = sorted({gemm.fqn for view in views[1:] for gemm in view.gemms})
    return {
        "name": first.name,
        "training": first.training,
        "summary": first.summary(),
        "count": len(views),
        "others": layers,  # GEMMs of the identical graphs
        "stages": ["before", *first.stages],
        "content": packed(json.dumps(_content(first, kernels or {}), separators=(",", ":")).encode()),
    }


def _content(view: GraphView, kernels: Mapping[int, KernelRecord]) -> dict[str, Any]:
    graph = folded({"before": view.before, **view.stages}, view.origins)
    numbers: dict[str, int] = {}  # of lines
    texts = [[numbers.setdefault(line, len(numbers)) for line in lines] for lines in graph.stages.values()]
    names = dict.fromkeys(name for line in numbers if (name := _name_of(line)) in view.origins)
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
        "alike": graph.identical,
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


class Folded(NamedTuple):
    """The stages of one graph, with one of several identical layers."""

    stages: Mapping[str, Sequence[str]]  # lines; one line stands for those of layers that are left out
    identical: Mapping[str, Sequence[str]]  # a layer that is kept -> those that it stands for


def folded(stages: Mapping[str, str], origins: Mapping[str, Origin]) -> Folded:
    """Return the stages without the layers that are identical to an earlier one."""
    split = {stage: text.split("\n") for stage, text in stages.items()}
    layers = {name: layer for name, origin in origins.items() if (layer := layer_of(origin.module))}
    identical = _identical(_readings(split.values(), layers))
    left_out = {layer: kept for kept, others in identical.items() for layer in others}
    return Folded({stage: list(_without(lines, layers, left_out)) for stage, lines in split.items()}, identical)


def layer_of(module: str) -> str:
    """Return the name of the layer that a module belongs to; "" if no number is in its name."""
    match = _LAYER.match(module)
    return match[0] if match else ""


def _name_of(line: str) -> str:
    """Return the node that a line of a graph's text makes; "" for a comment, or what the graph returns."""
    name, colon, _ = line.partition(": ")
    return name if colon and name.isidentifier() else ""


def _readings(stages: Iterable[Sequence[str]], layers: Mapping[str, str]) -> dict[str, list[str]]:
    """By layer: its lines in all stages, with nodes in place of names."""
    numbers: dict[str, int] = {}  # of a node, among those of its layer
    counts: dict[str, int] = {}
    by_line: dict[str, str] = {}  # line -> its reading
    readings: dict[str, list[str]] = {}
    for lines in stages:
        for line in lines:
            name = _name_of(line)
            layer = layers.get(name)
            if layer is None:
                continue
            if name not in numbers:
                numbers[name] = counts[layer] = counts.get(layer, -1) + 1
            reading = by_line.get(line)
            if reading is None:
                reading = by_line[line] = _reading(line, layer, layers, numbers)
            readings.setdefault(layer, []).append(reading)
        for reading in readings.values():
            reading.append("")
    return readings


def _reading(line: str, layer: str, layers: Mapping[str, str], numbers: Mapping[str, int]) -> str:
    def reading(match: re.Match[str]) -> str:
        name = match[0]
        if layers.get(name) == layer and name in numbers:
            return f"%{numbers[name]}"
        return "%" if name in layers else name

    text, hash_, module = line.partition("  # ")
    return _NAME.sub(reading, text) + hash_ + module.removeprefix(layer)


def _identical(readings: Mapping[str, list[str]]) -> dict[str, list[str]]:
    groups: dict[tuple[str, ...], list[str]] = {}
    for layer, lines in readings.items():
        if not any(" = " in line for line in lines):
            continue  # only inputs: arguments are not identical layers
        groups.setdefault((any_layer(f"{layer}."), *lines), []).append(layer)
    return {first: others for first, *others in groups.values() if others}


def _without(lines: Iterable[str], layers: Mapping[str, str], left_out: Mapping[str, str]) -> Iterator[str]:
    omitted: dict[str, set[str]] = {}  # layer that is kept -> the layers like it whose lines were left out here
    number = 0

    def comment() -> Iterator[str]:
        nonlocal number
        if number:
            like = "; ".join(f"{len(of)} layer{'s' * (len(of) > 1)} like {kept}" for kept, of in omitted.items())
            yield f"# {number} lines of {like}"
        omitted.clear()
        number = 0

    for line in lines:
        layer = layers.get(_name_of(line), "")
        if layer in left_out:
            omitted.setdefault(left_out[layer], set()).add(layer)
            number += 1
            continue
        yield from comment()
        yield _shorter(line, layers, left_out) if line.startswith("return ") else line
    yield from comment()


def _shorter(line: str, layers: Mapping[str, str], left_out: Mapping[str, str]) -> str:
    """Return the line that returns, without the results of layers that were left out."""
    results = line.removeprefix("return ").split(", ")
    kept = [name for name in results if layers.get(name, "") not in left_out]
    more = len(results) - len(kept)
    return f"return {', '.join(kept)}" + (f"  # and {more} more, of layers that were left out" if more else "")


def statistics_data(records: Iterable[StatisticRecord], losses: Losses | None) -> dict[str, Any]:
    """Return the steps, the layers, the loss of each step if it is known, and the matrices, as packed 32-bit floats."""
    steps: set[int] = set()
    sites: dict[str, int] = {}
    planes: dict[tuple[Any, ...], dict[tuple[int, int], float]] = {}
    for record in records:
        steps.add(record.step)
        row = sites.setdefault(record.site, len(sites))
        planes.setdefault(tuple(getattr(record, name) for name in _PLANE), {})[row, record.step] = record.value
    columns = {step: column for column, step in enumerate(sorted(steps))}
    return {
        "steps": list(columns),
        "sites": list(sites),
        "losses": _losses(losses),
        "planes": [
            dict(zip(_PLANE, key, strict=True)) | {"values": _matrix(values, columns, len(sites))}
            for key, values in planes.items()
        ],
    }


def _losses(losses: Losses | None) -> list[tuple[int, float]] | None:
    if losses is None:
        return None
    try:
        pairs = losses.items() if isinstance(losses, Mapping) else enumerate(losses)
        points = sorted((int(step), float(loss)) for step, loss in pairs)
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"losses={type(losses).__name__}: {error}. Give one number per step, or a mapping from step to loss."
        ) from None
    return [(step, loss) for step, loss in points if math.isfinite(loss)]


def _matrix(values: Mapping[tuple[int, int], float], columns: Mapping[int, int], rows: int) -> str:
    """[layers, steps] row-major, little-endian; NaN where nothing was measured."""
    matrix = array.array("f", [math.nan]) * (rows * len(columns))
    for (row, step), value in values.items():
        finite = not math.isfinite(value) or abs(value) < 3.4e38
        matrix[row * len(columns) + columns[step]] = value if finite else math.copysign(math.inf, value)
    if sys.byteorder == "big":
        matrix.byteswap()
    return packed(matrix.tobytes())
