"""compiler="eager" draws the random numbers of the eager program, and leaves torch's generator where that does."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Literal

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from fp8graph import Backend, Policy, Rule
from helpers import NONE, first_fast, same_bits


class _Noisy(torch.autograd.Function):
    """Draws in backward."""

    @staticmethod
    def forward(ctx: torch.autograd.function.FunctionCtx, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, *dy: Tensor) -> Tensor:
        return dy[0] + torch.randn_like(dy[0])


def attend(x: Tensor) -> Tensor:
    q = x.view(4, 4, 2, 8).transpose(1, 2)
    return functional.scaled_dot_product_attention(q, q, q, dropout_p=0.5, is_causal=True).reshape(x.shape)


def unread(x: Tensor) -> Tensor:
    torch.rand(3)
    return x * torch.rand(1)


DRAWS: dict[str, Callable[[Tensor], Tensor]] = {
    "randn": lambda x: x + torch.randn(x.shape),  # first, and so fast: Inductor's passes replace it
    "dropout": lambda x: functional.dropout(x, 0.5),
    "alpha_dropout": lambda x: functional.alpha_dropout(x, 0.5, training=True),
    "feature_dropout": lambda x: functional.dropout2d(x.view(4, 4, 4, 4), 0.5).view(x.shape),
    "attention": attend,
    "rand_like": lambda x: x * torch.rand_like(x),
    "normal": lambda x: x + torch.normal(x.detach(), 0.5),
    "randint_like": lambda x: x * torch.randint_like(x, 3),
    "randint": lambda x: x * torch.randint(5, x.shape),
    "randperm": lambda x: x[:, torch.randperm(16)],
    "bernoulli": lambda x: x * torch.bernoulli(torch.sigmoid(x)),
    "bernoulli_p": lambda x: x * torch.bernoulli(x.detach(), 0.25),
    "bernoulli_": lambda x: x * torch.empty_like(x).bernoulli_(0.25),
    "uniform_": lambda x: x * torch.empty_like(x).uniform_(),
    "exponential_": lambda x: x * torch.empty_like(x).exponential_(),
    "multinomial": lambda x: x[torch.multinomial(torch.softmax(x[0], 0), 16, replacement=True)],
    "rrelu": lambda x: functional.rrelu(x, training=True),
    "gumbel_softmax": lambda x: functional.gumbel_softmax(x),
    "in backward": lambda x: _Noisy.apply(x),
    "unread": unread,
    "checkpoint": lambda x: checkpoint(lambda y: functional.dropout(torch.sin(y), 0.5), x, use_reentrant=False),
}


class Drawing(nn.Module):
    """Two linears with random numbers between and behind them."""

    def __init__(self, draw: str) -> None:
        super().__init__()
        self.up, self.down, self.draw = nn.Linear(16, 16), nn.Linear(16, 16), DRAWS[draw]

    def forward(self, x: Tensor) -> Tensor:
        return self.draw(self.down(self.draw(self.up(x))))


def trained(model: nn.Module, steps: int = 3) -> list[Tensor]:
    """Results, gradients and the next random numbers of training steps."""
    torch.manual_seed(3)
    found: list[Tensor] = []
    for _ in range(steps):
        x = torch.randn(16, 16, requires_grad=True)
        y = model(x)
        y.square().sum().backward()
        gradients = [leaf.grad for leaf in (x, *model.parameters()) if leaf.grad is not None]
        found += [y.detach(), *gradients, torch.get_rng_state()]
        with torch.no_grad():
            found += [model(x), torch.get_rng_state()]
        model.zero_grad()
    return found


SOFTMAX = ("attention", "gumbel_softmax")  # torch decomposes it with other roundings


@first_fast("draw", DRAWS)
def test_an_eager_compiler_draws_as_the_eager_program(draw: str) -> None:
    model = Drawing(draw)
    compiled = copy.deepcopy(model)
    compiled.compile(backend=Backend(NONE, compiler="eager"))
    found, wanted = trained(compiled), trained(model)
    if draw in SOFTMAX:
        assert all(same_bits(a == 0, b == 0) for a, b in zip(found, wanted, strict=True))
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)
    else:
        assert same_bits(found, wanted)


def test_an_eager_compiler_draws_as_the_eager_program_under_compiled_autograd() -> None:
    model = Drawing("in backward")
    compiled = copy.deepcopy(model)
    compiled.compile(backend=Backend(NONE, compiler="eager"))
    with torch._dynamo.config.patch(compiled_autograd=True):
        found = trained(compiled, steps=2)
    assert same_bits(found, trained(model, steps=2))


def reported(compiler: Literal["inductor", "eager"]) -> str:
    policy = Policy([Rule("*", "tensorwise", op="attention")], default="tensorwise", min_speedup=0)
    backend = Backend(policy, compiler=compiler)
    torch.compile(Drawing("attention"), backend=backend)(torch.randn(16, 16)).sum().backward()
    assert all("quantize_attention" in graph.stages for graph in backend.report.graphs)
    return str(backend.report)


def test_dropout_hides_no_attention_from_an_eager_compiler() -> None:
    assert reported("eager")


@pytest.mark.slow
def test_both_compilers_decide_alike_about_dropout() -> None:
    eager = reported("eager")
    torch._dynamo.reset()
    assert eager == reported("inductor")
