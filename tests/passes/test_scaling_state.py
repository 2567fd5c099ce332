"""Delayed scaling compiled, against an eager reimplementation: histories and scales bit for bit."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import delayed_oracle
import fp8graph
from fp8graph import Backend, DelayedScaling, Format, Policy, Rule, StateError
from fp8graph.ir.sites import Use
from fp8graph.numerics.formats import SCALE, SCALE_INV
from fp8graph.numerics.history import HEADER, write_row
from fp8graph.passes.connect_scales import PageLayout
from fp8graph.passes.connect_scales.scaling_state import ScalingState
from helpers import MLP, eager_backend, first_fast, first_slow

RECIPE = DelayedScaling(amax_history_len=4, initial_scale="one")
SIZES = (32, 64, 48, 16)


class Net(nn.Module):
    """Three linears; ReLU is exact in every compiler."""

    def __init__(self, how: str = "plain", bias: bool = True) -> None:
        super().__init__()
        self.how = how
        self.layers = nn.ModuleList(nn.Linear(a, b, bias=bias) for a, b in zip(SIZES, SIZES[1:], strict=False))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            if self.how == "plain":
                x = self.block(layer, x)
            else:
                x = checkpoint(self.block, layer, x, use_reentrant=self.how == "reentrant")
        return x

    @staticmethod
    def block(layer: Any, x: Tensor) -> Tensor:
        return layer(x).relu()


def batch(step: int, rows: int = 16) -> Tensor:
    generator = torch.Generator().manual_seed(step)
    return torch.randn(rows, SIZES[0], generator=generator) * (1 + step % 5)


def rows_of(step: int) -> int:
    return 16 if step < 10 else 32  # a new shape in the middle: a recompile


def train(model: Callable[..., Any], net: Net, steps: range, backend: Backend | None, **hooks: Any) -> None:
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-3)
    for step in steps:
        optimizer.zero_grad()
        loss = (model(batch(step, rows_of(step))) ** 2).mean()
        hooks.get("after_forward", lambda: None)()
        loss.backward()
        hooks.get("after_backward", lambda: None)()
        optimizer.step()
        if step in (3, 11) and backend is not None:  # evaluation in between
            with torch.no_grad():
                model(batch(99, rows_of(step)) * 1e3)


def reference(recipe: DelayedScaling, steps: int, bias: bool) -> tuple[Net, dict[str, tuple[float, list[float]]]]:
    torch.manual_seed(0)
    net = Net(bias=bias)
    layers = [delayed_oracle.Layer(layer, recipe) for layer in net.layers]  # pyright: ignore[reportArgumentType]

    def model(x: Tensor) -> Tensor:
        for layer in layers:
            x = layer(x).relu()
        return x

    train(
        model,
        net,
        range(steps),
        None,
        after_forward=lambda: delayed_oracle.end_of_forward(layers),
        after_backward=lambda: delayed_oracle.end_of_backward(layers),
    )
    state = {
        f"layers.{i}.{operand}": (history.scale, history.slots())
        for i, layer in enumerate(layers)
        for operand, history in layer.histories().items()
    }
    return net, state


def by_tensor(backend: Backend) -> dict[str, tuple[float, list[float]]]:
    state = backend.state_dict()
    names = {key.partition("|")[0]: key.rpartition("|")[0] for key in state if "|" in key}
    return {
        place: (state[f"{name}|scale"].item(), state[f"{name}|amax_history"].tolist()) for place, name in names.items()
    }


def compiled(
    net: Net, recipe: DelayedScaling = RECIPE, compiler: Any = "eager", cache_weights: Any = "update", **kwargs: Any
) -> tuple[Any, Backend]:
    backend = Backend(Policy(default=recipe), compiler=compiler, cache_weights=cache_weights)
    return torch.compile(net, backend=backend, dynamic=False, **kwargs), backend


def assert_equal_to_reference(net: Net, backend: Backend, recipe: DelayedScaling = RECIPE, steps: int = 20) -> None:
    expected_net, expected = reference(recipe, steps, bias=net.layers[0].bias is not None)
    assert by_tensor(backend) == expected
    for got, exact in zip(net.parameters(), expected_net.parameters(), strict=True):
        assert torch.equal(got, exact)


RECIPES = [
    RECIPE,
    DelayedScaling(amax_history_len=1, initial_scale="one"),
    DelayedScaling(
        amax_history_len=7, amax_compute_algo="most_recent", margin=2, fp8_format=Format.E4M3, initial_scale="one"
    ),
]


@first_fast(
    ("how", "recipe"), [*(("plain", r) for r in RECIPES), ("checkpoint", RECIPES[0]), ("reentrant", RECIPES[0])]
)
def test_twenty_steps(how: str, recipe: DelayedScaling) -> None:
    """With a recompile in the middle, evaluation in between, and activation checkpointing inside the graph."""
    torch.manual_seed(0)
    net = Net(how)
    model, backend = compiled(net, recipe)
    train(model, net, range(20), backend)
    assert_equal_to_reference(net, backend, recipe)


@first_slow("how", ["plain", "checkpoint"])
def test_twenty_steps_of_generated_code(how: str) -> None:
    """Without biases: the order in which their gradients are summed is the compiler's choice."""
    torch.manual_seed(0)
    net = Net(how, bias=False)
    model, backend = compiled(net, compiler="inductor")
    train(model, net, range(20), backend)
    assert_equal_to_reference(net, backend)


