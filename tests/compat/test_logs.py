"""logs: a text for tlparse is made only where somebody listens."""

from __future__ import annotations

import json
import logging

import pytest
import torch

from fp8graph.compat.dynamo import trace_artifact


def test_an_artifact_is_a_record_with_a_payload(monkeypatch: pytest.MonkeyPatch) -> None:
    log = logging.getLogger("torch.__trace")
    records: list[logging.LogRecord] = []
    handler = logging.Handler()
    monkeypatch.setattr(handler, "emit", records.append)
    monkeypatch.setattr(log, "handlers", [handler])
    trace_artifact("fp8graph_report", "two\nlines")
    (record,) = [r for r in records if getattr(r, "metadata", {}).get("artifact")]
    values = vars(record)
    assert values["metadata"]["artifact"] == {"name": "fp8graph_report", "encoding": "string"}
    assert values["payload"] == "two\nlines"
    json.dumps(values["metadata"])  # tlparse reads JSON


def test_nothing_is_written_where_nobody_listens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch._logging._internal.trace_log, "handlers", [])
    trace_artifact("fp8graph_report", "text")
