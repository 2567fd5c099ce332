"""One compiled graph in the report: its rows, its text before and after each pass, its module, and each node's origin.

torch's logs and the structured trace that tlparse renders have it, too: ``TORCH_LOGS="fp8graph"`` prints one line per
graph, and one per kind of GEMM left in high precision; ``TORCH_LOGS="+fp8graph"`` also prints each graph after each
pass. ``TORCH_TRACE=folder`` (then ``tlparse folder/*.log``) keeps the graphs as artifacts of their compile.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import logging
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import PurePath
from typing import Any, Final, cast

import torch
from torch import fx

from fp8graph.compat.dynamo import trace_artifact
from fp8graph.ir import collectives
from fp8graph.ir.collectives import Gathered
from fp8graph.ir.naming import split_source
from fp8graph.ir.nodes import GATHERED_KEY, PURPOSE_KEY, backward_nodes, module_path, nodes, size_hint, value
from fp8graph.records import (
    OTHERS,
    AttentionRecord,
    CollectiveRecord,
    GemmRecord,
    Origin,
    OtherRecord,
    RefusalRecord,
    SiteRecord,
)
from fp8graph.report.tables import left_alone, summary

_log: Final = logging.getLogger("fp8graph.report")
_FRAME: Final = re.compile(r'File "([^"]*)", line (\d+), in [^\n]*\n[ ]*([^\n]*)')
_LENGTH: Final = 160  # of a line of code


@dataclass(frozen=True, kw_only=True, repr=False)
class GraphView:
    """One compiled graph: its GEMMs, and its text before the passes, after each pass, and after all of them."""

    name: str  #: the function or module that Dynamo traced
    training: bool  #: forward and backward in one graph; else forward alone
    inputs: tuple[str, ...]  #: of ``module``: Dynamo's sources, FP8 copies, scaling state, the output gradients
    gemms: tuple[GemmRecord, ...]  #: up to three per site
    collectives: tuple[CollectiveRecord, ...]  #: in the graph; those after a step are in the report
    refusals: tuple[RefusalRecord, ...]  #: layers that a pass left unchanged, and why
    before: str  #: the graph as text, as AOTAutograd traced it
    after: str  #: after all passes, before it is lowered to aten
    stages: dict[str, str]  #: after each pass, by its name, in order
    origins: dict[str, Origin]  #: of the nodes of all stages, by their names
    saved: tuple[str, ...]  #: what forward returns, results and all that it keeps for backward, by their names
    policy: str  #: the policy it was compiled with, as text; distinguishes graphs after set_policy
    others: tuple[OtherRecord, ...] = ()  #: of sites that are not matmuls, which are not counted among the GEMMs
    load_module: Callable[[], fx.GraphModule] | None = field(default=None, compare=False, repr=False)

    @property
    def module(self) -> fx.GraphModule:
        """The rewritten dialect graph. It runs eagerly, with one tensor for each of ``inputs``.

        By position, or by names made of them: ``L['fn']._modules['up']._parameters['weight']`` is ``up_weight``.
        """
        if self.load_module is None:
            raise ValueError(
                f"graph {self.name!r} has text but no module: its model is gone, or it is from a file or a pickle"
            )
        return self.load_module()

    @property
    def attention(self) -> tuple[AttentionRecord, ...]:
        """Its attentions, one row for each direction."""
        return tuple(row for row in self.others if isinstance(row, AttentionRecord))

    @property
    def decisions(self) -> tuple[SiteRecord, ...]:
        """The rows of all sites."""
        return (*self.gemms, *self.others)

    def __getstate__(self) -> dict[str, Any]:
        """Return the part that is pickled and copied: the text, without the module."""
        return vars(self) | {"load_module": None}

    def summary(self) -> str:
        """Return one line: how many of its GEMMs run in FP8, and how much of the multiplying that is."""
        return summary(self.gemms, self.others)

    def __repr__(self) -> str:
        return f"<GraphView {self.name!r}: {self.summary()}>"

    def to_dict(self) -> dict[str, Any]:
        """Return the view as plain values, without the module."""
        values = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        del values["load_module"]
        others: tuple[OtherRecord, ...] = values.pop("others")
        records: dict[str, Sequence[Any]] = {name: values[name] for name in ("gemms", "collectives", "refusals")}
        records |= {name: [row for row in others if isinstance(row, kind)] for name, kind in OTHERS.items()}
        return values | {name: [dataclasses.asdict(record) for record in all_] for name, all_ in records.items()}

    @staticmethod
    def from_dict(values: dict[str, Any]) -> GraphView:
        """Return the inverse of :meth:`to_dict`."""
        kinds: dict[str, Any] = {"gemms": GemmRecord, "collectives": CollectiveRecord, "refusals": RefusalRecord}
        fields = _with_tuples(values)
        for name, kind in {**kinds, **OTHERS}.items():
            fields[name] = tuple(kind(**_with_tuples(row)) for row in values[name])
        fields["others"] = tuple(itertools.chain(*(fields.pop(name) for name in OTHERS)))
        fields["origins"] = {name: Origin(*origin) for name, origin in values["origins"].items()}
        return GraphView(**fields)


def _with_tuples(values: Mapping[str, Any]) -> dict[str, Any]:
    """JSON has lists in place of tuples."""
    return {name: tuple(value) if isinstance(value, list) else value for name, value in values.items()}


def announce(view: GraphView) -> None:
    """Log one compiled graph and add it to the structured trace."""
    _log.info("%s: %s", view.name, summary(view.gemms, view.others))
    for line in left_alone(view.gemms):
        _log.info("%s: left alone: %s", view.name, line)
    texts = {"before": view.before, **view.stages}
    for stage, text in texts.items():
        _log.debug("%s: graph after %s:\n%s", view.name, stage, text)
    texts["report"] = json.dumps(view.to_dict()["gemms"], indent=1)
    for position, (stage, text) in enumerate(texts.items()):
        trace_artifact(f"fp8graph_{position:02}_{stage}", text)


def add_origins(origins: dict[str, Origin], graph: fx.Graph) -> None:
    """Add the nodes of ``graph`` whose names are not in ``origins``.

    A sum of gradients belongs to no module by itself: it gets the module of the last gradient that has one.
    """
    new = [node for node in graph.nodes if node.name not in origins]
    if not new:
        return
    in_backward = backward_nodes(graph)
    lines: dict[str, str] = {}  # by stack trace: many nodes have the same
    for node in new:
        module, backward = split_source(module_path(node))[1], node in in_backward
        if not module and backward and node.target is torch.ops.aten.add.Tensor:
            given = (
                origins[source.name].module for source in reversed(node.all_input_nodes) if source.op != "placeholder"
            )
            module = next(filter(None, given), "")
        trace = str(node.meta.get("stack_trace") or "")
        if trace not in lines:
            lines[trace] = source_line(trace)
        origins[node.name] = Origin(module=module, source=lines[trace], backward=backward)


def input_origins(names: Mapping[fx.Node, str | None]) -> dict[str, Origin]:
    """Return the inputs of a graph, by their names in the report; None: an unused spare input."""
    origins: dict[str, Origin] = {}
    for node, text in names.items():
        root, path = split_source(text or "")
        origins[node.name] = Origin(module=path or root, source="", backward=str(node.target).startswith("tangents"))
    return origins


def source_line(trace: str) -> str:
    """Return the innermost line of a stack trace outside of torch, as "models/llama.py:65 x = x *
    torch.rsqrt(variance)".
    """
    frames = _FRAME.findall(trace)
    outside = [frame for frame in frames if "torch" not in PurePath(frame[0]).parts] or frames
    if not outside:
        return ""
    file, line, code = outside[-1]
    path = PurePath(file).parts
    start = path.index("site-packages") + 1 if "site-packages" in path else max(0, len(path) - 2)
    return f"{'/'.join(path[start:])}:{line} {code[:_LENGTH]}"


def collective_records(graph: fx.Graph) -> list[CollectiveRecord]:
    """Return every functional collective of ``graph``, in order."""
    records: list[CollectiveRecord] = []
    in_backward = backward_nodes(graph)
    for node in nodes(graph, collectives.KINDS):
        kind = collectives.KINDS[node.target]
        given, result = value(cast(fx.Node, node.args[0])), value(node)
        gathered = cast("Gathered | None", node.meta.get(GATHERED_KEY))
        ranks = _ranks(node)
        largest = max(size_hint(x.numel()) for x in (given, result))
        records.append(
            CollectiveRecord(
                kind=kind,
                direction="backward" if node in in_backward else "forward",
                tensor=gathered.tensor if gathered else split_source(module_path(node))[1],
                dtype=str(given.dtype).removeprefix("torch."),
                shape=tuple(size if isinstance(size, int) else str(size) for size in given.shape),
                ranks=ranks,
                bytes_sent=collectives.bytes_sent(kind, largest * given.itemsize, ranks),
                reason=gathered.reason if gathered else str(node.meta.get(PURPOSE_KEY, "")),
            )
        )
    return records


def _ranks(node: fx.Node) -> int:
    """Return the size of the group: an argument of gathers and scatters, else that of the group itself."""
    sizes: dict[Any, int] = {collectives.ALL_GATHER: 1, collectives.REDUCE_SCATTER: 2}
    if node.target in sizes:
        return cast(int, node.args[sizes[node.target]])
    return max(1, len(collectives.ranks_of(node.args[-1])))
