"""The policy for a model that no family file names, and the choice of a family."""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable, Mapping
from typing import Any, Final

from torch import nn

from fp8graph.models.families import FAMILIES
from fp8graph.recipes import RecipeLike
from fp8graph.recipes.policy import Policy
from fp8graph.recipes.rules import Rule

# Why: HEAD and ROUTER in family.py.
HEADS: Final = (
    "lm_head", "embed_out", "score", "classifier", "qa_outputs", "cls", "output_projection",
)  # fmt: skip
# A bare "gate" is not a router: many gated MLPs call their gate projection so.
ROUTERS: Final = ("router", "mlp.gate", "moe.gate", "block_sparse_moe.gate", "shared_expert_gate")
# Adapters (PEFT's names): trained, with ranks so low that a GEMM is mostly overhead; fine-tuning keeps only them.
ADAPTERS: Final = ("lora_A", "lora_B", "lora_embedding_A", "lora_embedding_B")
# What models of other libraries keep besides, by globs on the models' full class names. The patterns match whole names:
# a block's proj_out stays in FP8, in a model and alone. Diffusers' are embedders and what follows the blocks.
LIBRARIES: Final[Mapping[str, tuple[str, ...]]] = {
    "diffusers.models.*Model": ("*embed*", "norm_out.*", "proj_out*"),
    "timm.models.*": ("head", "head.fc", "fc"),
    "torchvision.models.*": ("heads.head", "head", "fc"),
}
_ELSEWHERE: Final = {family.model: name for name, family in FAMILIES.items() if family.model}
_WRAPPED: Final = "base_model.model."  # PEFT puts this before every name


def general_policy(recipe: RecipeLike = "tensorwise") -> Policy:
    """FP8 for every linear except heads, MoE routers and low-rank adapters.

    Heads are found by what the graph does with them (``passes/match.py``), and behind that, as the others, by their
    usual names.
    """
    names = [pattern for name in (*HEADS, *ROUTERS) for pattern in (name, f"*.{name}")]
    # Heads of several layers: cls.predictions.decoder, lm_head.dense, classifier.out_proj.
    names += [f"{name}.*" for name in HEADS]
    names += [pattern for name in ADAPTERS for pattern in (f"*.{name}", f"*.{name}.*")]
    names += [f"{_WRAPPED}{name}.*" for name in HEADS]
    names += [f"*.{name}.base_layer" for name in ROUTERS]  # with an adapter beside it
    return Policy([Rule(name, None, optional=True) for name in names], default=recipe, keep_heads=True)


def policy_of(families: Iterable[str], recipe: RecipeLike = "tensorwise") -> Policy:
    """The general policy, after the rules of the named families. Unknown names add no rules."""
    kept = dict.fromkeys(
        pattern
        for name in families
        for pattern in (FAMILIES[name].keep if name in FAMILIES else LIBRARIES.get(name, ()))
    )
    general = general_policy(recipe)
    rules = [Rule(f"{prefix}{pattern}", None, optional=True) for pattern in kept for prefix in ("", _WRAPPED)]
    return Policy(
        [*rules, *(rule for rule in general.rules if rule.pattern not in kept)], default=recipe, keep_heads=True
    )


def extended(policy: Policy, families: Iterable[str], recipe: RecipeLike = "tensorwise") -> Policy:
    """``policy`` as it decides for models of ``families``: with ``extends="default"``, :func:`policy_of` behind it."""
    return policy if policy.extends is None else policy.over(policy_of(families, recipe))


def policy_for(model: nn.Module, recipe: RecipeLike = "tensorwise") -> Policy:
    """The default policy of ``model``: that of the families that its modules' classes come from."""
    return policy_of(families_of(type(module) for module in model.modules()), recipe)


def families_of(classes: Iterable[Any]) -> list[str]:
    """The families of classes (or of their full names), each once; they may be unknown ones."""
    found: dict[str, None] = {}
    for owner in dict.fromkeys(classes):
        name = owner if isinstance(owner, str) else f"{owner.__module__}.{owner.__qualname__}"
        parts = name.split(".")
        if parts[:2] == ["transformers", "models"] and len(parts) > 2:
            found[parts[2]] = None
        elif name in _ELSEWHERE:
            found[_ELSEWHERE[name]] = None
        found |= dict.fromkeys(library for library in LIBRARIES if fnmatch.fnmatchcase(name, library))
    return list(found)
