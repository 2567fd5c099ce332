"""calibration: the largest inputs of layers over batches in any form; the model is as it was afterwards."""

from __future__ import annotations

import torch

import fp8graph
from fp8graph.tools.export import input_amaxes
from helpers import MLP


def test_the_largest_input_over_all_batches() -> None:
    model = fp8graph.compile(MLP(), compiler="eager")
    model.train()
    batches = [torch.full((2, 32), 0.5), (torch.full((2, 32), -3.0),), {"x": torch.ones(2, 32)}]
    found = input_amaxes(model, {name: model.get_submodule(name) for name in ("gate", "down")}, batches)
    assert found["gate"] == 3.0
    assert found.keys() == {"gate", "down"}
    assert found["down"].dtype == torch.float32
    assert model.training
    assert not any(module._forward_pre_hooks for module in model.modules())
    assert fp8graph.backend_of(model).report.graphs == []  # in eager
