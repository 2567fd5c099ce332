"""The difference between the layers that were trained in FP8 and those that an engine quantizes.

An engine that quantizes weights as it loads them decides by a rule of its own. ``ENGINES`` has the rules of verl, vLLM
and SGLang, written again from their sources. A layer that is on one list only is computed in another precision there.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from torch import nn

from fp8graph.backend.entry import backend_of
from fp8graph.compat.wrappers import original_module
from fp8graph.errors import ConfigError, Fp8CoverageError, did_you_mean, expect
from fp8graph.models import extended
from fp8graph.models.general import HEADS, ROUTERS
from fp8graph.recipes.policy import HasConfig, Policy
from fp8graph.recipes.rules import DEFAULT_OPS
from fp8graph.records import GemmRecord
from fp8graph.report import Report
from fp8graph.report.tables import any_layer
from fp8graph.tools.forms import saved_layers

_HEAD: Final = "output head: "  # how the reason of a head begins that the graph shows


def _by_verl(layer: str) -> bool:
    """``FP8QuantizerHelper.should_quantize_param`` of the layer's weight: parts of its name, in lower case."""
    name = f"{layer}.weight".lower()
    if any(part in name for part in ("embed_tokens", "lm_head", "norm", "ln_", "embeddings", "mlp.gate.weight")):
        return False
    return any(
        part in name for part in ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
    ) or (any(part in name for part in ("fc1", "fc2", "mlp")))


def _by_class(layer: str) -> bool:
    """Return every linear and all experts. Heads are no linears there, and routers are built without a quantization
    config.
    """
    return not any(layer == name or layer.endswith(f".{name}") for name in (*HEADS, *ROUTERS))


@dataclass(frozen=True, kw_only=True)
class Engine:
    """The rule by which an engine quantizes a model that it loads in high precision."""

    title: str
    quantizes: Callable[[str], bool]  # by the layer's name


ENGINES: Final[Mapping[str, Engine]] = {
    # verl/utils/fp8_utils.py (commit 14a1b8ef), FP8QuantizerHelper.should_quantize_param
    "verl": Engine(title="verl", quantizes=_by_verl),
    # vllm/model_executor/layers/quantization/online/base.py (commit 5cfa34dd), get_quant_method
    "vllm": Engine(title='vLLM\'s quantization="fp8"', quantizes=_by_class),
    # python/sglang/srt/layers/quantization/fp8.py (commit 00563d36), Fp8Config.get_quant_method
    "sglang": Engine(title='SGLang\'s quantization="fp8"', quantizes=_by_class),
}


@dataclass(frozen=True, kw_only=True)
class LayerComparison:
    """Layers by where they are in FP8: in the forward of the model here, and in an engine or policy there."""

    there: str  #: the engine or policy that the model was compared with
    both: tuple[str, ...]  #: in FP8 here and there
    only_here: tuple[str, ...]  #: in FP8 here, in high precision there
    only_there: tuple[str, ...]  #: in high precision here, in FP8 there
    neither: tuple[str, ...]  #: in high precision here and there
    other_recipe: Mapping[str, tuple[str, str]] = field(default_factory=dict[str, tuple[str, str]])
    #: of ``both``: the layers that have another recipe there, with the recipe here and the one there

    @property
    def same(self) -> bool:
        """Whether the same layers are in FP8, under the same recipes where these are known."""
        return not (self.only_here or self.only_there or self.other_recipe)

    def check(self) -> None:
        """
        Raises:
            Fp8CoverageError: a layer is in FP8 here or there alone, or has another recipe there.
        """
        if not self.same:
            raise Fp8CoverageError(f"{self}\nGive both sides one list: Policy.from_checkpoint, or fp8graph.export.")

    def to_dict(self) -> dict[str, Any]:
        """Plain values, ready for JSON."""
        lists = {name: list(getattr(self, name)) for name in ("both", "only_here", "only_there", "neither")}
        other = {layer: list(recipes) for layer, recipes in self.other_recipe.items()}
        return {"there": self.there, "same": self.same, **lists, "other_recipe": other}

    def __str__(self) -> str:
        """Return one line per kind of layer that differs."""
        counts = f"{len(self.both)} layers in FP8 here and in {self.there}, {len(self.neither)} in neither"
        lines = [f"the same layers: {counts}" if self.same else f"not the same layers: {counts}"]
        for text, layers in (
            (f"in FP8 here, in high precision in {self.there}", self.only_here),
            (f"in high precision here, in FP8 in {self.there}", self.only_there),
        ):
            lines += [f"  {text}: {name}" for name in _kinds(layers)]
        recipes = {name: f"{name}: {here} here, {there} there" for name, (here, there) in self.other_recipe.items()}
        lines += [f"  other recipe: {text}" for text in _kinds(recipes.values())]
        return "\n".join(lines)


