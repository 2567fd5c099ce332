"""export: the bytes and scales that fprop multiplies, in the formats that engines load."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

import fp8graph
from fp8graph import Policy, Rule
from fp8graph.backend.multiplied import Multiplied, multiplied_by
from fp8graph.checkpoints import Checkpoint, dequantize
from fp8graph.libraries.stored_linear import StoredLinear, StoredWeight
from fp8graph.numerics import quantization
from fp8graph.recipes import resolve_recipe
from fp8graph.tools.forms import chosen, kind_of
from helpers import first_fast, first_slow, mixtral, same_bits
from tiny_models import causal_lm

IDS = torch.randint(0, 256, (2, 16), generator=torch.Generator().manual_seed(0))
LINEARS = 7  # per layer of a Llama


def trained(recipe: Any, *, steps: int = 2, **settings: Any) -> Any:
    torch.manual_seed(0)
    model = causal_lm("Llama")(2).bfloat16()
    fp8graph.compile(model, recipe=recipe, compiler="eager", **settings)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for _ in range(steps):
        model(input_ids=IDS, labels=IDS, use_cache=False).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return model


def written(model: Any, folder: Path, *args: Any, **kwargs: Any) -> Checkpoint:
    checkpoint = Checkpoint(fp8graph.export(model, folder / "out", *args, **kwargs))
    checkpoint.check()
    return checkpoint


@first_fast(
    ("recipe", "form", "method", "scheme"),
    [
        ("blockwise", "auto", "fp8", "dynamic 128x128"),
        ("tensorwise", "auto", "fp8", "dynamic tensor"),
        ("rowwise", "auto", "compressed-tensors", "FP8_DYNAMIC"),
        ("blockwise", "compressed-tensors", "compressed-tensors", "FP8_BLOCK"),
        ("delayed", "auto", "compressed-tensors", "FP8"),
        ("mxfp8", "auto", "compressed-tensors", "MXFP8"),
        ("rowwise", "modelopt", "modelopt", "FP8_PER_CHANNEL_PER_TOKEN"),
        ("delayed", "modelopt", "modelopt", "FP8"),
        ("mxfp8", "modelopt", "modelopt", "MXFP8"),
        ("mxfp8", "mxfp8", "mxfp8", "dynamic 1x32 ue8m0"),
    ],
    others=pytest.mark.release,  # tools/test_export_ways.py has a folder of each recipe
)
def test_the_bytes_and_scales_are_those_of_fprop(
    recipe: str, form: str, method: str, scheme: str, tmp_path: Path
) -> None:
    model = trained(recipe)
    checkpoint = written(model, tmp_path, form)
    assert checkpoint.quantization.method == method
    multiplied = {weight.layer: weight for weight in multiplied_by(fp8graph.backend_of(model), model)}
    assert len(multiplied) == len(checkpoint.layers) == 2 * LINEARS
    for layer, weight in multiplied.items():
        stored = checkpoint.weight(layer)
        assert same_bits(
            [stored.data, stored.scale_inv], [weight.data, weight.scale_inv.reshape(stored.scale_inv.shape)]
        )
    kept = {
        name: tensor for name, tensor in model.state_dict().items() if name.removesuffix(".weight") not in multiplied
    }
    assert all(torch.equal(checkpoint.shards.tensor(name), tensor) for name, tensor in kept.items())
    assert checkpoint.quantization.ignore == ("lm_head",)
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLM"]


@first_slow("recipe", ["delayed", "tensorwise", "blockwise"])
def test_exported_weights_are_those_of_the_next_forward(recipe: str) -> None:
    model = trained(recipe)
    backend = fp8graph.backend_of(model)
    found = {weight.layer: weight for weight in multiplied_by(backend, model)}
    with torch.no_grad():
        model(input_ids=IDS, use_cache=False)
    copies = [copy for copy in backend.weights._copies() if "rowwise" in copy.tensors]
    assert sum(copy.request.linears for copy in copies) >= len(found)
    rows = {bytes(row) for copy in copies for row in copy.tensors["rowwise"].view(torch.uint8).tolist()}
    for weight in found.values():
        assert {bytes(row) for row in weight.data.view(torch.uint8).tolist()} <= rows


SERVED = {
    "tensorwise": fp8graph.Float8CurrentScaling(),
    "rowwise": fp8graph.Float8RowwiseScaling(power_2_scale=False, amax_epsilon=0.0),
    "blockwise": fp8graph.Float8BlockScaling(power_2_scale=False),
    "blockwise in powers of two": fp8graph.Float8BlockScaling(scale_format="ue8m0"),
    "delayed": fp8graph.DelayedScaling(),
    "mxfp8": fp8graph.MXFP8BlockScaling(),
}


def served(checkpoint: Checkpoint, model: Any) -> Any:
    """A new model of the checkpoint, which multiplies its bytes as they are."""
    new = type(model)(model.config).bfloat16()
    new.load_state_dict(
        {n: checkpoint.shards.tensor(n) for n in new.state_dict() if n in checkpoint.shards}, strict=False
    )
    for layer in checkpoint.layers:
        weight, block = checkpoint.weight(layer), checkpoint.layers[layer].block
        scale = (
            weight.scale_inv.view(torch.uint8) if weight.scale_inv.dtype == torch.float8_e8m0fnu else weight.scale_inv
        )
        scaling = {(0, 0): "tensor", (1, 0): "row", (128, 128): "block", (1, 32): "mxfp8"}[block]
        if scaling == "block" and scale.dtype == torch.uint8:
            scaling = "block_e8m0"
        settings: dict[str, Any] = {"scaling": scaling, "block": [*block] if all(block) else []}
        if weight.input_scale_inv is not None:
            settings |= {"activations": "static", "input_scale_inv": weight.input_scale_inv}
        new.set_submodule(layer, _Served(weight.data, scale.reshape(1) if scaling == "tensor" else scale, settings))
    return new.eval()


class _Served(nn.Module):
    def __init__(self, data: Tensor, scale_inv: Tensor, settings: dict[str, Any]) -> None:
        super().__init__()
        self.weight, self.scale_inv = (nn.Parameter(x, requires_grad=False) for x in (data, scale_inv))
        self.settings = settings

    def forward(self, x: Tensor) -> Tensor:
        weight = torch.ops.fp8graph.stored_weight(self.weight, self.scale_inv, x.dtype, **self.settings)
        return nn.functional.linear(x, weight)


@first_slow("name", SERVED)
def test_the_served_model_gives_the_trained_models_logits_bit_for_bit(name: str, tmp_path: Path) -> None:
    model = trained(SERVED[name], fuse_linears=False).eval()
    checkpoint = written(model, tmp_path)
    with torch.no_grad():
        expected = model(input_ids=IDS, use_cache=False).logits
        new = fp8graph.compile(served(checkpoint, model), compiler="eager")
        got = new(input_ids=IDS, use_cache=False).logits
    report = fp8graph.backend_of(new).report
    assert sum(gemm.reason.startswith("weight stored in") for gemm in report.gemms) == 2 * LINEARS
    assert torch.equal(expected, got)


@pytest.mark.slow
def test_a_state_for_an_engine_is_what_a_folder_holds(tmp_path: Path) -> None:
    model = trained("blockwise")
    state = dict(fp8graph.quantized_state(model))
    shards = written(model, tmp_path, max_shard_bytes=50_000).shards
    assert len(shards.files) > 3
    assert state.keys() == set(shards)
    assert same_bits(state.values(), [shards.tensor(name) for name in state])


@first_slow(("recipe", "form"), [("nvfp4", "auto"), ("nvfp4", "modelopt"), ("tensorwise", "modelopt")])
def test_static_scales_from_calibration(recipe: str, form: str, tmp_path: Path) -> None:
    model = trained(recipe)
    with pytest.raises(fp8graph.CheckpointError, match=r"it stores a static scale of the input of model\.layers"):
        fp8graph.export(model, tmp_path / "none", "compressed-tensors")
    batches = [{"input_ids": IDS}, {"input_ids": IDS[:, :5]}]
    seen = list[Tensor]()
    layer = model.model.layers[1].mlp.down_proj
    layer.register_forward_pre_hook(lambda _, args: seen.append(args[0].abs().amax().float()))
    checkpoint = written(model, tmp_path, form, calibration=batches)
    stored = checkpoint.weight("model.layers.1.mlp.down_proj")
    largest = 448 * 6 if recipe == "nvfp4" else 448
    scale = stored.input_scale_inv
    if stored.input_scale is not None:
        scale = stored.input_scale.reciprocal()
    assert scale is not None
    torch.testing.assert_close(scale.reshape(()), torch.stack(seen).amax() / largest)
    (own,) = (w for w in multiplied_by(fp8graph.backend_of(model), model) if w.layer == "model.layers.1.mlp.down_proj")
    quantizer = own.quantizer
    if recipe == "nvfp4":
        decoded = quantization.dequantize_data(own.data, own.scale_inv, torch.float32, scaling=quantizer.scaling,
                                      block=quantizer.block, global_scale_inv=own.global_scale_inv)  # fmt: skip
        assert torch.allclose(dequantize(stored), decoded, rtol=1e-6)


@pytest.mark.slow
def test_delayed_scales_need_a_step_of_training(tmp_path: Path) -> None:
    model = trained("delayed", steps=0)
    with torch.no_grad():
        model(input_ids=IDS, use_cache=False)  # with a scale of 1: nothing was recorded
    with pytest.raises(fp8graph.CheckpointError, match="it stores a static scale of the input of"):
        fp8graph.export(model, tmp_path / "out")
    written(model, tmp_path, calibration=[IDS])


@pytest.mark.slow
def test_layers_that_no_format_has_stay_as_they_are(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    config = transformers.GPT2Config(n_embd=64, n_layer=1, n_head=2, vocab_size=256)
    model = fp8graph.compile(transformers.GPT2LMHeadModel(config).bfloat16(), recipe="rowwise", compiler="eager")
    model(input_ids=IDS)
    with pytest.raises(fp8graph.ConfigError, match="no linear of GPT2LMHeadModel can be written in FP8"):
        fp8graph.export(model, tmp_path / "out")
    assert "transformer.h.0.attn.c_attn is exported in high precision: its weight is [K, N] (Conv1D)" in caplog.text
    assert not (tmp_path / "out").exists()


@first_slow("recipe", ["blockwise", "rowwise", "mxfp8", "delayed"])
def test_experts_are_written_as_linears(recipe: str, tmp_path: Path) -> None:
    """Bytes and scales of each expert, by the names of Mixtral's checkpoints."""
    torch.manual_seed(0)
    model = mixtral().bfloat16()
    fp8graph.compile(model, recipe=recipe, compiler="eager")
    for _ in range(2):
        model(input_ids=IDS, labels=IDS, use_cache=False).loss.backward()
    checkpoint = written(model, tmp_path)
    saved = "model.layers.0.block_sparse_moe"
    assert len(checkpoint.layers) == 4 + 3 * 4
    found = {weight.parameter.rpartition(".")[2]: weight for weight in multiplied_by(fp8graph.backend_of(model), model)}
    for expert in range(4):
        for name, parameter, half in (("w1", "gate_up_proj", 0), ("w3", "gate_up_proj", 1), ("w2", "down_proj", 0)):
            stored, own = checkpoint.weight(f"{saved}.experts.{expert}.{name}"), found[parameter]
            rows = slice(half * stored.data.shape[0], (half + 1) * stored.data.shape[0])
            assert same_bits([stored.data], [own.data[expert, rows]])
            numbers = dequantize(stored)
            error = numbers - model.get_parameter(f"model.layers.0.mlp.experts.{parameter}")[expert, rows].float()
            assert error.norm() / numbers.norm() < 0.05
            assert (stored.input_scale_inv is not None) == (recipe == "delayed")
    kept = {name for name in checkpoint.shards if name.rpartition(".")[0] not in checkpoint.layers}
    assert f"{saved}.gate.weight" in kept
    assert not any("experts" in name for name in kept)
    assert {f"{saved}.gate", "model.layers.0.mlp.gate", "lm_head"} == set(checkpoint.quantization.ignore)


