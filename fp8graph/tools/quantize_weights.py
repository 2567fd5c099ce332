"""Give a model in high precision the FP8 weights of a checkpoint, for serving: its own weights are dropped."""

from __future__ import annotations

import inspect
import logging
from collections import Counter
from typing import Final, TypeVar

import torch
from torch import nn

from fp8graph.compat.wrappers import name_in_original, original_module, submodule
from fp8graph.errors import ConfigError, expect
from fp8graph.libraries.stored_linear import StoredLinear, StoredWeight
from fp8graph.models import extended
from fp8graph.models.general import families_of
from fp8graph.numerics import api
from fp8graph.recipes import Recipe, RecipeLike
from fp8graph.recipes.policy import Policy
from fp8graph.runtime.policies import PolicyLike

_log = logging.getLogger("fp8graph")
_Model = TypeVar("_Model", bound=nn.Module)
_STORED: Final = ("tensor", "row", "block", "block_e8m0", "mxfp8")  # kinds of scaling whose inputs need a recipe alone


def quantize_weights(model: _Model, *, policy: PolicyLike | None = None, recipe: RecipeLike = "blockwise") -> _Model:
    """Replace the weights of ``model``'s linears by FP8 ones, in place and for serving: those in bf16 are dropped.

    Each linear that the policy quantizes becomes a ``StoredLinear``, as if :func:`load_checkpoint` had loaded what
    ``fp8graph export`` writes: half of the memory of its weight stays, and nothing is quantized when it is called.
    One weight is quantized at a time. Inputs are scaled by ``amax / 448``, as engines do. The model is put into
    evaluation mode; compile it afterwards, or again.

    It cannot be trained any more: a call with gradients in training mode (``model.train()``) raises ``ConfigError``, as
    updates would have nowhere to go. To train, keep a model in high precision, whose weights each forward quantizes.

    Args:
        model: in high precision, with weights on any one device, compiled or not.
        policy, recipe: see :class:`fp8graph.Backend`. The recipe of fprop decides; "tensorwise", "rowwise",
            "blockwise" and "mxfp8" have no state.

    Returns:
        ``model``. Linears that stay in high precision although the policy has a recipe for them are logged with the
        reason: several modules have their weight, a forward of their own, a tensor subclass.

    Raises:
        ConfigError: a recipe cannot be stored without more than the weight (delayed scales, NVFP4's inputs), or no
            linear can be quantized. ``model`` is unchanged.
    """
    expect("quantize_weights", "model", model, nn.Module, "a model, an nn.Module")
    whole = original_module(model)
    given = Policy(extends="default") if policy is None else Policy.coerce(policy)
    resolved = extended(given, families_of(type(module) for module in whole.modules()), recipe)
    every = whole.named_parameters(remove_duplicate=False)
    owners = Counter(id(parameter) for _, parameter in every)
    recipes: dict[str, Recipe] = {}
    linears: dict[str, nn.Linear] = {}
    for own_name, own in whole.named_modules():
        name, module = name_in_original(own_name), original_module(own)
        if isinstance(module, nn.Linear) and not isinstance(module, StoredLinear):
            one = resolved.resolve(name, "linear", _head(whole, module)).recipes["fprop"]
            if one is None:
                continue
            if (scaling := one.quantizer("weight").scaling) not in _STORED:
                raise ConfigError(
                    f"quantize_weights: {name} would have {one.name}, and its {scaling} scales need a run of the "
                    "model: take tensorwise, rowwise, blockwise or mxfp8, or train it and use fp8graph.export."
                )
            if not name:
                raise ConfigError(
                    "quantize_weights: the model is a linear itself, and the weights of a model are replaced in place: "
                    "put it into an nn.Sequential."
                )
            if (reason := _why_not(module, submodule(whole, name.rpartition(".")[0]), name, owners)) is None:
                recipes[name], linears[name] = one, module
            else:
                _log.warning("%s stays in high precision: %s", name, reason)
    if not recipes:
        raise ConfigError(
            f"quantize_weights: no linear of {type(whole).__name__} is quantized by the policy, or can be (see the "
            "warnings). Name some by a rule, as in Policy([Rule('*.mlp.*', 'blockwise')])."
        )
    for name, one in recipes.items():
        owner, _, leaf = name.rpartition(".")
        setattr(submodule(whole, owner), leaf, _stored(name, linears.pop(name), one))
    return model.eval()


def _head(model: nn.Module, module: nn.Module) -> str:
    """Return the reason why ``module`` is an output head; "" if it is none."""
    output = getattr(model, "get_output_embeddings", lambda: None)()
    return "the model's output embedding" if output is module else ""


def _why_not(module: nn.Linear, parent: nn.Module, name: str, owners: Counter[int]) -> str | None:
    """Return the reason why no ``StoredLinear`` can take the place of ``module``; None if one can."""
    weight, kind = module.weight, type(module)
    if kind.forward is not nn.Linear.forward or "forward" in vars(module):
        return f"{kind.__name__} multiplies in a way of its own"
    if type(weight) is not nn.Parameter or weight.is_meta:
        return f"its weight is a {'tensor without memory' if weight.is_meta else type(weight).__name__}"
    if weight.dtype not in (torch.bfloat16, torch.float16, torch.float32):
        return f"its weight is {weight.dtype}"
    if not weight.numel():
        return "its weight is empty"
    if _reads_weight(type(parent), name.rpartition(".")[2]):
        return f"{type(parent).__name__}.forward reads its weight, which would be FP8"
    if owners[id(weight)] > 1:
        return "another module has the same weight"
    if module._forward_hooks or module._forward_pre_hooks:
        return "it has hooks, which another module would not call"
    return None


def _reads_weight(kind: type[nn.Module], leaf: str) -> bool:
    """Return whether the forward of a class reads the weight of a module in it, as T5's does for its dtype."""
    try:
        return f"self.{leaf}.weight" in inspect.getsource(kind.forward)
    except (OSError, TypeError):  # no source
        return False


@torch.no_grad()
def _stored(name: str, module: nn.Linear, recipe: Recipe) -> StoredLinear:
    made = api.quantize(module.weight.detach(), recipe, "weight", "rowwise")
    quantizer = made.quantizer
    block = [*quantizer.block] if any(quantizer.block) else []
    stored = StoredWeight(data=made.data, scale_inv=made.scale_inv, scaling=quantizer.scaling, block=block)
    linear = StoredLinear(stored, module.bias)
    linear.served_as = name
    return linear
