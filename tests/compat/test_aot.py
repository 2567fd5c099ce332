"""aot: which of Dynamo's inputs a placeholder is; the memory budget of a graph."""

from __future__ import annotations

import pytest
import torch
from torch import fx, nn
from torch._functorch import config
from torch._functorch._aot_autograd.descriptors import PlainAOTInput, SubclassGetAttrAOTInput
from torch.utils.checkpoint import CheckpointPolicy

from fp8graph.compat import aot
from fp8graph.compat.distributed import SHARD
from helpers import NONE, view_of


def placeholder(desc: object = None) -> fx.Node:
    node = fx.Graph().placeholder("x")
    node.meta.update({} if desc is None else {"desc": desc})
    return node


def test_a_position_that_was_set_is_read() -> None:
    node = placeholder()
    assert aot.input_position(node) is None
    aot.set_input_position(node, 3)
    assert aot.input_position(node) == 3


def test_a_shard_is_where_its_dtensor_is() -> None:
    assert aot.input_position(placeholder(SubclassGetAttrAOTInput(PlainAOTInput(2), SHARD))) == 2


def test_other_parts_of_a_subclass_are_not_inputs() -> None:
    assert aot.input_position(placeholder(SubclassGetAttrAOTInput(PlainAOTInput(2), "inner"))) is None


def test_inputs_of_a_real_graph() -> None:
    """Parameters and activations are where Dynamo has them, gradients of outputs nowhere."""
    view = view_of(nn.Linear(32, 48), torch.randn(16, 32, requires_grad=True), policy=NONE)
    placeholders = view.module.graph.find_nodes(op="placeholder")
    assert [aot.input_position(node) for node in placeholders] == [0, 1, 2, None]
    assert str(placeholders[-1].target).startswith("tangents")


def test_backward_is_compiled_at_once_only_inside() -> None:
    with aot.backward_at_once():
        assert config.force_non_lazy_backward_lowering
    assert not config.force_non_lazy_backward_lowering


@pytest.mark.parametrize(
    ("policy", "budget", "taken"),
    [
        (CheckpointPolicy.MUST_SAVE, 0.0, [aot._LEAST]),
        (CheckpointPolicy.MUST_SAVE, 0.5, []),
        (CheckpointPolicy.PREFER_RECOMPUTE, 0.0, []),
    ],
)
def test_a_memory_budget_of_0_is_another_where_a_node_must_be_saved(
    policy: CheckpointPolicy, budget: float, taken: list[float]
) -> None:
    node = placeholder()
    node.meta["recompute"] = policy
    with config.patch(activation_memory_budget=budget):
        aot.save_what_must_be_saved(node.graph)
    assert [each.meta["memory_budget"] for each in node.graph.nodes if "memory_budget" in each.meta] == taken
