"""Estimate from Dynamo's graph, before anything is traced, how many inputs it will take beside Dynamo's own.

It is a guess. An input that no pass takes costs a little at each call; with too few, the graph is traced once more.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any, Final, cast

import torch
from torch import fx

from fp8graph import hardware
from fp8graph.analysis.siblings import fits_in_group
from fp8graph.errors import Fp8GraphError
from fp8graph.ir.compilation import Known
from fp8graph.ir.naming import Parameter, names_of, place_of
from fp8graph.ir.sites import Site
from fp8graph.numerics import quantization
from fp8graph.passes.assign import resolve
from fp8graph.recipes import LAYOUTS, OPERANDS, DelayedScaling, Recipe
from fp8graph.recipes.autocast import REGION_KEY
from fp8graph.recipes.rules import Op

# The functions and methods that become a matmul, by name, and the op of the site that each becomes
_MATMULS: Final[Mapping[str, Op]] = {
    **dict.fromkeys(("linear", "matmul", "mm", "bmm", "addmm", "baddbmm", "einsum", "bilinear"), "linear"),
    **dict.fromkeys(("_grouped_mm", "grouped_mm", "grouped_mm_fallback"), "grouped_mm"),
}


def spare_inputs(module: fx.GraphModule, known: Known, *, training: bool) -> int:
    """The number of tensors (copies and their scales, pages, gradients, statistics) that ``module`` may take."""
    if known.subgraph:
        return 0
    parameters, kept = _parameters(module, known), known.settings.keeps_weights(training=training)
    found: list[tuple[fx.Node, Site]] = []
    weight_of: dict[fx.Node, fx.Node] = {}
    for node, weight, op in _matmuls(module.graph, parameters):
        custom = cast("dict[str, Any] | None", node.meta.get("custom")) or {}
        place = place_of(node, weight, parameters)
        weight_of[node] = weight
        found.append((node, Site(place=place, op=op, region=custom.get(REGION_KEY))))
    names = names_of([site.place for _, site in found], parameters.values())
    weights: dict[Any, int] = {}  # the weights that become one copy -> the number of its tensors
    pages: set[Any] = set()
    gradients: set[Any] = set()
    for (node, site), (fqn, index) in zip(found, names, strict=True):
        site.fqn, site.index = fqn, index
        with contextlib.suppress(Fp8GraphError):  # the pass `assign` raises this error
            recipes = resolve(site, known).recipes
            used = [recipes["fprop"], recipes["dgrad"] if training else None]
            device = _device(weight_of[node], known)
            for recipe in {recipe for recipe in used if recipe is not None}:
                own = [recipe.quantizer(operand) for operand in ("weight", "grad_output")]
                native = device.multiplies(own[0].scaling)
                fits = fits_in_group(_rows(weight_of[node]), [quantizer.block for quantizer in own])
                can_join = known.settings.fuse_linears and native and fits
                joined = (fqn.rpartition(".")[0], node.args[0], _has_bias(node)) if can_join else node
                if kept and site.parameter is not None:
                    weights[joined, recipe] = _outputs(recipe, layouts=2 if used == [recipe, recipe] else 1)
            if known.settings.accumulate_wgrad and training and recipes["wgrad"] is not None:
                gradients.add(site.parameter)
            for recipe in recipes.values():
                if isinstance(recipe, DelayedScaling):
                    pages |= {
                        (recipe, device.quantizer(recipe, operand).fp8_max, operand == "grad_output")
                        for operand in OPERANDS
                        if (training or operand == "input")
                        and (operand != "weight" or not kept or site.parameter is None)
                    }
    statistics = 0 if known.observed is None else 2 if training else 1
    return statistics + sum(weights.values()) + len(pages) + len(gradients - {None})


def _outputs(recipe: Recipe, *, layouts: int) -> int:
    """The number of tensors that the FP8 copy of a weight has."""
    names = quantization.output_names(recipe.quantizer("weight").scaling, LAYOUTS[:layouts])
    return sum(name != "amax" for name in names)


def _parameters(module: fx.GraphModule, known: Known) -> dict[fx.Node, Parameter]:
    placeholders = module.graph.find_nodes(op="placeholder")
    return {placeholders[index]: parameter for index, parameter in known.parameters.items()}


def _matmuls(graph: fx.Graph, parameters: Mapping[fx.Node, Parameter]) -> Iterator[tuple[fx.Node, fx.Node, Op]]:
    """``(node, weight, op)`` for each node that multiplies by a matrix computed from one parameter."""
    of_parameter: dict[fx.Node, fx.Node] = {node: node for node in parameters}
    for node in graph.nodes:
        name = str(getattr(node.target, "__name__", node.target)).rpartition(".")[2]
        if node.op in ("call_function", "call_method") and name in _MATMULS:
            weights = [source for source in node.all_input_nodes if source in of_parameter and _is_matrix(source)]
            if len(weights) == 1:
                yield node, of_parameter[weights[0]], _MATMULS[name]
        elif len(node.all_input_nodes) == 1 and node.all_input_nodes[0] in of_parameter:
            of_parameter[node] = of_parameter[node.all_input_nodes[0]]


def _device(weight: fx.Node, known: Known) -> hardware.Hardware:
    example = weight.meta.get("example_value")
    device = example.device if isinstance(example, torch.Tensor) else torch.device("cpu")
    return known.settings.hardware or hardware.of_device(device)


def _rows(weight: fx.Node) -> int:
    """N of a weight [N, K]."""
    example = weight.meta.get("example_value")
    return int(example.shape[0]) if isinstance(example, torch.Tensor) and example.ndim else 0


def _has_bias(linear: fx.Node) -> bool:
    return (linear.args[2] if len(linear.args) > 2 else linear.kwargs.get("bias")) is not None


def _is_matrix(node: fx.Node) -> bool:
    example = node.meta.get("example_value")
    return not isinstance(example, torch.Tensor) or example.ndim > 1
