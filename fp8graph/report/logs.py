"""Compiled graphs in torch's logs, and in the structured trace that tlparse renders.

``TORCH_LOGS="fp8graph"`` prints one line per graph, and one per kind of GEMM left in high precision;
``TORCH_LOGS="+fp8graph"`` also prints each graph after each pass. ``TORCH_TRACE=folder`` (then
``tlparse folder/*.log``) keeps the graphs as artifacts of their compile.
"""

from __future__ import annotations

import json
import logging
from typing import Final

from fp8graph.compat.logs import trace_artifact
from fp8graph.report.graph_view import GraphView
from fp8graph.report.tables import left_alone, summary

_log: Final = logging.getLogger("fp8graph.report")


def announce(view: GraphView) -> None:
    """Log one compiled graph and add it to the structured trace."""
    _log.info("%s: %s", view.name, summary(view.gemms))
    for line in left_alone(view.gemms):
        _log.info("%s: left alone: %s", view.name, line)
    texts = {"before": view.before, **view.stages}
    for stage, text in texts.items():
        _log.debug("%s: graph after %s:\n%s", view.name, stage, text)
    texts["report"] = json.dumps(view.to_dict()["gemms"], indent=1)
    for position, (stage, text) in enumerate(texts.items()):
        trace_artifact(f"fp8graph_{position:02}_{stage}", text)
