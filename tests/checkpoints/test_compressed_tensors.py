"""compressed-tensors' configs: what is read from them, what is refused, and that the library agrees where it is."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from fp8graph.checkpoints.compressed_tensors import PRESETS, CompressedTensors, layer_format
from fp8graph.checkpoints.hugging_face_fp8 import HuggingFaceFP8
from fp8graph.checkpoints.layer_format import WHOLE
from fp8graph.errors import CheckpointError
from helpers import in_one_test

LIBRARY = "compressed_tensors.quantization"


def config_of(preset: str = "FP8_DYNAMIC", **changed: Any) -> dict[str, Any]:
    config = CompressedTensors.of({"a": layer_format(preset)}, ["lm_head"]).config()
    return {**copy.deepcopy(config), "version": "0.20.0", **changed}


def parsed(config: dict[str, Any]) -> CompressedTensors:
    return CompressedTensors.parse(config, "here")


@in_one_test("preset", PRESETS)
def test_presets(preset: str) -> None:
    read = parsed(config_of(preset))
    assert read.layer_formats("model.a") == (layer_format(preset),)
    assert read.layer_formats("lm_head") == ()
    assert read.config() == {name: value for name, value in config_of(preset).items() if name != "version"}
    by_name = parsed(config_of(config_groups={preset: ["Linear"]}))
    assert by_name.layer_formats("model.a") == (layer_format(preset),)


@in_one_test("preset", PRESETS)
def test_the_library_reads_what_is_written(preset: str) -> None:
    quantization = pytest.importorskip(LIBRARY)
    config = config_of(preset)
    theirs = quantization.QuantizationConfig.model_validate(config)
    scheme = theirs.config_groups["group_0"]
    own = quantization.preset_name_to_scheme(preset, ["Linear"])
    for ours, wanted in ((scheme.weights, own.weights), (scheme.input_activations, own.input_activations)):
        assert (ours is None) == (wanted is None)
        if ours is not None:
            # observers are for calibration; zero points are for schemes that are not symmetric
            without = {"observer", "zp_dtype"}
            assert ours.model_dump(exclude=without) == wanted.model_dump(exclude=without)
    assert scheme.format == config["format"]
    for status in ("compressed", "frozen"):  # "frozen": files of 2024, in transformers' docs, too
        assert parsed({**theirs.model_dump(mode="json"), "quantization_status": status}) == parsed(config)


def test_layer_formats_of_the_presets() -> None:
    fp8, mx, fp4 = layer_format("FP8"), layer_format("mxfp8"), layer_format("NVFP4")
    assert fp8.names("a") == {"weight": "a.weight", "scale": "a.weight_scale", "input scale": "a.input_scale"}
    assert fp8.activation is not None
    assert (fp8.block, fp8.activation.scale) == ((WHOLE, WHOLE), "static")
    assert (mx.block, mx.scale_dtypes) == ((1, 32), (torch.uint8,))
    assert fp4.names("a") == {
        "weight": "a.weight_packed",
        "scale": "a.weight_scale",
        "global scale": "a.weight_global_scale",
        "input scale": "a.input_global_scale",
    }
    assert fp4.activation is not None
    assert (fp4.divides, fp4.activation.scale, fp4.activation.block) == (True, "local", (1, 16))
    weights_only = layer_format("NVFP4A16")
    assert (weights_only.activation, weights_only.scheme) == (None, "NVFP4A16")
    with pytest.raises(CheckpointError, match="'FP5' is not a known preset: FP8, FP8_DYNAMIC"):
        layer_format("FP5")


def changed(part: str, **values: Any) -> dict[str, Any]:
    config = config_of()
    config["config_groups"]["group_0"][part] |= values
    return config


@in_one_test(
    ("config", "message"),
    [
        (config_of(format="pack-quantized"), "here: format is 'pack-quantized'. Known: 'float-quantized'"),
        (config_of(quantization_status="calibration"), "quantization_status is 'calibration'. Known: 'compressed'"),
        (config_of(version="1.0"), "here: version is '1.0'. It must be a version of 0.x"),
        (config_of(transform_config={"R1": {}}), "here: transform_config is {'R1': {}}. It must be empty"),
        (config_of(sparsity_config={"format": "bitmask"}), "here: sparsity_config is"),
        (config_of(moe=1), "here: moe is 1. fp8graph does not know this field"),
        (config_of(config_groups=[]), r"here: config_groups is \[\]. It must be a table of groups"),
        (config_of(config_groups={"W4A16": ["Linear"]}), "config_groups: 'W4A16' is not a known preset"),
        (config_of(config_groups={"group_0": {"targets": ["Linear"]}}), "weights: None is not a table of fields"),
        (changed("weights", type="int"), "here: config_groups.group_0.weights: type is 'int'. Known: 'float'"),
        (changed("weights", num_bits=6), r"group_0.weights: num_bits is 6. Known: 8, 4"),
        (changed("weights", symmetric=False), "group_0.weights: symmetric is False. Known: True"),
        (changed("weights", dynamic=True), "group_0.weights: dynamic is True. Known: False"),
        (changed("weights", actorder="group"), "actorder is 'group'. It must be empty"),
        (changed("weights", strategy="attn_head"), "strategy is 'attn_head'. Known: 'tensor', 'channel', 'block'"),
        (changed("weights", strategy="block"), "block_structure is None. That does not go with strategy 'block'"),
        (changed("weights", strategy="group"), "group_size is None. That does not go with strategy 'group'"),
        (
            changed("weights", scale_dtype="torch.uint8"),
            "strategy is 'channel'. With num_bits 8 and scale_dtype torch.ui",
        ),
        (changed("weights", num_bits=4), "weights.*num_bits|num_bits is 8. The weights have 4"),
        (changed("weights", color="red"), "weights: color is 'red'. fp8graph does not know this field"),
        (changed("input_activations", dynamic=False), "dynamic is False. That does not go with strategy 'token'"),
        (changed("input_activations", dynamic="local"), "dynamic is 'local'. That does not go with strategy 'token'"),
        (changed("input_activations", num_bits=4), "num_bits is 4. The weights have 8"),
    ],
)
def test_unknown_configs_are_refused(config: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        parsed(config)


def test_output_activations_are_refused() -> None:
    config = config_of()
    config["config_groups"]["group_0"]["output_activations"] = {"num_bits": 8}
    with pytest.raises(CheckpointError, match="output_activations is {'num_bits': 8}. It must be empty"):
        parsed(config)


def test_several_groups() -> None:
    layers = {"a.q": layer_format("FP8_DYNAMIC"), "a.k": layer_format("NVFP4"), "b.q": layer_format("FP8_DYNAMIC")}
    config = CompressedTensors.of(layers, ["lm_head"]).config()
    assert config["format"] == "mixed-precision"
    assert [group["targets"] for group in config["config_groups"].values()] == [["a.q", "b.q"], ["a.k"]]
    read = parsed(config)
    assert {name: read.layer_formats(name) for name in layers} == {name: (one,) for name, one in layers.items()}
    assert read.layer_formats("lm_head") == read.layer_formats("other") == ()
    with pytest.raises(CheckpointError, match="compressed-tensors has no form for dynamic 128x128: it has FP8, FP8_DY"):
        CompressedTensors.of({"a": HuggingFaceFP8().linear()}, [])


def test_the_most_specific_target_wins() -> None:
    config = config_of()
    groups = {
        "group_0": {**config["config_groups"]["group_0"], "targets": ["Linear"]},
        "group_1": {**config_of("FP8_BLOCK")["config_groups"]["group_0"], "targets": [r"re:.*\.mlp\..*"]},
        "group_2": {**config_of("NVFP4")["config_groups"]["group_0"], "targets": ["a.mlp.up"]},
    }
    read = parsed({**config, "config_groups": groups, "ignore": ["lm_head", "re:.*skip"]})
    formats = {name: read.layer_formats(name) for name in ("a.q", "a.mlp.down", "a.mlp.up", "a.mlp.skip", "lm_head")}
    schemes = {name: [stored.scheme for stored in found] for name, found in formats.items()}
    wanted = {
        "a.q": ["FP8_DYNAMIC"],
        "a.mlp.down": ["FP8_BLOCK"],
        "a.mlp.up": ["NVFP4"],
        "a.mlp.skip": [],
        "lm_head": [],
    }
    assert schemes == wanted


def test_a_key_value_cache() -> None:
    read = parsed(config_of(kv_cache_scheme={"num_bits": 8, "type": "float"}))
    assert read.kv_cache == {"num_bits": 8, "type": "float"}
    assert read.config()["kv_cache_scheme"] == read.kv_cache


def test_names_come_before_expressions_before_classes() -> None:
    preset = ("FP8", "FP8_DYNAMIC", "FP8_BLOCK")
    targets = (["Linear", "b.c"], ["re:a\\..*", "re:b.*"], ["a.b"])
    read = parsed(config_of(format="mixed-precision", config_groups=dict(zip(preset, targets, strict=True))))
    found = [read.layer_formats(name)[0].scheme for name in ("x", "b.c", "a.c", "b.d", "a.b")]
    assert found == ["FP8", "FP8", "FP8_DYNAMIC", "FP8_DYNAMIC", "FP8_BLOCK"]


@pytest.mark.parametrize("field", ["ignore", "config_groups"])
def test_an_expression_that_python_would_try_for_ever(field: str) -> None:
    expressions = ["re:(a+)+!"]
    given: Any = expressions if field == "ignore" else {"FP8_DYNAMIC": expressions}
    assert bool(parsed(config_of(**{field: given})).layer_formats("a" * 60)) == (field == "ignore")
    wrong: Any = ["re:["] if field == "ignore" else {"FP8_DYNAMIC": ["re:["]}
    with pytest.raises(CheckpointError, match=rf"here: {field}: the expression '\[' cannot be read .unterminated"):
        parsed(config_of(**{field: wrong}))
