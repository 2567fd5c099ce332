"""Globs of layers, and those that match none."""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import fp8graph
from fp8graph import Backend
from fp8graph.backend.entry import is_compiled
from fp8graph.errors import ConfigError
from fp8graph.passes.observe.statistics import Layers, texts
from helpers import ALL, MLP, in_one_test


def test_one_text_or_several() -> None:
    assert texts("observe", "layers", "a*") == ("a*",)
    assert texts("observe", "layers", ["a", "b"]) == ("a", "b")
    wrongs: list[Any] = [3, [], ["a", 3], None]
    for wrong in wrongs:
        with pytest.raises(ConfigError, match=r"^observe\(layers=.*\): expected a string or a list of strings\.$"):
            texts("observe", "layers", wrong)


def test_unmatched_layers_are_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    view = SimpleNamespace(gemms=[SimpleNamespace(fqn="up"), SimpleNamespace(fqn="down")])
    graphs: Any = [SimpleNamespace(views=[view])]
    layers = Layers("observe", ["up", "dwn"], graphs)
    layers.warn()
    layers.warn()
    assert [r.getMessage() for r in caplog.records] == [
        "observe(layers=['dwn']) matches no layer, so nothing is measured for it. Layers: down, up."
    ]


def test_statistics_say_it_after_the_first_observed_step(caplog: pytest.LogCaptureFixture) -> None:
    backend = Backend(ALL, compiler="eager")
    backend.observe(every=2, layers=["up", "dwn"])
    torch._dynamo.reset()
    model = MLP()
    compiled, optimizer = torch.compile(model, backend=backend), torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(4):
        compiled(torch.randn(16, 32)).sum().backward()
        optimizer.step()
    assert [r.getMessage() for r in caplog.records if "matches no layer" in r.getMessage()] == [
        "observe(layers=['dwn']) matches no layer, so nothing is measured for it. Layers: down, gate, up."
    ]


@in_one_test("call", ["observe", "guard"])
@in_one_test(
    ("layers", "message"),
    [
        ("dwn", "matches no layer of the model. Did you mean 'down'?"),
        (["u*", "proj"], "matches no layer of the model. Did you mean '*.proj'?"),
        ("nosuch", "matches no layer of the model. Its modules: attention, attention.proj, attention.scale, down, ..."),
    ],
)
def test_a_bound_model_has_no_such_layer(call: str, layers: Any, message: str) -> None:
    model = MLP()
    attention = model.attention = torch.nn.Module()
    attention.proj, attention.scale = torch.nn.Linear(8, 8), torch.nn.Parameter(torch.ones(8, 8))
    last = layers if isinstance(layers, str) else layers[-1]
    error = pytest.raises(ConfigError, match="^" + re.escape(f"{call}(layers=[{last!r}]) {message}"))
    asked: dict[str, Any] = {call: {"layers": layers}}
    with error:
        fp8graph.compile(model, compiler="eager", **asked)
    assert not is_compiled(model)
    fp8graph.compile(model, compiler="eager")
    backend = fp8graph.backend_of(model)
    with error:
        getattr(backend, call)(layers=layers)
    assert (backend.statistics, backend.guards) == (None, ())
    for known in ("up", "*.proj", "attention.scale", "*"):
        getattr(backend, call)(layers=known)


def test_a_layer_may_be_of_a_graph_that_is_compiled_beside_the_model() -> None:
    """A function that multiplies activations, or another model that nobody bound."""
    torch._dynamo.reset()
    backend = Backend(ALL, compiler="eager")
    backend.bind(torch.nn.ModuleDict({"teacher": MLP()}))
    torch.compile(MLP(), backend=backend)(torch.randn(16, 32))
    backend.observe(layers="gate")
