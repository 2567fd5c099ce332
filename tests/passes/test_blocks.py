"""analysis/blocks: the last blocks of a model, which NVFP4 leaves in high precision under the default policy."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import fp8graph
from fp8graph import NVFP4BlockScaling, Policy, Rule, explain
from fp8graph.passes.assign import Blocks
from helpers import first_slow


@pytest.mark.parametrize(("blocks", "kept"), [(1, 0), (3, 0), (4, 1), (9, 1), (10, 2), (32, 5), (52, 8)])
def test_the_last_fifteen_percent(blocks: int, kept: int) -> None:
    found = Blocks(f"model.layers.{i}.mlp.up_proj" for i in range(blocks))
    last = [i for i in range(blocks) if found.last(f"model.layers.{i}.mlp.up_proj", 0.15)]
    assert last == list(range(blocks - kept, blocks))
    assert all(found.last(f"model.layers.{i}.mlp.up_proj", 0.15) == kept for i in last)


def test_each_stack_has_its_own() -> None:
    names = [f"vision.blocks.{i}.0.fc" for i in range(8)] + [
        f"layers.{i}.experts.{j}.up" for i in range(4) for j in (0, 1)
    ]
    found = Blocks([*names, "lm_head", "projector.linear"])
    last = {name for name in names if found.last(name, 0.15)}
    assert last == {"vision.blocks.7.0.fc", "layers.3.experts.0.up", "layers.3.experts.1.up"}
    assert found.last("lm_head", 0.15) == found.last("elsewhere.7.fc", 0.15) == 0


def model(layers: int = 4) -> Any:
    sizes: dict[str, Any] = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
    }
    return LlamaForCausalLM(LlamaConfig(num_hidden_layers=layers, vocab_size=64, **sizes))


def recipes(**settings: Any) -> dict[str, tuple[str | None, str]]:
    ids = torch.ones(1, 16, dtype=torch.long)
    report = explain(model(), input_ids=ids, labels=ids, **settings)
    return {g.fqn: (g.recipe, g.reason) for g in report.gemms if g.fqn.endswith("up_proj") and g.gemm == "wgrad"}


@pytest.mark.slow
def test_nvfp4_leaves_the_last_block_alone_under_the_default_policy() -> None:
    found = recipes(recipe="nvfp4")
    assert [recipe for recipe, _ in found.values()] == ["nvfp4", "nvfp4", "nvfp4", None]
    assert (
        found["model.layers.3.mlp.up_proj"][1] == "the last of 4 blocks in this graph: nvfp4 needs more precision there"
    )


@first_slow(
    "settings",
    [
        {"recipe": "mxfp8"},
        {"policy": Policy(default="nvfp4")},  # not the default policy
        {"policy": Policy([Rule("*.mlp.*", "nvfp4")], extends="default")},  # a rule asks for it
        {"policy": Policy([Rule("*", NVFP4BlockScaling(), wgrad="mxfp8")], extends="default")},
    ],
    ids=["mxfp8", "own policy", "own rule", "own wgrad"],
)
def test_last_blocks_only_apply_to_the_default_policy(settings: dict[str, Any]) -> None:
    assert all(recipe is not None for recipe, _ in recipes(**settings).values())


def test_a_gemm_of_another_recipe_stays() -> None:
    """The policy's default has one recipe for all GEMMs; only those that want it lose theirs."""
    resolution = Policy(default="nvfp4").resolve("layers.3.up", "linear")
    mixed = {**resolution.recipes, "wgrad": fp8graph.MXFP8BlockScaling()}
    object.__setattr__(resolution, "recipes", mixed)
    found = Blocks(f"layers.{i}.up" for i in range(4)).without_the_last("layers.3.up", resolution)
    assert [recipe and recipe.name for recipe in found.recipes.values()] == [None, None, "mxfp8"]
