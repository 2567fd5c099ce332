"""gather_weights: which weights FSDP2 may gather in FP8, and the text of every reason."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from fp8graph import MXFP8BlockScaling, Policy
from fp8graph.compat.fsdp import Shard
from fp8graph.ir.naming import graph_inputs
from fp8graph.passes.gather_weights import GatheredWeight, why_not_sent
from helpers import first_fast, passed


class Twice(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return super().forward(x) + self.weight.sum()


class Scaled(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return nn.functional.linear(x, self.weight * 2)


def reasons(module: nn.Module, recipe: Any, shard: Any = (128, None), last: str = "share") -> list[str | None]:
    """Of each weight of a graph whose parameters FSDP2 gathers."""
    policy = Policy(default=recipe, min_speedup=0)
    x = torch.randn(64, 256, dtype=torch.bfloat16, requires_grad=True)
    graph, found = passed(module.bfloat16(), x, last=last, policy=policy)
    parameters = {
        node: index for node, index in graph_inputs(graph) if index is not None and index in found.facts.parameters
    }
    facts = dataclasses.replace(
        found.facts,
        training=True,
        parameter_facts={GatheredWeight.store: dict.fromkeys(parameters.values(), Shard(*shard))},
    )
    return [*why_not_sent(graph, parameters, dataclasses.replace(found, facts=facts)).values()]


class Checkpointed(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return checkpoint(super().forward, x, use_reentrant=False)  # pyright: ignore


SQUARE = MXFP8BlockScaling(enable_2d_quantization=True)


@first_fast("recipe", ["tensorwise", "blockwise", "rowwise", "mxfp8", SQUARE])
def test_plain_weight_can_be_sent(recipe: Any) -> None:
    assert reasons(nn.Linear(256, 256, bias=False), recipe) == [None]


@pytest.mark.parametrize(
    ("module", "recipe", "shard", "reason"),
    [
        (nn.Linear(256, 256), "tensorwise", (128, "it is sharded along dim 1"), "it is sharded along dim 1"),
        (nn.Linear(256, 256), "blockwise", (64, None), "shards of 64 rows are not a multiple of the 128-row tile"),
        (nn.Linear(256, 264), "tensorwise", (132, None), "it is padded"),
        (Twice(256, 256), "tensorwise", (128, None), "it is read in high precision too, by "),
        (Scaled(256, 256), "tensorwise", (128, None), "it is computed from more than matrices and casts"),
        (nn.Linear(256, 256), "delayed", (128, None), "its amaxes are not reduced over the ranks that gather"),
        (nn.Linear(256, 256), "mxfp8", (48, None), "shards of 48 rows are not a multiple of the 32-row tile"),
        (nn.Linear(256, 256), SQUARE, (48, None), "shards of 48 rows are not a multiple of the 32-row tile"),
        (nn.Linear(256, 256), "rowwise", (128, None, "", True), "one gather serves both directions"),
        (nn.Linear(256, 256), "mxfp8", (128, None, "", True), "one gather serves both directions"),
        (Checkpointed(256, 256), "rowwise", (128, None), "backward reads fprop's copy of it, too"),
        (nn.Linear(256, 256), "nvfp4", (128, None), "NVFP4 tensors are never sent quantized"),
    ],
)
def test_weight_that_cannot_be_sent_has_a_reason(module: nn.Module, recipe: Any, shard: Any, reason: str) -> None:
    (found,) = reasons(module, recipe, shard)
    assert found is not None
    assert found.startswith(reason)


def test_joined_weights_are_sent_together() -> None:
    class Joined(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(256, 256, bias=False), nn.Linear(256, 256, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            return self.a(x) * self.b(x)

    for recipe in ("tensorwise", "rowwise"):
        assert reasons(Joined(), recipe, last="fuse_linears") == [None]
