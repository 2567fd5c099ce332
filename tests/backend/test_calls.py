"""What a call costs beside the compiled code, and what one compile costs beside plain torch's: counts and ratios."""

from __future__ import annotations

import copy
import gc
import sys
import weakref
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any, cast

import pytest
import torch
from torch import Tensor, fx, nn
from torch._inductor.compile_fx import compile_fx

import fp8graph
from fp8graph import Backend, Policy, Rule
from fp8graph.backend import codegen, compiling
from fp8graph.backend.codegen import run_eagerly
from fp8graph.ir.settings import Settings
from fp8graph.models.family import causal_lm
from helpers import ALL, MLP, counted_passes, eager_backend, same_bits, step


class Counting(Backend):
    """Runs graphs as they are; counts the passes and the graphs that code would be generated for."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, compiler="eager", **kwargs)
        self.generated: list[dict[str, Any]] = []

    @property
    def inner_compile(self) -> Callable[..., Any]:
        def compile(module: fx.GraphModule, inputs: Sequence[Any], **kwargs: Any) -> Any:
            self.generated.append({"inputs": inputs, **kwargs})
            return run_eagerly(module, inputs)

        return compile


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("recipe", ["tensorwise", "delayed"])
def test_inputs_stay_where_they_are_for_cuda_graphs(recipe: str, training: bool) -> None:
    """CUDA graphs copy what is not static at each replay, and leave graphs alone that write into it."""
    model, x = MLP(), torch.randn(16, 32)
    static: list[list[int]] = []

    def plain(module: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        def inner(graph: fx.GraphModule, _inputs: Sequence[Any], **kwargs: Any) -> Any:
            static.append(list(kwargs["static_input_idxs"]))
            return run_eagerly(graph, _inputs)

        return cast(Any, compile_fx)(module, list(inputs), inner_compile=inner)

    with torch.set_grad_enabled(training):
        torch.compile(model, backend=plain)(x)
        backend = Counting(Policy(default=recipe, min_speedup=0))
        torch.compile(model, backend=backend)(x)
    (forward,) = backend.generated
    ours = list(forward["static_input_idxs"])
    assert static[0]
    assert ours == [*static[0], *range(4, len(forward["inputs"]))]
    assert len(forward["inputs"]) > 4  # x, three weights; and copies, pages


@pytest.mark.parametrize("recipe", ["tensorwise", "delayed", "rowwise", "blockwise", "nvfp4"])
@pytest.mark.parametrize("training", [True, False])
def test_a_graph_is_traced_once(recipe: str, training: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """What it takes beside Dynamo's inputs is foreseen, to the tensor."""
    runs = counted_passes(monkeypatch)
    model, x = MLP(128, 256), torch.randn(16, 128, requires_grad=training)
    backend = Counting(Policy(default=recipe, min_speedup=0))
    with torch.set_grad_enabled(training):
        torch.compile(model, backend=backend)(x)
    assert len(runs) == 1
    assert all(t.numel() for t in backend.generated[0]["inputs"] if isinstance(t, Tensor))


