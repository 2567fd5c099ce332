"""The list of passes: those that a graph does not need would change nothing in it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from attentions import qkv, sdpa
from fp8graph import DelayedScaling, Policy, Rule
from fp8graph.backend import inductor_passes
from helpers import ALL, MLP, NONE, view_of

# Users ask for these by name, and they do not look whether anyone did.
ASKED_FOR = {"score", "fuse_linears", "observe", "hoist_weights", "note_weights", "accumulate_wgrad"} | {
    "refuse_batches",
    "fix_order",
    "fix_sums",
}


LINEAR = nn.Linear(64, 32).bfloat16()


def x(*shape: int, **settings: Any) -> Any:
    return torch.randn(shape, dtype=torch.bfloat16, **settings)


@pytest.mark.parametrize(
    ("module", "inputs", "policy"),
    [
        pytest.param(MLP().bfloat16(), [x(16, 32)], ALL, id="training"),
        pytest.param(MLP().bfloat16().requires_grad_(False), [x(16, 32)], ALL, id="inference"),
        pytest.param(MLP().bfloat16(), [x(16, 32)], NONE, id="high precision"),
        pytest.param(MLP().bfloat16(), [x(16, 32)], Policy(default=DelayedScaling()), id="delayed"),
        pytest.param(LINEAR, [x(16, 64, requires_grad=True)], Policy(default="nvfp4"), id="nvfp4"),
        pytest.param(sdpa(), qkv(), Policy([Rule("*", "tensorwise", op="attention")]), id="attention"),
    ],
)
def test_a_pass_that_is_not_needed_would_change_nothing(
    module: Any, inputs: Any, policy: Policy, monkeypatch: pytest.MonkeyPatch
) -> None:
    view = view_of(module, *inputs, policy=policy)
    every = [
        each if each.name in ASKED_FOR else each._replace(needed=lambda graph, compilation: True)
        for each in inductor_passes.JOINT_PIPELINE
    ]
    monkeypatch.setattr(inductor_passes, "JOINT_PIPELINE", tuple(every))
    torch._dynamo.reset()
    forced = view_of(module, *inputs, policy=policy)
    assert len(forced.stages) > len(view.stages)
    assert forced.after == view.after
    assert forced.stages == {**forced.stages, **view.stages}
