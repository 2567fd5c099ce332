"""Policies with exactly the layers that an FP8 checkpoint quantizes, or that the config of an engine would.

A folder lists its layers: the headers of its files are read, and each quantized weight names the module that multiplies
it. Where config.json describes a model of transformers, that model says which module that is (experts are stored one by
one, and renamed); elsewhere the names are taken as they are. A config alone says it with names and expressions, which
become rules in the same order. A form that no recipe computes is refused, with the name of its layer.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final, cast

import torch

from fp8graph.analysis.stored import recipe_of_kind
from fp8graph.checkpoints import WHOLE, Checkpoint, LayerFormat
from fp8graph.checkpoints.checkpoint import parsed, quantization_of
from fp8graph.checkpoints.hugging_face_fp8 import FUSED, HuggingFaceFP8
from fp8graph.checkpoints.layer_format import EMBEDDING, EVERY, Quantization
from fp8graph.checkpoints.shards import read_json
from fp8graph.errors import CheckpointError, ConfigError, PolicyError, expect
from fp8graph.models.general import HEADS, ROUTERS
from fp8graph.recipes import Recipe, RecipeLike, resolve_recipe
from fp8graph.recipes.expressions import cost
from fp8graph.recipes.policy import Policy
from fp8graph.recipes.recipe import name_of
from fp8graph.recipes.rules import DEFAULT_OPS, Rule, check_costs
from fp8graph.report.tables import any_layer
from fp8graph.tools.forms import saved_layers
from fp8graph.tools.inspect_checkpoint import model_of_checkpoint

_log = logging.getLogger("fp8graph")
_EXPERT: Final = re.compile(rf"(.+\.experts)\.(?:\d+\..+|{'|'.join(FUSED)})")  # of experts that are one module
_Given = Mapping[str, RecipeLike]  # by the name of a form


def policy_of(source: object, recipes: _Given) -> Policy:
    """See :meth:`fp8graph.Policy.from_checkpoint`."""
    wanted = "an FP8 checkpoint: its folder, its config.json, or a config"
    expect("Policy.from_checkpoint", "recipes", recipes, Mapping, "recipes by the names of forms, a dict")
    for recipe in recipes.values():
        resolve_recipe(recipe)
    if isinstance(source, (str, os.PathLike)):
        path = Path(cast(str, source))
        if path.is_dir() and any(path.glob("*.safetensors*")):
            return _Layers(Checkpoint(path), recipes).policy()
        where = path / "config.json" if path.is_dir() else path
        name = where.parent.resolve().name if where.name in ("config.json", "hf_quant_config.json") else where.name
        return _of_config(quantization_of(path) if path.is_dir() else parsed(read_json(path), str(path)), name, recipes)
    config: Any = cast(Any, source).to_dict() if hasattr(source, "to_dict") else source
    expect("Policy.from_checkpoint", "folder_or_config", config, Mapping, wanted)
    inner = config.get("quantization_config")
    if hasattr(inner, "to_dict"):
        config = {**config, "quantization_config": inner.to_dict()}
    return _of_config(parsed(config, "config"), str(config.get("_name_or_path") or "the config"), recipes)


class _Layers:
    """The layers of a folder, by the modules that multiply them."""

    def __init__(self, checkpoint: Checkpoint, recipes: _Given) -> None:
        self._checkpoint, self._recipes = checkpoint, recipes
        self._name = checkpoint.folder.resolve().name
        stored = checkpoint.layers | dict(self._unlisted())
        self._stored = {layer: one for layer, one in stored.items() if one.scheme != EMBEDDING[0]}  # no GEMM reads it
        if not self._stored:
            raise CheckpointError(f"{checkpoint.folder}: none of its layers is quantized.")
        self._say_listed()

    def policy(self) -> Policy:
        """Return one rule for the layers that differ in numbers alone and have one form."""
        rules: dict[tuple[str, LayerFormat], list[str]] = {}
        for module, op, stored in self._modules():
            rules.setdefault((op, stored), []).append(module)
        made: list[Rule] = []
        for (op, stored), modules in rules.items():
            recipe = _recipe_of(stored, f"{self._checkpoint.folder}: layer {modules[0]!r}", self._recipes)
            why = f"{self._name} stores it as {stored.scheme}"
            made += [Rule(re.compile(text), _named(recipe), op=op, reason=why) for text in _expressions(modules)]
        why = f"{self._name} has it in high precision"
        made += [Rule("*", None, op=op, optional=True, reason=why) for op in DEFAULT_OPS]
        return Policy(made, default=None, min_speedup=0)

    def _modules(self) -> Iterator[tuple[str, str, LayerFormat]]:
        """Yield each module with quantized weights, the op of a rule for it, and the form of its weights.

        Raises:
            CheckpointError: a module has weights of several forms.
        """
        owners = self._owners()
        forms: dict[tuple[str, str], dict[LayerFormat | None, str]] = {}
        for layer, owner in owners.items():
            form = _as_one(self._stored[layer]) if layer in self._stored else None
            forms.setdefault(owner, {}).setdefault(form, layer)
        for (module, op), by_form in forms.items():
            if len(by_form) > 1:
                texts = (f"{layer!r} {'is not' if one is None else one.scheme}" for one, layer in by_form.items())
                raise CheckpointError(
                    f"{self._checkpoint.folder}: the layers of {module!r} are quantized in several ways "
                    f"({', '.join(texts)}), and a rule gives all of them one recipe."
                )
            if (form := next(iter(by_form))) is not None:
                yield module, op, form

    def _owners(self) -> dict[str, tuple[str, str]]:
        """By layer of the checkpoint: the module that multiplies its weight, and the op of a rule for that."""
        owners = {layer: _owner(layer) for layer in self._stored}
        try:
            model = model_of_checkpoint(self._checkpoint)
            saved = saved_layers(model)
        except ConfigError as error:
            _log.info("%s: names of layers are taken from its files: %s", self._checkpoint.folder, error)
            return owners
        fused = {name for name, parameter in model.named_parameters() if parameter.ndim == 3}
        for parameter, layers in saved.items():
            if not self._stored.keys().isdisjoint(layers):
                owner = parameter.rpartition(".")[0], "*" if parameter in fused else "linear"
                owners |= dict.fromkeys(layers, owner)
        return owners

    def _unlisted(self) -> Iterator[tuple[str, LayerFormat]]:
        """Yield the layers that the config leaves in high precision, and the files have in FP8: stored as others are.

        Raises:
            CheckpointError: no other layer is stored so.
        """
        tensors = self._checkpoint.shards.tensors
        for layer, weight in self._checkpoint.unlisted.items():
            where = f"{self._checkpoint.folder}: layer {layer!r} is {tensors[weight].stored_as} in its files, and the"
            others = dict.fromkeys(self._checkpoint.layers.values())
            fits = (o for o in others if o.names(layer)["weight"] == weight and not any(o.problems(layer, tensors)))
            if (stored := next(fits, None)) is None:
                raise CheckpointError(f"{where} config leaves it in high precision: its form is not known.")
            _log.warning("%s config leaves it in high precision: the files decide.", where)
            yield layer, stored

    def _say_listed(self) -> None:
        """Log layers that the config quantizes, and the files have in high precision."""
        tensors = self._checkpoint.shards.tensors
        leaves = {_leaf(layer) for layer in self._stored}
        kept = [
            layer
            for name in self._checkpoint.others
            if name.endswith(".weight") and len(tensors[name].shape) == 2
            if _leaf(layer := name.removesuffix(".weight")) in leaves and layer not in self._stored
            if self._checkpoint.quantization.layer_formats(layer)
        ]
        if kept:
            more = f" and {len(kept) - 1} more" if kept[1:] else ""
            _log.warning(
                "%s: layer %r%s is %s in its files, and the config quantizes it: the files decide.",
                *(self._checkpoint.folder, kept[0], more, tensors[f"{kept[0]}.weight"].stored_as),
            )


def _leaf(layer: str) -> str:
    """Return the last part of a name; * for a number, which differs from layer to layer."""
    return any_layer(f"{layer}.").removesuffix(".").rpartition(".")[2]


def _owner(layer: str) -> tuple[str, str]:
    """Return the module of a layer, by the names that transformers gives to experts, and the op of a rule for it."""
    expert = _EXPERT.fullmatch(layer)
    return (layer, "linear") if expert is None else (expert[1], "*")


def _as_one(stored: LayerFormat) -> LayerFormat:
    """Return the form without its names and places, which do not change what is computed."""
    return LayerFormat(
        scheme=stored.scheme,
        suffixes=stored.suffixes.__class__(),
        block=stored.block,
        scale_dtypes=stored.scale_dtypes,
        packed=stored.packed,
        activation=stored.activation,
    )


def _expressions(names: Iterable[str]) -> Iterator[str]:
    """Expressions that match these names and no other: one for all that differ in numbers alone, where that can be."""
    kinds: dict[tuple[str, ...], dict[tuple[str, ...], None]] = {}
    for name in names:
        parts = re.split(r"(?<![^.])(\d+)(?![^.])", name)  # text, number, text, ...
        kinds.setdefault((*parts[::2],), {})[(*parts[1::2],)] = None
    for texts, numbers in kinds.items():
        for sets in _products(sorted(numbers, key=lambda row: [*map(int, row)])):
            choices = [one[0] if len(one) == 1 else f"(?:{'|'.join(one)})" for one in sets]
            yield "".join(re.escape(text) + choice for text, choice in zip(texts, [*choices, ""], strict=True))


def _products(rows: list[tuple[str, ...]]) -> Iterator[tuple[list[str], ...]]:
    """Lists of choices for each place whose products are these rows."""
    if not rows[0]:
        yield ()
        return
    by_first: dict[str, list[tuple[str, ...]]] = {}
    for first, *others in rows:
        by_first.setdefault(first, []).append((*others,))
    by_rest: dict[frozenset[tuple[str, ...]], list[str]] = {}
    for first, others in by_first.items():
        by_rest.setdefault(frozenset(others), []).append(first)
    for firsts in by_rest.values():
        for others in _products(by_first[firsts[0]]):
            yield firsts, *others


def _of_config(quantization: Quantization, name: str, recipes: _Given) -> Policy:
    """Return the rules of a config, which names no layer of a model."""
    rules: list[Rule] = []
    default: Recipe | None = None
    for expression, stored in quantization.selections():
        if stored is not None and stored.scheme == EMBEDDING[0]:
            continue
        recipe = None if stored is None else _recipe_of(stored, name, recipes)
        if expression == EVERY and stored is not None:
            default = recipe
            break
        _check(expression, name)
        why = f"{name} leaves it in high precision" if stored is None else f"{name} asks for {stored.scheme}"
        of_experts = "experts" in expression
        for op in ("*",) if stored is None else DEFAULT_OPS:
            optional = stored is None or of_experts == (op == "linear")
            rules.append(Rule(re.compile(expression), _named(recipe), op=op, optional=optional, reason=why))
    # transformers without a list keeps the output head, too
    heads = isinstance(quantization, HuggingFaceFP8) and not quantization.ignore
    if default is not None:
        whys = dict.fromkeys(ROUTERS, "a router is no linear in transformers' and engines' models")
        whys |= dict.fromkeys(HEADS if heads else (), f"{name} names no layer to leave out: its head is")
        for kept, why in whys.items():
            rules += [Rule(pattern, None, optional=True, reason=why) for pattern in (kept, f"*.{kept}")]
    try:
        check_costs(rules)
        return Policy(rules, default=_named(default), min_speedup=0, keep_heads=heads)
    except PolicyError as error:
        raise CheckpointError(f"{name}: {error}") from None


def _check(expression: str, name: str) -> None:
    """
    Raises:
        CheckpointError: the time to match a name with an expression is not bounded.
    """
    try:
        cost(re.compile(expression))
    except (re.error, OverflowError, RecursionError, ValueError) as error:
        raise CheckpointError(
            f"{name}: the expression {expression!r:.100} {error}: no rule is made of it. "
            "Give the folder with its files, which list the layers."
        ) from None


def _named(recipe: Recipe | None) -> RecipeLike:
    """Return a recipe by its name, if it has one: policies are shorter so."""
    return recipe if recipe is None else name_of(recipe) or recipe


def _recipe_of(stored: LayerFormat, where: str, recipes: _Given) -> Recipe | None:
    """Return the recipe that computes what engines compute with weights that are ``stored`` so.

    Raises:
        CheckpointError: there is none, and none is given.
    """
    if stored.scheme in recipes:
        return resolve_recipe(recipes[stored.scheme])
    kind, reason = _kind_of(stored)
    if reason:
        raise CheckpointError(
            f"{where}: {stored.scheme} {reason}. To train it with a recipe near it, give "
            f"Policy.from_checkpoint(..., recipes={{{stored.scheme!r}: {kind!r}}}), or another recipe."
        )
    return recipe_of_kind(kind, stored.block)


def _kind_of(stored: LayerFormat) -> tuple[str, str]:
    """Get the kind of scaling that is computed as ``stored`` is, and ""; or a recipe near it, and why there is none."""
    activation, (rows, columns) = stored.activation, stored.block
    e8m0 = torch.uint8 in stored.scale_dtypes
    one, row = stored.block == (WHOLE, WHOLE), stored.block == (1, WHOLE)
    near = "nvfp4" if stored.packed else "tensorwise" if one else "rowwise" if row else "mxfp8" if e8m0 else "blockwise"
    if activation is None:
        return near, "quantizes weights alone, and a recipe quantizes inputs, too"
    if activation.scale != "dynamic":
        near = "delayed" if near == "tensorwise" else near
        return near, "has static scales of inputs, which no recipe takes from a checkpoint"
    if stored.packed:
        return near, f"has 4-bit numbers in tiles of {rows}x{columns}, which no recipe makes"
    if activation.block != (stored.block if one or row else (1, columns)):
        scales = _scales(stored.block), _scales(activation.block)
        return near, f"has {scales[0]} for weights and {scales[1]} for inputs, which no recipe has together"
    if one or row:
        return "tensor" if one else "row", ""
    return ("mxfp8" if stored.block == (1, 32) else "block_e8m0") if e8m0 else "block", ""


def _scales(block: tuple[int, int]) -> str:
    texts = {(WHOLE, WHOLE): "one scale", (1, WHOLE): "a scale per row"}
    return texts.get(block, f"{block[0]}x{block[1]} scales")
