"""Delayed scaling before the first amax: the first step, inference without training, and tensors that come later."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

import fp8graph
from fp8graph import Backend, DelayedScaling, Policy
from fp8graph.backend.multiplied import multiplied_by
from fp8graph.errors import UnsupportedRecipeError
from fp8graph.numerics import history
from helpers import MLP, Weight, eager_backend, first_fast, in_one_test, same_bits
from ranks import run_ranks

AUTO, ONE = DelayedScaling(amax_history_len=4), DelayedScaling(amax_history_len=4, initial_scale="one")
TINY = 1e-7  # of gradients: nothing is left of them at scale 1


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(32, 64), nn.Linear(64, 32)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(nn.functional.gelu(self.up(x)))


class Deep(nn.Module):
    """Layers whose gradients come through each other."""

    def __init__(self, around: Callable[..., Tensor] = lambda block, x: block(x)) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.around = around

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + self.around(block, x)
        return x


class Bottleneck(nn.Module):
    """An adapter: no gradient comes to ``a`` as long as ``b`` is zero."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = nn.Linear(32, 16, bias=False), nn.Linear(16, 32, bias=False)
        nn.init.zeros_(self.b.weight)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.b(self.a(x))


def whole(module: nn.Module, backend: Any) -> Any:
    return torch.compile(module, backend=backend)


def blocks(module: Any, backend: Any) -> Any:
    for block in module.blocks:
        block.compile(backend=backend)
    return module


def batch(scale: float = 1.0) -> Tensor:
    torch.manual_seed(1)
    return torch.randn(16, 32) * scale


def gradients(module: nn.Module, model: Any, x: Tensor | None = None) -> list[Tensor]:
    module.zero_grad()
    (model(batch() if x is None else x).sum() * TINY).backward()
    return [p.grad.clone() for p in module.parameters() if p.grad is not None]


def distance(found: list[Tensor], wanted: list[Tensor]) -> float:
    assert len(found) == len(wanted) > 0
    return max(float((a - b).norm() / b.norm()) for a, b in zip(found, wanted, strict=True) if b.any())


def reentrant(block: nn.Module, x: Tensor) -> Tensor:
    return checkpoint(block, x, use_reentrant=True)


def not_reentrant(block: nn.Module, x: Tensor) -> Tensor:
    return checkpoint(block, x, use_reentrant=False)


WAYS: dict[str, tuple[Callable[[], nn.Module], Callable[..., Any], dict[str, Any]]] = {
    "whole": (Deep, whole, {}),
    "block by block": (Deep, blocks, {}),
    "generated code": (Deep, whole, {"compiler": "inductor"}),
    "checkpointed blocks": (lambda: Deep(not_reentrant), blocks, {}),
    "checkpointed inside": (lambda: Deep(not_reentrant), whole, {}),
    "reentrant": (lambda: Deep(reentrant), blocks, {}),
    "kept weights": (Deep, whole, {"cache_weights": "update"}),
    "memory": (Deep, whole, {"save": "memory"}),
    "strict": (Deep, whole, {"strict": True}),
    "observed": (Deep, whole, {"observe": {"every": 1}}),
}


@first_fast("way", WAYS, also=["block by block", "checkpointed inside", "kept weights"])
def test_the_first_step_has_the_gradients_of_current_scaling(way: str) -> None:
    """Bit for bit: the scale of each tensor is that of its own amax; and none of the steps after it is off."""
    make, compiled, settings = WAYS[way]
    results: list[list[Tensor]] = []
    for recipe in (AUTO, "tensorwise"):
        torch._dynamo.reset()
        module = make()
        given: dict[str, Any] = {"compiler": "eager", "cache_weights": False, **settings}
        model = compiled(module, backend := Backend(Policy(default=recipe), **given))
        x = batch().requires_grad_()
        results.append(gradients(module, model, x))
        results.append(gradients(module, model, x))
        assert all(gemm.recipe for gemm in backend.report.gemms)
        assert backend.report.gemms
    assert same_bits(results[0], results[2])
    reference = make()
    assert distance(results[0], gradients(reference, reference, batch().requires_grad_())) < 0.25
    assert distance(results[1], results[0]) < 0.01  # the same batch again: the amaxes of the step before are its own


@pytest.mark.parametrize("settings", [{"save": "speed"}, {"save": "memory", "save_activations_in_fp8": True}])
def test_the_first_step_keeps_the_bytes_of_the_others(settings: dict[str, Any]) -> None:
    """Beside its scales: else it needs more memory than all the steps after it."""
    kept: list[int] = []
    for recipe in (AUTO, ONE):
        torch._dynamo.reset()
        model = torch.compile(MLP(64, 96), backend=eager_backend(Policy(default=recipe), **settings))
        sizes: list[int] = []
        with torch.autograd.graph.saved_tensors_hooks(
            lambda x, sizes=sizes: (sizes.append(x.nbytes), x)[1], lambda x: x
        ):
            model(torch.randn(128, 64, requires_grad=True))
        kept.append(sum(sizes))
    assert kept[1] <= kept[0] <= kept[1] + 64


