"""export_folder: a checkpoint in high precision becomes an FP8 one, tensor by tensor."""

from __future__ import annotations

import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import fp8graph
from fp8graph import cli
from fp8graph.checkpoints import Checkpoint, Shards
from fp8graph.tools.export import export_folder
from helpers import mixtral, same_bits
from tiny_models import causal_lm

LINEARS = 7  # per layer


def saved(folder: Path, layers: int = 2) -> Any:
    torch.manual_seed(0)
    model = causal_lm("Llama")(layers).bfloat16()
    model.save_pretrained(folder, max_shard_size="60KB")
    (folder / "tokenizer.json").write_text("{}")
    return model


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["blockwise", "rowwise", "mxfp8"])
def test_the_same_bytes_as_the_model_multiplies(recipe: str, tmp_path: Path) -> None:
    model = saved(tmp_path / "source")
    found = Checkpoint(export_folder(tmp_path / "source", tmp_path / "out", recipe=recipe))
    found.check()
    fp8graph.compile(model, recipe=recipe, compiler="eager")
    with torch.no_grad():
        model(input_ids=torch.randint(0, 256, (2, 16)), use_cache=False)
    expected = Checkpoint(fp8graph.export(model, tmp_path / "expected"))
    assert found.layers.keys() == expected.layers.keys()
    assert found.quantization == expected.quantization
    assert len(found.layers) == 2 * LINEARS
    assert {*found.shards} == {*expected.shards}
    for name in expected.shards:
        assert same_bits([found.shards.tensor(name)], [expected.shards.tensor(name)])
    assert (tmp_path / "out" / "tokenizer.json").exists()


@pytest.mark.slow
def test_experts_are_quantized_by_their_names_in_the_shards(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = mixtral().bfloat16()
    model.save_pretrained(tmp_path / "source")
    found = Checkpoint(export_folder(tmp_path / "source", tmp_path / "out"))
    fp8graph.compile(model, recipe="blockwise", compiler="eager")
    model(input_ids=torch.randint(0, 256, (2, 16)), use_cache=False)
    expected = Checkpoint(fp8graph.export(model, tmp_path / "expected"))
    assert {*found.shards} == {*expected.shards}
    assert len(found.layers) == 4 + 3 * 4
    for name in expected.shards:
        assert same_bits([found.shards.tensor(name)], [expected.shards.tensor(name)])


def test_no_more_than_two_shards_are_in_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saved(tmp_path / "source", layers=8)
    alive: dict[int, int] = {}
    peaks = list[int]()
    read = Shards.tensor

    def counted(self: Shards, name: str) -> Tensor:
        tensor = read(self, name)
        alive[id(tensor)] = tensor.nbytes
        weakref.finalize(tensor, alive.pop, id(tensor))
        peaks.append(sum(alive.values()))
        return tensor

    monkeypatch.setattr(Shards, "tensor", counted)
    shard = 50_000
    export_folder(tmp_path / "source", tmp_path / "out", max_shard_bytes=shard)
    total = sum(file.stat().st_size for file in (tmp_path / "source").glob("*.safetensors"))
    assert max(peaks) <= 2 * shard < total / 5


def test_policies_and_errors(tmp_path: Path) -> None:
    saved(tmp_path / "source")
    source = tmp_path / "source"
    policy = {"rules": [{"pattern": "*.mlp.*", "recipe": "high_precision"}], "extends": "default"}
    found = Checkpoint(export_folder(source, tmp_path / "out", policy=policy))
    assert len(found.layers) == 2 * 4
    assert "model.layers.1.mlp.up_proj" in found.quantization.ignore
    with pytest.raises(fp8graph.ConfigError, match="the policy quantizes none of its linears"):
        export_folder(source, tmp_path / "none", policy={"default": "high_precision"})
    with pytest.raises(fp8graph.CheckpointError, match="it stores a static scale of the input"):
        export_folder(source, tmp_path / "nvfp4", recipe="nvfp4")
    with pytest.raises(fp8graph.CheckpointError, match=r"q_proj.weight' is quantized already"):
        export_folder(tmp_path / "out", tmp_path / "again")
    assert not (tmp_path / "nvfp4").exists()


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    saved(tmp_path / "source")
    arguments = ["export", str(tmp_path / "source"), str(tmp_path / "out"), "--recipe", "rowwise"]
    assert cli.main(arguments) == 0
    text = capsys.readouterr().out
    assert "compressed-tensors" in text
    assert "FP8_DYNAMIC" in text
    assert "Nothing is missing, left over or of a wrong shape." in text
    assert cli.main(arguments) == 2
    assert "exists" in capsys.readouterr().err
    assert cli.main(["export", str(tmp_path / "nosuch"), str(tmp_path / "out2")]) == 2
