"""Estimate from Dynamo's graph, before anything is traced, how many inputs it will take beside Dynamo's own.

It is a guess. An input that no pass takes costs a little at each call; with too few, the graph is traced once more.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
from collections.abc import Iterator, Mapping
from typing import Any, Final, cast

import torch
from torch import fx

from fp8graph import hardware
from fp8graph.errors import Fp8GraphError
from fp8graph.ir.compilation import GraphFacts
from fp8graph.ir.naming import Parameter, names_of, place_of
from fp8graph.ir.nodes import size_hint
from fp8graph.ir.sites import Foreseen, Site
from fp8graph.passes import JOINT_PIPELINE
from fp8graph.recipes import GemmName, Recipe
from fp8graph.recipes.autocast import REGION_KEY
from fp8graph.recipes.rules import Op

# The functions and methods that become a matmul, by name, and the op of the site that each becomes
_MATMULS: Final[Mapping[str, Op]] = {
    **dict.fromkeys(("linear", "matmul", "mm", "bmm", "addmm", "baddbmm", "einsum", "bilinear"), "linear"),
    **dict.fromkeys(("_grouped_mm", "grouped_mm", "grouped_mm_fallback"), "grouped_mm"),
}


def spare_inputs(module: fx.GraphModule, facts: GraphFacts, *, training: bool) -> int:
    """Return the number of tensors beside Dynamo's own that ``module`` may take, as each pass estimates for its own."""
    if facts.subgraph:
        return 0
    facts, count = dataclasses.replace(facts, training=training), 0
    foreseen = functools.cache(lambda: _foresee(module, facts))  # most graphs take none, and no pass looks
    for entry in JOINT_PIPELINE:
        with contextlib.suppress(Fp8GraphError):  # of a recipe's quantizer: the pass asks it again, if it needs it
            count += entry.wants(foreseen, facts)
    return count


def _foresee(module: fx.GraphModule, facts: GraphFacts) -> list[Foreseen]:
    parameters = _parameters(module, facts)
    sites: list[tuple[fx.Node, fx.Node, Site]] = []
    for node, weight, op in _matmuls(module.graph, parameters):
        custom = cast("dict[str, Any] | None", node.meta.get("custom")) or {}
        place = place_of(node, weight, parameters)
        sites.append((node, weight, Site(place=place, op=op, region=custom.get(REGION_KEY))))
    names = names_of([site.place for *_, site in sites], parameters.values())
    foreseen: list[Foreseen] = []
    for (node, weight, site), (site.fqn, site.index) in zip(sites, names, strict=True):
        with contextlib.suppress(Fp8GraphError):  # the pass `assign` raises this error
            resolution, stored = facts.decisions.of(site), _stored_as(node)
            recipes: dict[GemmName, Recipe | None] = {
                gemm: recipe if recipe is not None and not stored and recipe.covers(gemm) else None
                for gemm, recipe in resolution.recipes.items()
            }
            siblings = site.fqn.rpartition(".")[0], node.all_input_nodes[0], _has_bias(node)
            device = facts.settings.hardware or hardware.of_device(_device(weight))
            size = _rows(weight)
            foreseen.append(
                Foreseen(
                    site=site,
                    recipes=recipes,
                    hardware=device,
                    sibling_key=siblings,
                    rows=size,
                    tokens=_tokens(node),
                    stored=stored,
                )
            )
    return foreseen


def _stored_as(matmul: fx.Node) -> str:
    """Return the scaling of the weight that arrives quantized; "" for any other."""
    stored = next(filter(_is_stored, matmul.all_input_nodes), None)
    return "" if stored is None else str(stored.kwargs.get("scaling", "tensor"))


def _is_stored(node: fx.Node) -> bool:
    return str(node.target).startswith("fp8graph.stored_weight")


def _parameters(module: fx.GraphModule, facts: GraphFacts) -> dict[fx.Node, Parameter]:
    placeholders = module.graph.find_nodes(op="placeholder")
    return {placeholders[index]: parameter for index, parameter in facts.parameters.items()}


def _matmuls(graph: fx.Graph, parameters: Mapping[fx.Node, Parameter]) -> Iterator[tuple[fx.Node, fx.Node, Op]]:
    """``(node, weight, op)`` for each node that multiplies by a matrix computed from one parameter."""
    of_parameter: dict[fx.Node, fx.Node] = {node: node for node in parameters}
    for node in graph.nodes:
        name = str(getattr(node.target, "__name__", node.target)).rpartition(".")[2]
        if node.op in ("call_function", "call_method") and name in _MATMULS:
            weights = [source for source in node.all_input_nodes if source in of_parameter and _is_matrix(source)]
            if len(weights) == 1:
                yield node, of_parameter[weights[0]], _MATMULS[name]
        elif _is_stored(node) and node.args[0] in of_parameter:
            of_parameter[node] = of_parameter[node.args[0]]
        elif len(node.all_input_nodes) == 1 and node.all_input_nodes[0] in of_parameter:
            of_parameter[node] = of_parameter[node.all_input_nodes[0]]


def _device(weight: fx.Node) -> torch.device:
    example = weight.meta.get("example_value")
    return example.device if isinstance(example, torch.Tensor) else torch.device("cpu")


def _tokens(matmul: fx.Node) -> int:
    """M of the input [..., K]."""
    example = matmul.all_input_nodes[0].meta.get("example_value")
    shape = example.shape[:-1] if isinstance(example, torch.Tensor) else ()
    return math.prod(map(size_hint, shape)) if len(shape) else 0


def _rows(weight: fx.Node) -> int:
    """N of a weight [N, K]."""
    example = weight.meta.get("example_value")
    return int(example.shape[0]) if isinstance(example, torch.Tensor) and example.ndim else 0


def _has_bias(linear: fx.Node) -> bool:
    return (linear.args[2] if len(linear.args) > 2 else linear.kwargs.get("bias")) is not None


def _is_matrix(node: fx.Node) -> bool:
    example = node.meta.get("example_value")
    return not isinstance(example, torch.Tensor) or example.ndim > 1
