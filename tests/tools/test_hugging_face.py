"""Models from a config, and batches of text. A whole folder: ``tests/cli/test_tune.py``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from fp8graph.cli import main
from fp8graph.errors import ConfigError
from fp8graph.tools.hugging_face import batches_of
from helpers import first_slow


@pytest.mark.slow
def test_a_config_is_not_cut(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from tiny_models import llama_config

    llama_config(3).save_pretrained(tmp_path)
    file = tmp_path / "config.json"
    assert main(["explain", str(file), "--seq", "16", "--inference"]) == 0
    out, err = capsys.readouterr()
    assert "model.layers.* (3)" in out
    assert err == "fp8graph: LlamaForCausalLM\n"
    file.write_text('{"model_type": "lama"}')
    assert main(["explain", str(file)]) == 2
    assert "has no model type 'lama'. Did you mean 'llama'?" in capsys.readouterr().err
    for text in ("{}", "3", "["):
        file.write_text(text)
        assert main(["explain", str(file)]) == 2
        assert f"{file}: not a config" in capsys.readouterr().err
    file.write_text('{"model_type": "llama", "vocab_size": "many"}')
    assert main(["explain", str(file)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "not a config that transformers reads" in line


# model type -> its class and how many linears are in FP8 in forward, of two layers per stack: heads are not
MODELS: dict[str, tuple[str, int]] = {
    "t5": ("T5ForConditionalGeneration", 32),  # the whole model: 6 linears of an encoder's layer, 10 of a decoder's
    "bert": ("BertForMaskedLM", 12),
    "vit": ("ViTForImageClassification", 12),
    "clip": ("CLIPModel", 24),
    "whisper": ("WhisperForConditionalGeneration", 32),
    "wav2vec2": ("Wav2Vec2ForCTC", 13),
    "audio-spectrogram-transformer": ("ASTForAudioClassification", 12),
    "llava": ("LlavaForConditionalGeneration", 28),
    "qwen2_vl": ("Qwen2VLForConditionalGeneration", 14),
}


@first_slow("name", MODELS)
def test_all_kinds_of_models(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    torch._dynamo.reset()
    assert main(["explain", name, "--seq", "16", "--inference", "--json", "--target", "cpu"]) == 0
    out, err = capsys.readouterr()
    gemms = [gemm for graph in json.loads(out)["graphs"] for gemm in graph["gemms"]]
    found = err.removeprefix("fp8graph: ").split(", ")[0].strip()
    assert (found, sum(gemm["recipe"] is not None for gemm in gemms)) == MODELS[name]
    assert ("without images" in err) is (name == "qwen2_vl")


@pytest.mark.slow
def test_a_cut_leaves_a_layer_of_experts(capsys: pytest.CaptureFixture[str]) -> None:
    """DeepSeek's first three layers have none."""
    assert main(["explain", "deepseek_v3", "--seq", "16", "--layers", "1", "--inference", "--target", "cpu"]) == 0
    out, err = capsys.readouterr()
    assert "(num_hidden_layers: 61, first_k_dense_replace: 3); --layers N" in err
    assert "experts" in out


@pytest.mark.slow
def test_more_tokens_than_positions(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "clip", "--layers", "1", "--inference", "--target", "cpu"]) == 2
    (_, line) = capsys.readouterr().err.splitlines()
    assert "cannot trace CLIPModel" in line
    assert line.endswith("Try --seq 77, or call fp8graph.explain(model, ...) with inputs of your own.")


@pytest.mark.slow
def test_a_class_of_ones_choice(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["explain", "llama", "--seq", "16", "--layers", "1", "--target", "cpu"]
    assert main([*arguments, "--class", "AutoModelForSequenceClassification"]) == 0
    out, err = capsys.readouterr()
    assert err.startswith("fp8graph: LlamaForSequenceClassification, cut to 1 layer per stack")
    assert "score" in out


def letters(text: str, **_: Any) -> dict[str, torch.Tensor]:
    return {"input_ids": torch.tensor([[ord(letter) for letter in text]])}


def test_several_files_are_one_text(tmp_path: Path) -> None:
    files = [tmp_path / "a.txt", tmp_path / "b.txt"]
    for file, text in zip(files, ("aaa", "bbb"), strict=True):
        file.write_text(text)
    (batch,) = batches_of(letters, files, 1, 2, 7)
    assert batch.tolist() == [[97, 97, 97, 10, 98, 98, 98]] * 2
    with pytest.raises(ConfigError, match="7 tokens, fewer than one sequence of 8"):
        batches_of(letters, files, 1, 2, 8)


def test_binary_files_are_refused(tmp_path: Path) -> None:
    (tmp_path / "picture.png").write_bytes(b"\x89PNG\xff")
    with pytest.raises(ConfigError, match="cannot be read as text"):
        batches_of(letters, [tmp_path / "picture.png"], 1, 1, 1)
