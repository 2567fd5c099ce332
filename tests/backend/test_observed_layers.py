"""Globs of layers, and those that match none."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fp8graph import Backend
from fp8graph.backend.observed_layers import UnmatchedLayers, texts
from fp8graph.errors import ConfigError
from helpers import ALL, MLP


def test_one_text_or_several() -> None:
    assert texts("observe", "layers", "a*") == ("a*",)
    assert texts("observe", "layers", ["a", "b"]) == ("a", "b")
    wrongs: list[Any] = [3, [], ["a", 3], None]
    for wrong in wrongs:
        with pytest.raises(ConfigError, match=r"^observe\(layers=.*\): expected a string or a list of strings\.$"):
            texts("observe", "layers", wrong)


def test_it_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    check = UnmatchedLayers("observe", ["up", "dwn"], lambda: {"up", "down"})
    check()
    check()
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
