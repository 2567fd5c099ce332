"""saved_parts: the linears of a checkpoint that a weight of a model is written as."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
import transformers
from torch import nn

from fp8graph.backend.multiplied import Multiplied
from fp8graph.numerics import api, dequantize
from fp8graph.recipes import resolve_recipe
from fp8graph.tools.forms import Part, cut, saved_parts, why_not
from tiny_models import causal_lm


def parts_of(model: nn.Module, *names: str) -> dict[str, list[Part]]:
    return saved_parts(model, {name: model.get_parameter(name).shape for name in names})


def test_a_linear_is_itself() -> None:
    ((name, (part,)),) = parts_of(nn.Sequential(nn.Linear(4, 6)), "0.weight").items()
    assert (name, part.layer, part.expert, part.rows.tolist()) == ("0.weight", "0", None, list(range(6)))


def test_experts_are_linears_by_the_names_of_the_checkpoint() -> None:
    model, mlp = causal_lm("Mixtral")(1), "model.layers.0.mlp"
    experts, inner = model.config.num_local_experts, model.config.intermediate_size
    found = parts_of(model, f"{mlp}.experts.gate_up_proj", f"{mlp}.experts.down_proj", f"{mlp}.gate.weight")
    saved = "model.layers.0.block_sparse_moe"
    assert [part.layer for part in found[f"{mlp}.gate.weight"]] == [f"{saved}.gate"]
    assert len(found[f"{mlp}.experts.down_proj"]) == experts
    by_name = {part.layer: part for part in found[f"{mlp}.experts.gate_up_proj"]}
    assert len(by_name) == 2 * experts
    gate, up = by_name[f"{saved}.experts.3.w1"], by_name[f"{saved}.experts.3.w3"]
    assert (gate.expert, up.expert) == (3, 3)
    assert torch.equal(gate.rows, torch.arange(inner))
    assert torch.equal(up.rows, torch.arange(inner, 2 * inner))


def test_what_no_checkpoint_has_as_linears_is_left_out() -> None:
    config = transformers.GptOssConfig(
        num_hidden_layers=1, hidden_size=64, intermediate_size=64, num_local_experts=2, vocab_size=64,
        num_attention_heads=2, num_key_value_heads=2, head_dim=32,
    )  # fmt: skip
    assert not parts_of(transformers.GptOssForCausalLM(config), "model.layers.0.mlp.experts.down_proj")
    assert not parts_of(nn.MultiheadAttention(16, 2), "in_proj_weight")


def matrices(recipe: str) -> list[api.QuantizedTensor]:
    resolved: Any = resolve_recipe(recipe)
    return [api.quantize(torch.randn(256, 64) * (e + 1), resolved, "weight", "rowwise") for e in range(3)]


def together(made: list[api.QuantizedTensor]) -> Multiplied:
    data, scale_inv = (torch.stack([getattr(x, name) for x in made]) for name in ("data", "scale_inv"))
    return Multiplied(parameter="experts.up", data=data, scale_inv=scale_inv, quantizer=made[0].quantizer)


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise", "blockwise", "mxfp8"])
def test_each_part_has_the_bytes_and_scales_of_its_rows(recipe: str) -> None:
    made = matrices(recipe)
    weight = together(made)
    halves = [
        Part(layer=f"{e}.{half}", rows=torch.arange(128) + 128 * half, expert=e) for e in range(3) for half in range(2)
    ]
    assert why_not(weight, halves) is None
    found = dict(cut(weight, halves))
    assert found.keys() == {part.layer for part in halves}
    for part in halves:
        whole, own = made[part.expert or 0], found[part.layer]
        got = dataclasses.replace(whole, data=own.data, scale_inv=own.scale_inv, shape=torch.Size((128, 64)))
        assert torch.equal(dequantize(got), dequantize(whole)[part.rows])


def test_tiles_are_not_cut() -> None:
    shifted = Part(layer="up", rows=torch.arange(64, 192), expert=1)
    mixed = Part(layer="up", rows=torch.arange(128).flip(0), expert=1)
    tiles = together(matrices("blockwise"))
    assert why_not(together(matrices("rowwise")), [shifted, mixed]) is None
    for part in (shifted, mixed):
        assert why_not(tiles, [part]) == "up begins or ends inside a tile of 128 rows"
    one = dataclasses.replace(shifted, rows=torch.arange(128, 256))
    assert why_not(tiles, [one]) is None
