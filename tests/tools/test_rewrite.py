"""rewrite and lower: graphs of other tracers compute the bits of torch.compile(backend="fp8graph")."""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional

import fp8graph
from fp8graph import Backend, ConfigError, Policy, Rule
from fp8graph.compat.inductor import select_decomp_table
from fp8graph.compat.torch_build import CPP_ROUNDS_BETWEEN
from fp8graph.ir.ops import REFERENCE
from gathers import two_ranks
from helpers import MLP, RECIPES, first_fast, in_one_test, joint, rounding_to_nearest, same_bits


class Layers(nn.Module):
    """Two MLPs, one after the other."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([MLP(), MLP()])

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def traced(model: nn.Module) -> tuple[fx.GraphModule, list[Tensor], list[str]]:
    """A joint graph, with inputs and the names of the first ones."""
    x, dy = torch.randn(32, 32), torch.randn(32, 32)
    parameters = dict(model.named_parameters())
    return joint(model, x.clone().requires_grad_()), [*parameters.values(), x, dy], list(parameters)


@functools.cache
def one() -> tuple[fx.GraphModule, list[Tensor], list[str]]:
    """A graph for tests that do not change it."""
    return traced(MLP())


@first_fast("recipe", ["delayed", *(recipe for recipe in RECIPES if recipe != "delayed")])
def test_a_joint_graph_computes_what_the_backend_computes(recipe: str) -> None:
    """Results and gradients of three steps, as they are and lowered; scaling state comes back as tensors."""
    model, chosen = MLP(), rounding_to_nearest(recipe)
    if isinstance(chosen, fp8graph.DelayedScaling):
        chosen = dataclasses.replace(chosen, initial_scale="one")
    graph, inputs, names = traced(model)
    rewritten, extra = fp8graph.rewrite(graph, inputs, names, recipe=chosen)
    lowered = fp8graph.lower(rewritten)
    assert len(extra) == (2 if recipe == "delayed" else 0)
    backend = Backend(recipe=chosen, compiler="eager", cache_weights=False)
    compiled = torch.compile(model, backend=backend)
    parameters, (x, dy) = list(model.parameters()), inputs[-2:]
    leaf, optimizer = x.clone().requires_grad_(), torch.optim.SGD(parameters, 0.1)
    for _ in range(3):
        y = compiled(leaf)
        wanted = [y, *torch.autograd.grad(y, [*parameters, leaf], dy)]
        with torch.no_grad():
            before = [page.clone() for page in extra]
            assert same_bits(wanted, rewritten(*inputs, *extra))
            assert same_bits(wanted, lowered(*inputs, *before))
            assert same_bits(extra, before)  # both wrote the same state
        for parameter, gradient in zip(parameters, wanted[1:], strict=False):
            parameter.grad = gradient
        optimizer.step()
    found = rewritten.meta["fp8graph_report"].gemms
    assert [(gemm.fqn, gemm.gemm, gemm.dtypes) for gemm in found] == [
        (gemm.fqn, gemm.gemm, gemm.dtypes) for gemm in backend.report.gemms
    ]


@pytest.mark.skipif(not CPP_ROUNDS_BETWEEN, reason="generated C++ does not round before torch 2.13")
def test_a_row_has_the_same_bits_in_a_graph_of_fewer() -> None:
    model = MLP()
    results: list[Tensor] = []
    x, dy = torch.randn(2, 64, 32)
    for rows in (64, 40):
        inputs = [*model.parameters(), x[:rows], dy[:rows]]
        graph = joint(model, x[:rows].clone().requires_grad_())
        names = list(dict(model.named_parameters()))
        rewritten, _ = fp8graph.rewrite(graph, inputs, names, recipe="rowwise", batch_invariant=True)
        y, *_, dx = fp8graph.lower(rewritten)(*inputs)
        results += [y[:40], dx[:40]]
    assert same_bits(results[:2], results[2:])


def test_a_partitioner_saves_fp8_and_each_part_is_lowered() -> None:
    model = MLP()
    graph, inputs, names = traced(model)
    whole, _ = fp8graph.rewrite(graph, inputs, names, recipe="tensorwise")
    with torch.no_grad():
        wanted = whole(*inputs)
    forward, backward = min_cut_rematerialization_partition(whole, inputs, num_fwd_outputs=1)
    forward, backward = fp8graph.lower(forward), fp8graph.lower(backward)
    assert not [node for part in (forward, backward) for node in part.graph.nodes if node.target in REFERENCE]
    with torch.no_grad():
        y, *saved = forward(*inputs[:-1])
        assert {torch.float8_e4m3fn} <= {x.dtype for x in saved}
        assert same_bits(wanted, [y, *backward(*saved, inputs[-1])])


@pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning")  # torch's own, of run_decompositions
def test_an_exported_program_computes_what_the_backend_computes() -> None:
    model, x = Layers().eval(), torch.randn(16, 32)
    program = torch.export.export(model, (x,)).run_decompositions(select_decomp_table())
    names = [*program.graph_signature.inputs_to_parameters.values()]
    inputs = [*dict(model.named_parameters()).values(), x]
    policy = Policy([Rule("layers.1.*", None)], default="rowwise")
    rewritten, extra = fp8graph.rewrite(program.graph_module, inputs, names, policy)
    with torch.no_grad():
        backend = Backend(policy, compiler="eager")
        wanted = torch.compile(model, backend=backend)(x)
        for module in (rewritten, fp8graph.lower(rewritten)):
            assert same_bits([wanted], module(*inputs))
    assert extra == []
    found = {(gemm.fqn, gemm.recipe) for gemm in rewritten.meta["fp8graph_report"].gemms}
    wanted_rows = {(f"layers.{i}.{part}", None if i else "rowwise") for i in (0, 1) for part in ("gate", "up", "down")}
    assert found == wanted_rows


def test_names_and_directions_come_from_the_marks_of_other_tracers() -> None:
    """The autograd engine's mark of backward, and modules as torchtitan annotates them."""
    graph, inputs, names = traced(MLP())
    tagged, _ = fp8graph.rewrite(graph, inputs, names, recipe="tensorwise")
    for node in graph.graph.nodes:
        node.meta.pop("partitioner_tag", None)
        if node.op == "call_function":
            node.meta["custom"] = {"module_fqn": "layers.7.feed_forward"}
    marked, _ = fp8graph.rewrite(graph, inputs, names, recipe="tensorwise")
    assert str(marked.graph) == str(tagged.graph)
    reports = [module.meta["fp8graph_report"] for module in (tagged, marked)]
    assert {gemm.fqn for gemm in reports[0].gemms} == {"gate", "up", "down"}  # from the names of the weights
    assert {gemm.fqn for gemm in reports[1].gemms} == {"layers.7.feed_forward"}
    added = [node for node in marked.graph.nodes if node.name not in {other.name for other in graph.graph.nodes}]
    engine_marks = any(node.meta.get("autograd_backward") for node in graph.graph.nodes)
    assert engine_marks or torch.__version__ < "2.13"  # 2.11 has no such marks: all is taken for forward
    assert any(node.meta.get("autograd_backward") for node in added) == engine_marks
    assert any(not node.meta.get("autograd_backward") for node in added)


