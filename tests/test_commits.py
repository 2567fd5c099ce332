"""When amaxes are committed, and what outlives a process group. No process is started: nothing is sent."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.checkpoint import checkpoint

from fp8graph import Backend, DelayedScaling
from fp8graph.runtime.stores import accelerator_of
from helpers import MLP

if dist.is_available():
    from torch.testing._internal.distributed.fake_pg import FakeStore
else:
    pytest.skip("torch without torch.distributed", allow_module_level=True)

RECIPE = DelayedScaling(amax_history_len=4)


@pytest.fixture(autouse=True)
def _group() -> Iterator[None]:  # pyright: ignore[reportUnusedFunction]
    """Two ranks, of which this process is one."""
    gc.collect()  # backends of other tests: Dynamo guards the hooks of optimizers
    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


def trained(how: str = "plain", steps: int = 3) -> tuple[Backend, nn.Module]:
    """The model, too: the state of layers goes with them."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    net = MLP(32, 64)
    backend = Backend(recipe=RECIPE, compiler="eager")
    train(torch.compile(net, backend=backend), net, how, steps)
    return backend, net


def train(model: Any, net: nn.Module, how: str = "plain", steps: int = 3) -> None:
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    step = torch.compile(optimizer.step, backend="eager") if how == "compiled step" else optimizer.step
    for _ in range(steps):
        x = torch.randn(16, 32, requires_grad=True)
        y = checkpoint(model, x, use_reentrant=how == "reentrant") if "reentrant" in how else model(x)
        y.square().sum().backward()
        step()


def state_of(backend: Backend) -> dict[str, list[float]]:
    return {name: tensor.tolist() for name, tensor in backend.state_dict().items()}


@pytest.mark.slow
@pytest.mark.parametrize("how", ["reentrant", "not reentrant"])
def test_checkpointing_around_compiled_code_commits(how: str) -> None:
    """With the reentrant one every call that trains is one of backward."""
    (expected, _net), (found, _other) = trained(), trained(how)
    assert any(scale != [1.0] for name, scale in state_of(expected).items() if "|scale" in name)
    assert state_of(found) == state_of(expected)


@pytest.mark.slow
def test_a_compiled_optimizer_step_leaves_the_commit_to_the_next_forward() -> None:
    (expected, _net), (found, _other) = trained(steps=2), trained("compiled step")
    assert any(scale != [1.0] for name, scale in state_of(expected).items() if "|scale" in name)
    assert state_of(found) == state_of(expected)


@pytest.mark.slow
def test_the_process_group_may_be_destroyed() -> None:
    """With a step that nothing has committed: its forward and backward are done."""
    backend, net = trained()
    model = torch.compile(net, backend=backend)
    model(torch.randn(16, 32)).sum().backward()
    before = state_of(backend)
    dist.destroy_process_group()
    (reduction,) = [c for c in backend.report.collectives if c.direction == "step"]
    assert reduction.ranks == 2
    assert "1 collectives" in str(backend.report)
    assert state_of(backend) == before
    train(model, net)
    assert state_of(backend) != before


def test_a_number_on_the_cpu_does_not_say_where_the_model_is() -> None:
    """With ``dynamic=True`` a float is a tensor on the CPU, which NCCL does not reduce."""
    assert accelerator_of([torch.tensor(1.0), 2, torch.empty(2, device="meta")]).type == "meta"
    assert accelerator_of([2, torch.tensor(1.0)]).type == "cpu"


@pytest.mark.slow
def test_a_backend_may_be_collected_while_hooks_of_optimizers_run() -> None:
    """Torch iterates over them, and two backends that refer to themselves are garbage."""
    gc.disable()
    for backend in (Backend(compiler="eager"), Backend(compiler="eager")):
        backend.cycle = backend  # pyright: ignore[reportAttributeAccessIssue]
    del backend
    optimizer = torch.optim.SGD(nn.Linear(2, 2).parameters())
    handles = [register_optimizer_step_post_hook(lambda *_: print(gc.collect())) for _ in range(2)]
    optimizer.step()
    gc.enable()
    for handle in handles:
        handle.remove()
