"""forms: the linears as which a weight is stored, and the form that a format has for its recipe, or why it has none."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
import transformers
from torch import nn

from fp8graph.backend.multiplied import Multiplied
from fp8graph.checkpoints import compressed_tensors, dequantize
from fp8graph.errors import CheckpointError, ConfigError
from fp8graph.numerics import api
from fp8graph.recipes import NVFP4BlockScaling, resolve_recipe
from fp8graph.tools.forms import Kind, MatrixRows, as_stored, chosen, cut, kind_of, saved_parts, why_not
from helpers import in_one_test
from tiny_models import causal_lm

BLOCK, ROW, TENSOR, NVFP4 = ("block", (128, 128)), ("row", (0, 0)), ("tensor", (0, 0)), ("nvfp4", (1, 16))


@in_one_test(
    ("kinds", "inputs", "method"),
    [
        ({"a": BLOCK, "b": BLOCK}, (), "fp8"),
        ({"a": ROW}, (), "compressed-tensors"),
        ({"a": BLOCK, "b": ROW}, (), "compressed-tensors"),
        ({"a": TENSOR}, (), "fp8"),
        ({"a": TENSOR, "b": ROW}, ("a",), "compressed-tensors"),
    ],
)
def test_the_first_format_with_a_form_for_all(kinds: dict[str, Kind], inputs: tuple[str, ...], method: str) -> None:
    quantization, forms = chosen("auto", kinds, inputs)
    assert quantization.method == method
    assert forms.keys() == set(kinds.values())


def test_reasons() -> None:
    with pytest.raises(
        CheckpointError, match=r"fp8: .*several; compressed-tensors: it stores a static scale .*calibration"
    ):
        chosen("auto", {"a": TENSOR, "b": BLOCK}, ())
    with pytest.raises(
        CheckpointError, match="modelopt: a is quantized as 'block' with 128x128 tiles, for which it has"
    ):
        chosen("modelopt", {"a": BLOCK}, ())
    with pytest.raises(
        ConfigError, match="format must be one of auto, fp8, compressed-tensors, modelopt, mxfp8, not 'fp9'"
    ):
        chosen("fp9", {"a": BLOCK}, ())


def test_square_tiles_of_fp4_are_written_row_by_row() -> None:
    weight = torch.randn(32, 64)
    made = api.quantize(weight, NVFP4BlockScaling(), "weight", "rowwise")
    own = Multiplied(parameter="a.weight", data=made.data, scale_inv=made.scale_inv, quantizer=made.quantizer,
                     global_scale_inv=made.global_scale_inv)  # fmt: skip
    assert kind_of(own) == NVFP4
    stored = as_stored(own, compressed_tensors.layer_format("NVFP4"), torch.tensor(3.0))
    assert stored.scale_inv.shape == (32, 4)
    assert stored.input_scale_inv == torch.tensor(3.0) / (6 * 448)
    torch.testing.assert_close(dequantize(stored), api.dequantize(made), rtol=1e-6, atol=0)


def parts_of(model: nn.Module, *names: str) -> dict[str, list[MatrixRows]]:
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


def test_modules_without_separate_linears_have_no_parts() -> None:
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
    names = ("data", "scale_inv", *(["global_scale_inv"] if made[0].global_scale_inv is not None else []))
    each: dict[str, Any] = {name: torch.stack([getattr(x, name) for x in made]) for name in names}
    return Multiplied(parameter="experts.up", quantizer=made[0].quantizer, **each)


@in_one_test("recipe", ["tensorwise", "rowwise", "blockwise", "mxfp8", "nvfp4"])
def test_each_part_has_the_bytes_and_scales_of_its_rows(recipe: str) -> None:
    made = matrices(recipe)
    weight = together(made)
    halves = [
        MatrixRows(layer=f"{e}.{half}", rows=torch.arange(128) + 128 * half, expert=e)
        for e in range(3)
        for half in range(2)
    ]
    assert why_not(weight, halves) is None
    found = dict(cut(weight, halves))
    assert found.keys() == {part.layer for part in halves}
    for part in halves:
        whole, own = made[part.expert or 0], found[part.layer]
        scales: dict[str, Any] = {"scale_inv": own.scale_inv, "global_scale_inv": own.global_scale_inv}
        got = dataclasses.replace(whole, data=own.data, shape=torch.Size((128, 64)), **scales)
        assert torch.equal(api.dequantize(got), api.dequantize(whole)[part.rows])


def test_tiles_are_not_cut() -> None:
    shifted = MatrixRows(layer="up", rows=torch.arange(64, 192), expert=1)
    mixed = MatrixRows(layer="up", rows=torch.arange(128).flip(0), expert=1)
    tiles = together(matrices("blockwise"))
    assert why_not(together(matrices("rowwise")), [shifted, mixed]) is None
    for part in (shifted, mixed):
        assert why_not(tiles, [part]) == "up begins or ends inside a tile of 128 rows"
    one = dataclasses.replace(shifted, rows=torch.arange(128, 256))
    assert why_not(tiles, [one]) is None
