"""Whole checkpoints: as their libraries write them, decoded as they decode them, written again bit for bit."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import FineGrainedFP8Config, Qwen3MoeConfig, Qwen3MoeForCausalLM
from transformers.integrations.finegrained_fp8 import Fp8Dequantize

import fp8_checkpoints
from fp8_checkpoints import LINEARS, decoded_by_its_library
from fp8graph.checkpoints import Checkpoint, QuantizedWeight, dequantize, write_checkpoint
from fp8graph.checkpoints.compressed_tensors import CompressedTensors
from fp8graph.checkpoints.hugging_face_fp8 import HuggingFaceFP8
from fp8graph.checkpoints.modelopt import FILE, ModelOpt
from fp8graph.errors import CheckpointError
from helpers import first_fast

SCHEMES = {
    "hf-float": "dynamic 128x128",
    "hf-ue8m0": "dynamic 128x128 ue8m0",
    "hf-static": "static 128x128",
    "hf-tensor": "dynamic tensor",
    "hf-mxfp8": "dynamic 1x32 ue8m0",
    "compressed-tensors-fp8": "FP8",
    "compressed-tensors-fp8-dynamic": "FP8_DYNAMIC",
    "compressed-tensors-fp8-block": "FP8_BLOCK",
    "compressed-tensors-mxfp8": "MXFP8",
    "compressed-tensors-nvfp4": "NVFP4",
    "modelopt-fp8": "FP8",
    "modelopt-fp8-channel": "FP8_PER_CHANNEL_PER_TOKEN",
    "modelopt-fp8-block": "FP8_PB_WO",
    "modelopt-nvfp4": "NVFP4",
    "modelopt-mxfp8": "MXFP8",
}


@pytest.fixture(scope="module")
def written_by_its_library(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    folders: dict[str, Path] = {}

    def written(name: str) -> Path:
        if name not in folders:
            folder = tmp_path_factory.mktemp(name)
            fp8_checkpoints.FORMATS[name].write(folder)
            folders[name] = folder
        return folders[name]

    return written


@first_fast("name", SCHEMES)
def test_decoded_weights_equal_those_of_the_library(name: str, written_by_its_library: Callable[[str], Path]) -> None:
    folder = written_by_its_library(name)
    checkpoint = Checkpoint(folder)
    checkpoint.check()
    assert {stored.scheme for stored in checkpoint.layers.values()} == {SCHEMES[name]}
    layers = [f"model.layers.{i}.{linear}" for i in range(2) for linear in LINEARS]
    assert sorted(checkpoint.layers) == sorted(layers)
    assert not any("scale" in other for other in checkpoint.others)
    held = load_file(folder / "model.safetensors")
    for layer in layers:
        prefix = f"{layer}."
        tensors = {key.removeprefix(prefix): value for key, value in held.items() if key.startswith(prefix)}
        theirs = decoded_by_its_library(name, tensors, folder)
        assert torch.equal(dequantize(checkpoint.weight(layer)).to(theirs.dtype), theirs), layer


@first_fast("name", SCHEMES)
def test_written_again(name: str, tmp_path: Path, written_by_its_library: Callable[[str], Path]) -> None:
    """Config and bytes go through the neutral form, into several shards, and are what they were."""
    folder = written_by_its_library(name)
    source, target = Checkpoint(folder), tmp_path / "model"
    write_checkpoint(
        target,
        layers=((layer, stored, source.weight(layer)) for layer, stored in source.layers.items()),
        others=((other, source.shards.tensor(other)) for other in source.others),
        quantization=type(source.quantization),
        ignore=source.quantization.ignore,
        copy_from=folder,
        max_shard_bytes=200_000,
    )
    again = Checkpoint(target)
    again.check()
    assert len(again.shards.files) > 3
    assert again.quantization == source.quantization
    assert again.layers == source.layers
    assert sorted(again.shards) == sorted(source.shards)
    one = name == "hf-tensor"  # transformers writes [1, 1] and reads []
    for key in source.shards:
        ours, theirs = again.shards.tensor(key), source.shards.tensor(key)
        assert (ours.dtype, ours.numel() if one else ours.shape) == (
            theirs.dtype,
            theirs.numel() if one else theirs.shape,
        )
        assert torch.equal(ours.flatten().view(torch.uint8), theirs.flatten().view(torch.uint8)), key
    assert (target / "generation_config.json").read_bytes() == (folder / "generation_config.json").read_bytes()
    config, before = (json.loads((path / "config.json").read_text()) for path in (target, folder))
    del config["quantization_config"], before["quantization_config"]
    assert config == before


@pytest.mark.parametrize(
    "name", [name for name in SCHEMES if not name.startswith("modelopt")]
)  # transformers loads them
def test_libraries_load_what_is_written(
    name: str, tmp_path: Path, written_by_its_library: Callable[[str], Path]
) -> None:
    """One with scales per tensor too, which transformers writes and cannot read."""
    source = Checkpoint(written_by_its_library(name))
    write_checkpoint(
        tmp_path / "model",
        layers=((layer, stored, source.weight(layer)) for layer, stored in source.layers.items()),
        others=((other, source.shards.tensor(other)) for other in source.others),
        quantization=type(source.quantization),
        ignore=source.quantization.ignore,
        copy_from=source.folder,
    )
    loaded = fp8_checkpoints.load(tmp_path / "model").state_dict()
    for key in source.shards:
        theirs = source.shards.tensor(key).flatten()
        assert torch.equal(loaded[key].flatten().view(torch.uint8), theirs.view(torch.uint8)), key


def test_experts_that_transformers_writes(tmp_path: Path) -> None:
    """Weights one by one, scales of all experts in one tensor; written again, each has its own."""
    config = Qwen3MoeConfig(
        vocab_size=64,
        hidden_size=256,
        moe_intermediate_size=256,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_experts=3,
    )
    torch.manual_seed(0)
    Qwen3MoeForCausalLM(config).bfloat16().save_pretrained(tmp_path / "bf16")
    with fp8_checkpoints.any_device():
        model: Any = Qwen3MoeForCausalLM.from_pretrained(
            tmp_path / "bf16", quantization_config=FineGrainedFP8Config(), dtype=torch.bfloat16
        )
        model.save_pretrained(tmp_path / "fp8")
    experts = model.model.layers[0].mlp.experts
    source = Checkpoint(tmp_path / "fp8")
    source.check()
    write_checkpoint(
        tmp_path / "again",
        layers=((layer, stored, source.weight(layer)) for layer, stored in source.layers.items()),
        others=((other, source.shards.tensor(other)) for other in source.others),
        quantization=HuggingFaceFP8,
        copy_from=tmp_path / "fp8",
    )
    again = Checkpoint(tmp_path / "again")
    again.check()
    assert "model.layers.0.mlp.experts.2.up_proj.weight_scale_inv" in again.shards
    assert all(stored.part is None for stored in again.layers.values())
    for checkpoint in (source, again):
        for i in range(3):
            both = torch.cat(
                [
                    dequantize(checkpoint.weight(f"model.layers.0.mlp.experts.{i}.{which}_proj"))
                    for which in ("gate", "up")
                ]
            )
            data, scales = experts.gate_up_proj[i], experts.gate_up_proj_scale_inv[i]
            assert torch.equal(both, Fp8Dequantize(None)._dequantize_one(data, scales, torch.float32))
            down = Fp8Dequantize(None)._dequantize_one(
                experts.down_proj[i], experts.down_proj_scale_inv[i], torch.float32
            )
            assert torch.equal(dequantize(checkpoint.weight(f"model.layers.0.mlp.experts.{i}.down_proj")), down)
    with fp8_checkpoints.any_device():
        loaded: Any = Qwen3MoeForCausalLM.from_pretrained(tmp_path / "again", dtype=torch.bfloat16)
    theirs = loaded.model.layers[0].mlp.experts
    assert torch.equal(theirs.gate_up_proj_scale_inv, experts.gate_up_proj_scale_inv)
    assert torch.equal(theirs.down_proj.view(torch.uint8), experts.down_proj.view(torch.uint8))


# Without any library: one layer in FP8, one in high precision.

CONFIG = {"model_type": "llama", "quantization_config": HuggingFaceFP8(ignore=("lm_head",)).config()}


def tensors() -> dict[str, Tensor]:
    return {
        "a.weight": torch.ones(128, 256).to(torch.float8_e4m3fn),
        "a.weight_scale_inv": torch.full((1, 2), 0.5),
        "a.bias": torch.ones(128),
        "lm_head.weight": torch.ones(4, 128),
    }


def folder_with(folder: Path, config: Any = CONFIG, **changed: Tensor | None) -> Path:
    held = {**tensors(), **{name.replace("__", "."): tensor for name, tensor in changed.items()}}
    save_file({name: tensor for name, tensor in held.items() if tensor is not None}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def test_layers_and_others(tmp_path: Path) -> None:
    checkpoint = Checkpoint(folder_with(tmp_path))
    assert list(checkpoint.layers) == ["a"]
    assert sorted(checkpoint.others) == ["a.bias", "lm_head.weight"]
    assert checkpoint.problems == []
    assert torch.equal(dequantize(checkpoint.weight("a")), torch.full((128, 256), 0.5))
    with pytest.raises(CheckpointError, match="there is no quantized layer 'lm_head'"):
        checkpoint.weight("lm_head")


FP8 = torch.ones(128, 256).to(torch.float8_e4m3fn)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"a__weight_scale_inv": None}, "the scale of layer 'a' is missing: there is no tensor 'a.weight_scale_inv'"),
        ({"a__weight_scale_inv": torch.ones(2, 1)}, r"'a.weight_scale_inv' has shape \[2, 1\], .* needs \[1, 2\]"),
        ({"a__weight": torch.ones(128, 256)}, "tensor 'a.weight_scale_inv' is a scale without a quantized layer"),
        ({"b__weight_scale_inv": torch.ones(1, 1)}, "tensor 'b.weight_scale_inv' is a scale without a quantized layer"),
        (
            {"lm_head__weight": FP8},
            "'lm_head.weight' is F8_E4M3, and the config leaves layer 'lm_head' in high precision",
        ),
        ({"cache": FP8}, "tensor 'cache' is F8_E4M3, and not the weight of a layer"),
    ],
)
def test_check_names_the_tensor_that_does_not_fit(
    tmp_path: Path, changed: dict[str, Tensor | None], message: str
) -> None:
    checkpoint = Checkpoint(folder_with(tmp_path, **changed))
    with pytest.raises(CheckpointError, match=message):
        checkpoint.check()


def test_many_problems(tmp_path: Path) -> None:
    both = {"a__weight_scale_inv": None, "b__weight_scale_inv": torch.ones(1, 1)}
    with pytest.raises(CheckpointError, match="And 1 more: fp8graph inspect shows all"):
        Checkpoint(folder_with(tmp_path, **both)).check()


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"model_type": "llama"}, f"config.json: there is no quantization_config, and no {FILE}"),
        ({"quantization_config": "fp8"}, "quantization_config: 'fp8' is not a table of fields"),
        (
            {"quantization_config": {"quant_method": "gptq"}},
            "quant_method is 'gptq'. Known: fp8, compressed-tensors, mod",
        ),
        ({"quantization_config": {"quant_method": []}}, r"quant_method is \[\]. Known"),
        ({"quantization_config": {"quant_method": "fp8" * 10**6}}, "quant_method is 'fp8fp8.{0,200}. Known"),
        (
            {"quantization_config": {"quant_method": "fp8", "x" * 10**6: 1}},
            "quantization_config: x{200} is 1. fp8graph does not know this field",
        ),
        (
            {"quantization_config": {"quant_method": "fp8", "weight_block_size": [2**70, 128]}},
            "weight_block_size is .1180591620717411303424, 128.. It must be",
        ),
        ({"quantization_config": {}}, "there is no quantization_config|quant_method is None. Known"),
        ({"quantization_config": {"quant_method": "fp8", "scale_fmt": "x"}}, "quantization_config: scale_fmt is 'x'"),
    ],
)
def test_configs_that_are_not_known(tmp_path: Path, config: dict[str, Any], message: str) -> None:
    folder_with(tmp_path, config)
    with pytest.raises(CheckpointError, match=message):
        Checkpoint(tmp_path)


@pytest.mark.parametrize(
    ("text", "message"),
    [(None, "there is no such file"), ("{", "cannot be read"), ("[]", "there is no table of fields")],
)
def test_config_files_that_cannot_be_read(tmp_path: Path, text: str | None, message: str) -> None:
    folder_with(tmp_path)
    file = tmp_path / "config.json"
    file.unlink()
    if text is not None:
        file.write_text(text)
    with pytest.raises(CheckpointError, match=f"config.json: {message}"):
        Checkpoint(tmp_path)


def test_the_config_of_modelopt_in_its_own_file(tmp_path: Path) -> None:
    folder_with(tmp_path, {"model_type": "llama"})
    written = ModelOpt.of({}, [])
    assert written.layer_formats("a") == ()
    (tmp_path / FILE).write_text(
        json.dumps(
            {
                "producer": {"name": "modelopt", "version": "0.47.0"},
                "quantization": {"quant_algo": "FP8_PB_WO", "exclude_modules": ["lm_head"]},
            }
        )
    )
    assert isinstance(Checkpoint(tmp_path).quantization, ModelOpt)


def written(target: Path, **more: Any) -> Path:
    stored = HuggingFaceFP8().linear()
    weight = QuantizedWeight(data=tensors()["a.weight"], scale_inv=torch.full((1, 2), 0.5), block=(128, 128))
    wanted: dict[str, Any] = {
        "layers": [("a", stored, weight)],
        "others": [("b", torch.ones(3))],
        "quantization": HuggingFaceFP8,
    }
    return write_checkpoint(target, **{**wanted, **more})


def test_a_new_checkpoint(tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    for name in ("tokenizer.json", "model.safetensors", "pytorch_model.bin.index.json", FILE, ".gitattributes", "a.py"):
        (source / name).write_text(name)
    (source / "config.json").write_text('{"model_type": "llama", "quantization_config": {"quant_method": "gptq"}}')
    for name in ("additional_chat_templates", "onnx"):
        (source / name).mkdir()
        (source / name / "file").touch()
    told: list[int] = []
    target = written(tmp_path / "model", copy_from=source, ignore=["lm_head"], progress=told.append)
    names = {str(path.relative_to(target)) for path in target.rglob("*")}
    assert names == {
        *("config.json", "model.safetensors", "tokenizer.json", "a.py"),
        *("additional_chat_templates", "additional_chat_templates/file"),
    }
    config = json.loads((target / "config.json").read_text())
    assert config["model_type"] == "llama"
    assert config["quantization_config"] == HuggingFaceFP8(ignore=("lm_head",)).config()
    assert told == [128 * 256 + 8 + 12]
    assert Checkpoint(target).others == ["b"]
    assert (
        json.loads((written(tmp_path / "own", config={"model_type": "x"}) / "config.json").read_text())["model_type"]
        == "x"
    )


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"copy_from": "/nosuch"}, "/nosuch: there is no such folder to copy files from"),
        ({"quantization": CompressedTensors}, "compressed-tensors has no form for dynamic 128x128"),
        ({"others": [("a.weight", torch.ones(1))]}, "tensor 'a.weight' is to be written twice"),
    ],
)
def test_nothing_is_left_of_what_cannot_be_written(tmp_path: Path, more: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        written(tmp_path / "model", **more)
    assert list(tmp_path.iterdir()) == []
