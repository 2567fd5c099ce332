"""Hugging Face's FP8 configs: what is read from them, what is refused, and that transformers agrees."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers.integrations.finegrained_fp8 import FP8Linear
from transformers.quantizers.quantizers_utils import should_convert_module
from transformers.utils.quantization_config import FineGrainedFP8Config

from fp8graph.checkpoints import checkpoint
from fp8graph.checkpoints.compressed_tensors import layer_format
from fp8graph.checkpoints.hugging_face_fp8 import HuggingFaceFP8
from fp8graph.checkpoints.layer_format import WHOLE
from fp8graph.checkpoints.modelopt import ALGORITHMS
from fp8graph.checkpoints.shards import Shards
from fp8graph.checkpoints.writing import write_shards
from fp8graph.errors import CheckpointError
from helpers import in_one_test

DEEPSEEK_V3 = {"activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8", "weight_block_size": [128, 128]}
VARIANTS = [
    HuggingFaceFP8(block=block, scale_format=scales, static=static)
    for block in ((128, 128), None, (1, 32))
    for scales in ("float", "ue8m0")
    for static in (False, True)
]


def parsed(**changed: Any) -> HuggingFaceFP8:
    return HuggingFaceFP8.parse({**DEEPSEEK_V3, **changed}, "config.json: quantization_config")


def test_deepseek_v3() -> None:
    assert parsed() == HuggingFaceFP8()
    stored = parsed().layer_formats("model.layers.0.mlp.up_proj")[0]
    assert (stored.block, stored.scheme) == ((128, 128), "dynamic 128x128")
    assert stored.activation is not None
    assert (stored.activation.scale, stored.activation.block) == ("dynamic", (1, 128))
    assert stored.names("a") == {"weight": "a.weight", "scale": "a.weight_scale_inv"}


@in_one_test(
    ("changed", "message"),
    [
        ({"scale_fmt": "ue4m3"}, "quantization_config: scale_fmt is 'ue4m3'. Known: 'float', 'ue8m0'"),
        ({"activation_scheme": "maybe"}, "activation_scheme is 'maybe'. Known: 'dynamic', 'static'"),
        ({"weight_block_size": [128]}, r"weight_block_size is \[128\]. It must be null or \[rows, columns\]"),
        ({"weight_block_size": [128, 0]}, r"weight_block_size is \[128, 0\]"),
        ({"fmt": "e5m2"}, "fmt is 'e5m2'. Known: 'e4m3'"),
        ({"expert_dtype": "fp6"}, "expert_dtype is 'fp6'. Known: 'fp8', 'fp4'"),
        ({"modules_to_convert": "embed"}, "modules_to_convert is 'embed'. It must be a list of names"),
        ({"modules_to_not_convert": "lm_head"}, "modules_to_not_convert is 'lm_head'. It must be a list of names"),
        ({"modules_to_not_convert": ["*.gate"]}, r"modules_to_not_convert: the expression '\*.gate' cannot"),
        ({"rotation": "hadamard"}, "rotation is 'hadamard'. fp8graph does not know this field"),
    ],
)
def test_unknown_configs_are_refused(changed: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        parsed(**changed)


@in_one_test("variant", VARIANTS)
def test_transformers_reads_what_is_written(variant: HuggingFaceFP8) -> None:
    variant = replace(variant, ignore=("lm_head",))
    config = variant.config()
    assert HuggingFaceFP8.parse(config, "here") == variant
    theirs = FineGrainedFP8Config(**config)
    written = theirs.to_dict()
    assert HuggingFaceFP8.parse(written, "here") == variant
    assert written == {**written, **config}


@in_one_test("variant", VARIANTS)
def test_tensors_are_those_of_transformers(variant: HuggingFaceFP8) -> None:
    stored = variant.linear()
    linear = FP8Linear(
        384,
        256,
        block_size=variant.block,
        activation_scheme="static" if variant.static else "dynamic",
        scale_fmt=variant.scale_format,
    )
    theirs = dict(linear.named_parameters())
    names = stored.names("")
    assert {name.removeprefix(".") for name in names.values()} == theirs.keys()
    assert tuple(theirs["weight_scale_inv"].shape) == stored.stored_shape((256, 384))
    if variant.block is not None:
        assert theirs["weight_scale_inv"].dtype in stored.scale_dtypes


@in_one_test("variant", VARIANTS)
def test_the_config_of_layers(variant: HuggingFaceFP8) -> None:
    layers = {"a": variant.linear(), "b.experts.down_proj": variant.experts()}
    assert HuggingFaceFP8.of(layers, ["lm_head"]) == replace(variant, ignore=("lm_head",))


def test_layers_without_a_config() -> None:
    for stored in (layer_format("FP8_DYNAMIC"), ALGORITHMS["NVFP4"], layer_format("FP8")):
        with pytest.raises(CheckpointError, match=f"Hugging Face FP8 has no form for {stored.scheme}"):
            HuggingFaceFP8.of({"a": stored}, [])
    static, dynamic = HuggingFaceFP8(static=True).linear(), HuggingFaceFP8().linear()
    with pytest.raises(CheckpointError, match="one format for all layers, and these have dynamic 128x128, static 128"):
        HuggingFaceFP8.of({"a": dynamic, "b": static}, [])


def test_scales_that_are_powers_of_two_in_fp32() -> None:
    """DeepSeek-V3.1 says ue8m0, and stores FP32."""
    stored = parsed(scale_fmt="ue8m0").linear()
    assert set(stored.scale_dtypes) == {torch.float8_e8m0fnu, torch.uint8, torch.float32}


def test_other_names_of_scales() -> None:
    names = [stored.names("a")["scale"] for stored in parsed().layer_formats("a")]
    assert names == ["a.weight_scale_inv", "a.scale", "a.qscale_weight", "a.weight_scale", "a.weight_scale"]


# What public checkpoints have in config.json: MiniMax-M2 (MiniMaxAI/MiniMax-M2 on the Hub), DeepSeek-V3.2 (as V3.1 and
# V4: vLLM's tests/test_config.py), Devstral Small 2 (transformers' convert_ministral3_weights_to_hf.py), Llama 3 of
# AutoFP8 (vLLM pull request 6592), and a table that transformers 5.24 loads as FP8Embedding
MINIMAX_M2: dict[str, Any] = {
    "activation_scheme": "dynamic",
    "fmt": "float8_e4m3fn",
    "quant_method": "fp8",
    "weight_block_size": [128, 128],
    "modules_to_not_convert": ["gate", "e_score_correction_bias", "lm_head"],
}
DEEPSEEK_V32 = {**DEEPSEEK_V3, "scale_fmt": "ue8m0"}
DEVSTRAL: dict[str, Any] = {
    "activation_scheme": "static",
    "dequantize": False,
    "modules_to_not_convert": ["model.vision_tower", "model.multi_modal_projector", "lm_head"],
    "quant_method": "fp8",
    "weight_block_size": None,
}
AUTO_FP8: dict[str, Any] = {"activation_scheme": "static", "ignored_layers": ["lm_head"], "quant_method": "fp8"}
# Hunyuan 3 has scales of keys and values beside; MiniMax-M3 and Inkling 2 have bytes of E8M0 for 1x32 tiles
HUNYUAN_3: dict[str, Any] = {
    "activation_scheme": "static",
    "ignored_layers": ["lm_head", "model.embed_tokens"],
    "kv_cache_scheme": "static",
    "quant_method": "fp8",
}
MINIMAX_M3: dict[str, Any] = {
    "activation_scheme": "dynamic",
    "ignored_layers": ["lm_head", "model.embed_tokens", "model.layers.3.block_sparse_moe.gate"],
    "quant_method": "mxfp8",
    "weight_block_size": [1, 32],
}
TABLE: dict[str, Any] = {**DEEPSEEK_V3, "modules_to_convert": ["embed_tokens"]}


@in_one_test(
    ("config", "layer", "scheme", "kept"),
    [
        (MINIMAX_M2, "model.layers.0.self_attn.q_proj", "dynamic 128x128", "model.layers.0.block_sparse_moe.gate"),
        (MINIMAX_M2, "model.layers.0.block_sparse_moe.experts.0.w1", "dynamic 128x128", "lm_head"),
        (DEEPSEEK_V32, "model.layers.0.self_attn.indexer.wk", "dynamic 128x128 ue8m0", None),
        (DEVSTRAL, "model.language_model.layers.0.mlp.up_proj", "static tensor", "model.vision_tower.patch_conv"),
        (AUTO_FP8, "model.layers.0.mlp.up_proj", "static tensor", "lm_head"),
        (HUNYUAN_3, "model.layers.1.mlp.experts.0.up_proj", "static tensor", "lm_head"),
        (MINIMAX_M3, "model.layers.3.block_sparse_moe.experts.0.w1", "dynamic 1x32 ue8m0", "model.embed_tokens"),
        (TABLE, "model.embed_tokens", "embedding", None),
        (TABLE, "model.layers.0.mlp.up_proj", "dynamic 128x128", None),
    ],
)
def test_configs_of_public_checkpoints(config: dict[str, Any], layer: str, scheme: str, kept: str | None) -> None:
    read = checkpoint.parsed(config, "config.json: quantization_config")
    assert read.layer_formats(layer)[0].scheme == scheme
    assert kept is None or not read.layer_formats(kept)
    assert read.kv_cache == config.get("kv_cache_scheme")
    again = checkpoint.parsed(read.config(), "again")
    assert (again, again.kv_cache) == (read, read.kv_cache)


@pytest.mark.parametrize("suffixes", [("weight_scale_inv", "activation_scale"), ("weight_scale", "input_scale")])
@pytest.mark.parametrize("shape", [(), (1,), (1, 1)])
def test_one_scale_has_any_rank_and_the_names_of_either_library(
    suffixes: tuple[str, str], shape: tuple[int, ...], tmp_path: Path
) -> None:
    tensors = {
        "a.weight": torch.ones(256, 384).to(torch.float8_e4m3fn),
        f"a.{suffixes[0]}": torch.full(shape, 0.5),
        f"a.{suffixes[1]}": torch.full(shape, 0.25),
    }
    write_shards(tmp_path, tensors.items())
    shards = Shards(tmp_path)
    formats = HuggingFaceFP8.parse(DEVSTRAL, "config.json").layer_formats("a")
    (fits,) = [one for one in formats if not any(one.problems("a", shards.tensors)) and one.activation is not None]
    weight = fits.read("a", shards.tensors, shards.tensor)
    assert weight.scales().tolist() == [[0.5]]
    assert weight.input_scale_inv is not None
    assert weight.input_scale_inv.tolist() == 0.25


def test_experts() -> None:
    formats = parsed(activation_scheme="static").layer_formats("model.layers.1.mlp.experts.gate_up_proj")
    assert formats[0].names("x") == {"weight": "x", "scale": "x_scale_inv", "input scale": "x_activation_scale"}
    alone = parsed().layer_formats("model.layers.1.mlp.experts.3.down_proj")
    assert "x.weight" in {stored.names("x")["weight"] for stored in alone}
    packed = parsed(expert_dtype="fp4")
    assert packed.layer_formats("model.layers.1.mlp.experts.3.down_proj")[0].packed
    assert packed.layer_formats("model.layers.1.mlp.experts.3.down_proj")[0].block == (1, 32)
    assert not packed.layer_formats("model.layers.1.self_attn.q_proj")[0].packed


def test_scales_of_one_expert_among_those_of_all() -> None:
    gate, down = (parsed().layer_formats(f"a.experts.3.{which}_proj")[-1] for which in ("gate", "down"))
    assert gate.names("x") == {"weight": "x.weight", "scale": "a.experts.gate_up_proj_scale_inv"}
    assert down.names("x")["scale"] == "a.experts.down_proj_scale_inv"
    assert gate.part is not None
    assert gate.part.shape((8, 4, 2)) == (2, 2)
    assert gate.part.shape((3, 4, 2)) == gate.part.shape((8, 3, 2)) == gate.part.shape((8, 4)) == ()
    scales = torch.arange(64.0).reshape(8, 4, 2)
    up = parsed().layer_formats("a.experts.3.up_proj")[-1].part
    assert up is not None
    assert torch.equal(gate.part.of(scales), scales[3, :2])
    assert torch.equal(up.of(scales), scales[3, 2:])
    assert HuggingFaceFP8.of({"x": gate, "y": down}, []) == HuggingFaceFP8()


def test_one_scale_per_tensor() -> None:
    assert parsed(weight_block_size=None).linear().block == (WHOLE, WHOLE)


SKIPPED = ["lm_head", "layers.1", r"model\.layers\.\d+\.mlp\.gate", "fc1", "model.layers.(2|3)"]
NAMES = """
    lm_head model.lm_head layers.1 layers.11.attn layers.1.attn model.layers.1.attn model.layers.0.mlp.gate
    model.layers.0.mlp.gate_proj model.decoder.layers.2.fc1 model.decoder.fc12 model.layers.3.mlp model.layers.33.mlp
