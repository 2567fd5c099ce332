"""Embeddings in FP8 with one scale: loaded, looked up, compiled, and written again; with transformers and without."""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, LlamaForCausalLM
from transformers.integrations.finegrained_fp8 import FP8Embedding

import fp8_checkpoints
import fp8graph
from fp8_checkpoints import BF16, CONFIG, E4M3, IDS, any_device
from fp8graph import CheckpointError
from fp8graph.checkpoints import Checkpoint
from fp8graph.libraries.stored_linear import StoredEmbedding
from fp8graph.numerics import sqnr_db
from fp8graph.tools import inspect_checkpoint
from helpers import first_fast

TOKENS = torch.arange(64).reshape(2, 32)


class Model(nn.Module):
    """A table and two linears; a linear in high precision is its head."""

    def __init__(self, rows: int = 64, size: int = 256) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed_tokens = nn.Embedding(rows, size)
        self.up, self.down = nn.Linear(size, 384), nn.Linear(384, size, bias=False)
        self.lm_head = nn.Linear(size, rows, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        return self.lm_head(self.down(self.up(self.embed_tokens(ids)).relu()))


def one_scale_each(source: nn.Module, *, static: bool = False) -> dict[str, Tensor]:
    """The state of a model with linears and table in E4M3, by one scale each; of the table as transformers names it."""
    tensors: dict[str, Tensor] = {}
    for name, x in source.state_dict().items():
        layer = name.removesuffix(".weight")
        if x.ndim != 2 or layer == "lm_head":
            tensors[name] = x.clone()
            continue
        scale = x.float().abs().amax() / 448
        tensors[name] = (x.float() / scale).to(E4M3)
        if layer.endswith("embed_tokens"):
            tensors[f"{layer}.weight_scale"] = scale.reshape(1)
            continue
        tensors[f"{layer}.weight_scale_inv"] = scale
        if static:
            tensors[f"{layer}.activation_scale"] = torch.tensor(0.01)
    return tensors


def written(folder: Path, tensors: dict[str, Tensor], model: Mapping[str, Any] | None = None, **config: Any) -> Path:
    folder.mkdir(exist_ok=True)
    save_file(tensors, folder / "model.safetensors")
    said: dict[str, Any] = {"quant_method": "fp8", "weight_block_size": None, "activation_scheme": "dynamic"}
    (folder / "config.json").write_text(json.dumps({**(model or {}), "quantization_config": {**said, **config}}))
    return folder


@first_fast("config", [{}, {"modules_to_convert": ["embed_tokens"]}, {"activation_scheme": "static"}])
def test_loaded_table_gives_the_numbers_of_its_source(config: dict[str, Any], tmp_path: Path) -> None:
    source = Model().to(BF16)
    tensors = one_scale_each(source, static="activation_scheme" in config)
    model = fp8graph.load_checkpoint(Model().to(BF16), written(tmp_path, tensors, **config))
    table = cast(Any, model.embed_tokens)
    assert isinstance(table, StoredEmbedding)
    assert torch.equal(table.weight.view(torch.uint8), tensors["embed_tokens.weight"].view(torch.uint8))
    exact = tensors["embed_tokens.weight"].double() * tensors["embed_tokens.weight_scale"].double()
    assert torch.equal(table(TOKENS), exact[TOKENS].float().bfloat16())
    fp8graph.compile(model, compiler="eager", fullgraph=True)
    assert sqnr_db(source(TOKENS), model(TOKENS)) > 22
    report = fp8graph.backend_of(model).report
    assert [(one.fqn, one.reason) for one in report.refusals if one.what == "stored weight"] == [
        ("embed_tokens", "its rows are decoded as they are looked up, and no GEMM multiplies them")
    ]
    assert {gemm.fqn for gemm in report.gemms if gemm.reason.startswith("weight stored in")} == {"up", "down"}


def test_transformers_rows_equal_ours_in_fp32() -> None:
    data, scale = torch.randn(64, 32).mul(100).to(E4M3), torch.tensor([0.017])
    theirs: Any = FP8Embedding(64, 32)
    theirs.weight.data.copy_(data)
    theirs.weight_scale.data.copy_(scale)
    ours = StoredEmbedding(data, scale, dtype=torch.float32)
    ids = torch.tensor([[3, 0, 63], [5, 5, 1]])
    assert torch.equal(ours(ids), theirs(ids))
    assert ours.state_dict().keys() == theirs.state_dict().keys()


def test_module_of_transformers_is_reported_by_its_own_name() -> None:
    model = Model()
    table: Any = FP8Embedding(64, 256)
    table.weight.data.copy_(torch.randn(64, 256).to(E4M3))
    model.embed_tokens = table
    fp8graph.compile(model, compiler="eager", fullgraph=True)
    model(TOKENS).sum().backward()
    report = fp8graph.backend_of(model).report
    assert [(one.what, one.fqn) for one in report.refusals] == [("stored weight", "embed_tokens")]
    assert {gemm.recipe for gemm in report.gemms if gemm.fqn != "lm_head"} == {"tensorwise"}


@first_fast("static", [False, True])
def test_written_again_bytes_and_scales_are_the_same(static: bool, tmp_path: Path) -> None:
    tensors, scheme = one_scale_each(Model(), static=static), "static" if static else "dynamic"
    model = fp8graph.load_checkpoint(Model(), written(tmp_path / "in", tensors, activation_scheme=scheme))
    fp8graph.compile(model, compiler="eager")
    with torch.no_grad():
        model(TOKENS)
    again = load_file(fp8graph.export(model, tmp_path / "out") / "model.safetensors")
    assert again.keys() == tensors.keys()
    for name, x in tensors.items():
        assert (again[name].dtype, again[name].shape) == (x.dtype, x.shape), name
        assert torch.equal(again[name].flatten().view(torch.uint8), x.flatten().view(torch.uint8)), name
    said = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    assert (said["modules_to_convert"], said["activation_scheme"]) == (["embed_tokens"], scheme)
    with pytest.raises(CheckpointError, match="embed_tokens is an embedding in FP8, for which it has no form"):
        fp8graph.export(model, tmp_path / "other", "compressed-tensors")


@pytest.mark.slow
def test_transformers_loads_what_is_written_again(tmp_path: Path) -> None:
    source: Any = fp8_checkpoints.model()
    whole = {**CONFIG.to_dict(), "architectures": ["LlamaForCausalLM"]}
    llama: Any = LlamaForCausalLM(copy.deepcopy(CONFIG)).eval()
    llama.to(BF16)
    fp8graph.load_checkpoint(llama, written(tmp_path / "in", one_scale_each(source), whole))
    fp8graph.compile(llama, compiler="eager", fullgraph=True)
    with torch.no_grad():
        expected = llama(input_ids=IDS, use_cache=False).logits
        assert sqnr_db(source(input_ids=IDS, use_cache=False).logits, expected) > 22
    fp8graph.export(llama, tmp_path / "out")
    with any_device():
        theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=BF16).requires_grad_(False).eval()
    assert type(theirs.model.embed_tokens) is FP8Embedding
    fp8graph.compile(theirs, compiler="eager", fullgraph=True)
    with torch.no_grad():
        found = theirs(input_ids=IDS, use_cache=False).logits
    assert sqnr_db(expected, found) > 25  # it rounds the table's scale to bf16


