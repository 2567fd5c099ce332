"""Delayed scaling of weights that something other than an optimizer has written, and of layers that were replaced."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize, prune

import fp8graph
from fp8graph.numerics import sqnr_db
from fp8graph.runtime.rank_groups import RankGroups
from helpers import MLP, eager_backend, first_fast

LARGER = 40.0


def warm(model: nn.Module, x: Tensor, **settings: Any) -> Any:
    """Compiled under delayed scaling, after three steps without an optimizer."""
    compiled = torch.compile(
        model, backend=eager_backend(None, recipe="delayed", cache_weights=True, **settings), dynamic=False
    )
    for _ in range(3):
        compiled(x).square().sum().backward()
    return compiled


def load(model: nn.Module) -> None:
    model.load_state_dict({name: x * LARGER for name, x in model.state_dict().items()})


def average(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.data.mul_(LARGER)


@pytest.mark.parametrize("write", [load, average], ids=["load_state_dict", ".data"])
@first_fast("trained_next", [True, False])
def test_its_own_scale_at_once(write: Callable[[nn.Module], None], trained_next: bool) -> None:
    """The scale of before would clip all but small numbers, in evaluation for ever."""
    model, x = nn.Linear(64, 64, bias=False), torch.randn(32, 64)
    run = warm(model, x)
    write(model)
    for train in (trained_next, False, True, False):
        with torch.set_grad_enabled(train):
            out = run(x)
        assert sqnr_db(model(x).detach(), out.detach()) > 25
        if train:
            out.sum().backward()


def test_a_rehearsal_of_a_stage_sees_no_weight_whose_scale_was_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    """FSDP2 gathers weights once more after it: they are not taken for written, and keep the loaded scale."""
    model, x = nn.Linear(64, 64, bias=False), torch.randn(32, 64)
    state = dict(fp8graph.backend_of(warm(model, x)).state_dict())
    name = next(key for key in state if ".weight|" in key and key.endswith("|scale"))
    backend = eager_backend(None, recipe="delayed", cache_weights=True)
    backend.load_state_dict({**state, name: state[name] / 2})
    with monkeypatch.context() as patch:
        patch.setattr(RankGroups, "is_dry_run", lambda _: True)
        (run := torch.compile(model, backend=backend))(x)
    with torch.no_grad():
        model.weight.copy_(model.weight.clone())
        run(x)
    assert torch.equal(backend.state_dict()[name], state[name] / 2)


def test_a_step_of_an_optimizer_keeps_the_history() -> None:
    """Transformer Engine's: the step after an update reads the scale of before."""
    model, x = nn.Linear(64, 64, bias=False), torch.randn(32, 64)
    backend = eager_backend(None, recipe="delayed", cache_weights=True)
    run, optimizer = torch.compile(model, backend=backend), torch.optim.SGD(model.parameters(), lr=0.5)
    amaxes = [model.weight.abs().max().item()]
    for _ in range(2):
        run(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        amaxes.append(model.weight.abs().max().item())
    (scale,) = (v.item() for k, v in backend.state_dict().items() if ".weight|" in k and k.endswith("|scale"))
    assert amaxes[-1] != max(amaxes[:2])
    assert scale == pytest.approx(448 / max(amaxes[:2]), rel=1e-6)


def test_an_evaluation_after_a_step_of_an_optimizer_reads_the_scale_of_before() -> None:
    model, x = nn.Linear(64, 64, bias=False), torch.randn(32, 64)
    backend = eager_backend(None, recipe="delayed", cache_weights=True)
    run, optimizer = torch.compile(model, backend=backend), torch.optim.SGD(model.parameters(), lr=0.5)
    before = model.weight.abs().max().item()
    for _ in range(2):
        run(x).square().mean().backward()
    optimizer.step()
    with torch.no_grad():
        run(x)
    (scale,) = (v.item() for k, v in backend.state_dict().items() if ".weight|" in k and k.endswith("|scale"))
    assert model.weight.abs().max().item() != before
    assert scale == pytest.approx(448 / before, rel=1e-6)


def test_a_loaded_state_has_the_scales_that_were_saved() -> None:
    """A run that is resumed in a model that has run: its weights were written, and their scales come from the file."""
    model, x = nn.Linear(64, 64, bias=False), torch.randn(32, 64)
    backend = eager_backend(None, recipe="delayed", cache_weights=True)
    run, optimizer = torch.compile(model, backend=backend), torch.optim.SGD(model.parameters(), lr=0.5)
    for _ in range(3):
        run(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    weights, state = copy.deepcopy(model.state_dict()), backend.state_dict()
    load(model)
    run(x).square().sum().backward()
    model.load_state_dict(weights)
    backend.load_state_dict(state)
    with torch.no_grad():
        run(x)
    assert all(torch.equal(backend.state_dict()[name], x) for name, x in state.items() if name.endswith("|scale"))


class Doubled(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return weight * 100


def test_the_scale_of_what_is_computed_from_it_is_not_its_own() -> None:
    """A parametrization: the amax of the parameter is that of another tensor."""
    model, x = nn.Linear(64, 64, bias=False), torch.randn(32, 64)
    parametrize.register_parametrization(model, "weight", Doubled())
    run = warm(model, x)
    with torch.no_grad():
        model.parametrizations["weight"].original.mul_(1.01)  # pyright: ignore
    assert sqnr_db(model(x).detach(), run(x).detach()) > 25


def pruned(model: MLP, run: Callable[[], Any]) -> Any:
    prune.l1_unstructured(model.up, "weight", amount=0.5)
    run()
    prune.remove(model.up, "weight")


def pruned_for_good(model: MLP, _run: Callable[[], Any]) -> Any:
    prune.l1_unstructured(model.up, "weight", amount=0.5)


def another_layer(model: MLP, _run: Callable[[], Any]) -> Any:
    former, model.up = model.up, nn.Linear(32, 64, bias=False)
    return former


def another_weight(model: MLP, _run: Callable[[], Any]) -> Any:
    former = model.up.weight
    model.up.weight = nn.Parameter(torch.randn(64, 32))
    return former  # as an optimizer holds it


@first_fast("change", [pruned, pruned_for_good, another_layer, another_weight])
def test_replaced_weight_has_no_state(change: Callable[[MLP, Callable[[], Any]], Any]) -> None:
    model, x = MLP(), torch.randn(16, 32)
    fp8graph.compile(model, recipe="delayed", compiler="eager")

    def run() -> None:
        model(x).sum().backward()

    run()
    kept = change(model, run)
    run()
    state = fp8graph.backend_of(model).state_dict()
    assert len([name for name in state if name.startswith("up.weight|") and name.endswith("|scale")]) <= 1
    if change is not pruned_for_good:  # torch does not copy a pruned module that has run
        copy.deepcopy(model)(x)
    del kept  # alive until here


def test_two_layers_of_one_name_are_an_error_as_before() -> None:
    layers, backend = [MLP(), MLP()], eager_backend(None, recipe="delayed")
    for layer in layers:
        torch.compile(layer, backend=backend)(torch.randn(16, 32)).sum().backward()
    with pytest.raises(fp8graph.StateError, match="two layers are called"):
        backend.state_dict()
