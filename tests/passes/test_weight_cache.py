"""FP8 copies of weights: quantized once per update, never stale, whoever updates them."""

from __future__ import annotations

import copy
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fp8graph
from fp8graph import Backend, DelayedScaling, Policy, Rule
from fp8graph.numerics import quantize
from fp8graph.passes.hoist_weights import weight_cache
from fp8graph.runtime import contents
from helpers import ALL, MLP, RECIPES, Weight, first_fast, in_one_test, same_bits, step


def compiled(model: Any, policy: Any = ALL, cache_weights: Any = "update", **kwargs: Any) -> tuple[Any, Backend]:
    backend = Backend(policy, compiler="eager", cache_weights=cache_weights, **kwargs)
    return torch.compile(model, backend=backend, dynamic=False), backend


def model_and_input(seed: int = 0) -> tuple[MLP, Tensor]:
    torch.manual_seed(seed)
    return MLP(), torch.randn(16, 32, requires_grad=True)


@first_fast("recipe", RECIPES)
def test_same_numbers_as_quantizing_in_the_graph(recipe: str) -> None:
    model, x = model_and_input()
    results: list[list[Tensor]] = []
    for cache_weights in ("update", False):
        torch._dynamo.reset()
        run, backend = compiled(model, Policy(default=recipe), cache_weights=cache_weights)
        torch.manual_seed(1)  # of what nvfp4 draws
        results.append(step(run, x, parameters=model.parameters()))
        assert bool(backend.weights.bytes) == bool(cache_weights)
    assert same_bits(*results)


@in_one_test(
    ("made", "wanted", "covers"),
    [
        (((16, 16), (16, 16)), ((16, 16), ()), True),
        (((16, 16), ()), ((16, 16), (16, 16)), False),
        (((16, 16), ()), ((1, 16), ()), False),  # padded for the other side of a GEMM
        (((16, 16), (16, 16)), ((16, 16), (16, 32)), False),
    ],
)
def test_a_copy_serves_graphs_that_want_no_more_and_nothing_else(made: Any, wanted: Any, covers: bool) -> None:
    one, other = (SimpleNamespace(layouts=layouts) for layouts in (made, wanted))
    assert weight_cache.covers(one, other) is covers  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("written", [True, False])