def test_one_is_the_start_of_transformer_engine() -> None:
    module = Deep()
    backend = eager_backend(Policy(default=ONE))
    found = gradients(module, torch.compile(module, backend=backend))
    assert distance(found, gradients(module, module)) > 0.9
    assert graphs_compiled(backend) == [()]


@pytest.mark.parametrize("way", ["whole", "checkpointed blocks", "reentrant"])
def test_gradients_of_all_micro_batches_before_the_first_step(way: str) -> None:
    """All forwards, and then all backwards: one that runs again has the scales of its first time."""
    make, compiled, _ = WAYS[way]
    module = make()
    model = compiled(module, eager_backend(Policy(default=AUTO)))
    batches = [batch(scale).requires_grad_() for scale in (2e-5, 5e-6, 1e-5)]
    torch.stack([model(x).sum() * TINY for x in batches]).sum().backward()
    found = [p.grad.clone() for p in module.parameters() if p.grad is not None]
    module = make()
    torch.stack([module(x).sum() * TINY for x in batches]).sum().backward()
    assert distance(found, [p.grad for p in module.parameters() if p.grad is not None]) < 0.25


@first_fast("cached", [False, True])
@pytest.mark.parametrize("make", [Deep, lambda: parametrizations.weight_norm(nn.Linear(32, 32))])
def test_inference_before_training_is_that_of_current_scaling(make: Callable[[], nn.Module], cached: bool) -> None:
    torch.manual_seed(0)
    module = make().requires_grad_(False)
    for parameter in module.parameters():
        parameter.mul_(1e-3)  # at scale 1 much of it would be zero
    outputs: list[Tensor] = []
    for recipe in (AUTO, "tensorwise"):
        backend = Backend(Policy(default=recipe), compiler="eager", strict=True, cache_weights=cached)
        model = torch.compile(module, backend=backend)
        with torch.no_grad():
            outputs += [model(batch()), model(batch(100.0))]
        assert backend.report.graphs
        torch._dynamo.reset()
    assert same_bits(outputs[:2], outputs[2:])


def test_training_after_evaluation_begins_with_own_amaxes() -> None:
    module = Deep()
    model = torch.compile(module, backend=eager_backend(Policy(default=AUTO), cache_weights=True))
    with torch.no_grad():
        model(batch(100.0))
    assert distance(gradients(module, model), gradients(module, module)) < 0.25


def test_a_tensor_whose_first_amax_is_zero_begins_when_it_has_one() -> None:
    module = Bottleneck()
    model = torch.compile(module, backend=eager_backend(Policy(default=AUTO)))
    for _ in range(5):  # gradients to a are zero
        gradients(module, model)
    nn.init.constant_(module.b.weight, 0.5)
    found = gradients(module, model)
    assert distance(found, gradients(module, module)) < 0.25


def graphs_compiled(backend: Backend) -> list[tuple[str, ...]]:
    """The conditions of all variants that were compiled, in order."""
    return [
        tuple(type(each).__name__ for each in situation.conditions)
        for program in backend.programs
        for situation, _ in program._variants
    ]


def test_two_graphs_are_compiled_and_the_second_runs_from_the_second_step_on() -> None:
    module, backend = Deep(), eager_backend(Policy(default=AUTO))
    model = torch.compile(module, backend=backend)
    gradients(module, model)
    assert graphs_compiled(backend) == [("InitialScales",)]
    for _ in range(3):
        gradients(module, model)
    assert graphs_compiled(backend) == [("InitialScales",), ()]
    (view,) = backend.report.graphs
    assert "initial_scales" not in view.after


def test_graphs_compiled_later_for_trained_layers_are_not_compiled_twice() -> None:
    module, backend = Deep(), eager_backend(Policy(default=AUTO))
    model = torch.compile(module, backend=backend, dynamic=False)
    for _ in range(2):
        gradients(module, model)
    gradients(module, model, batch()[:8])  # another shape
    with torch.no_grad():
        model(batch())
    assert sorted(graphs_compiled(backend)) == [(), (), (), ("InitialScales",)]


def test_a_state_is_loaded_into_one_graph() -> None:
    module, backend = Deep(), eager_backend(Policy(default=AUTO))
    model = fp8graph.compile(module, backend=backend)
    gradients(module, model)
    wanted, state = gradients(module, model), backend.state_dict()
    torch._dynamo.reset()
    resumed = eager_backend(Policy(default=AUTO))
    model = fp8graph.compile(Deep(), backend=resumed)
    resumed.load_state_dict(state)
    assert distance(gradients(model, model), wanted) < 0.01
    assert graphs_compiled(resumed) == [()]


def test_a_state_from_before_training_begins_with_own_amaxes() -> None:
    backend, reference = eager_backend(Policy(default=AUTO)), Deep()
    model = fp8graph.compile(Deep(), backend=backend)
    with torch.no_grad():
        model(batch())
    before = backend.state_dict()
    torch._dynamo.reset()
    resumed = eager_backend(Policy(default=AUTO))
    model = fp8graph.compile(Deep(), backend=resumed)
    resumed.load_state_dict(before)
    scaled = batch(1e-3)  # at scale 1 nothing is left of it
    assert distance(gradients(model, model, scaled), gradients(reference, reference, scaled)) < 0.25


