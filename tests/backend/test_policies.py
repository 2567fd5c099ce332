"""policies: which policy decides, and whether it could rewrite anything."""

from __future__ import annotations

from typing import Any

import pytest

from fp8graph import ConfigError, Policy, Rule, hardware
from fp8graph.backend.policies import Policies
from fp8graph.models import general_policy
from fp8graph.models.general import families_of
from fp8graph.recipes.autocast import DISABLED, POLICY


def policies(policy: Any = None, recipe: Any = None, target: str = "sm_90") -> Policies:
    found = Policies(hardware.from_target(target))
    found.set(policy, recipe)
    return found


@pytest.mark.parametrize(("target", "recipe"), [("sm_90", "tensorwise"), ("sm_100", "mxfp8")])
def test_the_default_is_the_targets(target: str, recipe: str) -> None:
    found = policies(target=target)
    assert found.asked == Policy(extends="default")
    assert found.current == general_policy(recipe)


def test_a_recipe_takes_the_place_of_the_default_alone() -> None:
    rules = [Rule("head", None)]
    found = policies(Policy(rules, default="tensorwise", min_speedup=2.0), "rowwise").current
    assert (list(found.rules), found.default, found.min_speedup) == (rules, "rowwise", 2.0)
    assert policies(None, "rowwise").current.rules == general_policy("rowwise").rules


@pytest.mark.parametrize("wrong", [{"recipe": "nosuch"}, {"policy": "nosuch.toml"}, {"policy": {"rule": []}}])
def test_what_is_no_policy(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        policies(**wrong)


def test_families_add_their_rules_unless_the_user_chose() -> None:
    found, chosen = policies(), policies(Policy())
    plain, identity = found.of(())
    assert plain is found.current
    of_family, other = found.of(("llama",))
    assert (identity != other) == (of_family != plain)
    assert found.of(("llama",))[0] is of_family
    assert chosen.of(("llama",)) == chosen.of(())
    assert chosen.of(())[0] is chosen.current


@pytest.mark.parametrize(
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
def test_what_may_rewrite(policy: Policy, regions: list[Any], may: bool) -> None:
    assert policies(policy).now.may_rewrite(regions) == may


def test_lines_tell_policies_apart() -> None:
    lines = policies(Policy([Rule("up", None)], default="rowwise", min_speedup=1.5)).lines()
    assert lines == [f"rule 0 {Rule('up', None)!r}", "default 'rowwise'", "min_speedup 1.5"]


@pytest.mark.parametrize(
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
