"""analysis/blocks: the last blocks of a model, which NVFP4 leaves in high precision under the default policy."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from fp8graph import NVFP4BlockScaling, Policy, Rule, explain
from fp8graph.ir.decisions import Decisions, stacks_of
from fp8graph.ir.naming import Place
from fp8graph.ir.sites import Site
from fp8graph.models import general_policy
from helpers import first_slow, in_one_test


def in_high_precision(names: Sequence[str], recipe: str = "nvfp4") -> list[str]:
    """The layers among ``names`` that the default policy leaves in high precision under ``recipe``."""
    decisions = Decisions(policy=general_policy(recipe).resolved(), stacks=stacks_of(names))
    place = Place(root="", path="", parameter=None)
    sites = [Site(place=place, fqn=name, op="linear", region=None) for name in names]
    return [site.fqn for site in sites if not any(decisions.of(site).recipes.values())]


@in_one_test(("blocks", "kept"), [(1, 0), (3, 0), (4, 1), (9, 1), (10, 2), (32, 5), (52, 8)])
def test_the_last_fifteen_percent(blocks: int, kept: int) -> None:
    names = [f"model.layers.{i}.mlp.up_proj" for i in range(blocks)]
    assert in_high_precision(names) == names[blocks - kept :]
    assert in_high_precision(names, "mxfp8") == []


def test_each_stack_has_its_own() -> None:
    names = [f"vision.blocks.{i}.0.fc" for i in range(8)] + [
        f"layers.{i}.experts.{j}.up" for i in range(4) for j in (0, 1)
    ]
    kept = in_high_precision([*names, "projector.linear"])
    assert kept == ["vision.blocks.7.0.fc", "layers.3.experts.0.up", "layers.3.experts.1.up"]


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
    assert found["model.layers.3.mlp.up_proj"][1] == "the last of 4 blocks: nvfp4 needs more precision there"


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
