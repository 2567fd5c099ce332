"""compare_layers: layers in FP8 on one side only are named, and raise if asked."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from torch import nn

import fp8graph
from fp8graph import Fp8CoverageError, Policy, Rule
from fp8graph.tools.compare_layers import ENGINES, LayerComparison, compare_layers
from helpers import first_slow, in_one_test
from tiny_models import model_and_inputs

DEEPSEEK = ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj")


@in_one_test(
    ("layer", "verl", "engines"),
    [
        ("model.layers.0.self_attn.q_proj", True, True),
        *((f"model.layers.0.self_attn.{leaf}", False, True) for leaf in DEEPSEEK),
        ("model.layers.0.mlp.gate_proj", True, True),
        ("model.layers.3.mlp.gate", False, False),
        ("model.layers.3.mlp.experts.0.gate_proj", True, True),
        ("model.layers.3.block_sparse_moe.experts.0.w1", False, True),  # Mixtral's names
        ("model.layers.3.block_sparse_moe.gate", False, False),
        ("model.layers.3.mlp.shared_expert_gate", True, False),
        ("lm_head", False, False),
        ("model.encoder.FC1", True, True),
        ("model.norm_proj.mlp", False, True),
    ],
)
def test_rules_of_engines(layer: str, verl: bool, engines: bool) -> None:
    assert [ENGINES[name].quantizes(layer) for name in ("verl", "vllm", "sglang")] == [verl, engines, engines]


class Attention(nn.Module):
    """Projections by DeepSeek-V3's names, and a router."""

    def __init__(self) -> None:
        super().__init__()
        self.q_a_proj, self.o_proj, self.router = (nn.Linear(32, 32, bias=False) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.router(self.o_proj(self.q_a_proj(x)))


def compiled(policy: Policy) -> nn.Module:
    model = nn.ModuleDict({"layers": nn.ModuleList([Attention(), Attention()])})
    model.forward = lambda x: model["layers"][1](model["layers"][0](x))  # type: ignore[method-assign]
    fp8graph.compile(model, policy=policy, compiler="eager")
    with torch.no_grad():
        model(torch.randn(16, 32))
    return model


def test_layers_that_differ_are_named_by_kind() -> None:
    model = compiled(Policy([Rule("*.0.o_proj", None), Rule("*.router", None)]))
    found = compare_layers(model, "verl")
    assert found.only_here == ("layers.0.q_a_proj", "layers.1.q_a_proj")
    assert found.only_there == ("layers.0.o_proj",)
    assert (found.both, found.neither) == (("layers.1.o_proj",), ("layers.0.router", "layers.1.router"))
    assert str(found) == (
        "not the same layers: 1 layers in FP8 here and in verl, 2 in neither\n"
        "  in FP8 here, in high precision in verl: layers.*.q_a_proj\n"
        "  in high precision here, in FP8 in verl: layers.*.o_proj"
    )
    with pytest.raises(Fp8CoverageError, match=r"in high precision in verl: layers\.\*\.q_a_proj"):
        found.check()
    assert json.loads(json.dumps(found.to_dict()))["only_there"] == ["layers.0.o_proj"]
    assert compare_layers(fp8graph.backend_of(model).report, "verl") == found


@pytest.mark.parametrize("differ", [{"only_here": ("a",)}, {"only_there": ("a",)}, {"other_recipe": {"a": ("x", "y")}}])
def test_one_difference_is_enough(differ: dict[str, Any]) -> None:
    lists: dict[str, Any] = dict.fromkeys(("both", "only_here", "only_there", "neither"), ())
    LayerComparison(there="verl", **lists).check()
    with pytest.raises(Fp8CoverageError, match="not the same layers: 0 layers in FP8 here and in verl"):
        LayerComparison(there="verl", **lists | differ).check()


def test_policies_are_compared_with_their_recipes() -> None:
    model = compiled(Policy([Rule("*.router", None)], default="rowwise"))
    same = compare_layers(model, Policy([Rule("*.router", None)], default="rowwise"))
    same.check()
    assert str(same) == "the same layers: 4 layers in FP8 here and in the policy, 2 in neither"
    other = compare_layers(model, {"rules": [{"pattern": "*.o_proj", "recipe": "mxfp8"}], "default": "rowwise"})
    assert other.only_there == ("layers.0.router", "layers.1.router")
    assert other.other_recipe == {f"layers.{i}.o_proj": ("rowwise", "mxfp8") for i in (0, 1)}
    assert "  other recipe: layers.*.o_proj: rowwise here, mxfp8 there" in str(other)
    checkpoint = {"quant_method": "fp8", "weight_block_size": [128, 128], "modules_to_not_convert": ["router"]}
    of_config = compare_layers(model, checkpoint)
    assert (of_config.only_here, of_config.only_there) == ((), ())
    assert set(of_config.other_recipe.values()) == {("rowwise", "blockwise")}
    default = compare_layers(model, Policy(extends="default", default="rowwise"))
    assert default.same


def test_wrong_arguments_are_named() -> None:
    report = fp8graph.Backend().report
    with pytest.raises(
        fp8graph.ConfigError, match="with_='verk'.: not one of verl, vllm, sglang.* Did you mean 'verl'"
    ):
        compare_layers(report, "verk")
    with pytest.raises(fp8graph.ConfigError, match="model_or_report must be a compiled model or a report"):
        compare_layers("llama", "verl")  # pyright: ignore[reportArgumentType]
    with pytest.raises(fp8graph.ConfigError):
        compare_layers(nn.Linear(2, 2), "verl")


# by family: the layers that verl's rule leaves in high precision, of those that the default policy quantizes
LEFT_BY_VERL: dict[str, set[str]] = {
    "deepseek_v3": {f"self_attn.{leaf}" for leaf in DEEPSEEK},
    "mixtral": {"mlp.experts"},  # block_sparse_moe.experts.0.w1 in its checkpoints
    "llama": set(),
    "qwen3": set(),
    "qwen3_moe": set(),
}


@first_slow("family", LEFT_BY_VERL)
def test_families_under_the_default_policy(family: str) -> None:
    model, inputs = model_and_inputs(family)
    fp8graph.compile(model, recipe="mxfp8", compiler="eager")
    with torch.no_grad():
        model(**inputs, use_cache=False)
    verl: Any = compare_layers(model, "verl")
    assert {name.split(".", 3)[3] for name in verl.only_here} == LEFT_BY_VERL[family]
    assert verl.only_there == ()
    for engine in ("vllm", "sglang"):
        compare_layers(model, engine).check()