class Computed(nn.Module):
    """A linear whose weight is computed from parameters of its own, and of modules in it."""

    def __init__(self, weight: Callable[[Any], Tensor]) -> None:
        super().__init__()
        self.w, self.g = nn.Parameter(torch.randn(32, 32)), nn.Parameter(torch.randn(32, 1))
        self.a, self.b = nn.Linear(32, 32, bias=False), nn.Linear(32, 32, bias=False)
        self.weight = weight

    def forward(self, x: Tensor) -> Tensor:
        return functional.linear(x, self.weight(self))


class Around(nn.Module):
    """``layer`` as ``up``, then a linear as ``down``."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.up, self.down = layer, nn.Linear(32, 32)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.relu(self.up(x)))


class LowRank(nn.Module):
    """A parametrization with products of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Parameter(torch.randn(8, 32)), nn.Parameter(torch.randn(32, 8))

    def forward(self, w: Tensor) -> Tensor:
        return w + self.b @ self.a


class Quoted(nn.Module):
    """A linear with a quote in its name."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.ModuleDict({"x'y": nn.Linear(32, 32)})

    def forward(self, x: Tensor) -> Tensor:
        return self.up["x'y"](x)


def low_rank() -> nn.Linear:
    layer = nn.Linear(32, 32)
    nn.utils.parametrize.register_parametrization(layer, "weight", LowRank())
    return layer


NAMED: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "weight_norm": (lambda: Around(nn.utils.parametrizations.weight_norm(nn.Linear(32, 32))), "up"),
    "linear": (lambda: Around(nn.Linear(32, 32)), "up"),
    "weight_norm of the whole": (lambda: nn.utils.parametrizations.weight_norm(nn.Linear(32, 32)), "weight"),
    "parametrized": (lambda: Around(low_rank()), "up"),
    "gain": (lambda: Around(Computed(lambda m: m.w * m.g)), "up"),
    "gain first": (lambda: Around(Computed(lambda m: m.g * m.w)), "up"),
    "cast": (lambda: Around(Computed(lambda m: m.w.double().float())), "up"),
    "borrowed": (lambda: Around(Computed(lambda m: m.a.weight)), "up.a"),
    "of two layers": (lambda: Around(Computed(lambda m: m.a.weight + m.b.weight)), "up"),
    "of a layer and a gain": (lambda: Around(Computed(lambda m: m.a.weight * m.g)), "up"),
    "product": (lambda: Around(Computed(lambda m: m.b.weight @ m.a.weight)), "up"),
    "joined": (lambda: Around(Computed(lambda m: torch.cat([m.a.weight[:16], m.b.weight[:16]]))), "up"),
    "at the root": (lambda: Computed(lambda m: m.w * m.g), "w"),
    "borrowed at the root": (lambda: Computed(lambda m: m.a.weight), "a"),
    "quotes": (Quoted, "up.x'y"),
}


@first_fast("case", NAMED)
def test_names_of_layers_are_those_of_the_backend(case: str) -> None:
    """A rule of a layer whose weight is computed was obeyed by torch.compile, and not here."""
    made, kept = NAMED[case]
    model = made()
    policy = Policy([Rule(kept, None)], default="tensorwise", min_speedup=0)
    graph, inputs, names = traced(model)
    rewritten, _ = fp8graph.rewrite(graph, inputs, names, policy)
    backend = Backend(policy, compiler="eager")
    torch.compile(model, backend=backend)(inputs[-2].clone().requires_grad_()).sum().backward()
    found = [
        {(gemm.fqn, gemm.gemm): gemm.recipe for gemm in report.gemms}
        for report in (rewritten.meta["fp8graph_report"], backend.report)
    ]
    assert found[0] == found[1]
    assert found[0][kept, "fprop"] is None


def test_the_given_graph_is_not_changed() -> None:
    graph, inputs, names = one()
    before = [(node.format_node(), dict(node.meta)) for node in graph.graph.nodes]
    rewritten, _ = fp8graph.rewrite(graph, inputs, names, recipe="delayed")
    text = str(rewritten.graph)
    fp8graph.lower(rewritten)
    assert [(node.format_node(), dict(node.meta)) for node in graph.graph.nodes] == before
    assert str(rewritten.graph) == text
    described = [node.meta.get("desc") for node in rewritten.graph.find_nodes(op="placeholder")]
    assert described[: len(inputs)] == [node.meta["desc"] for node in graph.graph.find_nodes(op="placeholder")]


def test_a_graph_without_fake_values_gets_them_from_the_inputs() -> None:
    model, x = MLP(), torch.randn(16, 32)
    parameters = dict(model.named_parameters())

    def call(*inputs: Tensor) -> Tensor:
        return torch.func.functional_call(model, dict(zip(parameters, inputs[:-1], strict=True)), (inputs[-1],))

    with torch.no_grad():
        graph = make_fx(call)(*parameters.values(), x)
        for node in graph.graph.nodes:
            node.meta.clear()
        rewritten, _ = fp8graph.rewrite(graph, [*parameters.values(), x], [*parameters], recipe="tensorwise")
        wanted = torch.compile(model, backend=Backend(recipe="tensorwise", compiler="eager"))(x)
        assert same_bits([wanted], [rewritten(*parameters.values(), x)])


@in_one_test(
    ("changed", "message"),
    [
        ({"graph_module": None}, "rewrite(graph_module=None): graph_module must be a torch.fx.GraphModule."),
        ({"inputs": ()}, "rewrite(inputs=...): 0 values, and the graph takes 5 inputs."),
        ({"names": "gate.weight"}, "rewrite(names=...): names must be a list with a parameter's full name, or None"),
        ({"names": [None] * 6}, "rewrite(names=...): 6 names, and the graph takes 5 inputs."),
        ({"cache_weights": True}, "rewrite has no setting 'cache_weights'. Settings: strict, target, save"),
        ({"taget": "sm_90"}, "rewrite has no setting 'taget'. Did you mean 'target'?"),
        ({"recipe": "rowise"}, "unknown recipe 'rowise'. Did you mean 'rowwise'?"),
        ({"strict": True, "policy": Policy([Rule("up_proj", "rowwise")])}, 'rule "up_proj" -> rowwise matched nothing'),
        ({"policy": Policy([Rule("*", None, steps=(0, 10))], default="rowwise")}, "it has a schedule"),
    ],
)  # fmt: skip
def test_wrong_arguments_are_refused(changed: dict[str, Any], message: str) -> None:
    graph, inputs, names = one()
    given: dict[str, Any] = {"graph_module": graph, "inputs": inputs, "names": names, **changed}
    with pytest.raises(fp8graph.Fp8GraphError, match=re.escape(message)):
        fp8graph.rewrite(**given)


def test_graphs_that_cannot_be_rewritten_are_refused() -> None:
    model, x = MLP(), torch.randn(16, 32)
    program = torch.export.export(model, (x,))
    inputs, names = [*model.parameters(), x], [name for name, _ in model.named_parameters()]
    with pytest.raises(ConfigError, match="node linear is aten.linear.default, which passes do not read. Decompose"):
        fp8graph.rewrite(program.graph_module, inputs, names)
    graph, inputs, names = one()
    rewritten, _ = fp8graph.rewrite(graph, inputs, names)
    with pytest.raises(ConfigError, match="this graph was rewritten before"):
        fp8graph.rewrite(rewritten, inputs, names)
    with pytest.raises(ConfigError, match=re.escape("lower(graph_module=None): graph_module must be")):
        fp8graph.lower(None)  # pyright: ignore[reportArgumentType]


def test_amaxes_are_reduced_over_ranks_by_collectives_in_the_graph() -> None:
    graph, inputs, names = one()
    with two_ranks():
        shared, _ = fp8graph.rewrite(graph, inputs, names, recipe="delayed")
        alone, _ = fp8graph.rewrite(graph, inputs, names, recipe=fp8graph.DelayedScaling(reduce_amax=False))
    rows = [(row.kind, row.direction, row.shape) for row in shared.meta["fp8graph_report"].collectives]
    assert rows == [("all_reduce", "forward", (4,)), ("all_reduce", "backward", (2,))]  # gate and up are fused
    assert not alone.meta["fp8graph_report"].collectives


@pytest.mark.parametrize(("start", "warnings"), [("auto", 1), ("one", 0)])
def test_a_graph_alone_begins_with_scales_of_one_and_says_so(
    start: Any, warnings: int, caplog: pytest.LogCaptureFixture
) -> None:
    fp8graph.rewrite(*one(), recipe=fp8graph.DelayedScaling(initial_scale=start))
    assert caplog.text.count("rewrite: delayed scaling begins with scales of 1 in this graph, ") == warnings


def test_a_lowered_graph_keeps_its_state_and_refuses_that_of_another() -> None:
    graph, inputs, names = one()
    rewritten, state = fp8graph.rewrite(graph, inputs, names, recipe="delayed")
    kept = [page.clone() for page in state]
    alone, lowered = fp8graph.lower(rewritten, kept), fp8graph.lower(rewritten)
    with torch.no_grad():
        for _ in range(2):
            assert same_bits(lowered(*inputs, *state), alone(*inputs))
    assert same_bits(state, kept)
    with pytest.raises(ConfigError, match="1 tensors, and the graph takes 2 inputs of scaling state. Pass the list"):
        fp8graph.lower(rewritten, state[:1])
