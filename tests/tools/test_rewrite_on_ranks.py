"""rewrite and lower on two ranks: gathers, experts and shared scales in graphs that another compiler traced."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.fx.experimental.proxy_tensor import make_fx

import fp8graph
from expert_parallel import HIDDEN, Experts
from fp8graph import Backend, ConfigError, Policy, PolicyError, Rule
from fp8graph.numerics.formats import SCALE
from gathers import Sharded
from helpers import MLP, joint, same_bits
from ranks import run_each, run_ranks

EXPERTS = Policy([Rule("router", None), Rule("*", "tensorwise", op="*")], default=None)


def compared(rank: int, model: nn.Module, x: Tensor, policy: Any) -> dict[str, Any]:
    """Three steps of a rewritten joint graph, as it is, lowered, and lowered with its state inside, beside a backend's.

    Both have the same weights, which an optimizer moves after each step.
    """
    leaf = x.clone().requires_grad_()
    backend = Backend(policy, compiler="eager", cache_weights=False)
    compiled, parameters = torch.compile(model, backend=backend), [*model.parameters()]
    graph, names = joint(model, leaf.detach().clone().requires_grad_()), [name for name, _ in model.named_parameters()]
    dy = torch.randn(model(x).shape, dtype=x.dtype, generator=torch.Generator().manual_seed(7 + rank))
    rewritten, state = fp8graph.rewrite(graph, [*parameters, x, dy], names, policy)
    lowered, kept = fp8graph.lower(rewritten), [page.clone() for page in state]
    alone, equal = fp8graph.lower(rewritten, kept), list[bool]()
    optimizer = torch.optim.SGD(parameters, 0.1)
    for _ in range(3):
        y = compiled(leaf)
        wanted = [y, *torch.autograd.grad(y, [*parameters, leaf], dy)]
        with torch.no_grad():
            before = [page.clone() for page in state]
            inputs = [*parameters, x, dy]
            for results in (rewritten(*inputs, *state), lowered(*inputs, *before), alone(*inputs)):
                equal.append(same_bits(wanted, results))
            equal.append(same_bits(state, before) and same_bits(state, kept))
        for parameter, gradient in zip(parameters, wanted[1:], strict=False):
            parameter.grad = gradient
        optimizer.step()
    report = rewritten.meta["fp8graph_report"]
    return {
        "equal": equal,
        "state": state,
        "scales": [x for name, x in backend.state_dict().items() if name.endswith("|scale")],
        "sent": [(row.kind, row.tensor, row.dtype, row.bytes_sent, row.reason) for row in report.collectives],
        "gemms": {(gemm.fqn, gemm.recipe) for gemm in report.gemms},
    }


def gathering(rank: int, recipe: str) -> dict[str, Any]:
    """A linear whose weight is gathered in the graph, from another shard on each rank."""
    torch.manual_seed(rank)
    # a graph alone begins with scales of 1
    chosen = fp8graph.DelayedScaling(initial_scale="one") if recipe == "delayed" else recipe
    return compared(rank, Sharded().bfloat16(), torch.randn(32, 128).bfloat16(), Policy(default=chosen))


def routing(rank: int) -> dict[str, Any]:
    """Experts of two ranks, with an all-to-all before and after them."""
    importlib.import_module("transformers.integrations.moe")  # it defines an op
    generator = torch.Generator().manual_seed(rank)
    return compared(rank, Experts(2, "after"), torch.randn(16, HIDDEN, generator=generator), EXPERTS)


def refused(rank: int) -> Sequence[str]:
    """The messages for ranks that differ, and for a graph with FSDP2's own gathers."""
    said: list[str] = []
    model, x = MLP(), torch.randn(32, 32)
    graph, names = joint(model, x.clone().requires_grad_()), [name for name, _ in model.named_parameters()]
    inputs = [*model.parameters(), x, x]
    layers = [f"layers.{rank}.{name}" for name in names]
    for called, recipe in ((names, ("tensorwise", "rowwise")[rank]), (layers, "delayed")):
        with pytest.raises(PolicyError) as error:
            fp8graph.rewrite(graph, inputs, called, recipe=recipe)
        said.append(str(error.value))
    fully_shard(model)
    sharded = make_fx(lambda x: model(x))(x)  # noqa: PLW0108
    with pytest.raises(ConfigError) as hooks:
        fp8graph.rewrite(sharded, [x], [])
    return [*said, str(hooks.value)]


RECIPES = ("tensorwise", "blockwise", "rowwise", "delayed")


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    calls: dict[str, Any] = {recipe: (gathering, (recipe,)) for recipe in RECIPES}
    calls |= {"experts": (routing, ()), "refused": (refused, ())}
    return run_ranks(run_each, 2, tmp_path_factory.mktemp("ranks"), calls)


@pytest.mark.slow
@pytest.mark.parametrize("name", [*RECIPES, "experts"])
def test_a_graph_traced_on_ranks_computes_what_the_backend_computes(ranks: list[dict[str, Any]], name: str) -> None:
    for found in ranks:
        assert found[name]["equal"] == [True] * 12
        rows = {("weight", name)}
        if name == "experts":
            rows = {("up", "tensorwise"), ("down", "tensorwise"), ("router", None)}
        assert found[name]["gemms"] == rows


@pytest.mark.slow
def test_gathers_of_weights_in_a_graph_send_fp8_or_say_why_not(ranks: list[dict[str, Any]]) -> None:
    for found in ranks:
        sent = {recipe: [row for row in found[recipe]["sent"] if row[0] == "all_gather"] for recipe in RECIPES}
        assert sent["tensorwise"] == sent["delayed"]
        ((*_, reason),) = sent["tensorwise"]
        assert reason == "quantized before it is sent, 32768 bytes otherwise"
        assert [row[2:4] for row in sent["tensorwise"]] == [("uint8", 16384)]
        assert [row[2:4] for row in sent["blockwise"]] == [("uint8", 16384), ("float32", 4)]
        ((*_, why),) = sent["rowwise"]
        assert why == "a scale per column spans all ranks, so both layouts would have to be sent"


@pytest.mark.slow
def test_delayed_scales_are_those_of_all_ranks_by_a_collective_per_direction(ranks: list[dict[str, Any]]) -> None:
    first, second = (found["delayed"] for found in ranks)
    assert same_bits(first["state"], second["state"])
    reduced = [row[3] for row in first["sent"] if row[4] == "delayed scaling has one scale on all ranks"]
    assert reduced == [8, 4]  # of input and weight; of the gradient
    scales = torch.cat([page[:, SCALE] for page in first["state"]])
    assert sorted(scales.tolist()) == sorted(torch.cat(first["scales"]).tolist())


@pytest.mark.slow
def test_ranks_that_differ_and_gathers_of_fsdp2s_hooks_are_refused(ranks: list[dict[str, Any]]) -> None:
    for found in ranks:
        policies, layers, hooks = found["refused"]
        assert "the ranks do not agree on how to quantize" in policies
        assert "layers.1.gate fprop delayed" in layers
        assert "fp8graph.autocast(amax_reduction_group=...)" in layers
        assert "with which FSDP2's hooks gather into memory of their own" in hooks