def test_weights_handed_over_before_training_have_their_own_scales() -> None:
    module = Weight(lambda w, x: x @ w.T, 32, 32).requires_grad_(False)
    module.w.mul_(1e-3)
    found: list[Tensor] = []
    for recipe in (AUTO, "tensorwise"):
        backend = eager_backend(Policy(default=recipe), cache_weights=True)
        model = fp8graph.compile(module, backend=backend)
        with torch.no_grad():
            model(batch())
        (weight,) = multiplied_by(backend, module)
        found += [weight.data.view(torch.uint8), weight.scale_inv.reshape(())]
        torch._dynamo.reset()
    assert same_bits(found[:2], found[2:])


def test_scales_that_are_given_are_not_changed() -> None:
    """The arithmetic: a row of a table is changed where it is unset alone; experts' rows of no group do not count."""
    table = torch.tensor([[0.5, 2.0, 0.0, 0.0], [1.0, 1.0, 1.0, 0.0]])
    x = torch.tensor([[1.0, -4.0], [2.0, 0.0], [torch.inf, 9.0]])
    given = history.initial_scales(table, [x[:2]], None, 0, 448.0, 0)
    assert torch.equal(given, table[:1])
    for parts, offs in (([x[:1], x[1:2]], None), ([x], torch.tensor([1, 2], dtype=torch.int32))):
        made = history.initial_scales(table, parts, offs, 1, 448.0, 1)
        assert torch.equal(made, torch.tensor([[1 / 56.0, 56.0, 1.0, 0.0]]))
    unknown = history.initial_scales(table, [x], None, 1, 448.0, 0)  # an amax of inf
    assert unknown.tolist() == [[1.0, 1.0, 1.0, 0.0]]


def test_any_recorded_amax_sets_a_scale() -> None:
    page = history.new_page(1, 2, unset=True)
    new = history.updated_page(page, [torch.tensor([448.0]), torch.tensor([0.0])], 448.0, 0, "max")
    assert new[:, history.UNSET].tolist() == [0.0, 1.0]  # with a history of one slot, and a scale of 1, too
    assert history.new_page(1, 2)[:, history.UNSET].tolist() == [0.0, 0.0]


@in_one_test("given", ["auto ", "1", None, 1.0])
def test_other_initial_scales_are_refused(given: Any) -> None:
    with pytest.raises(UnsupportedRecipeError, match="initial_scale must be"):
        DelayedScaling(initial_scale=given)


def _ranks(rank: int, reduce_amax: bool) -> tuple[float, float]:
    recipe = dataclasses.replace(AUTO, reduce_amax=reduce_amax)
    module, backend = Deep(), eager_backend(Policy(default=recipe))
    model = torch.compile(nn.parallel.DistributedDataParallel(module), backend=backend)
    reference = nn.parallel.DistributedDataParallel(Deep())
    x = batch(1.0 + rank)
    wanted = gradients(reference, reference, x)
    return distance(gradients(module, model, x), wanted), distance(gradients(module, model, x), wanted)


@first_fast("reduce_amax", [True, False])
def test_ranks_begin_each_with_its_own_amaxes(reduce_amax: bool, tmp_path: Path) -> None:
    for first, second in run_ranks(_ranks, 2, tmp_path, reduce_amax):
        assert first < 0.25
        assert second < 0.25


def test_a_tensor_that_never_has_an_amax_is_named(caplog: pytest.LogCaptureFixture) -> None:
    module = Bottleneck()
    model = torch.compile(module, backend=eager_backend(Policy(default=AUTO)))
    for _ in range(66):
        gradients(module, model)
    assert caplog.text.count("had no amax in 64 calls of their graph, the first b.weight:") == 1


def test_a_weight_that_was_zero_has_its_own_scale_once_it_is_not() -> None:
    module = Bottleneck()
    model = torch.compile(module, backend=eager_backend(Policy(default=AUTO)))
    optimizer = torch.optim.SGD(module.parameters(), 1.0)
    gradients(module, model)
    optimizer.step()
    assert 0.0 < module.b.weight.detach().abs().amax() < 1e-3  # nothing is left of it at scale 1
    assert distance(gradients(module, model), gradients(module, module)) < 0.25


@pytest.mark.slow
def test_graphs_of_observed_steps_are_not_listed_beside_those_of_the_first() -> None:
    module, backend = Deep(), eager_backend(Policy(default=AUTO), observe={"every": 2})
    model = torch.compile(module, backend=backend)
    with torch.no_grad():
        model(batch())
        model(batch())
    assert len(backend.report.graphs) == 1
    gradients(module, model)
    optimizer = torch.optim.SGD(module.parameters(), 1e-3)
    for _ in range(3):
        gradients(module, model)
        optimizer.step()
    assert sorted(view.name for view in backend.report.graphs) == ["Block inference", "Block training"]