"""


@in_one_test("name", NAMES.split())
def test_skipped_layers_are_those_that_transformers_skips(name: str) -> None:
    for field in ("modules_to_not_convert", "ignored_layers"):
        assert bool(parsed(**{field: SKIPPED}).layer_formats(name)) == should_convert_module(name, SKIPPED)


def test_long_lists_of_names_are_not_compared_one_by_one() -> None:
    names = [f"model.layers.{i}.mlp.gate" for i in range(20_000)]
    read, started = parsed(modules_to_not_convert=names), time.process_time()
    assert not any(map(read.layer_formats, names))
    assert time.process_time() - started < 10  # 0.3 s; each with each: minutes


def test_the_halves_of_fused_experts_have_scales_of_their_own() -> None:
    one_each, tiles = HuggingFaceFP8(block=None), HuggingFaceFP8()
    gate_up, down = (f"model.layers.0.mlp.experts.{name}" for name in ("gate_up_proj", "down_proj"))
    assert one_each.layer_formats(gate_up)[0].grid((4, 256, 512)) == (4, 2, 1)
    assert one_each.layer_formats(down)[0].grid((4, 256, 512)) == (4, 1, 1)
    assert tiles.layer_formats(gate_up)[0].grid((4, 64, 512)) == (4, 2, 4)  # two halves of 32 rows
    assert tiles.layer_formats(down)[0].grid((4, 64, 512)) == (4, 1, 4)
