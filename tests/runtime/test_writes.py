"""No way to write a weight leaves a graph with older numbers, whatever it leaves no trace of."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn

import fp8graph
from fp8graph import Policy
from helpers import eager_backend, first_fast, same_bits
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
@first_fast("recipe", ["tensorwise", "rowwise", "blockwise"])
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


class Written(Last):
    """A linear whose weight its own forward writes, in each call: a hook of it, before it multiplies."""

    def __init__(self, hook: Callable[[Any], Any]) -> None:
        super().__init__()
        linear: Any = self.linear
        linear.original, linear.vector = nn.Parameter(linear.weight.detach().clone()), torch.ones(48)
        if hook is not _in_place:
            del linear._parameters["weight"]
            linear.weight = linear.original.detach().clone()  # a plain tensor, as spectral_norm's

        def before(module: Any, _args: Any) -> None:
            with torch.no_grad():
                hook(module)

        linear.register_forward_pre_hook(before)


def _in_place(linear: Any) -> None:
    linear.weight.mul_(1.1)


def _set_anew(linear: Any) -> None:
    linear.vector = linear.vector * 1.1
    linear.weight = linear.original * linear.vector


def _filled_again(linear: Any) -> None:
    linear.vector.mul_(1.1)
    linear.weight.copy_(linear.original * linear.vector)


def _with(norm: Callable[[nn.Module], nn.Module]) -> Last:
    model = Last()
    norm(model.linear)
    return model


FORWARDS: dict[str, Callable[[], Last]] = {
    "spectral_norm": lambda: _with(nn.utils.spectral_norm),
    "weight_norm": lambda: _with(cast(Any, nn.utils).weight_norm),
    "a parameter in place": lambda: Written(_in_place),
    "a plain tensor": lambda: Written(_set_anew),
    "a plain tensor in place": lambda: Written(_filled_again),
}


@pytest.mark.filterwarnings("ignore:.*weight_norm.* is deprecated:FutureWarning")
@first_fast("cache_weights", ["update", True])
@first_fast("without_gradients", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("name", FORWARDS)
def test_a_forward_that_writes_its_own_weight(name: str, without_gradients: Any, cache_weights: Any) -> None:
    """Each backend has a model of its own: of one of these, two calls in a row multiply other numbers, as in torch."""
    results: list[list[Tensor]] = []
    for kept in (cache_weights, False):
        torch._dynamo.reset()
        torch.manual_seed(0)
        model, x = FORWARDS[name](), torch.randn(16, 48)
        run = torch.compile(model, backend=eager_backend(cache_weights=kept), dynamic=False)
        with without_gradients():
            results.append([run(x).clone() for _ in range(3)])
    assert same_bits(*results)
    moves = name != "weight_norm"
    assert all(torch.equal(a, b) is not moves for a, b in itertools.pairwise(results[0]))
