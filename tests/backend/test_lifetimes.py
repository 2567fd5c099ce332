"""Nothing grows for ever: what goes with a model, what at ``torch._dynamo.reset()``, and what stays."""

from __future__ import annotations

import gc
import pickle
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import FakeTensor

import fp8graph
from fp8graph import Backend, Policy
from fp8graph.backend import named_backend
from fp8graph.backend.compiled_graph import KEPT_POLICIES, CompiledGraph
from fp8graph.passes.connect_scales.pages import Page
from fp8graph.passes.connect_scales.scaling_state import ScalingState
from helpers import ALL, MLP, counted_passes, first_fast, same_bits

DELAYED = Policy(default="delayed", min_speedup=0)
FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)


@pytest.fixture(autouse=True)
def _fresh() -> None:  # pyright: ignore[reportUnusedFunction]
    """Objects that other tests of this process left are not counted."""
    torch._dynamo.reset()
    gc.collect()
    gc.freeze()


def alive() -> dict[str, int]:
    """The living objects that backends made in this process, by kind; and the bytes of FP8 tensors."""
    gc.collect()
    objects = [
        x for x in gc.get_objects() if issubclass(type(x), (Backend, CompiledGraph, Page, fx.GraphModule, Tensor))
    ]
    counts = {kind.__name__: sum(isinstance(x, kind) for x in objects) for kind in (Backend, CompiledGraph, Page)}
    counts["GraphModule"] = sum(isinstance(x, fx.GraphModule) for x in objects)
    tensors = [x for x in objects if isinstance(x, Tensor) and not isinstance(x, FakeTensor)]
    return counts | {"bytes": sum(x.nbytes for x in tensors if x.dtype in FP8)}


def _by_object(options: dict[str, Any]) -> Callable[[nn.Module, int], Any]:
    backend = Backend(DELAYED, **options)
    return lambda model, _: torch.compile(model, backend=backend)


def _by_name(options: dict[str, Any]) -> Callable[[nn.Module, int], Any]:
    def compiled(model: nn.Module, i: int) -> Any:
        policy = Policy(default="delayed", min_speedup=i / 100)  # options of its own, and so a backend
        given: dict[str, Any] = {"policy": policy, **options}
        return torch.compile(model, backend="fp8graph", options=given)

    return compiled


def _in_place(options: dict[str, Any]) -> Callable[[nn.Module, int], Any]:
    return lambda model, _: fp8graph.compile(model, DELAYED, **options)


def _explained(_: dict[str, Any]) -> Callable[[nn.Module, int], Any]:
    return lambda model, _: lambda x: fp8graph.explain(model, x, policy=DELAYED) and model(x)


def _use(compile: Callable[[nn.Module, int], Any], i: int) -> None:
    model = MLP(32, 64 + 16 * i)
    optimizer = torch.optim.SGD(model.parameters())
    compiled = compile(model, i)
    for _ in range(2):
        compiled(torch.randn(16, 32)).sum().backward()
        optimizer.step()


@pytest.mark.slow
@first_fast(
    ("how", "compiler"),
    [
        (_by_object, "eager"),
        (_by_name, "eager"),
        (_in_place, "eager"),
        (_explained, "eager"),
        pytest.param(_by_name, "inductor", marks=pytest.mark.release),
        pytest.param(_by_object, "inductor", marks=pytest.mark.release),
    ],
)
def test_models_come_and_go(how: Any, compiler: str) -> None:
    compile, found = how({"compiler": compiler}), list[dict[str, int]]()
    for i in range(4):
        _use(compile, i)
        torch._dynamo.reset()
        found.append(alive())
    assert found[1:] == found[:1] * 3
    assert found[0]["CompiledGraph"] == found[0]["Page"] == found[0]["bytes"] == 0
    assert found[0]["Backend"] == (how is _by_object)


def test_models_by_name_with_equal_options_come_and_go() -> None:
    """They share Dynamo's graph, which lives as long as its class has code."""
    options: dict[str, Any] = {"policy": DELAYED, "compiler": "eager"}
    stays, found = MLP(), list[dict[str, int]]()
    kept: Any = torch.compile(stays, backend="fp8graph", options=options)
    for _ in range(2):  # both of its graphs
        kept(torch.randn(16, 32)).sum().backward()
    for _ in range(3):
        _use(lambda model, _: torch.compile(model, backend="fp8graph", options=dict(options)), 0)
        found.append(alive())
    assert found[1:] == found[:1] * 2
    assert (found[0]["Backend"], found[0]["CompiledGraph"]) == (1, 1)
    assert len(fp8graph.backend_of(kept).state_dict()) > 1


def test_copies_and_scales_go_with_their_model_and_code_at_reset() -> None:
    """Dynamo keeps the code of a class for other models of it."""
    backend = Backend(DELAYED, compiler="eager")
    for i in range(3):
        _use(lambda model, _: torch.compile(model, backend=backend), i)
        counts = alive()
        assert (counts["bytes"], counts["Page"], counts["CompiledGraph"]) == (0, 0, i + 1)
        assert (backend.weights.bytes, len(backend.state_dict()), len(backend.names._names)) == (0, 1, 0)
    torch._dynamo.reset()
    assert alive()["CompiledGraph"] == 0


