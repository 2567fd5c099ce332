"""Exports of fp8graph, loaded by the libraries that own the formats: the same bytes, logits within rounding."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import fp8_checkpoints
import fp8graph
from fp8graph import Float8BlockScaling, Float8RowwiseScaling
from fp8graph.backend.multiplied import multiplied_by
from fp8graph.checkpoints import Checkpoint, dequantize
from fp8graph.numerics import sqnr_db
from helpers import first_fast, mixtral, same_bits

RECIPES: dict[str, Any] = {
    "rowwise": Float8RowwiseScaling(power_2_scale=False, amax_epsilon=0.0),
    "blockwise": Float8BlockScaling(power_2_scale=False),
    "blockwise ue8m0": Float8BlockScaling(scale_format="ue8m0"),
}


def exported(recipe: str, folder: Path, form: str, **kwargs: Any) -> tuple[Any, Checkpoint]:
    """The compiled model and what was written of it."""
    model = fp8_checkpoints.model()
    fp8graph.compile(model, recipe=RECIPES.get(recipe, recipe), compiler="eager")
    for _ in range(2 * (recipe == "delayed")):  # amaxes for its scales
        model(input_ids=fp8_checkpoints.IDS, labels=fp8_checkpoints.IDS, use_cache=False).loss.backward()
    with torch.no_grad():
        model(input_ids=fp8_checkpoints.IDS, use_cache=False)
    return model, Checkpoint(fp8graph.export(model, folder, form, **kwargs))


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["blockwise", "blockwise ue8m0"])
def test_transformers_loads_the_bytes(recipe: str, tmp_path: Path) -> None:
    _, checkpoint = exported(recipe, tmp_path / "out", "fp8")
    loaded = fp8_checkpoints.load(tmp_path / "out")
    from transformers.integrations.finegrained_fp8 import FP8Linear

    for layer in checkpoint.layers:
        module, stored = loaded.get_submodule(layer), checkpoint.weight(layer)
        assert isinstance(module, FP8Linear)
        assert same_bits([module.weight], [stored.data])
        assert torch.equal(module.weight_scale_inv.float(), stored.scales())
    assert not isinstance(loaded.lm_head, FP8Linear)


@pytest.mark.slow
def test_transformers_dequantizes_to_the_same_weights(tmp_path: Path) -> None:
    """On a CPU it loads an FP8 folder as bf16 weights, dequantized by its own code."""
    from transformers import LlamaForCausalLM

    model, checkpoint = exported("blockwise", tmp_path / "out", "fp8")
    loaded = LlamaForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.bfloat16)
    for layer in checkpoint.layers:
        own = loaded.get_parameter(f"{layer}.weight")
        assert torch.equal(own, dequantize(checkpoint.weight(layer)).bfloat16())
    with torch.no_grad():
        got = loaded(input_ids=fp8_checkpoints.IDS, use_cache=False).logits
        expected = model(input_ids=fp8_checkpoints.IDS, use_cache=False).logits
    assert sqnr_db(expected, got) > 20  # it does not quantize activations


@pytest.mark.slow
def test_transformers_loads_experts(tmp_path: Path) -> None:
    """One tensor for all experts, of the bytes and scales that were written for each."""
    from transformers import MixtralForCausalLM

    model = fp8graph.compile(mixtral().bfloat16(), recipe=RECIPES["blockwise"], compiler="eager")
    ids = fp8_checkpoints.IDS
    model(input_ids=ids, labels=ids, use_cache=False)
    multiplied = {weight.parameter: weight for weight in multiplied_by(fp8graph.backend_of(model), model)}
    fp8graph.export(model, tmp_path / "out", "fp8")
    with fp8_checkpoints.any_device():
        loaded = MixtralForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.bfloat16)
    for name in ("gate_up_proj", "down_proj"):
        own, parameter = multiplied[f"model.layers.0.mlp.experts.{name}"], f"model.layers.0.mlp.experts.{name}"
        assert same_bits([loaded.get_parameter(parameter)], [own.data])
        assert torch.equal(loaded.get_parameter(f"{parameter}_scale_inv"), own.scale_inv)


@pytest.mark.slow
@first_fast(
    ("recipe", "calibrated"),
    [("rowwise", False), ("blockwise", False), ("mxfp8", False), ("delayed", False), ("nvfp4", True)],
    others=pytest.mark.release,
)
def test_compressed_tensors_loads_the_bytes(recipe: str, calibrated: bool, tmp_path: Path) -> None:
    pytest.importorskip("compressed_tensors", reason="compressed-tensors is not installed")
    batches = [{"input_ids": fp8_checkpoints.IDS}] if recipe == "nvfp4" else None
    model, checkpoint = exported(recipe, tmp_path / "out", "compressed-tensors", calibration=batches)
    loaded = fp8_checkpoints.load(tmp_path / "out")
    for layer in checkpoint.layers:
        module, stored = loaded.get_submodule(layer), checkpoint.weight(layer)
        data: Tensor = module.weight_packed if stored.packed else module.weight
        assert same_bits([data], [stored.data])
        scale = stored.scale_inv if stored.scale_inv.dtype != torch.float32 else stored.scale_inv.bfloat16()
        assert torch.equal(module.weight_scale.float().flatten(), scale.float().flatten())  # in the model's dtype
    with torch.no_grad():
        got = loaded(input_ids=fp8_checkpoints.IDS, use_cache=False).logits
        expected = model(input_ids=fp8_checkpoints.IDS, use_cache=False).logits
    assert sqnr_db(expected, got) > (8 if recipe == "nvfp4" else 18)


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["rowwise", "mxfp8", "delayed"])
def test_modelopt_reads_the_config(recipe: str, tmp_path: Path) -> None:
    """ModelOpt has no loader on a CPU: engines load its folders. Its converter reads the layers in the config."""
    converter = pytest.importorskip("modelopt.torch.export.convert_hf_config", reason="ModelOpt is not installed")
    exported(recipe, tmp_path / "out", "modelopt")
    said = json.loads((tmp_path / "out" / "hf_quant_config.json").read_text())
    own = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    found = converter.convert_hf_quant_config_format(said)
    assert found["quant_algo"] == own["quant_algo"]
    assert found["ignore"] == ["lm_head"]
