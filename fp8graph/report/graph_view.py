"""One compiled graph in the report: its rows, its text before and after each pass, and its module."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torch import fx

from fp8graph.records import AttentionRecord, CollectiveRecord, GemmRecord, Origin, RefusalRecord
from fp8graph.report.tables import summary


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
    attention: tuple[AttentionRecord, ...] = ()  #: not counted among the GEMMs
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

    def __getstate__(self) -> dict[str, Any]:
        """What is pickled and copied: the text, without the module."""
        return vars(self) | {"load_module": None}

    def summary(self) -> str:
        """One line: how many of its GEMMs run in FP8, and how much of the multiplying that is."""
        return summary(self.gemms)

    def __repr__(self) -> str:
        return f"<GraphView {self.name!r}: {self.summary()}>"

    def to_dict(self) -> dict[str, Any]:
        """The view as plain values, without the module."""
        values = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        del values["load_module"]
        records = {name: values[name] for name in ("gemms", "attention", "collectives", "refusals")}
        return values | {name: [dataclasses.asdict(record) for record in all_] for name, all_ in records.items()}

    @staticmethod
    def from_dict(values: dict[str, Any]) -> GraphView:
        """The inverse of :meth:`to_dict`."""
        gemms = (GemmRecord(**(g | {"dtypes": tuple(g["dtypes"])})) for g in values["gemms"])
        attention = (AttentionRecord(**(a | {"dtypes": tuple(a["dtypes"])})) for a in values["attention"])
        sent = (CollectiveRecord(**(c | {"shape": tuple(c["shape"])})) for c in values["collectives"])
        refused = (RefusalRecord(**r) for r in values["refusals"])
        fields: dict[str, Any] = {**values, "gemms": tuple(gemms), "collectives": tuple(sent)}
        fields["refusals"], fields["attention"] = tuple(refused), tuple(attention)
        fields["inputs"], fields["saved"] = tuple(values["inputs"]), tuple(values["saved"])
        fields["origins"] = {name: Origin(*origin) for name, origin in values["origins"].items()}
        return GraphView(**fields)
