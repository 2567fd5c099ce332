"""Return the default policy of a model: what its family keeps in high precision, then what any model keeps."""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from torch import nn

from fp8graph.recipes import RecipeLike
from fp8graph.recipes.policy import Policy
from fp8graph.recipes.rules import Rule

# Why linears stay in high precision.
HEAD: Final = "the output is the loss's input: no later layer averages its errors out"
EMBEDDER: Final = "every block reads its output, and it multiplies next to nothing: one row per image, or few features"


@dataclass(frozen=True, kw_only=True)
class Family:
    """Models with layers that stay in high precision and have no usual name."""

    name: str
    classes: str  #: glob on the full names of modules' classes
    keep: Mapping[str, str]  #: glob on the layers' full names -> why they stay in high precision


FAMILIES: Final[dict[str, Family]] = {
    family.name: family
    for family in (
        Family(name="clip", classes="transformers.models.clip.*", keep={"*_projection": HEAD}),  # outputs are compared
        Family(name="whisper", classes="transformers.models.whisper.*", keep={"proj_out": HEAD}),
        Family(
            name="diffusers_pixart",
            classes="diffusers.models.transformers.pixart_transformer_2d.PixArtTransformer2DModel",
            keep={"adaln_single.linear": EMBEDDER, "caption_projection.*": EMBEDDER},
        ),
        Family(
            name="diffusers_unet",
            classes="diffusers.models.unets.unet_2d_condition.UNet2DConditionModel",
            keep={"*.time_emb_proj": EMBEDDER},
        ),
        # Of models, and not of blocks: a block's proj_out is in FP8, in a model and alone.
        Family(
            name="diffusers",
            classes="diffusers.models.*Model",
            keep={"*embed*": EMBEDDER, "norm_out.*": HEAD, "proj_out*": HEAD},
        ),
        Family(name="timm", classes="timm.models.*", keep={"head": HEAD, "head.fc": HEAD, "fc": HEAD}),
        Family(name="torchvision", classes="torchvision.models.*", keep={"heads.head": HEAD, "head": HEAD, "fc": HEAD}),
    )
}

HEADS: Final = (
    "lm_head", "embed_out", "score", "classifier", "qa_outputs", "cls", "output_projection",
)  # fmt: skip
# Experts are chosen by comparing logits: a small error is another expert. A bare "gate" is not a router: many gated
# MLPs call their gate projection so.
ROUTERS: Final = ("router", "router.gate", "mlp.gate", "moe.gate", "block_sparse_moe.gate", "shared_expert_gate")
# Adapters (PEFT's names): trained, with ranks so low that a GEMM is mostly overhead; fine-tuning keeps only them.
ADAPTERS: Final = ("lora_A", "lora_B", "lora_embedding_A", "lora_embedding_B")
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
    """Return the general policy, after the rules of the named families. Unknown names add no rules."""
    kept = dict.fromkeys(pattern for name in families if name in FAMILIES for pattern in FAMILIES[name].keep)
    general = general_policy(recipe)
    rules = [Rule(f"{prefix}{pattern}", None, optional=True) for pattern in kept for prefix in ("", _WRAPPED)]
    return Policy(
        [*rules, *(rule for rule in general.rules if rule.pattern not in kept)], default=recipe, keep_heads=True
    )


def extended(policy: Policy, families: Iterable[str], recipe: RecipeLike = "tensorwise") -> Policy:
    """``policy`` as it decides for models of ``families``: with ``extends="default"``, :func:`policy_of` behind it."""
    return policy if policy.extends is None else policy.over(policy_of(families, recipe))


def policy_for(model: nn.Module, recipe: RecipeLike = "tensorwise") -> Policy:
    """Return the default policy of ``model``: that of the families that its modules' classes come from."""
    return policy_of(families_of(type(module) for module in model.modules()), recipe)


def families_of(classes: Iterable[Any]) -> list[str]:
    """Return the families of classes (or of their full names), each once."""
    names: dict[str, None] = {}
    for owner in dict.fromkeys(classes):
        name = owner if isinstance(owner, str) else f"{owner.__module__}.{owner.__qualname__}"
        names |= {family.name: None for family in FAMILIES.values() if fnmatch.fnmatchcase(name, family.classes)}
    return list(names)
