"""A policy with a schedule moves on with the steps of training, nobody needs to tell it."""

from __future__ import annotations

import logging
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import changing
import fp8graph
from fp8graph import DelayedScaling, Policy, Rule
from fp8graph.errors import StateError
from helpers import MLP, Counting, eager_backend, first_fast, in_one_test, same_bits
from ranks import run_each, run_ranks

DELAYED = DelayedScaling(amax_history_len=4)
WARM_UP = Policy([Rule("*", None, steps=(0, 2))], default=DELAYED, min_speedup=0)
X = torch.randn(16, 32, generator=torch.Generator().manual_seed(1))


def model_and(policy: Any = WARM_UP) -> tuple[MLP, fp8graph.Backend]:
    torch._dynamo.reset()
    torch.manual_seed(0)
    model, backend = MLP(), eager_backend(policy, cache_weights="update")
    backend.bind(model)
    model.compile(backend=backend)
    return model, backend


def in_fp8(backend: fp8graph.Backend) -> bool:
    """Whether the policy of now gives a recipe."""
    return backend.policy.resolve("up", "linear").recipes["fprop"] is not None


def train(model: nn.Module, optimizers: list[Any], backend: fp8graph.Backend, steps: int, backwards: int = 1) -> Any:
    seen: list[bool] = []
    losses: list[torch.Tensor] = []
    for _ in range(steps):
        loss = torch.zeros(())
        for _ in range(backwards):
            loss = (model(X) - X).square().mean()
            loss.backward()
        losses.append(loss.detach())
        seen.append(in_fp8(backend))
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    return seen, losses


@first_fast("kwargs", [{}, {"fused": True}])
@first_fast("backwards", [1, 3])
def test_schedule_advances_by_optimizer_steps(kwargs: dict[str, Any], backwards: int) -> None:
    model, backend = model_and()
    seen, _ = train(model, [torch.optim.AdamW(model.parameters(), **kwargs)], backend, 4, backwards)
    assert seen == [False, False, True, True]
    assert [{g.recipe is None for g in graph.gemms} for graph in backend.report.graphs] == [{True}, {False}]
    assert {g.recipe is None for g in backend.report.gemms} == {False}  # those that run now
    with torch.no_grad():
        model(X)  # evaluation is no step
    assert in_fp8(backend)


def test_schedule_equals_set_policy_before_each_step() -> None:
    model, backend = model_and()
    _, losses = train(model, [torch.optim.AdamW(model.parameters())], backend, 4)
    plain, other = model_and(None)
    expected: list[torch.Tensor] = []
    optimizer = torch.optim.AdamW(plain.parameters())
    for step in range(4):
        other.set_policy(WARM_UP.at_step(step))
        expected += train(plain, [optimizer], other, 1)[1]
    assert same_bits(losses, expected)
    assert same_bits(model.parameters(), plain.parameters())


def test_who_tells_it_is_obeyed() -> None:
    model, backend = model_and(WARM_UP.at_step(0))
    optimizer = torch.optim.AdamW(model.parameters())
    assert train(model, [optimizer], backend, 4)[0] == [False] * 4
    backend.set_policy(WARM_UP)  # four steps are over
    assert train(model, [optimizer], backend, 1)[0] == [True]


def test_several_optimizers_of_one_model_make_one_step() -> None:
    model, backend = model_and()
    optimizers = [torch.optim.SGD(part.parameters()) for part in (model.gate, model.up, model.down)]
    assert train(model, optimizers, backend, 3)[0] == [False, False, True]


def test_an_optimizer_of_another_model_does_not_count() -> None:
    """A GAN's critic takes five steps for one of the generator's."""
    model, backend = model_and()
    other = nn.Parameter(torch.zeros(3))
    critic = torch.optim.SGD([other])
    other.grad = torch.ones(3)
    assert train(model, [torch.optim.SGD(model.parameters()), *[critic] * 5], backend, 3)[0] == [False, False, True]


def test_an_optimizer_of_copies_counts() -> None:
    """Of slices of the parameters, like ZeRO's, or of masters."""
    model, backend = model_and()
    flat = nn.Parameter(torch.zeros(3))
    assert train(model, [torch.optim.SGD([flat])], backend, 3)[0] == [False, False, True]


@pytest.mark.slow
def test_a_compiled_step_counts() -> None:
    model, backend = model_and()
    optimizer = torch.optim.SGD(model.parameters())
    optimizer.step = torch.compile(optimizer.step, backend="eager")
    assert train(model, [optimizer], backend, 3)[0] == [False, False, True]


@first_fast("cut", [1, 3])
def test_a_resumed_run_goes_on_where_it_was(cut: int) -> None:
    whole, backend = model_and()
    optimizer = torch.optim.AdamW(whole.parameters())
    _, losses = train(whole, [optimizer], backend, 4)
    first, backend1 = model_and()
    optimizer = torch.optim.AdamW(first.parameters())
    before = train(first, [optimizer], backend1, cut)[1]
    saved = first.state_dict(), optimizer.state_dict(), backend1.state_dict()
    assert saved[2]["fp8graph.step"].item() == cut
    second, backend2 = model_and()
    optimizer = torch.optim.AdamW(second.parameters())
    second.load_state_dict(saved[0])
    optimizer.load_state_dict(saved[1])
    backend2.load_state_dict(saved[2])
    after = train(second, [optimizer], backend2, 4 - cut)[1]
    assert same_bits([*before, *after], losses)
    assert same_bits(whole.parameters(), second.parameters())
    assert same_bits(backend.state_dict().values(), backend2.state_dict().values())
    again = pickle.loads(pickle.dumps(backend2))  # noqa: S301
    assert in_fp8(again)
    assert again.state_dict()["fp8graph.step"].item() == 4
    backend2.load_state_dict({**dict(backend2.state_dict()), "fp8graph.step": torch.tensor([0])})
    assert not in_fp8(backend2)


