"""ModelOpt's configs, in both files: what is read from them, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fp8graph.checkpoints.compressed_tensors import layer_format
from fp8graph.checkpoints.layer_format import WHOLE
from fp8graph.checkpoints.modelopt import ALGORITHMS, FILE, ModelOpt
from fp8graph.errors import CheckpointError
from helpers import in_one_test

PRODUCER = {"name": "modelopt", "version": "0.47.0"}


def own_file(**quantization: Any) -> dict[str, Any]:
    """``hf_quant_config.json``."""
    said = {"quant_algo": "FP8", "kv_cache_quant_algo": None, "exclude_modules": ["lm_head"]}
    return {"producer": PRODUCER, "quantization": {**said, **quantization}}


def parsed(config: dict[str, Any]) -> ModelOpt:
    return ModelOpt.parse(config, "here")


@in_one_test("name", ALGORITHMS)
def test_algorithms(name: str) -> None:
    written = ModelOpt.of({"a": ALGORITHMS[name]}, ["lm_head"])
    assert parsed(written.config()) == parsed(written.files()[FILE]) == written
    assert written.layer_formats("model.a") == (ALGORITHMS[name],)
    assert written.layer_formats("lm_head") == ()


@in_one_test("name", ALGORITHMS)
def test_the_other_file_is_what_modelopt_makes_of_the_first(name: str) -> None:
    export = pytest.importorskip("modelopt.torch.export.convert_hf_config")
    for layers in ({"a": ALGORITHMS[name]}, {"a": ALGORITHMS[name], "b": ALGORITHMS["FP8_PER_CHANNEL_PER_TOKEN"]}):
        written = ModelOpt.of(layers, ["lm_head"])
        if name == "FP8_PB_WO" and len(layers) > 1:
            continue  # ModelOpt warns that it does not know it in mixed precision
        theirs = export.convert_hf_quant_config_format(written.files()[FILE])
        assert theirs == {**theirs, **written.config()}
        assert parsed(theirs) == written


def test_mixed_precision() -> None:
    layers = {"a.q": ALGORITHMS["FP8"], "a.experts": ALGORITHMS["NVFP4"]}
    written = ModelOpt.of(layers, ["lm_head"])
    said = written.files()[FILE]["quantization"]
    assert said["quant_algo"] == "MIXED_PRECISION"
    assert said["quantized_layers"] == {
        "a.q": {"quant_algo": "FP8"},
        "a.experts": {"quant_algo": "NVFP4", "group_size": 16},
    }
    for read in (parsed(written.config()), parsed(written.files()[FILE])):
        assert read == written
        assert read.layer_formats("a.q") == (ALGORITHMS["FP8"],)
        assert read.layer_formats("a.experts.3.up") == (ALGORITHMS["NVFP4"],)  # listed by the module around it
        assert read.layer_formats("a.k") == ()
    with pytest.raises(CheckpointError, match="ModelOpt has no form for FP8_BLOCK: it has FP8, FP8_PER_CHANNEL"):
        ModelOpt.of({"a": layer_format("FP8_BLOCK")}, [])


def test_layer_formats_of_the_algorithms() -> None:
    fp8, fp4 = ALGORITHMS["FP8"], ALGORITHMS["NVFP4"]
    assert fp8.names("a") == {"weight": "a.weight", "scale": "a.weight_scale", "input scale": "a.input_scale"}
    assert (fp8.block, fp8.scale_dims) == ((WHOLE, WHOLE), 0)
    assert fp4.names("a") == {
        "weight": "a.weight",
        "scale": "a.weight_scale",
        "global scale": "a.weight_scale_2",
        "input scale": "a.input_scale",
    }
    assert (fp4.divides, fp4.packed, fp4.scale_dtypes) == (False, True, (torch.float8_e4m3fn,))


def test_excluded_modules() -> None:
    read = parsed(own_file(exclude_modules=["lm_head", "model.layers.0.*", "*router*", "model.vision"]))
    assert not any(map(read.layer_formats, ["lm_head", "model.layers.0.mlp.up", "a.router.b", "model.vision.fc"]))
    assert all(map(read.layer_formats, ["model.layers.1.mlp.up", "model.vision2.fc", "a.lm_head"]))


@in_one_test(
    ("config", "message"),
    [
        (
            own_file(quant_algo="W4A8_AWQ"),
            "here: quantization: quant_algo is 'W4A8_AWQ'. Known: FP8, FP8_PER_CHANNEL_PER",
        ),
        (own_file(quant_algo=None), "quant_algo is None"),
        (own_file(group_size=32, quant_algo="NVFP4"), "group_size is 32. Known: 16"),
        (own_file(group_size=128, quant_algo="NVFP4"), "group_size is 128. Known: 16"),
        (own_file(group_size=16), "group_size is 16. Known: None, 0"),
        (own_file(pre_quant_scale=True), "pre_quant_scale is True. It must be empty"),
        (own_file(color="red"), "here: quantization: color is 'red'. fp8graph does not know this field"),
        (own_file(exclude_modules="lm_head"), "exclude_modules is 'lm_head'. It must be a list of names"),
        ({**own_file(), "color": "red"}, "here: color is 'red'. fp8graph does not know this field"),
        (
            {**own_file(), "producer": {"name": "other", "version": "0.1"}},
            "here: producer: name is 'other'. Known: 'mod",
        ),
        (
            {**own_file(), "producer": {"name": "modelopt", "version": "2.0"}},
            "version is '2.0'. It must be a version of",
        ),
        (
            own_file(quant_algo="MIXED_PRECISION", quantized_layers={"a": {"quant_algo": "INT4"}}),
            r"here: quantized_layers\['a'\]: quant_algo is 'INT4'",
        ),
    ],
)
def test_unknown_configs_are_refused(config: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        parsed(config)


def test_a_key_value_cache() -> None:
    read = parsed(own_file(kv_cache_quant_algo="FP8"))
    assert read.kv_cache == "FP8"
    assert read.files()[FILE]["quantization"]["kv_cache_quant_algo"] == "FP8"


@pytest.mark.parametrize(
    ("said", "message"),
    [
        ({"quant_algo": []}, r"quant_algo is \[\]. Known: FP8, "),
        ({"quant_algo": "MIXED_PRECISION", "quantized_layers": []}, r"quantized_layers is \[\]. It must be a table"),
    ],
)
def test_values_of_other_types(said: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        parsed(own_file(**said))
