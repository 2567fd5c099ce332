"""The report on compiled graphs, for people and for machines."""

from fp8graph.report.graph_view import GraphView
from fp8graph.report.report import Report

__all__ = ["GraphView", "Report"]
