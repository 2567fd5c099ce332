"""Compiled autograd: torch hands the backward that was rewritten with its forward to a backend again.

Its GEMMs are those that the forward's report lists. They are neither decided again nor listed twice.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._dynamo import compiled_autograd
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from fp8graph import Backend, Policy, Rule
from helpers import first_slow, same_bits


class Net(nn.Module):
    """Two linears of one input, which are fused, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k = nn.Linear(32, 32, bias=False), nn.Linear(32, 32, bias=False)
        self.head = nn.Linear(32, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.head((self.q(x) * self.k(x)).relu())


def policy(recipe: str) -> Policy:
    """In backward alone the head's matmuls are those of activations, which the second rule would take."""
    return Policy([Rule("*head", None), Rule("*", recipe, op="*")], min_speedup=0)


def compiled(model: Any, backend: Any) -> Any:
    return torch.compile(model, backend=backend)


def checkpointed(model: Any, backend: Any) -> Any:
    layers = torch.compile(model, backend=backend)
    return lambda x: checkpoint(layers, x, use_reentrant=False)


def train(backend: Any, again: bool, wrap: Any = compiled) -> tuple[list[Tensor], Net]:
    """The gradients of four steps, of two sizes, in three updates; ``again``: backward is compiled again."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    net = Net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    run, gradients = wrap(net, backend), []
    for rows in (16, 16, 48, 48):
        loss = run(torch.randn(rows, 32)).square().mean()
        with compiled_autograd._enable(torch.compile(backend=backend)) if again else contextlib.nullcontext():
            loss.backward()
        if rows == 48 or gradients:
            optimizer.step()
        gradients += [p.grad.clone() for p in net.parameters() if p.grad is not None]
    return gradients, net


def rows(backend: Backend) -> list[tuple[str, str, str]]:
    return [(gemm.fqn, gemm.gemm, str(gemm.recipe)) for gemm in backend.report.gemms]


@first_slow(
    ("recipe", "wrap", "options"),
    [
        ("delayed", compiled, {}),
        ("delayed", checkpointed, {"save": "memory"}),
        ("delayed", compiled, {"cache_weights": False, "accumulate_wgrad": True}),
        ("tensorwise", compiled, {}),
    ],
)
def test_gradients_state_and_report_are_those_without_it(recipe: str, wrap: Any, options: dict[str, Any]) -> None:
    expected, got = (Backend(policy(recipe), compiler="eager", **options) for _ in range(2))
    (gradients, net), (again, other) = train(expected, False, wrap), train(got, True, wrap)
    assert all(torch.equal(a, b) for a, b in zip(gradients, again, strict=True))
    assert rows(got) == rows(expected)
    assert {recipe for _, _, recipe in rows(got)} == {str(expected.policy.rules[1].recipe), "None"}
    state, other_state = dict(expected.state_dict()), dict(got.state_dict())
    assert (len(state) > 1) == (recipe == "delayed")
    assert same_bits(state.values(), other_state.values())
    del net, other  # their state is freed with them


def test_a_step_compiled_by_name() -> None:
    torch._dynamo.reset()
    torch.manual_seed(0)
    net, x = Net(), torch.randn(16, 32)

    def step(x: Tensor) -> None:
        net(x).square().mean().backward()

    gradients: list[list[Tensor]] = []
    for again in (False, True):
        net.zero_grad()
        with torch._dynamo.config.patch(compiled_autograd=again):
            function = torch.compile(step, backend="fp8graph", options={"compiler": "eager", "recipe": "tensorwise"})
            function(x)
        gradients.append([p.grad.clone() for p in net.parameters() if p.grad is not None])
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))


@pytest.fixture
def process_group() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.slow
@pytest.mark.skipif(not dist.is_available(), reason="torch without torch.distributed")
@pytest.mark.usefixtures("process_group")
def test_ddp_whose_reducer_is_python() -> None:
    """The Python reducer is for compiled autograd alone. Names then begin with "module.". Amaxes are reduced, too."""

    def wrap(model: Net, backend: Any) -> Any:
        return torch.compile(DistributedDataParallel(model), backend=backend)

    expected, _ = train(Backend(policy("delayed"), compiler="eager"), False)
    with torch._dynamo.config.patch(optimize_ddp="python_reducer"):
        got, _ = train(Backend(policy("delayed"), compiler="eager"), True, wrap)
    assert all(torch.equal(a, b) for a, b in zip(expected, got, strict=True))


@pytest.mark.release
def test_its_code_is_generated() -> None:
    """The dialect's nodes are lowered there, and the gradients are those of the backward that AOTAutograd compiles."""
    (expected, _), (got, _) = (train(Backend(policy("delayed")), again) for again in (False, True))
    assert all(torch.equal(a, b) for a, b in zip(expected, got, strict=True))
