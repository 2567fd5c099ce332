"""policies: which policy decides, and whether it could rewrite anything."""

from __future__ import annotations

from typing import Any

import pytest

from fp8graph import ConfigError, Policy, Rule, hardware
from fp8graph.ir.decisions import Decisions
from fp8graph.models import FAMILIES, general_policy
from fp8graph.models.general import families_of
from fp8graph.recipes.autocast import DISABLED, POLICY, region_of
from fp8graph.runtime.policies import Policies
from helpers import in_one_test


def policies(policy: Any = None, recipe: Any = None, target: str = "sm_90") -> Policies:
    found = Policies(hardware.from_target(target))
    found.set(policy, recipe)
    return found


@pytest.mark.parametrize(("target", "recipe"), [("sm_90", "tensorwise"), ("sm_100", "mxfp8")])
def test_the_default_is_the_targets(target: str, recipe: str) -> None:
    found = policies(target=target)
    assert found.whole == Policy(extends="default")
    assert found.current == general_policy(recipe)


def test_a_recipe_takes_the_place_of_the_default_alone() -> None:
    rules = [Rule("head", None)]
    found = policies(Policy(rules, default="tensorwise", min_speedup=2.0), "rowwise").current
    assert (list(found.rules), found.default, found.min_speedup) == (rules, "rowwise", 2.0)
    assert policies(None, "rowwise").current.rules == general_policy("rowwise").rules


@pytest.mark.parametrize("wrong", [{"recipe": "nosuch"}, {"policy": "nosuch.toml"}, {"policy": {"rule": []}}])
def test_invalid_policies_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        policies(**wrong)


def in_fp8(policy: Policy, name: str) -> bool:
    return policy.resolve(name, "linear").recipes["fprop"] is not None


@in_one_test(
    ("family", "kept"),
    [
        ("clip", ("visual_projection", "text_projection")),
        ("diffusers_pixart", ("adaln_single.linear", "caption_projection.linear_1")),
        ("diffusers_unet", ("down_blocks.0.resnets.0.time_emb_proj",)),
        ("whisper", ("proj_out", "base_model.model.proj_out")),  # PEFT puts this before every name
    ],
)
def test_families_add_their_rules_unless_the_user_chose(family: str, kept: tuple[str, ...]) -> None:
    found, chosen = policies(), policies(Policy())
    plain, identity = found.of(())
    assert plain == found.current.resolved()
    of_family, other = found.of((family,))
    assert [in_fp8(plain, name) for name in kept] == [True] * len(kept)
    assert [in_fp8(of_family, name) for name in kept] == [False] * len(kept)
    assert in_fp8(of_family, "layers.0.fc1")
    assert other != identity
    assert found.of((family,))[0] is of_family
    assert chosen.of((family,)) == chosen.of(())
    assert chosen.of(())[0] == chosen.current.resolved()


@in_one_test("family", FAMILIES)
def test_every_rule_of_a_family_is_in_its_policy(family: str) -> None:
    policy, _ = policies().of((family,))
    assert FAMILIES[family].keep.keys() <= {rule.pattern for rule in policy.rules if rule.recipe is None}


@in_one_test(
    ("kept", "rewritten"),
    [
        ("model.layers.0.mlp.gate", "model.layers.0.mlp.gate_proj"),
        ("model.layers.0.block_sparse_moe.gate", "model.layers.0.gate"),
        ("model.layers.0.mlp.router", "model.layers.0.mlp.router_norm.up"),
        ("base_model.model.layers.0.up.lora_A.default", "base_model.model.layers.0.up.base_layer"),
        ("base_model.model.layers.0.up.lora_B.default", "base_model.model.layers.0.up.base_layer"),
        ("cls.predictions.decoder", "model.cls_token.up"),
    ],
)
def test_default_policy_keeps_routers_and_adapters(kept: str, rewritten: str) -> None:
    policy = policies().current
    assert (in_fp8(policy, kept), in_fp8(policy, rewritten)) == (False, True)


@in_one_test(
    ("policy", "regions", "may"),
    [
        (Policy(default="tensorwise"), [None], True),
        (Policy(default=None), [None], False),
        (Policy(default=None), [None, DISABLED, POLICY], False),
        (Policy(default=None), [None, "rowwise"], True),
        (Policy([Rule("up", "tensorwise")], default=None), [], True),
        (Policy([Rule("up", None, dgrad="tensorwise")], default=None), [], True),
        (Policy([Rule("up", None)], default="high_precision"), [], False),
    ],
)
def test_may_rewrite_by_policy_and_regions(policy: Policy, regions: list[Any], may: bool) -> None:
    given = {str(index): region_of(region) for index, region in enumerate(regions) if region is not None}
    decisions = Decisions(policy=policies(policy).now.of(())[0], regions=given)
    assert decisions.may_rewrite == may


def test_lines_tell_policies_apart() -> None:
    lines = policies(Policy([Rule("up", None)], default="rowwise", min_speedup=1.5)).lines()
    assert lines == [f"rule 0 {Rule('up', None)!r}", "default 'rowwise'", "min_speedup 1.5"]


@in_one_test(
    ("owner", "kept", "rewritten"),
    [
        ("timm.models.vision_transformer.VisionTransformer", ("head",), ("blocks.0.mlp.fc1", "blocks.0.attn.proj")),
        ("timm.models.resnet.ResNet", ("fc",), ()),
        ("torchvision.models.vision_transformer.VisionTransformer", ("heads.head",), ("encoder.layers.0.mlp.0",)),
        ("diffusers.models.transformers.transformer_flux.FluxSingleTransformerBlock", (), ("proj_out",)),
    ],
)
def test_the_last_layers_of_other_libraries_models(
    owner: str, kept: tuple[str, ...], rewritten: tuple[str, ...]
) -> None:
    policy = policies().of(tuple(families_of([owner])))[0]
    assert [policy.resolve(name, "linear").recipes["fprop"] for name in kept] == [None] * len(kept)
    assert None not in [policy.resolve(name, "linear").recipes["fprop"] for name in rewritten]
