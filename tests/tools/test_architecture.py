"""architecture: the names in a checkpoint beside those of the model that its config describes."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import fp8graph
from fp8_checkpoints import FORMATS
from fp8graph.checkpoints import Checkpoint
from fp8graph.tools.inspect_checkpoint import compared
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
        ({"num_hidden_layers": 10**9}, "config.json says num_hidden_layers = 1000000000, and there are 35 tensors."),
        ({"hidden_act": "nosuch"}, "cannot build a model from a config of llama: "),
        ({"vocab_size": 2**62}, "transformers cannot build LlamaForCausalLM: "),
    ],
)
def test_unusable_config_has_a_reason(whole: Path, config: dict[str, Any], reason: str, tmp_path: Path) -> None:
    names, problems = compared(changed(whole, tmp_path, **config))
    assert names.startswith("The names were not compared with those of a model: ")
    assert reason in names
    assert problems == []


def test_without_transformers(whole: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    assert compared(Checkpoint(whole)) == (
        "The names were not compared with those of a model: transformers is not installed.",
        [],
    )