def test_inspect_shows_the_table(tmp_path: Path) -> None:
    folder = written(tmp_path, one_scale_each(Model()), modules_to_convert=["embed_tokens"])
    found = inspect_checkpoint.inspect(Checkpoint(folder))
    assert {(one.name, one.layers, one.tile, one.input) for one in found.schemes} == {
        ("dynamic tensor", 2, "tensor", "dynamic, row"),
        ("embedding", 1, "tensor", "high precision"),
    }
    assert not found.problems


class Scaled(nn.Embedding):
    def forward(self, input: Tensor) -> Tensor:  # noqa: A002
        return 2 * super().forward(input)


class OfItsOwn(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:  # noqa: A002
        return super().forward(input).flip(-1)


def refused(folder: Path, tensors: dict[str, Tensor], **layers: nn.Module) -> str:
    model = Model()
    for name, layer in layers.items():
        setattr(model, name, layer)
    with pytest.raises(CheckpointError) as raised:
        fp8graph.load_checkpoint(model, written(folder, tensors))
    return str(raised.value)


def test_refused_layers_are_named_with_the_reason(tmp_path: Path) -> None:
    tensors, cannot = one_scale_each(Model()), "cannot be loaded"
    text = refused(tmp_path, tensors, embed_tokens=Scaled(64, 256))
    assert f"layer 'embed_tokens' (dynamic tensor) {cannot}: Scaled computes more than rows of its table" in text
    text = refused(tmp_path, tensors, up=OfItsOwn(256, 384))
    assert f"layer 'up' (dynamic tensor) {cannot}: OfItsOwn multiplies in a way of its own" in text
    table = nn.Embedding(64, 256)
    head = nn.Linear(256, 64, bias=False)
    head.weight = table.weight
    text = refused(tmp_path, {k: x for k, x in tensors.items() if "head" not in k}, embed_tokens=table, lm_head=head)
    assert "lm_head.weight is the same weight in the model. Make the model with tie_word_embeddings=False" in text


def test_table_with_tiles_is_refused(tmp_path: Path) -> None:
    data, scales = torch.ones(64, 256).to(E4M3), torch.ones(1, 2)
    folder = written(tmp_path, {"weight": data, "weight_scale_inv": scales}, weight_block_size=[128, 128])
    save_file({"a.weight": data, "a.weight_scale_inv": scales}, folder / "model.safetensors")
    with pytest.raises(CheckpointError, match="'a' .dynamic 128x128. cannot be loaded: its scales are of 128x128, and"):
        fp8graph.load_checkpoint(nn.ModuleDict({"a": nn.Embedding(64, 256)}), folder)


def test_linear_that_is_stored_as_a_table_is_refused(tmp_path: Path) -> None:
    folder = written(tmp_path, one_scale_each(Model()), modules_to_convert=["up"])
    save_file({"up.weight": torch.ones(8, 16).to(E4M3), "up.weight_scale": torch.ones(1)}, folder / "model.safetensors")
    with pytest.raises(
        CheckpointError, match="'up' .embedding. cannot be loaded: it is stored as an embedding is, and"
    ):
        fp8graph.load_checkpoint(nn.ModuleDict({"up": nn.Linear(16, 8, bias=False)}), folder)


def test_scales_without_use_are_named(tmp_path: Path) -> None:
    text = refused(tmp_path, one_scale_each(Model()) | {"up.activation_scale": torch.ones(())})
    assert "'up.activation_scale' is a scale, and by the config layer 'up' (dynamic tensor) has no use for it" in text
