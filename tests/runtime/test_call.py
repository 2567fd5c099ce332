"""The cost of a call beside the compiled code, and the things that a prepared call depends on."""

from __future__ import annotations

import copy
import gc
import sys
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any, cast

import pytest
import torch
from torch import Tensor, fx, nn
from torch._inductor.compile_fx import compile_fx

import fp8graph
from fp8graph import Backend, Policy
from fp8graph.compat import autograd
from fp8graph.passes.hoist_weights import weight_cache
from fp8graph.runtime import call, staleness
from fp8graph.runtime.call import BoundCall
from helpers import ALL, MLP, eager_backend


def constant(module: fx.GraphModule, _inputs: Sequence[Any], **_: Any) -> Callable[..., Any]:
    """``inner_compile``: code that takes no time."""
    (output,) = module.graph.find_nodes(op="output")
    results = [torch.zeros(tuple(node.meta["val"].shape)) for node in output.args[0]]

    def run(args: list[Any]) -> list[Tensor]:
        args.clear()
        return results

    run._boxed_call = True  # pyright: ignore[reportFunctionMemberAccess]
    return run


class NoCode(Backend):
    @property
    def inner_compile(self) -> Callable[..., Any]:
        return constant


def instructions(call: Callable[[], Any]) -> tuple[int, int]:
    """Functions that one call of ``call`` calls, in Python and in C, and the bytecode instructions that it executes."""
    for _ in range(3):
        call()
    functions = executed = 0

    def profile(_frame: FrameType, event: str, _argument: Any) -> None:
        nonlocal functions
        functions += event in ("call", "c_call")

    def trace(frame: FrameType, event: str, _argument: Any) -> Any:
        nonlocal executed
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        executed += event == "opcode"
        return trace

    for _ in range(2):  # what is traced for the first time may be prepared for it: Python 3.12
        functions, executed = 0, 0
        for begin, function in ((sys.setprofile, profile), (sys.settrace, trace)):
            begin(cast(Any, function))
            try:
                call()
            finally:
                begin(None)
    return functions, executed