def compare_layers(
    model_or_report: nn.Module | Report, with_: str | os.PathLike[str] | Mapping[str, Any] | Policy | HasConfig
) -> LayerComparison:
    """Compare the layers that run in FP8 with those that an engine, a policy or a checkpoint quantizes.

    What an engine quantizes that was trained in high precision, or leaves in high precision that was trained in FP8,
    is another model than the one that was trained. ``print`` shows the difference, ``check()`` raises if there is one.

    Args:
        model_or_report: a compiled model that was called, or a report: ``fp8graph.explain(model, ...)`` runs nothing.
            Engines look at the names under which transformers saves a model's weights; of a report, at those of its
            modules, which may be others for experts.
        with_: "verl", "vllm" or "sglang", for their rules for models that they load in high precision; or a policy, a
            policy file, or an FP8 checkpoint as :meth:`fp8graph.Policy.from_checkpoint` takes it. Recipes are then
            compared, too.

    Raises:
        ConfigError: (a ``ValueError``) the model is not compiled, or ``with_`` cannot be read.
    """
    expect("compare_layers", "model_or_report", model_or_report, (nn.Module, Report), "a compiled model or a report")
    report = model_or_report if isinstance(model_or_report, Report) else backend_of(model_or_report).report
    rows = {row.fqn: row for row in report.gemms if row.gemm == "fprop" and row.op in DEFAULT_OPS}
    here = {row.fqn for row in report.gemms if row.fqn in rows and row.gemm == "fprop" and row.recipe is not None}
    recipes: dict[str, str | None] = {}
    if isinstance(with_, str) and with_ in ENGINES:
        title = ENGINES[with_].title
        names = dict[str, list[str]]()
        if isinstance(model_or_report, nn.Module):
            for parameter, layers in saved_layers(original_module(model_or_report)).items():
                names.setdefault(parameter.rpartition(".")[0], []).extend(layers)
        there = {layer for layer in rows if all(map(ENGINES[with_].quantizes, names.get(layer, [layer])))}
    else:
        title, policy = _policy(with_)
        recipes = {layer: _recipe(policy, row) for layer, row in rows.items()}
        there = {layer for layer, recipe in recipes.items() if recipe is not None}
    groups = {(at, to): tuple(x for x in rows if (x in here, x in there) == (at, to)) for at in (0, 1) for to in (0, 1)}
    other = {layer: (str(rows[layer].recipe), str(recipes[layer])) for layer in groups[1, 1] if layer in recipes}
    return LayerComparison(
        there=title,
        both=groups[1, 1],
        only_here=groups[1, 0],
        only_there=groups[0, 1],
        neither=groups[0, 0],
        other_recipe={layer: two for layer, two in other.items() if two[0] != two[1]},
    )


def _policy(given: Any) -> tuple[str, Policy]:
    """Return the policy that ``given`` stands for, and its name in a text."""
    if isinstance(given, str) and not os.path.exists(given):
        choices = f"{', '.join(ENGINES)}, a policy or a path"
        raise ConfigError(f"compare_layers(with_={given!r}): not one of {choices}.{did_you_mean(given, ENGINES)}")
    policy = Policy.from_checkpoint(given) if hasattr(given, "to_dict") and not isinstance(given, Policy) else given
    title = str(given) if isinstance(given, (str, os.PathLike)) else "the policy"
    return title, extended(Policy.coerce(policy), ())


def _recipe(policy: Policy, row: GemmRecord) -> str | None:
    """Return the name of the recipe of a layer's fprop under ``policy``; None: high precision."""
    head = row.reason.removeprefix(_HEAD) if row.reason.startswith(_HEAD) else ""
    recipe = policy.resolve(row.fqn, row.op, head).recipes["fprop"]
    return None if recipe is None else recipe.name


def _kinds(names: Iterable[str]) -> list[str]:
    """Names, with one entry for layers that differ only in their numbers."""
    return list(dict.fromkeys(any_layer(f"{name}.").removesuffix(".") for name in names))