@first_fast("policy", [ALL, DELAYED], ids=["tensorwise", "delayed"])
def test_one_model_is_compiled_again_and_again(policy: Policy) -> None:
    model, x, backend = MLP(), torch.randn(16, 32), Backend(policy, compiler="eager", cache_weights="update")
    backend.bind(model)
    found = list[dict[str, int]]()
    for _ in range(4):
        torch.compile(lambda x: model(x), backend=backend)(x).sum().backward()
        backend.bind(model)
        torch._dynamo.reset()
        found.append(alive())
        assert len(backend.report.graphs) == 1  # all were alike
    assert found[1:] == found[:1] * 3
    # a copy under a delayed scale is that of its step, also if it is made again
    assert (found[0]["CompiledGraph"], found[0]["bytes"]) == (0, 0)
    assert len(backend.names._models) == 1


@first_fast("name", [True, False])
def test_reset_leaves_the_state_of_what_lives(name: bool) -> None:
    def trained(reset: bool) -> tuple[list[Tensor], dict[str, list[float]]]:
        torch._dynamo.reset()
        torch.manual_seed(0)
        inputs = [torch.randn(16, 32) * 2**step for step in range(4)]
        model = MLP()
        options: dict[str, Any] = {"policy": DELAYED, "compiler": "eager"}
        given: dict[str, Any] = {"backend": "fp8graph", "options": options} if name else {"backend": Backend(**options)}
        compiled = torch.compile(model, **given)
        results: list[Tensor] = []
        for step, x in enumerate(inputs):
            if step == 2 and reset:
                before = dict(fp8graph.backend_of(compiled).state_dict())
                torch._dynamo.reset()
                gc.collect()
                after = dict(fp8graph.backend_of(compiled).state_dict())
                assert before.keys() == after.keys()
                assert same_bits(before.values(), after.values())
            y = compiled(x)
            y.sum().backward()
            results.append(y.detach())
        state = fp8graph.backend_of(compiled).state_dict()
        return results, {key: tensor.tolist() for key, tensor in state.items()}

    (expected, state), (got, kept) = trained(False), trained(True)
    assert same_bits(expected, got)
    assert state == kept


def test_a_backend_by_name_lives_as_long_as_what_was_compiled_with_it() -> None:
    model, x = MLP(), torch.randn(16, 32)
    options: dict[str, Any] = {"compiler": "eager", "policy": ALL}
    compiled: Any = torch.compile(model, backend="fp8graph", options=options)
    fp8graph.backend_of(compiled).bind(nn.ModuleDict({"outer": model}))  # nothing else refers to it yet
    gc.collect()
    again: Any = torch.compile(model, backend="fp8graph", options=dict(options))
    assert fp8graph.backend_of(again) is fp8graph.backend_of(compiled)
    compiled(x)
    assert fp8graph.backend_of(compiled).report.gemms[0].fqn == "outer.gate"
    del again
    torch._dynamo.reset()
    gc.collect()
    backend = fp8graph.backend_of(compiled)
    assert len(backend.report.graphs) == 1
    compiled(x)
    assert fp8graph.backend_of(compiled) is backend
    assert pickle.loads(pickle.dumps(named_backend)) is named_backend
    reference = weakref.ref(backend)
    del compiled, backend
    torch._dynamo.reset()
    gc.collect()
    assert reference() is None


def test_a_graph_keeps_its_variants_for_the_last_policies_only() -> None:
    """And their FP8 copies of the weights, of which each of these policies has its own."""
    policies = [Policy(default=fp8graph.Float8CurrentScaling(amax_epsilon=0.125 * i)) for i in range(2 * KEPT_POLICIES)]
    model, x, found = MLP(), torch.randn(16, 32), list[tuple[dict[str, int], int, int]]()
    fp8graph.compile(model, policies[0], compiler="eager")
    backend = fp8graph.backend_of(model)

    def call_under(policy: Policy) -> list[str]:
        backend.set_policy(policy)
        model(x).sum().backward()
        return [graph.policy for graph in backend.report.graphs]

    for policy in policies:
        call_under(policy)
        found.append((alive(), backend.weights.bytes, len(backend.store(ScalingState)._graphs)))
    assert found[KEPT_POLICIES:] == found[KEPT_POLICIES - 1 : KEPT_POLICIES] * KEPT_POLICIES
    last = [policy.identity() for policy in policies[-KEPT_POLICIES:]]
    assert [*dict.fromkeys(call_under(policies[-2]))] == last  # a switch back compiles nothing
    kept = last[1:2] + last[-1:] + last[-2:-1]
    assert sorted(call_under(policies[0])) == sorted([*kept, policies[0].identity()])
    torch._dynamo.reset()
    gc.collect()
    assert len(backend.report.graphs) == KEPT_POLICIES  # those of a graph that is gone, too


def test_a_model_that_changes_policies_takes_no_variant_from_another_of_its_class(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    options: dict[str, Any] = {"policy": ALL, "compiler": "eager"}
    models, x = [MLP(), MLP()], torch.randn(16, 32)
    still, moves = (torch.compile(model, backend="fp8graph", options=options) for model in models)
    for compiled in (still, moves):
        compiled(x).sum().backward()
    for i in range(KEPT_POLICIES + 1):
        fp8graph.backend_of(moves).set_policy(Policy(default="tensorwise", min_speedup=i / 8))
        moves(x).sum().backward()
    passes = counted_passes(monkeypatch)
    still(x).sum().backward()
    assert len(fp8graph.backend_of(still).report.graphs) == 1
    assert passes == []