@pytest.mark.slow
@pytest.mark.parametrize(
    ("policy", "cache_weights", "instructions_per_weight"),
    [
        pytest.param(ALL, True, 8, id="copies of all weights"),
        pytest.param(ALL, False, 0, id="no copies"),
        pytest.param(Policy(default=None), True, 0, id="nothing in FP8"),
    ],
)
def test_a_call_costs_little_more_than_dynamos_guards(
    policy: Policy, cache_weights: bool, instructions_per_weight: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Python functions in a call, names bound, less those of the model compiled without us. The time: first_hour.py.

    The weights' numbers are not looked at: on a CPU that takes longer, and elsewhere a watch does it (test_contents).
    """
    monkeypatch.setattr(weight_cache, "same_contents", lambda *_: lambda _args: True)
    more: list[tuple[int, int]] = []
    for weights in (32, 64):
        torch._dynamo.reset()
        model, x = nn.Sequential(*(nn.Linear(16, 16, bias=False) for _ in range(weights))), torch.randn(16, 16)
        plain: Any = torch.compile(
            lambda x, model=model: model(x),
            backend=lambda m, inputs: cast(Any, compile_fx)(m, list(inputs), inner_compile=constant),
        )
        backend = NoCode(policy, compiler="eager", cache_weights=cache_weights)
        backend.bind(model)
        ours: Any = torch.compile(lambda x, model=model: model(x), backend=backend)
        with torch.no_grad():
            (ours_calls, ours_executed), (calls, executed) = (
                instructions(lambda run=run, x=x: run(x)) for run in (ours, plain)
            )
        more.append((ours_calls - calls, ours_executed - executed))
        assert bool(backend.weights.bytes) == (cache_weights and policy is ALL)
    (few_calls, few), (many_calls, many) = more
    # no function per weight; five of 38 compare the parameters, in place of an id for each, which no profile counts
    assert many_calls == few_calls < 39
    assert (many - few) / 32 <= instructions_per_weight  # Dynamo's wrappers: 6
    assert few - 32 * instructions_per_weight < 350


def test_a_call_reads_each_weight_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its version and its address; that the parameters are the same ones is one comparison of memory."""
    monkeypatch.setattr(weight_cache, "same_contents", lambda *_: lambda _args: True)
    model, x = nn.Sequential(*(nn.Linear(16, 16, bias=False) for _ in range(6))), torch.randn(16, 16)
    run = torch.compile(model, backend=eager_backend(ALL, cache_weights=True))
    read = Counter[str]()

    def counting(name: str, function: Callable[[Any], Any]) -> Callable[[Any], Any]:
        def read_one(x: Any) -> Any:
            read[name] += 1
            return function(x)

        return read_one

    with torch.no_grad():
        for _ in range(3):
            run(x)
        monkeypatch.setattr(autograd, "version", counting("version", autograd.version))
        monkeypatch.setattr(Tensor, "data_ptr", counting("address", Tensor.data_ptr))
        for module in (call, staleness):
            monkeypatch.setattr(module, "id", counting("id", id), raising=False)
        run(x)
    assert (read["version"], read["address"]) == (6, 6)
    assert read["id"] <= 2  # of the first parameter, by which the prepared call is found, and of the tuple of all


def test_prepared_calls_keep_nothing_alive() -> None:
    model = MLP()
    backend = eager_backend(ALL, cache_weights=True)
    run = torch.compile(model, backend=backend)
    run(torch.randn(16, 32))
    assert any(graph._calls for graph in backend.programs)
    parameters = [weakref.ref(p) for p in model.parameters()]
    del model, run
    torch._dynamo.reset()
    gc.collect()
    assert [reference() for reference in parameters] == [None] * 3
    assert not any(graph._calls for graph in backend.programs)


def test_a_call_goes_with_the_parameters_that_it_is_bound_to() -> None:
    """The first one is the same: a layer whose second weight was replaced, and is replaced again."""
    model, x = MLP(), torch.randn(16, 32)
    backend = eager_backend(ALL, cache_weights=True)
    run = torch.compile(model, backend=backend)
    *_, last = (name for name, _ in model.named_parameters())
    with torch.no_grad():
        run(x)
        (graph,) = backend.programs

        def bound() -> list[weakref.ref[BoundCall]]:
            return [weakref.ref(call) for calls in graph._calls.values() for call in calls]

        (first,) = bound()
        second = nn.Parameter(torch.zeros_like(model.get_parameter(last)))
        module = model.get_submodule(last.rpartition(".")[0])
        module.weight = second
        run(x)
        assert first() is None  # its parameter was freed
        (kept,) = bound()
        module.weight = nn.Parameter(torch.ones_like(second))
        del second
        assert kept() is None
        assert graph._calls == {}
        run(x)
    assert [dict(calls).keys() for calls, _ in graph.calls()] == [set(graph._graph.positions)]


def test_layers_that_share_a_first_parameter_do_not_take_turns() -> None:
    """One graph for two layers whose inputs begin with one parameter: each call would be bound again."""

    class Scaled(nn.Module):
        def __init__(self, scale: nn.Parameter) -> None:
            super().__init__()
            self.scale, self.linear = scale, nn.Linear(32, 32, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            return self.linear(x * self.scale)

    shared = nn.Parameter(torch.ones(32))
    model, backend = nn.Sequential(Scaled(shared), Scaled(shared)), eager_backend(ALL)
    x = torch.randn(16, 32, requires_grad=True)
    backend.bind(model)
    for layer in model:
        layer.compile(backend=backend)
    model(x).sum().backward()
    (graph,) = backend.programs
    before = [call for calls in graph._calls.values() for call in calls]
    model(x).sum().backward()
    assert [call for calls in graph._calls.values() for call in calls] == before
    assert len(before) == len(list(graph.calls())) == 2


def test_calls_of_an_earlier_epoch_hold_nothing_and_are_still_listed() -> None:
    """One layer is bound anew after a change of names; what the other took is freed, and its call is not forgotten."""
    model, backend = nn.Sequential(MLP(), MLP()), eager_backend(ALL, cache_weights=True)
    backend.bind(model)
    x = torch.randn(16, 32)
    for layer in model:
        layer.compile(backend=backend)
    with torch.no_grad():
        model(x)
        (graph,) = backend.programs
        backend.bind(model)
        model[0](x)
    calls = [call for calls in graph._calls.values() for call in calls]
    assert sorted((call.epoch == -1, len(call.more) > 0) for call in calls) == [(False, True), (True, False)]
    assert len(list(graph.calls())) == 2


def test_memory_that_comes_back_to_its_address_is_not_taken_for_the_old_one() -> None:
    model, x = MLP(), torch.randn(16, 32)
    backend = eager_backend(ALL, cache_weights=True)
    run = torch.compile(model, backend=backend)
    with torch.no_grad():
        run(x)
        for p in model.parameters():
            address, size = p.data_ptr(), p.shape
            p.data = torch.empty(1)
            news = [torch.zeros(size) for _ in range(50)]
            p.data = next((new for new in news if new.data_ptr() == address), news[0]) + 0.5
        expected = torch.compile(copy.deepcopy(model), backend=eager_backend(ALL))(x)
        assert torch.equal(run(x), expected)


@pytest.mark.parametrize("change", ["policy", "names", "region", "parameter"])
def test_a_prepared_call_ends_with_what_it_was_prepared_for(change: str) -> None:
    model, x = MLP(), torch.randn(16, 32)
    backend = eager_backend(ALL, cache_weights=True)
    run = torch.compile(model, backend=backend)
    with torch.no_grad():
        before = run(x)
        assert torch.equal(run(x), before)
        if change == "policy":
            backend.set_policy(Policy(default=None))
            assert torch.allclose(run(x), model(x), atol=1e-6)
        elif change == "names":
            backend.bind(nn.ModuleDict({"mlp": model}))
            run(x)
            assert {gemm.fqn for gemm in backend.report.gemms} >= {"mlp.gate", "gate"}
        elif change == "region":
            with fp8graph.autocast(enabled=False):
                assert torch.allclose(run(x), model(x), atol=1e-6)
            assert torch.equal(run(x), before)
        else:
            model.gate.weight = nn.Parameter(torch.zeros_like(model.gate.weight))
            assert not run(x).any()
