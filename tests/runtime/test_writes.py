"""No way to write a weight leaves a graph with older numbers, whatever it leaves no trace of."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fp8graph
from fp8graph import Policy
from helpers import same_bits
from writes import WAYS


class Last(nn.Module):
    """A linear that is the last operation: the sum of its gradients is easy to see."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(48, 32, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x)


def trained(run: Any, x: Tensor) -> list[Tensor]:
    x = x.clone().requires_grad_()
    out = run(x)
    out.square().sum().backward()
    assert x.grad is not None
    return [out.detach(), x.grad]


@pytest.mark.parametrize("compiler", ["eager", pytest.param("inductor", marks=pytest.mark.slow)])
@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise", "blockwise"])
def test_a_hundred_ways_to_write_a_weight(recipe: str, compiler: Any) -> None:
    """Beside a backend that keeps no copies at all, with and without gradients."""
    assert len(WAYS) >= 100
    model, x = Last(), torch.randn(16, 48)
    policy = Policy(default=recipe, min_speedup=0)
    ours, right = (
        torch.compile(model, backend=fp8graph.Backend(policy, compiler=compiler, cache_weights=kept), dynamic=False)
        for kept in (True, False)
    )
    stale: list[str] = []
    for name, write in WAYS.items():
        for turn in range(2):  # the second time after nothing but calls without gradients
            nn.init.normal_(model.linear.weight, std=0.2)
            with torch.no_grad():
                before = ours(x)
            write(model.linear)
            with torch.no_grad():
                found, expected = ours(x), right(x)
            if not torch.equal(found, expected) or torch.equal(before, expected):
                stale.append(f"{name}, turn {turn}, without gradients")
            if turn:
                write(model.linear)
                if not same_bits(trained(ours, x), trained(right, x)):
                    stale.append(f"{name}, with gradients")
    assert stale == []
