"""The report on compiled graphs, for people and for machines."""

from fp8graph.report.report import GraphView, Report

__all__ = ["GraphView", "Report"]
