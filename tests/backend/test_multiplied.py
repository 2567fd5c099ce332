"""multiplied: bytes and scales of each weight as fprop multiplies it, apart from padding and neighbours."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

import fp8graph
from fp8graph import Policy
from fp8graph.backend.multiplied import Multiplied, multiplied_by
from fp8graph.numerics import api
from fp8graph.recipes import resolve_recipe
from helpers import MLP, same_bits


def found(model: nn.Module, recipe: str, *, data: bool = True, width: int = 32) -> dict[str, Multiplied]:
    policy = Policy(default=recipe, min_speedup=0)
    fp8graph.compile(model, policy, compiler="eager")
    model(torch.randn(16, width)).sum().backward()
    return {weight.layer: weight for weight in multiplied_by(fp8graph.backend_of(model), model, data=data)}


@pytest.mark.parametrize("recipe", ["rowwise", "blockwise", "mxfp8"])
def test_each_weight_alone(recipe: str) -> None:
    model = MLP(40, 72)  # joined, and padded to multiples of 16
    weights = found(model, recipe, width=40)
    assert weights.keys() == {"gate", "up", "down"}
    resolved = resolve_recipe(recipe)
    assert resolved is not None
    for layer, weight in weights.items():
        own = api.quantize(model.get_parameter(f"{layer}.weight").detach(), resolved, "weight", "rowwise")
        assert same_bits([weight.data, weight.scale_inv], [own.data, own.scale_inv])
        assert (weight.quantizer, weight.flipped) == (own.quantizer, False)


def test_joined_weights_share_one_scale() -> None:
    weights = found(MLP(), "tensorwise")
    assert torch.equal(weights["gate"].scale_inv, weights["up"].scale_inv)
    assert not torch.equal(weights["gate"].scale_inv, weights["down"].scale_inv)


def test_delayed_scales_are_those_of_the_state() -> None:
    model = MLP()
    weights = found(model, "delayed")
    state = dict(fp8graph.backend_of(model).state_dict())
    for layer, weight in weights.items():
        saved = {key.partition("|")[0]: tensor for key, tensor in state.items() if key.endswith("|scale")}
        assert torch.equal(weight.scale_inv, saved[f"{layer}.weight"].reciprocal())
        assert weight.input_scale_inv is not None
        assert torch.equal(weight.input_scale_inv, saved[f"{layer}.input"].reciprocal()[0])


def test_a_plan_computes_nothing() -> None:
    weights = found(MLP(), "blockwise", data=False)
    assert weights.keys() == {"gate", "up", "down"}
    assert all(isinstance(weight.data, FakeTensor) for weight in weights.values())


def test_computed_weights_belong_to_no_layer() -> None:
    model = nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(32, 48)), nn.Linear(48, 16))
    assert found(model, "rowwise").keys() == {"1"}