def test_states_of_earlier_versions(caplog: pytest.LogCaptureFixture) -> None:
    _, plain = model_and(WARM_UP.at_step(5))
    assert "fp8graph.step" not in plain.state_dict()
    _, backend = model_and()
    with caplog.at_level(logging.WARNING, logger="fp8graph"):
        backend.load_state_dict(plain.state_dict())
    assert "has no step number" in caplog.text
    assert "goes on at step 0" in caplog.text


@in_one_test("step", [torch.tensor([-1]), torch.tensor([1.5]), 3, torch.tensor([1, 2])])
def test_a_damaged_step(step: Any) -> None:
    _, backend = model_and()
    with pytest.raises(StateError, match="'fp8graph.step' is not a whole number >= 0. Nothing was loaded."):
        backend.load_state_dict({**dict(backend.state_dict()), "fp8graph.step": step})


def test_ranks_compare_the_schedule_not_the_step_of_an_evaluation() -> None:
    model, backend = model_and()
    lines = backend.services.policies.lines()
    train(model, [torch.optim.AdamW(model.parameters())], backend, 4)
    assert backend.services.policies.lines() == lines
    assert "steps=(0, 2)" in lines[0]


CHANGE = 4
LATE: dict[str, Policy] = {
    name: Policy([Rule("*", recipe, steps=(0, CHANGE)), Rule("*", recipe, fprop=None, steps=(CHANGE, None))])
    for name, recipe in (("nvfp4", "nvfp4"), ("delayed", DELAYED))
}


def test_a_forward_in_bf16_late_in_a_run_compiles_once_more() -> None:
    torch._dynamo.reset()
    model, backend = MLP(), Counting(LATE["nvfp4"])
    compiled, optimizer = torch.compile(model, backend=backend), torch.optim.SGD(model.parameters())
    compiled_graphs: list[int] = []
    recipes: list[set[tuple[str, str | None]]] = []
    for _ in range(CHANGE + 3):
        compiled(X.clone().requires_grad_()).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        compiled_graphs.append(len(backend.generated))
        recipes.append({(gemm.gemm, gemm.recipe) for gemm in backend.report.gemms})
    assert compiled_graphs == [2] * CHANGE + [4] * 3  # forward and backward
    backwards: set[tuple[str, str | None]] = {("dgrad", "nvfp4"), ("wgrad", "nvfp4")}
    assert recipes == [{("fprop", "nvfp4"), *backwards}] * CHANGE + [{("fprop", None), *backwards}] * 3


def continued(name: str) -> tuple[Policy, Policy]:
    """The policy with the change, and one that has been what it is since the first step."""
    return LATE[name], Policy([Rule("*", {"nvfp4": "nvfp4", "delayed": DELAYED}[name], fprop=None)])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "how"),
    [
        pytest.param("nvfp4", {"checkpointed": True}, id="checkpointed"),
        pytest.param("delayed", {"compiler": "inductor"}, id="generated"),
        pytest.param("nvfp4", {"compiler": "inductor"}, id="nvfp4, generated", marks=pytest.mark.release),
    ],
)
def test_after_the_change_a_run_is_one_under_the_new_precision(name: str, how: dict[str, Any], tmp_path: Path) -> None:
    changed, fresh = changing.change_and_continue(0, CHANGE, *continued(name), tmp_path, **how)
    assert changed == fresh


@pytest.mark.slow
@pytest.mark.skipif(not torch.distributed.is_available(), reason="torch without torch.distributed")
def test_after_the_change_two_ranks_are_under_the_new_precision(tmp_path: Path) -> None:
    calls = {name: (changing.change_and_continue, (CHANGE, *continued(name), tmp_path / name)) for name in LATE}
    first, second = run_ranks(run_each, 2, tmp_path, calls)
    for name in LATE:
        for changed, fresh in (first[name], second[name]):
            assert changed == fresh
        assert first[name] != second[name]  # each has its data


@pytest.mark.slow
@pytest.mark.skipif(not torch.distributed.is_available(), reason="torch without torch.distributed")
def test_a_new_process_resumes_before_and_after_the_change(tmp_path: Path) -> None:
    """Bit for bit, with the backend's state, and torch's generator, from which NVFP4 rounds gradients."""
    whole: dict[str, list[float]] = {}
    for name, policy in LATE.items():
        whole[name] = changing.train(policy, range(CHANGE + 4), tmp_path / name, saves=(2, CHANGE, CHANGE + 1))
    calls = {
        (name, start): (changing.resume, (policy, range(start, CHANGE + 4), tmp_path / name))
        for name, policy in LATE.items()
        for start in (2, CHANGE, CHANGE + 1)
    }
    (resumed,) = run_ranks(run_each, 1, tmp_path, calls)
    for (name, start), losses in resumed.items():
        assert losses == whole[name][start:], (name, start)