@torch._dynamo.config.patch(recompile_limit=64)  # shapes x gradients on and off x inputs with and without gradients
@first_fast("reentrant", [False, True])
@first_fast("layers_at_a_time", [False, True])
def test_checkpointing_around_compiled_layers(reentrant: bool, layers_at_a_time: bool) -> None:
    """torch.utils.checkpoint outside of the compiled code runs it twice: it updates once, with one scale."""
    torch.manual_seed(0)
    net = Net()
    backend = Backend(Policy(default=RECIPE), compiler="eager")
    backend.bind(net)
    blocks = [lambda x, layer=layer: Net.block(layer, x) for layer in net.layers]
    if layers_at_a_time:
        parts = [torch.compile(block, backend=backend, dynamic=False) for block in blocks]
    else:
        parts = [torch.compile(net, backend=backend, dynamic=False)]

    def model(x: Tensor) -> Tensor:
        x = x.requires_grad_(torch.is_grad_enabled())
        for part in parts:
            x = checkpoint(part, x, use_reentrant=reentrant) if x.requires_grad else part(x)  # pyright: ignore
        return x

    train(model, net, range(20), backend)
    assert_equal_to_reference(net, backend)


@first_fast(
    ("compiled_before", "through"),
    [(False, "memory"), (True, "memory"), (True, "torch.save"), (True, "safetensors")],
)
def test_save_and_load_in_the_middle(compiled_before: bool, through: str, tmp_path: Any) -> None:
    torch.manual_seed(0)
    net = Net()
    model, backend = compiled(net)
    train(model, net, range(12), backend)
    saved = backend.state_dict()
    if through == "torch.save":
        torch.save(saved, tmp_path / "state.pt")
        saved = torch.load(tmp_path / "state.pt", weights_only=True)
    elif through == "safetensors":
        from safetensors.torch import load_file, save_file

        save_file(dict(saved), tmp_path / "state.safetensors")
        saved = load_file(tmp_path / "state.safetensors")
    fresh = Net()
    fresh.load_state_dict(copy.deepcopy(net.state_dict()))
    model, backend = compiled(fresh)
    if compiled_before:
        model(batch(7)).sum().backward()
    backend.load_state_dict(saved)
    train(model, fresh, range(12, 20), backend)
    assert_equal_to_reference(fresh, backend)
    assert backend.report.unused_state == []


def test_several_forwards_before_their_backwards() -> None:
    """Gradient accumulation the hard way: every forward keeps the scale that it used."""
    torch.manual_seed(0)
    net, recipe = Net(), RECIPE
    model, backend = compiled(net, cache_weights=False)  # the weights too are quantized three times
    outputs = [model(batch(i)) for i in range(3)]
    for out in outputs:
        (out**2).mean().backward()
    gradients = [p.grad for p in net.parameters()]
    state = by_tensor(backend)

    torch.manual_seed(0)
    other = Net()
    layers = [delayed_oracle.Layer(layer, recipe) for layer in other.layers]  # pyright: ignore[reportArgumentType]
    outputs = list[Tensor]()
    for i in range(3):
        x = batch(i)
        for layer in layers:
            x = layer(x).relu()
        delayed_oracle.end_of_forward(layers)
        outputs.append(x)
    for out in outputs:
        (out**2).mean().backward()
        delayed_oracle.end_of_backward(layers)
    for got, exact in zip(gradients, other.parameters(), strict=True):
        assert torch.equal(got, exact.grad)  # pyright: ignore[reportArgumentType]
    for i, layer in enumerate(layers):
        for operand, history in layer.histories().items():
            assert state[f"layers.{i}.{operand}"] == (history.scale, history.slots())


