"""programs: graphs go with their models; the report keeps what they were, not without end."""

from __future__ import annotations

import pytest
import torch

from fp8graph import Backend, Float8CurrentScaling
from fp8graph.backend import compiled_graph
from fp8graph.extras.planning.scoring import Scoring
from fp8graph.ir.decisions import GatheredInFP8
from fp8graph.passes.observe.observation import Observation
from helpers import ALL, MLP


def test_the_report_outlives_models() -> None:
    backend = Backend(ALL, compiler="eager")

    def compiled(inner: int) -> None:
        torch.compile(MLP(32, inner), backend=backend)(torch.randn(16, 32))

    compiled(64)
    (live,) = backend.report.graphs
    torch._dynamo.reset()
    (gone,) = backend.report.graphs
    assert gone == live
    assert len(list(live.module.graph.nodes)) > 10  # who holds the view holds the graph
    with pytest.raises(ValueError, match="has text but no module: its model is gone"):
        _ = gone.module
    for inner in (64, 80, 64):
        compiled(inner)
        torch._dynamo.reset()
    assert [view.gemms[0].n for view in backend.report.graphs] == [80, 64]


def test_a_long_history_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled_graph, "KEPT", 2)
    backend = Backend(ALL, compiler="eager")
    for inner in (16, 32, 48, 64):
        torch.compile(MLP(32, inner), backend=backend)(torch.randn(16, 32))
        torch._dynamo.reset()
    assert [view.gemms[0].n for view in backend.report.graphs] == [48, 64]
    assert "2 older graphs, whose models are gone, are no longer listed" in str(backend.report)


def test_a_graph_that_only_measured_stays_while_it_is_alive() -> None:
    backend = Scoring([Float8CurrentScaling()], None)
    model = torch.compile(MLP(32, 64), backend=backend)
    model(torch.randn(16, 32)).sum().backward()
    for _ in range(2):  # the first report must not drop it
        assert len(backend.report.graphs) == 1


def test_the_report_lists_no_calls_of_before_a_condition_that_lasts(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if FSDP2 gathered copies from the second step on: the graph of the first one is not run any more."""
    conditions: list[GatheredInFP8] = []
    monkeypatch.setattr(Observation, "condition", lambda _store, *, gradients: conditions[-1] if conditions else None)
    model, backend = MLP(), Backend(ALL, compiler="eager")
    run, x = torch.compile(model, backend=backend), torch.randn(16, 32)
    run(x)
    gemms = len(backend.report.gemms)
    conditions.append(GatheredInFP8(frozenset()))
    run(x)
    assert len(backend.report.graphs) == 1
    assert len(backend.report.gemms) == gemms