def test_a_training_call_in_between_where_numbers_are_not_looked_at(
    written: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Hand-written updates follow it, and leave no version: a device other than a CPU would show nothing."""
    for module in (weight_cache, contents):
        monkeypatch.setattr(module, "contents_of", lambda tensors: [None] * len(tensors))
    model, x = model_and_input()
    run, _ = compiled(model, cache_weights=True)
    with torch.no_grad():
        before = run(x)
    run(x).sum().backward()
    if written:
        for parameter in model.parameters():
            parameter.data.mul_(2)
    with torch.no_grad():
        assert torch.equal(run(x), before) is not written


def test_quantizing_under_autocast() -> None:
    """Weights are quantized at call time, where torch.autocast may be on: it cannot join FP8 tensors."""
    model, x = model_and_input()
    results: list[list[Tensor]] = []
    for cache_weights in ("update", False):
        torch._dynamo.reset()
        run, _ = compiled(model, cache_weights=cache_weights)
        with torch.autocast("cpu", torch.bfloat16):
            results.append(step(run, x, parameters=model.parameters()))
    assert same_bits(*results)


def test_once_per_update_not_once_per_call() -> None:
    model, x = model_and_input()
    run, backend = compiled(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for update in range(1, 4):
        for _ in range(3):  # gradient accumulation
            run(x).sum().backward()
        assert backend.weights.quantized == 3 * update
        optimizer.step()
        optimizer.zero_grad()
    with torch.no_grad():
        run(x)
        run(x)
    assert backend.weights.quantized == 12


def test_both_layouts_in_training_and_one_in_inference() -> None:
    model, x = model_and_input()
    run, backend = compiled(model)
    elements = sum(p.numel() for p in model.parameters())
    with torch.no_grad():
        run(x)
    scales = 2 * 4  # gate and up are joined
    assert backend.weights.bytes == elements + scales
    run(x)  # the copies with both layouts serve both graphs
    assert backend.weights.bytes == 2 * elements + scales
    with torch.no_grad():
        run(x)
    assert backend.weights.bytes == 2 * elements + scales


UPDATES: dict[str, Callable[[nn.Module], Any]] = {
    "in place": lambda m: [p.mul_(2.0) for p in m.parameters()],
    "replaced": lambda m: [setattr(p, "data", p.data * 2.0) for p in m.parameters()],
    "load_state_dict": lambda m: m.load_state_dict({k: v * 2 for k, v in m.state_dict().items()}),
    "new parameters": lambda m: [
        setattr(layer, "weight", nn.Parameter(layer.get_parameter("weight") * 2)) for layer in m.children()
    ],
}


@first_fast("how", UPDATES)
def test_a_changed_weight_is_quantized_again(how: str) -> None:
    model, x = model_and_input()
    run, _ = compiled(model)
    run(x)
    with torch.no_grad():
        UPDATES[how](model)
    expected, _ = compiled(copy.deepcopy(model), cache_weights=False)
    assert torch.equal(run(x), expected(x))


@first_fast(
    "make",
    [
        pytest.param(lambda p: torch.optim.AdamW(p, lr=0.1, fused=True), id="fused AdamW"),
        pytest.param(lambda p: torch.optim.AdamW(p, lr=0.1, foreach=True), id="foreach AdamW"),
        pytest.param(lambda p: torch.optim.SGD(p, lr=0.1), id="SGD"),
    ],
)
def test_optimizers_are_noticed(make: Any) -> None:
    """A fused optimizer bumps no version counter."""
    model, x = model_and_input()
    run, backend = compiled(model)
    optimizer = make(model.parameters())
    for _ in range(3):
        run(x).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    fresh, _ = compiled(copy.deepcopy(model), cache_weights=False)
    assert torch.equal(run(x), fresh(x))
    assert backend.weights.quantized == 12


def test_fused_optimizers_still_lie_about_versions() -> None:
    """The hook for optimizer steps can go when this fails."""
    parameter = nn.Parameter(torch.randn(8))
    parameter.grad = torch.ones(8)
    before = parameter._version
    torch.optim.AdamW([parameter], fused=True).step()
    assert parameter._version == before


def test_an_optimizer_that_holds_something_else() -> None:
    """A step makes stale what no optimizer was seen to hold: it may hold slices, as sharded training does."""
    model, x = model_and_input()
    run, backend = compiled(model)
    run(x)
    held = [p.detach().view(-1).requires_grad_() for p in model.parameters()]
    for p in held:
        p.grad = torch.ones_like(p)
    torch.optim.AdamW(held, lr=0.1, fused=True).step()
    fresh, _ = compiled(copy.deepcopy(model), cache_weights=False)
    assert torch.equal(run(x), fresh(x))
    assert backend.weights.quantized == 6


def test_frozen_weights_are_quantized_once() -> None:
    model, x = model_and_input()
    for layer in (model.gate, model.up):
        layer.weight.requires_grad_(False)
    run, backend = compiled(model)
    optimizer = torch.optim.AdamW([model.down.weight], lr=0.1, fused=True)
    for _ in range(3):
        run(x).sum().backward()
        optimizer.step()
    assert backend.weights.quantized == 3 + 2


def test_the_step_of_another_models_optimizer() -> None:
    """Another model's step comes between forward and backward, which still needs this model's weights."""
    model, x = model_and_input()
    run, _ = compiled(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run(x).sum().backward()
    optimizer.step()
    out = run(x)
    other = nn.Linear(4, 4)
    other(torch.randn(2, 4)).sum().backward()
    torch.optim.SGD(other.parameters(), lr=0.1).step()
    run(x)
    out.sum().backward()


def test_an_update_between_forward_and_backward_is_an_error() -> None:
    """As it is in plain torch: backward would use the new weights."""
    model, x = model_and_input()
    run, _ = compiled(model)
    out = run(x)
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(2.0)
    run(x)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def test_first_used_under_inference_mode() -> None:
    model, x = model_and_input()
    run, backend = compiled(model)
    with torch.inference_mode():
        run(x.detach())
    run(x).sum().backward()
    fresh, _ = compiled(copy.deepcopy(model), cache_weights=False)
    assert torch.equal(run(x), fresh(x))
    assert backend.weights.quantized <= 9


@pytest.mark.parametrize(
    ("body", "cached"),
    [
        pytest.param(lambda w, x: x @ w.t(), 1, id="transposed"),
        pytest.param(
            lambda w, x: x @ w.to(torch.bfloat16).to(torch.float32).t(),
            1,
            id="casts",
            marks=pytest.mark.skipif(torch.__version__ < "2.13", reason="2.11 drops the two casts inside a graph"),
        ),
        pytest.param(lambda w, x: x @ (w * 2 + 1).t(), 1, id="parametrization"),
        pytest.param(lambda w, x: x @ torch.cat([w, w * 2]).t(), 1, id="concatenated"),
        pytest.param(lambda w, x: x @ nn.functional.dropout(w, 0.5).t(), 0, id="random"),
        pytest.param(lambda w, x: x @ (w + x[0]).t(), 0, id="reads an input"),
    ],
)
def test_cached_weights(body: Any, cached: int) -> None:
    model = Weight(body, 48, 32)
    x = torch.randn(16, 32, requires_grad=True)
    run, backend = compiled(model, Policy([Rule("*", "tensorwise", op="*")]))
    torch.manual_seed(1)
    results = step(run, x, parameters=model.parameters())
    assert backend.weights.quantized == cached
    if cached:
        torch._dynamo.reset()
        fresh, _ = compiled(model, Policy([Rule("*", "tensorwise", op="*")]), cache_weights=False)
        assert same_bits(results, step(fresh, x, parameters=model.parameters()))


def test_a_tied_weight_is_kept_once() -> None:
    model, x = model_and_input()
    model.up.weight = model.gate.weight
    run, backend = compiled(model)
    run(x)
    assert backend.weights.quantized == 2


def test_layers_compiled_one_by_one_have_their_own() -> None:
    torch.manual_seed(0)
    layers = nn.ModuleList(MLP(32, 32) for _ in range(3))
    backend = Backend(ALL, compiler="eager", cache_weights="update")
    x = torch.randn(16, 32)
    for layer in layers:
        layer.compile(backend=backend, fullgraph=True)
        expected = Backend(ALL, compiler="eager", cache_weights=False)
        assert torch.equal(layer(x), torch.compile(copy.deepcopy(layer), backend=expected)(x))
    assert backend.weights.quantized == 9


def test_copies_go_with_their_model() -> None:
    model, x = model_and_input()
    run, backend = compiled(model)
    run(x)
    held = backend.weights.bytes
    del model, run
    torch._dynamo.reset()
    other, x = model_and_input(1)
    run, _ = compiled(other)
    torch.compile(other, backend=backend)(x)
    assert backend.weights.bytes == held


def test_the_report_says_what_they_take() -> None:
    model, x = model_and_input()
    run, backend = compiled(model)
    run(x)
    assert backend.report.weight_bytes == backend.weights.bytes
    assert "3 weights kept in FP8, 12.0 KiB of copies, until an update of them is noticed" in str(backend.report)
    with torch.no_grad():
        run, backend = compiled(model, cache_weights=True)
        run(x)
    assert "3 weights kept in FP8, 6.0 KiB of copies, where no gradients are computed" in str(backend.report)


def test_delayed_scaling_records_a_weight_when_it_is_quantized() -> None:
    recipe = DelayedScaling(amax_history_len=4)
    model, x = model_and_input()
    run, backend = compiled(model, Policy(default=recipe))
    amax = model.down.weight.abs().max().item()
    with torch.no_grad():
        run(x)  # evaluation quantizes, and records nothing
    key = "down.weight|DelayedScaling()"

    def history() -> list[float]:
        state = backend.state_dict()
        (name,) = [k for k in state if k.startswith("down.weight|") and k.endswith("amax_history")]
        return [value for value in state[name].tolist() if value]

    assert history() == []
    run(x).sum().backward()
    run(x).sum().backward()  # not quantized again: recorded once
    assert history() == [amax], key
    with torch.no_grad():
        model.down.weight.mul_(2)
    run(x)
    assert history() == [amax, 2 * amax]


class Twice(nn.Module):
    """Two linears of equal weights. The first one's dgrad wants its weight padded otherwise: x is transposed."""

    def __init__(self, *, tied: bool) -> None:
        super().__init__()
        self.a = nn.Linear(3, 3, bias=False)
        self.b = self.a if tied else copy.deepcopy(self.a)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(nn.functional.silu(self.a(x)))


def test_copies_of_one_weight_are_all_made_before_its_amax_is_recorded() -> None:
    """The two uses of a tied weight have a copy each, and one row of state: as two weights have, with a row each."""
    results: list[list[Tensor]] = []
    for tied in (True, False):
        torch.manual_seed(0)
        model, x = Twice(tied=tied), torch.randn(3, 3).t().requires_grad_()
        run, backend = compiled(model, Policy(default=DelayedScaling(amax_history_len=4)))
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        results.append([])
        for update in range(1, 4):
            results[-1] += step(run, x)
            for parameter in model.parameters():
                parameter.grad = -2.0 * parameter.detach()
            optimizer.step()  # three times as large: of an update by hand a new scale would be taken at once
            assert backend.weights.quantized == 2 * update
    assert same_bits(*results)


def test_loaded_state_scales_the_copies() -> None:
    recipe = DelayedScaling(amax_history_len=4)
    model, x = model_and_input()
    run, backend = compiled(model, Policy(default=recipe))
    run(x)
    state = backend.state_dict()
    scale = state[next(k for k in state if k.startswith("down.weight|") and k.endswith("|scale"))]
    backend.load_state_dict(state)
    run(x)
    copies = {c.request.name.rpartition(".")[2]: c for c in backend.weights._copies()}
    expected = quantize(model.down.weight.detach(), recipe, "weight", "rowwise", scale=scale[0])
    (down,) = [c for name, c in copies.items() if "down" in name]
    assert same_bits([down.tensors["rowwise"]], [expected.data])


class Layers(nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.a, self.b = (nn.Linear(size, size, bias=False) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        return self.b(nn.functional.silu(self.a(x)))


def micro_batches(between: Callable[[Any, Any], Any] | None) -> list[Tensor]:
    """A second micro-batch's output, and the weights' state after it, with something before it or without."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    backend = Backend(Policy(default=DelayedScaling(amax_history_len=8)), compiler="eager", cache_weights="update")
    models = Layers(64), Layers(32)
    run, other = (torch.compile(each, backend=backend, dynamic=False) for each in models)
    backend.bind(models[0], name="trained")
    backend.bind(models[1], name="other")
    optimizer, x = torch.optim.SGD(models[0].parameters(), lr=0.5), torch.randn(16, 64)
    for _ in range(3):
        run(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    with torch.no_grad():
        other(torch.ones(16, 32))  # evaluated first: its copies have one layout
    run(x).sum().backward()
    if between is not None:
        between(run, other)
    out, state = run(x), backend.state_dict()
    return [out, *(state[name] for name in sorted(state) if name.startswith("trained.") and "weight|" in name)]


def give_new_weight(_: Any, other: Any) -> None:
    other._orig_mod.a.weight = nn.Parameter(torch.ones(32, 32))
    other(torch.ones(16, 32)).sum().backward()


BETWEEN: dict[str, Callable[[Any, Any], Any]] = {
    "another model wants more layouts": lambda _, other: other(torch.ones(16, 32)).sum().backward(),
    "evaluation": lambda run, _: torch.no_grad()(run)(torch.ones(16, 64)),
    "another padding": lambda run, _: run(torch.ones(64, 16).t()).sum().backward(),
    "dynamo is reset": lambda *_: torch._dynamo.reset(),
    "a parameter of another model is freed": give_new_weight,
    "another backend": lambda run, _: compiled(run._orig_mod, Policy(default="delayed"))[0](torch.ones(16, 64)),
}


@first_fast("between", BETWEEN)
def test_micro_batches_of_one_step_multiply_the_same_weights(between: str) -> None:
    """Made again, copies would have a newer scale, and record their amax twice."""
    assert same_bits(micro_batches(BETWEEN[between]), micro_batches(None))


def test_a_graph_that_wants_another_padding_takes_the_scale_of_the_step() -> None:
    """Its numbers are the same whether another graph has recorded the amax before or not. That is recorded once."""
    results: list[list[Tensor]] = []
    for order in ((0, 1), (1, 0)):
        torch._dynamo.reset()
        torch.manual_seed(0)
        model, inputs = nn.Linear(3, 3, bias=False), [torch.randn(3, 3), torch.randn(3, 3).t()]
        run, backend = compiled(model, Policy(default=DelayedScaling(amax_history_len=4)))
        optimizer, outs = torch.optim.SGD(model.parameters(), lr=1.0), [torch.zeros(0)] * 2
        for update in range(1, 4):
            for which in order:
                outs[which] = run(inputs[which].clone().requires_grad_())
                outs[which].sum().backward()
            assert backend.weights.quantized == 2 * update  # a copy for each graph
            model.weight.grad = -2.0 * model.weight.detach()
            optimizer.step()
        (history,) = (x for name, x in backend.state_dict().items() if "weight|" in name and name.endswith("history"))
        assert history.count_nonzero() == 3  # one amax of each step
        results.append([*outs, history])
    assert same_bits(*results)


def test_recipes_of_one_weight_have_copies_of_their_own() -> None:
    """Their scales differ, and each records its amax."""
    model, x = model_and_input()
    run, backend = compiled(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    for _ in range(2):
        for margin in (0, 2):
            with fp8graph.autocast(recipe=DelayedScaling(amax_history_len=4, margin=margin)):
                run(x).sum().backward()
        optimizer.step()
    scales = {name: x for name, x in backend.state_dict().items() if "weight|" in name and name.endswith("|scale")}
    made = {x.item() for copy in backend.weights._copies() for name, x in copy.tensors.items() if "scale" in name}
    assert made == {x.reciprocal().item() for x in scales.values()}
    assert len(made) == 4  # of gate and up, which are one weight here, and of down


@pytest.mark.slow
def test_generated_code_quantizes_equal_weights_together() -> None:
    """Nine linears of one shape: one function for eight, one for a single one."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(32, 32, bias=False) for _ in range(9)))
    x = torch.randn(16, 32)
    backend = Backend(ALL, cache_weights="update")
    results = [torch.compile(model, backend=b)(x) for b in (backend, Backend(ALL, cache_weights=False))]
    assert torch.equal(*results)
    assert len(backend.weights._functions) == 2


def test_a_bad_option() -> None:
    with pytest.raises(fp8graph.ConfigError, match='cache_weights must be True, False or "update"'):
        Backend(cache_weights="yes")  # pyright: ignore[reportArgumentType]
