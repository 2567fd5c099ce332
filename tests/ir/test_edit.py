"""Nodes get the fake values that their ops give, also by the shortcut that graphs of a hundred layers need."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

from fp8graph import Policy, Rule
from fp8graph.ir import nodes, ops
from fp8graph.ir.edit import set_direction
from helpers import MLP, RECIPES, eager_backend, first_fast


class Experts(MLP):
    """An MLP, and a linear of two experts behind it: 16 tokens each."""

    def __init__(self) -> None:
        super().__init__(64, 128)
        self.experts = nn.Parameter(torch.randn(2, 64, 64))

    def forward(self, x: Tensor) -> Tensor:
        offsets = torch.tensor([16, 32], dtype=torch.int32)
        return torch._grouped_mm(super().forward(x), self.experts.transpose(-2, -1), offs=offsets)


@first_fast("recipe", RECIPES)
def test_fakes_without_dispatch_are_the_fakes_of_the_ops(recipe: str, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: set[Any] = set()
    shortcut = ops.fake_results

    def both(target: Any, args: Any, kwargs: Any) -> Any:
        made = shortcut(target, args, kwargs)
        if made is not None:
            seen.add(target)
            with args[0].fake_mode:
                expected = target(*args, **kwargs)
            assert described(made) == described(expected)
        return made

    monkeypatch.setattr(nodes.ops, "fake_results", both)
    backend = eager_backend(Policy([Rule("*", recipe, op="*")], min_speedup=0), cache_weights="update")
    x = torch.randn(32, 64, dtype=torch.bfloat16, requires_grad=True)
    torch.compile(Experts().bfloat16(), backend=backend, fullgraph=True)(x)
    # what is emulated is decoded, by an op that keeps strides
    assert seen >= {ops.quantize, ops.scaled_grouped_mm} | (
        {ops.scaled_mm} if recipe in ("tensorwise", "delayed") else set()
    )


def described(results: Any) -> list[Any]:
    return [(type(x), x.shape, x.stride(), x.dtype, x.device, x.fake_mode) for x in pytree.tree_leaves(results)]


def test_a_dynamic_size_takes_the_long_way() -> None:
    backend = eager_backend()
    torch.compile(nn.Linear(32, 32), backend=backend, dynamic=True)(torch.randn(32, 32, requires_grad=True))
    assert all(gemm.recipe for gemm in backend.report.gemms)


@pytest.mark.parametrize("tag", ["must_be_in_backward", None])
def test_the_direction_of_a_node(tag: str | None) -> None:
    """The node leaves the checkpointing region that it was made in."""
    node = fx.Graph().placeholder("x")
    node.meta |= {"recompute": 1, "ac_graph_id": 2, "partitioner_tag": "is_backward", "val": 3}
    set_direction(node, tag)
    assert node.meta == ({"val": 3} if tag is None else {"val": 3, "partitioner_tag": tag})
