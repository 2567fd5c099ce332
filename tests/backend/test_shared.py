"""Layers that are compiled one by one share code where they are decided alike."""

from __future__ import annotations

from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn

from fp8graph import Backend, Policy, Rule
from fp8graph.ir.settings import Settings
from helpers import MLP, Counting, eager_backend, first_fast, in_one_test, same_bits
from tiny_models import causal_lm


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


@pytest.mark.slow
@first_fast(
    ("rules", "generated"),
    [
        pytest.param([], 2, id="alike"),
        pytest.param([Rule("model.layers.1.*", None)], 4, id="one in high precision"),
        pytest.param(ATTENTION_IN_ROWS, 4, id="two rules that ask for the same"),
    ],
)
def test_layers_with_equal_decisions_share_code(rules: list[Rule], generated: int) -> None:
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


def test_a_layer_that_a_rule_names_shares_no_code_with_one_that_is_in_fp8_by_default() -> None:
    """The same recipes, but strict mode requires FP8 of the one only."""
    layers = nn.ModuleList([MLP(), MLP()])
    backend = eager_backend(Policy([Rule("1.*", "tensorwise")], default="tensorwise", min_speedup=0))
    backend.bind(layers)
    for layer in layers:
        layer.compile(backend=backend)
        layer(torch.randn(16, 32))
    assert {(gemm.fqn[0], gemm.required) for gemm in backend.report.gemms} == {("0", False), ("1", True)}


@pytest.mark.slow
def test_shared_code_keeps_the_scaling_state_of_each_layer() -> None:
    """Scales and histories after three steps are those of layers that share nothing."""
    policy = Policy(default="delayed", min_speedup=0)
    model, backend = llama_layer_by_layer(policy)
    losses = train(model, steps=3)
    assert len(backend.generated) == 4  # forward and backward, of the first step and of the others
    torch._dynamo.reset()
    alone, alone_backends = llama_with_a_backend_per_layer(policy)
    assert same_bits(losses, train(alone, steps=3))
    expected = {name: value for backend in alone_backends for name, value in backend.state_dict().items()}
    got = dict(backend.state_dict())
    assert got.keys() == expected.keys()
    assert len(got) == 1 + 3 * 7 * 3 * 2  # the version; layers, linears, operands, scale and history
    assert same_bits(got.values(), (expected[name] for name in got))


OTHER_DECISIONS: dict[str, dict[str, Any]] = {
    "target": {"target": "sm_90"},
    "cache_weights": {"cache_weights": "update"},
    "save": {"save": "memory"},
    "save_activations_in_fp8": {"save": "memory", "save_activations_in_fp8": True},
    "fuse_linears": {"fuse_linears": False},
    "accumulate_wgrad": {"accumulate_wgrad": True},
    "small_tiles": {"small_tiles": True},
    "batch_invariant": {"batch_invariant": True, "recipe": "rowwise"},
    "recipe": {"recipe": "rowwise"},
}


@in_one_test("setting", [*Settings().decisions(), "recipe"])
def test_ranks_that_decide_otherwise_say_so(setting: str) -> None:
    settings = OTHER_DECISIONS[setting]
    others = {name: value for name, value in settings.items() if name != setting}

    def decides(**settings: Any) -> str:
        return Backend(compiler="eager", **settings).decides(training=True)

    assert decides(**others) == decides(**others, strict=True)  # decides nothing
    assert decides(**others) != decides(**settings)