@pytest.mark.parametrize("foreseen", [0, 1, 40])
@pytest.mark.parametrize("recipe", ["tensorwise", "delayed"])
def test_foreseeing_wrongly_changes_no_number(recipe: str, foreseen: int, monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = MLP(), torch.randn(16, 32, requires_grad=True)
    results: list[list[Tensor]] = []
    for guess in (None, foreseen):
        torch._dynamo.reset()
        if guess is not None:
            monkeypatch.setattr(compiling, "spare_inputs", lambda *_, guess=guess, **__: guess)
        runs = counted_passes(monkeypatch)
        run = torch.compile(model, backend=eager_backend(Policy(default=recipe), cache_weights=True))
        results.append([t for _ in range(3) for t in step(run, x, parameters=model.parameters())])
        assert len(runs) >= 1 + (guess is not None and guess < 5)
    assert same_bits(*results)


def llama_layer_by_layer(policy: Policy, layers: int = 3, *, bind: bool = True) -> tuple[Any, Counting]:
    torch.manual_seed(0)
    model = causal_lm("Llama")(layers).bfloat16()
    backend = Counting(policy)
    if bind:
        backend.bind(model)
    for layer in model.model.layers:
        layer.compile(backend=backend)
    return model, backend


def llama_with_a_backend_per_layer(policy: Policy, layers: int = 3) -> tuple[Any, list[Backend]]:
    """The same model, in which no layer shares anything with another."""
    model, _ = llama_layer_by_layer(policy, layers)
    backends = [eager_backend(policy, cache_weights=True) for _ in range(layers)]
    for layer, backend in zip(model.model.layers, backends, strict=True):
        backend.bind(model)
        layer.compile(backend=backend)
    return model, backends


def train(model: Any, steps: int = 1) -> list[Tensor]:
    ids = torch.randint(0, 256, (2, 16), generator=torch.Generator().manual_seed(0))
    losses: list[Tensor] = []
    for _ in range(steps):
        model.zero_grad()
        losses.append(model(input_ids=ids, labels=ids, use_cache=False).loss)
        losses[-1].backward()
    return [*(loss.detach() for loss in losses), *(p.grad for p in model.parameters() if p.grad is not None)]


ATTENTION_IN_ROWS = [Rule(f"model.layers.{i}.self_attn.*", "rowwise") for i in (1, 2)]


@pytest.mark.parametrize(
    ("rules", "generated"),
    [
        pytest.param([], 2, id="alike"),
        pytest.param([Rule("model.layers.1.*", None)], 4, id="one in high precision"),
        pytest.param(ATTENTION_IN_ROWS, 4, id="two rules that ask for the same"),
    ],
)
def test_layers_share_code_where_they_are_decided_alike(rules: list[Rule], generated: int) -> None:
    policy = Policy(rules, default="tensorwise", min_speedup=0)
    model, backend = llama_layer_by_layer(policy)
    got = train(model)
    assert len(backend.generated) == generated
    gemms = backend.report.gemms
    assert [g.fqn for g in gemms[::21]] == [f"model.layers.{i}.self_attn.q_proj" for i in range(3)]
    for gemm in gemms:
        resolution = policy.resolve(gemm.fqn, gemm.op)
        recipe = resolution.recipes[cast(Any, gemm.gemm)]
        assert (gemm.recipe, gemm.rule) == (recipe and recipe.name, resolution.rule)
        assert resolution.source in gemm.reason
    torch._dynamo.reset()
    alone, _ = llama_with_a_backend_per_layer(policy)
    assert same_bits(got, train(alone))


def test_shared_code_keeps_the_scaling_state_of_each_layer() -> None:
    """Scales and histories after three steps are those of layers that share nothing."""
    policy = Policy(default="delayed", min_speedup=0)
    model, backend = llama_layer_by_layer(policy)
    losses = train(model, steps=3)
    assert len(backend.generated) == 2
    torch._dynamo.reset()
    alone, alone_backends = llama_with_a_backend_per_layer(policy)
    assert same_bits(losses, train(alone, steps=3))
    expected = {name: value for backend in alone_backends for name, value in backend.state_dict().items()}
    got = dict(backend.state_dict())
    assert got.keys() == expected.keys()
    assert len(got) == 1 + 3 * 7 * 3 * 2  # the version; layers, linears, operands, scale and history
    assert same_bits(got.values(), (expected[name] for name in got))


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
    functions, executed = 0, 0

    def profile(_frame: FrameType, event: str, _argument: Any) -> None:
        nonlocal functions
        functions += event in ("call", "c_call")

    def trace(frame: FrameType, event: str, _argument: Any) -> Any:
        nonlocal executed
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        executed += event == "opcode"
        return trace

    for begin, function in ((sys.setprofile, profile), (sys.settrace, trace)):
        begin(cast(Any, function))
        try:
            call()
        finally:
            begin(None)
    return functions, executed


@pytest.mark.parametrize(
    ("policy", "cache_weights", "instructions_per_weight"),
    [
        pytest.param(ALL, True, 8, id="copies of all weights"),
        pytest.param(ALL, False, 0, id="no copies"),
        pytest.param(Policy(default=None), True, 0, id="nothing in FP8"),
    ],
)
def test_a_call_costs_little_more_than_dynamos_guards(
    policy: Policy, cache_weights: bool, instructions_per_weight: int
) -> None:
    """What Python executes in a call, names bound, less the same model compiled without us. The time: first_hour.py."""
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
    assert many_calls == few_calls < 35  # no function per weight
    assert (many - few) / 32 <= instructions_per_weight  # Dynamo's wrappers: 6
    assert few - 32 * instructions_per_weight < 350


def test_prepared_calls_keep_nothing_alive() -> None:
    model = MLP()
    backend = eager_backend(ALL, cache_weights=True)
    run = torch.compile(model, backend=backend)
    run(torch.randn(16, 32))
    assert any(p._prepared._calls for p in backend._programs)
    parameters = [weakref.ref(p) for p in model.parameters()]
    del model, run
    torch._dynamo.reset()
    gc.collect()
    assert [reference() for reference in parameters] == [None] * 3
    assert not any(prepared._calls for prepared in (p._prepared for p in backend._programs))


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


def test_what_quantizes_weights_asks_for_no_cuda_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    """It writes into tensors that stay: torch would skip the graph, and warn."""
    asked: list[dict[str, Any]] = []
    monkeypatch.setattr(codegen, "compile_fx", lambda *_, config_patches, **__: asked.append(config_patches))
    settings = Settings(inductor_options={"triton.cudagraphs": True})
    codegen.compile_dialect(fx.GraphModule(nn.Module(), fx.Graph()), [torch.ones(1)], settings)
    assert [patches["triton.cudagraphs"] for patches in asked] == [False]