def test_evaluation_reads_scales_and_never_writes() -> None:
    net = Net()
    model, backend = compiled(net)
    with torch.no_grad():
        first = model(batch(0) * 100)  # scale 1: saturates
    assert all(state == (1.0, [0.0] * 4) for state in by_tensor(backend).values())
    model(batch(0) * 100).sum().backward()
    before = backend.state_dict()
    for guard in (torch.no_grad, torch.inference_mode):
        with guard():
            second = model(batch(0) * 100)
    assert all(torch.equal(value, before[key]) for key, value in backend.state_dict().items())
    assert not torch.equal(first, second)  # the trained scales were used


def test_training_mode_with_gradients_off_is_evaluation_and_eval_mode_with_gradients_is_not() -> None:
    net = Net()
    model, backend = compiled(net)
    net.train()
    with torch.no_grad():
        model(batch(0))
    assert by_tensor(backend)["layers.0.input"][0] == 1.0
    net.eval()
    model(batch(0)).sum().backward()
    assert by_tensor(backend)["layers.0.input"][0] != 1.0


def test_a_no_grad_region_inside_the_graph_is_evaluation() -> None:
    """A teacher's pass inside of the student's step: its amaxes are not recorded, its scales are the trained ones."""

    def step(x: Tensor) -> Tensor:
        with torch.no_grad():
            target = net(x * 1e3)
        return ((net(x) - target) ** 2).mean()

    net = Net()
    backend = Backend(Policy(default=RECIPE), compiler="eager")
    compiled_step = torch.compile(step, backend=backend, dynamic=False)
    compiled_step(batch(0)).backward()
    amax, state = batch(0).abs().max().item(), by_tensor(backend)
    assert state["layers.0.input"] == (pytest.approx(448 / amax), [0.0, 0.0, 0.0, amax])
    assert (
        state["layers.0.weight"][1][-1] == next(net.layers[0].parameters()).abs().max().item()
    )  # quantized once for both
    assert len(state) == 9  # the teacher reads the same rows


def test_frozen_layers_are_recorded_while_gradients_are_on() -> None:
    net = Net().requires_grad_(False)
    model, backend = compiled(net)
    model(batch(0))
    assert by_tensor(backend)["layers.0.input"][1][-1] == batch(0).abs().max().item()