@pytest.mark.slow
def test_experts_whose_tiles_would_be_cut_stay_as_they_are(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = mixtral(intermediate_size=192).bfloat16()
    fp8graph.compile(model, recipe="blockwise", compiler="eager")
    model(input_ids=IDS, labels=IDS, use_cache=False)
    checkpoint = written(model, tmp_path)
    assert (
        "gate_up_proj is exported in high precision: model.layers.0.block_sparse_moe.experts.0.w1 begins or ends"
        in (caplog.text)
    )
    assert torch.equal(
        checkpoint.shards.tensor("model.layers.0.block_sparse_moe.experts.1.w3.weight"),
        model.get_parameter("model.layers.0.mlp.experts.gate_up_proj")[1, 192:],
    )


@pytest.mark.slow
def test_policies_decide_what_is_written(tmp_path: Path) -> None:
    policy = Policy([Rule("model.layers.0.*", None), Rule("*.mlp.*", "mxfp8")], default="rowwise", extends="default")
    checkpoint = written(trained(None, policy=policy), tmp_path)
    assert checkpoint.quantization.method == "compressed-tensors"
    schemes = {layer: stored.scheme for layer, stored in checkpoint.layers.items()}
    assert len(schemes) == LINEARS
    assert schemes["model.layers.1.mlp.up_proj"] == "MXFP8"
    assert schemes["model.layers.1.self_attn.o_proj"] == "FP8_DYNAMIC"
    assert {"lm_head", "model.layers.0.mlp.up_proj"} < set(checkpoint.quantization.ignore)
    with pytest.raises(fp8graph.CheckpointError, match=r"fp8: .* is quantized as .*, for which it has no form"):
        fp8graph.export(trained(None, policy=policy), tmp_path / "fp8", "fp8")


@pytest.mark.slow
def test_other_files_come_along(tmp_path: Path) -> None:
    source = tmp_path / "source"
    model = trained("blockwise")
    model.save_pretrained(source)
    (source / "tokenizer.json").write_text("{}")
    written(model, tmp_path, copy_from=source)
    assert (tmp_path / "out" / "tokenizer.json").read_text() == "{}"
    names = {file.name for file in (tmp_path / "out").iterdir()}
    assert {"config.json", "generation_config.json", "model.safetensors"} <= names


@pytest.mark.slow
def test_errors(tmp_path: Path) -> None:
    model = trained("blockwise", steps=0)
    with pytest.raises(fp8graph.ConfigError, match="no weight of LlamaForCausalLM is multiplied in FP8 by what is"):
        fp8graph.export(model, tmp_path / "out")
    with pytest.raises(fp8graph.ConfigError, match="was not compiled with the fp8graph backend"):
        fp8graph.export(nn.Sequential(nn.Linear(4, 4)), tmp_path / "out")
    model = trained("blockwise", steps=1)
    with pytest.raises(
        fp8graph.ConfigError, match="format must be one of auto, fp8, compressed-tensors, modelopt, mxfp8, not"
    ):
        fp8graph.export(model, tmp_path / "out", "gguf")
    with pytest.raises(fp8graph.CheckpointError, match="modelopt: .* is quantized as 'block' with 128x128 tiles, for"):
        next(fp8graph.quantized_state(model, "modelopt"))
    fp8graph.export(model, tmp_path / "out")
    with pytest.raises(fp8graph.CheckpointError, match="exists"):
        fp8graph.export(model, tmp_path / "out")
    fp8graph.export(model, tmp_path / "out", overwrite=True)


def test_the_table_of_the_documentation() -> None:
    """Each recipe, and the formats that have a form for it."""
    page = (Path(__file__).parents[2] / "docs" / "checkpoints.md").read_text(encoding="utf-8").partition("## Out")[2]
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in page.splitlines() if line.startswith("| ")]
    columns = [re.search(r'"([\w-]+)"', cell) for cell in rows[0][1:]]
    names = [found[1] for found in columns if found is not None]
    for name, *cells in rows[1:]:
        recipe = resolve_recipe(name)
        assert recipe is not None
        weight = Multiplied(
            parameter="a.weight", data=(x := torch.zeros(1)), scale_inv=x, quantizer=recipe.quantizer("weight")
        )
        for title, cell in zip(names, cells, strict=True):
            for inputs in ((), ("a",)):  # without a static scale, and with one
                if cell and (inputs or "calibration" not in cell and name != "delayed"):
                    _, forms = chosen(title, {"a": kind_of(weight)}, inputs)
                    (stored,) = forms.values()
                    assert title in ("fp8", "mxfp8") or stored.scheme == re.split(r"[;,]", cell)[0]
                else:
                    with pytest.raises(fp8graph.CheckpointError):
                        chosen(title, {"a": kind_of(weight)}, inputs)


@pytest.mark.parametrize("stored", [False, True])
def test_a_layer_without_a_name_is_not_exported(stored: bool, tmp_path: Path) -> None:
    layer: nn.Module = nn.Linear(128, 128).bfloat16()
    if stored:
        made = fp8graph.numerics.quantize(torch.randn(128, 128), fp8graph.Float8BlockScaling(), "weight", "rowwise")
        weight = StoredWeight(data=made.data, scale_inv=made.scale_inv, scaling="block", block=[128, 128])
        layer = StoredLinear(weight)
    fp8graph.compile(layer, recipe="blockwise", compiler="eager")
    layer(torch.randn(2, 128, dtype=torch.bfloat16))
    with pytest.raises(fp8graph.ConfigError, match=rf"one {type(layer).__name__}: .*torch.nn.Sequential\(layer\)"):
        fp8graph.export(layer, tmp_path / "out")
