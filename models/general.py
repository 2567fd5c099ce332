"""The policy for a model that no family file names, and the choice of a family."""

from __future__ import annotations

from typing import Final

from torch import nn

from fp8graph.policy import Policy, Rule
from fp8graph.recipes import RecipeLike

# Heads: their output is the loss's input, errors there are not averaged out by later layers, and their N (the
# vocabulary) makes their gradients the widest in range. Every published FP8 recipe keeps them.
HEADS: Final = (
    "lm_head", "embed_out", "score", "classifier", "qa_outputs", "cls", "output_projection", "proj_out",
)  # fmt: skip
# Routers choose experts by comparing logits: a small error is another expert. A bare "gate" is not one: it is
# the gate projection of many gated MLPs.
ROUTERS: Final = ("router", "mlp.gate", "moe.gate", "block_sparse_moe.gate", "shared_expert_gate")


def general_policy(recipe: RecipeLike = "tensorwise") -> Policy:
    """FP8 for every linear except heads and MoE routers, found by their usual names."""
    names = [pattern for name in (*HEADS, *ROUTERS) for pattern in (name, f"*.{name}")]
    # Heads of several layers: cls.predictions.decoder, lm_head.dense, classifier.out_proj.
    names += [f"{name}.*" for name in HEADS]
    return Policy([Rule(name, None, optional=True) for name in names], default=recipe)


def policy_for(model: nn.Module) -> Policy:
    """The default policy of ``model``'s family; the general policy for a model that no family names."""
    del model  # llama, the only family so far, is served by the general policy
    return general_policy()
