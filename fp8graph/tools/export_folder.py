"""``fp8graph export``: quantize a checkpoint in high precision, from shards to shards, without building its model.

A tensor is read, quantized as the recipe quantizes a weight, and written: no more than two shards are in memory. Which
layers are linears, and which of them the policy keeps, is asked of the model on the meta device.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fp8graph.backend.multiplied import Multiplied
from fp8graph.backend.policies import PolicyLike
from fp8graph.checkpoints import LayerFormat, QuantizedWeight, Shards, write_checkpoint
from fp8graph.checkpoints.writing import SHARD_BYTES
from fp8graph.errors import CheckpointError, ConfigError
from fp8graph.models import extended
from fp8graph.models.general import families_of
from fp8graph.numerics import api
from fp8graph.recipes import Recipe, RecipeLike
from fp8graph.recipes.policy import Policy
from fp8graph.tools.forms import AUTO, as_stored, chosen, kind_of
from fp8graph.tools.from_config import config_of, model_of
from fp8graph.tools.inspect_checkpoint import progress_bar
from fp8graph.tools.saved_parts import saved_parts


def export_folder(
    source: Path,
    folder: Path,
    *,
    recipe: RecipeLike = "blockwise",
    policy: PolicyLike | None = None,
    format: str = AUTO,  # noqa: A002  (the public name)
    max_shard_bytes: int = SHARD_BYTES,
    overwrite: bool = False,
) -> Path:
    """Write the checkpoint in ``source`` into ``folder``, with its linears quantized.

    Args:
        source: a model of transformers in high precision: config.json and safetensors files.
        folder: must not exist.
        recipe, policy: see :class:`fp8graph.Backend`. Recipes with a static scale of inputs need a model that runs: see
            :func:`fp8graph.export`.
        format: see :func:`fp8graph.export`.
        max_shard_bytes, overwrite: see :func:`fp8graph.checkpoints.write_checkpoint`.

    Raises:
        ConfigError, CheckpointError: ``source`` cannot be read, or no format has a form for its layers.
    """
    shards = Shards(source)
    config, _ = config_of(str(source))
    model = model_of(config)
    asked = Policy(extends="default") if policy is None else Policy.coerce(policy)
    resolved = extended(asked, families_of(type(module) for module in model.modules()), recipe)
    linears = dict(_linears(model, shards))
    recipes = {layer: found for layer, owner in linears.items() if (found := _recipe_of(owner, model, resolved))}
    if not recipes:
        raise ConfigError(f"{source}: the policy quantizes none of its linears.")
    examples = {layer: _quantized(layer, torch.zeros(256, 256), one) for layer, one in recipes.items()}
    kinds = {layer: kind_of(example) for layer, example in examples.items()}
    quantization, forms = chosen(format, kinds, inputs=())

    kept = [name for layer, owner in linears.items() if layer not in recipes for name in (owner, layer)]
    total = sum(shards.info(name).bytes for name in shards)
    with progress_bar(f"writing {folder}") as progress:
        done = 0

        def read(name: str) -> Tensor:
            nonlocal done
            done += shards.info(name).bytes
            progress(done, total)
            return shards.tensor(name)

        def layers() -> Iterator[tuple[str, LayerFormat, QuantizedWeight]]:
            for layer, one in recipes.items():
                stored = forms[kinds[layer]]
                yield layer, stored, as_stored(_quantized(layer, read(f"{layer}.weight"), one), stored, None)

        quantized = {f"{layer}.weight" for layer in recipes}
        return write_checkpoint(
            folder,
            layers=layers(),
            others=((name, read(name)) for name in shards if name not in quantized),
            quantization=quantization,
            ignore=list(dict.fromkeys(kept)),
            copy_from=source,
            max_shard_bytes=max_shard_bytes,
            overwrite=overwrite,
        )


def _linears(model: nn.Module, shards: Shards) -> Iterator[tuple[str, str]]:
    """The linears in ``shards``, in high precision: their names there, and the modules of ``model`` that own them."""
    modules = model.named_modules()
    shapes = {f"{name}.weight": module.weight.shape for name, module in modules if isinstance(module, nn.Linear)}
    shapes |= {name: parameter.shape for name, parameter in model.named_parameters() if parameter.ndim == 3}  # experts
    for parameter, parts in saved_parts(model, shapes).items():
        for part in parts:
            if (weight := f"{part.layer}.weight") in shards:
                if shards.info(weight).dtype not in (torch.bfloat16, torch.float16, torch.float32):
                    raise CheckpointError(f"{shards.info(weight).file}: tensor {weight!r} is quantized already.")
                yield part.layer, parameter.rpartition(".")[0]


def _recipe_of(owner: str, model: Any, policy: Policy) -> Recipe | None:
    """The recipe with which fprop multiplies the weights of the module ``owner``."""
    module = model.get_submodule(owner)
    head = "the model's output embedding" if model.get_output_embeddings() is module else ""
    return policy.resolve(owner, "linear" if isinstance(module, nn.Linear) else "grouped_mm", head).recipes["fprop"]


def _quantized(layer: str, weight: Tensor, recipe: Recipe) -> Multiplied:
    made = api.quantize(weight, recipe, "weight", "rowwise")
    return Multiplied(
        parameter=f"{layer}.weight",
        data=made.data,
        scale_inv=made.scale_inv,
        quantizer=made.quantizer,
        global_scale_inv=made.global_scale_inv,
    )