def test_a_skipped_layer_neither_rolls_nor_rescales() -> None:
    class Skipping(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(32, 32), nn.Linear(32, 32)

        def forward(self, x: Tensor, skip: bool) -> Tensor:
            return self.a(x) if skip else self.b(self.a(x))

    backend = eager_backend(Policy(default=RECIPE))
    model = torch.compile(Skipping(), backend=backend)
    for _ in range(2):
        model(batch(0), False).sum().backward()
    b = {k: v for k, v in by_tensor(backend).items() if k.startswith("b.")}
    for _ in range(3):
        model(batch(0), True).sum().backward()
    state = by_tensor(backend)
    assert {k: state[k] for k in b} == b
    assert state["a.input"][1].count(0.0) == 1  # a has seen more steps than its history is long
    model(batch(0), False).sum().backward()
    assert by_tensor(backend)["b.input"][1].count(0.0) == 1


def test_a_layer_that_sees_zeros_keeps_its_scale() -> None:
    net = Net()
    model, backend = compiled(net)
    model(batch(0)).sum().backward()
    before = by_tensor(backend)
    model(torch.zeros(16, 32))
    assert by_tensor(backend)["layers.0.input"] == before["layers.0.input"]


@first_fast("bad", [math.inf, -math.inf, math.nan])
@first_fast("recipe", RECIPES)
def test_an_overflow_is_not_recorded_and_freezes_nothing(bad: float, recipe: DelayedScaling) -> None:
    net = Net()
    model, backend = compiled(net, recipe)
    model(batch(1)).sum().backward()
    before = by_tensor(backend)["layers.0.input"]
    x = batch(2)
    x[3, 5] = bad
    model(x)
    assert by_tensor(backend)["layers.0.input"] == before
    model(batch(4)).sum().backward()
    scale, history = by_tensor(backend)["layers.0.input"]
    assert scale != before[0]
    assert all(map(math.isfinite, [scale, *history]))


def test_two_recipes_in_one_model_have_their_own_state() -> None:
    long = DelayedScaling(amax_history_len=8)
    backend = eager_backend(Policy([Rule("up", long), Rule("down", RECIPE, wgrad=long)], default="tensorwise"))
    model = torch.compile(MLP(), backend=backend)
    model(torch.randn(16, 32, requires_grad=True)).sum().backward()
    names = sorted({key.rpartition("|")[0] for key in backend.state_dict() if "|" in key})
    assert names == sorted(
        [f"up.{o}|delayed(amax_history_len=8)" for o in ("input", "weight", "grad_output")]
        + [f"down.{o}|delayed(amax_history_len=4,initial_scale=one)" for o in ("input", "weight", "grad_output")]
        + [f"down.{o}|delayed(amax_history_len=8)" for o in ("input", "grad_output")]
    )


def test_layers_compiled_one_by_one_have_their_own_rows() -> None:
    """One graph serves all of them; bound, each has its full name, and not bound, saving says what to do."""
    for bind in (True, False):
        torch._dynamo.reset()
        torch.manual_seed(0)
        net = nn.Sequential(*(nn.Linear(32, 32) for _ in range(3)))
        backend = eager_backend(Policy(default=RECIPE))
        if bind:
            backend.bind(net)
        layers = [torch.compile(layer, backend=backend) for layer in net]
        x = batch(0)
        for layer in layers:
            x = layer(x) * 3
        x.sum().backward()
        if bind:
            scales = [by_tensor(backend)[f"{i}.input"][0] for i in range(3)]
            assert len(set(scales)) == 3
        else:
            with pytest.raises(StateError, match="backend.bind"):
                backend.state_dict()


def test_tensors_quantized_once_share_a_row_and_keep_their_names() -> None:
    """gate and up read one tensor: one cast, one amax; when the policy parts them, both keep the history."""
    both = Policy(default=RECIPE)
    backend = eager_backend(both)
    model = torch.compile(MLP(), backend=backend)
    x = torch.randn(16, 32, requires_grad=True)
    model(x).sum().backward()
    state = by_tensor(backend)
    assert state["gate.input"] == state["up.input"]
    assert sum("quantize(primals_" in line for line in backend.report.graphs[0].after.splitlines()) == 3
    backend.set_policy(Policy([Rule("gate", None)], default=RECIPE))
    model(x)
    after = by_tensor(backend)
    assert after["up.input"][1][-2:] == [state["up.input"][1][-1]] * 2
    assert set(after) == set(state)


def test_the_state_follows_the_layers_through_policy_changes() -> None:
    """The first steps in high precision, then FP8, then other layers: no row starts afresh that had a history."""
    net = Net()
    model, backend = compiled(net, cache_weights=False)  # the weights do not change here
    model(batch(0)).sum().backward()
    first = by_tensor(backend)
    backend.set_policy(Policy([Rule("layers.0", None)], default=RECIPE))
    model(batch(1)).sum().backward()
    second = by_tensor(backend)
    assert second["layers.0.input"] == first["layers.0.input"]
    assert second["layers.1.weight"][1][-2:-1] == first["layers.1.weight"][1][-1:]
    backend.set_policy(Policy(default=RECIPE))
    model(batch(2)).sum().backward()
    third = by_tensor(backend)
    assert third["layers.0.input"][1][-2:] == [first["layers.0.input"][1][-1], batch(2).abs().max().item()]
    assert third["layers.1.weight"][1][-3] == first["layers.1.weight"][1][-1]


def test_a_deep_copied_model_has_its_own_state() -> None:
    net = Net()
    model, backend = compiled(net)
    model(batch(0)).sum().backward()
    twin = copy.deepcopy(net)
    backend.bind(net)
    torch.compile(twin, backend=backend, dynamic=False)(batch(0) * 9)
    scales = {
        row.page.tensor[row.index, SCALE].item()
        for key, row in backend.store(ScalingState)._rows.items()
        if key.operand == "input"
    }
    assert len(scales) == 6


def test_callables() -> None:
    """Functions of the user's are traced into the graph, and no cache keeps what they were."""
    seen: list[tuple[int, ...]] = []

    def mean_of_history(history: Tensor) -> Tensor:
        seen.append(tuple(history.shape))
        return history.mean(0)

    def half(amax: Tensor, old_scale: Tensor, fp8_max: float, recipe: DelayedScaling) -> Tensor:
        return torch.where(amax > 0, fp8_max / (2 * amax), old_scale) + recipe.margin

    recipe = DelayedScaling(amax_history_len=4, amax_compute_algo=mean_of_history, scaling_factor_compute_algo=half)
    net = Net()
    model, backend = compiled(net, recipe, cache_weights=False)
    model(batch(1)).sum().backward()
    assert (4, 6) in seen
    amax = batch(1).abs().max()
    assert by_tensor(backend)["layers.0.input"][0] == (448.0 / (2 * (amax / 4))).item()
    with pytest.raises(fp8graph.UnsupportedRecipeError, match="code cannot be written to a file"):
        recipe.to_dict()


@pytest.mark.slow
def test_inductor_with_callables_bypasses_the_cache() -> None:
    recipe = DelayedScaling(amax_history_len=2, amax_compute_algo=lambda history: history.amax(0) * 2)
    model, backend = compiled(Net(), recipe, compiler="inductor")
    model(batch(1)).sum().backward()
    assert by_tensor(backend)["layers.0.input"][0] == (448.0 / (2 * batch(1).abs().max())).item()


def test_one_update_a_graph_and_direction() -> None:
    model, backend = compiled(Net())
    model(batch(0))
    (view,) = backend.report.graphs
    for op in ("fp8graph.update_page", "aten.copy_", "fp8graph.read_scales"):
        assert view.after.count(f"= {op}(") == 2, op


def test_binding_names_the_rows_that_are_there_already() -> None:
    inner = nn.Linear(32, 32)
    outer = nn.ModuleDict({"block": nn.ModuleDict({"proj": inner})})
    backend = eager_backend(Policy(default=RECIPE))
    model = torch.compile(inner, backend=backend)
    model(batch(0)).sum().backward()
    before = by_tensor(backend)
    backend.bind(outer)
    model(batch(0) * 0)
    after = by_tensor(backend)
    assert set(after) == {f"block.proj.{operand}" for operand in ("input", "weight", "grad_output")}
    assert after["block.proj.grad_output"] == before[next(name for name in before if name.endswith("grad_output"))]


def test_evaluated_in_inference_mode_first_and_trained_then() -> None:
    model, backend = compiled(Net())
    with torch.inference_mode():
        model(batch(0))
    model(batch(0)).sum().backward()
    assert by_tensor(backend)["layers.0.input"][0] != 1.0


def test_another_default_dtype_changes_no_state() -> None:
    model, backend = compiled(Net())
    x = batch(0)
    torch.set_default_dtype(torch.float64)
    try:
        model(x).sum().backward()
    finally:
        torch.set_default_dtype(torch.float32)
    assert {value.dtype for key, value in backend.state_dict().items() if "|" in key} == {torch.float32}


def test_a_model_that_moves_to_another_device_takes_its_state_along() -> None:
    state, weight = Backend().store(ScalingState), nn.Parameter(torch.ones(2, 2))
    row = Use(fqn="a", index=0, use=0, parameter=0, operand="input", recipe=RECIPE)
    layouts = [
        (PageLayout(recipe=RECIPE, fp8_max=448.0, backward=False, device=torch.device(device), rows=((row,),)),)
        for device in ("cpu", "meta")
    ]
    pages = [state.pages(layout, [weight])[0].tensor for layout in layouts]
    assert [page.device.type for page in pages] == ["cpu", "meta"]


def test_scales_follow_the_fp8_types_of_the_device_that_a_model_moves_to() -> None:
    """From one with E4M3, whose maximum is 448, to one with fnuz: 240. Amaxes are amaxes everywhere."""
    state, weight = Backend().store(ScalingState), nn.Parameter(torch.ones(2, 2))
    row = Use(fqn="a", index=0, use=0, parameter=0, operand="input", recipe=RECIPE)
    settings: Any = {"recipe": RECIPE, "backward": False, "device": torch.device("cpu"), "rows": ((row,),)}
    ((ocp,), (fnuz,)) = layouts = [(PageLayout(fp8_max=maximum, **settings),) for maximum in (448.0, 240.0)]
    assert ocp.rows == fnuz.rows
    page = state.pages(layouts[0], [weight])[0].tensor
    write_row(page, 0, torch.tensor([112.0]), torch.tensor([0.0, 1.0, 2.0, 4.0][: RECIPE.amax_history_len]))
    moved = state.pages(layouts[1], [weight])[0].tensor
    assert moved is not page
    assert moved[0, [SCALE, SCALE_INV]].tolist() == [60.0, torch.tensor(60.0).reciprocal().item()]
    assert torch.equal(moved[0, HEADER:], page[0, HEADER:])
    assert state.entries()["a.input|delayed(amax_history_len=4,initial_scale=one)|fp8_max"].tolist() == [240.0]
