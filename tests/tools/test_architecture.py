"""architecture: the names in a checkpoint beside those of the model that its config describes."""

from __future__ import annotations

import importlib.util
import json
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import fp8graph
from fp8_checkpoints import FORMATS
from fp8graph.checkpoints import Checkpoint
from fp8graph.errors import ConfigError
from fp8graph.tools.forms import saved_layers
from fp8graph.tools.hugging_face import model_of
from fp8graph.tools.inspect_checkpoint import compared, model_of_checkpoint
from helpers import mixtral
from tiny_models import causal_lm


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("architecture") / "whole"
    FORMATS["hf-float"].write(folder)
    return folder


def changed(whole: Path, folder: Path, tensors: Any = None, **config: Any) -> Checkpoint:
    """The checkpoint with other tensors and other fields in its config."""
    held = load_file(whole / "model.safetensors")
    save_file(held if tensors is None else tensors(held), folder / "model.safetensors")
    values = {**json.loads((whole / "config.json").read_text()), **config}
    (folder / "config.json").write_text(json.dumps({k: v for k, v in values.items() if v is not None}))
    return Checkpoint(folder)


def test_the_names_are_those_of_the_model(whole: Path) -> None:
    sentence = "The names were compared with those of LlamaForCausalLM in transformers."
    assert compared(Checkpoint(whole)) == (sentence, [])


def test_names_that_peft_wrote(whole: Path, tmp_path: Path) -> None:
    """As exports of adapted models had them."""

    def adapted(held: dict[str, Any]) -> dict[str, Any]:
        old = "model.layers.1.self_attn.q_proj"
        moved = {f"{old}.base_layer.{end}": held.pop(f"{old}.{end}") for end in ("weight", "weight_scale_inv")}
        return {**held, **moved, f"{old}.lora_A.default.weight": torch.ones(8, 256)}

    _, problems = compared(changed(whole, tmp_path, adapted))
    texts = [text.partition(": of LlamaForCausalLM, ")[2] for text in problems]
    assert texts == [
        "'model.layers.1.self_attn.q_proj.weight' is not in the checkpoint",
        "'model.layers.1.self_attn.q_proj.base_layer.weight' is in the checkpoint, and not in that model",
        "'model.layers.1.self_attn.q_proj.lora_A.default.weight' is in the checkpoint, and not in that model",
    ]


def test_names_without_the_heads_prefix(whole: Path, tmp_path: Path) -> None:
    _, problems = compared(
        changed(whole, tmp_path, lambda held: {k.removeprefix("model."): x for k, x in held.items()})
    )
    assert problems == []


@pytest.mark.slow
@pytest.mark.parametrize("family", ["Mixtral", "tied"])
def test_experts_and_tied_weights(family: str, tmp_path: Path) -> None:
    """Experts are saved one by one, and of tied weights the first."""
    torch.manual_seed(0)
    model = mixtral() if family == "Mixtral" else causal_lm("Llama")(1)
    if family == "tied":
        model.config.tie_word_embeddings = True
        model = type(model)(model.config)
    fp8graph.compile(model.bfloat16(), recipe="blockwise", compiler="eager")
    model(input_ids=torch.arange(16)[None], use_cache=False)
    names, problems = compared(Checkpoint(fp8graph.export(model, tmp_path / "out")))
    assert (names, problems) == (f"The names were compared with those of {type(model).__name__} in transformers.", [])


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        ({"architectures": None}, "config.json names no architecture."),
        ({"architectures": ["PeftModel"]}, "transformers has no architecture 'PeftModel', which config.json names."),
        ({"model_type": "llamma"}, "no model type 'llamma'. Did you mean 'llama'?"),
        ({"num_hidden_layers": 10**9}, "config.json says num_hidden_layers = 1000000000, and of its 35 tensors the"),
        ({"hidden_act": "nosuch"}, "cannot build a model from a config of llama: "),
        ({"vocab_size": 2**62}, "config.json says vocab_size = 4611686018427387904, and of its 35 tensors the"),
    ],
)
def test_unusable_config_has_a_reason(whole: Path, config: dict[str, Any], reason: str, tmp_path: Path) -> None:
    names, problems = compared(changed(whole, tmp_path, **config))
    assert names.startswith("The names were not compared with those of a model: ")
    assert reason in names
    assert problems == []


_MODELS: dict[str, dict[str, Any]] = {
    "gpt2": {"architectures": ["GPT2LMHeadModel"], "n_embd": 8, "n_head": 1},
    "musicgen_decoder": {"architectures": ["MusicgenForCausalLM"], "num_hidden_layers": 1},
    "swin": {"architectures": ["SwinForImageClassification"]},
    "wav2vec2": {"architectures": ["Wav2Vec2ForCTC"]},
}


@pytest.mark.parametrize(
    ("kind", "claim", "reason"),
    [
        ("gpt2", {"n_layer": 10**7}, "config.json says n_layer = 10000000, and of its 35 tensors the largest"),
        ("gpt2", {"n_layer": 200_000, "num_hidden_layers": None}, "it has more than 2350 modules and parameters"),
        ("gpt2", {"num_labels": 10**9}, "config.json says num_labels = 1000000000"),
        ("gpt2", {"id2label": {"0": ["a"] * 400_000}}, "config.json has more than 300000 values"),
        ("gpt2", {"other": {"deep": [[10**7]]}}, "config.json says deep = 10000000"),
        ("gpt2", {"n_positions": 10**9}, "config.json says n_positions = 1000000000"),
        ("musicgen_decoder", {"num_codebooks": 10**7}, "config.json says num_codebooks"),
        ("swin", {"depths": [10**7]}, "config.json says depths"),
        ("wav2vec2", {f"conv_{end}": [8] * 100_001 for end in ("dim", "stride", "kernel")}, "300000 values"),
    ],
)
def test_claims_of_a_config_are_not_built(
    whole: Path, kind: str, claim: dict[str, Any], reason: str, tmp_path: Path
) -> None:
    checkpoint = changed(whole, tmp_path, model_type=kind, **_MODELS[kind], **claim)
    started = time.process_time()
    names, problems = compared(checkpoint)
    assert reason in names
    assert problems == []
    assert time.process_time() - started < 10  # without the bounds: minutes, or all of the memory


def test_large_numbers_that_build_nothing(whole: Path, tmp_path: Path) -> None:
    """Lengths and angles are larger than any tensor."""
    checkpoint = changed(whole, tmp_path, max_position_embeddings=10_485_760, rope_theta=10**9, image_token_id=400_000)
    assert compared(checkpoint)[0] == "The names were compared with those of LlamaForCausalLM in transformers."


def test_rows_that_a_model_claims_are_not_numbered(whole: Path, tmp_path: Path) -> None:
    """Of the rows of a model on the meta device no list is made before their number is bounded."""
    heads = dict.fromkeys(("num_attention_heads", "num_key_value_heads", "hidden_size"), 2**12)
    checkpoint = changed(whole, tmp_path, head_dim=2**18, **heads)
    with pytest.raises(ConfigError, match="the matrices of LlamaForCausalLM have [0-9]{10} rows, more than 134217728"):
        saved_layers(model_of_checkpoint(checkpoint))


def test_a_model_with_too_many_modules_is_refused() -> None:
    config = causal_lm("Llama")(1).config
    with pytest.raises(ConfigError, match="it has more than 5 modules and parameters"):
        model_of(config, most=5)
    assert model_of(config, most=1000) is not None
    assert model_of(config) is not None


def test_without_transformers(whole: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    assert compared(Checkpoint(whole)) == (
        "The names were not compared with those of a model: transformers is not installed.",
        [],
    )
