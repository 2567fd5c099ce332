"""Scale the channels of a linear's input to one size before it is quantized, and its weight by the inverse.

    y = mm(x, w.t)                      ->      s, r = smoothing(x)                     # powers of two, [K]
                                                y = mm(x * s, (w * r).t)
    dw = mm(dy.t, x)                    ->      dw = mm(dy.t, x * s) * r

Where a recipe asks for it (``smooth_input=True``). In high precision the products would be those of x and w, exactly:
powers of two cancel. But an outlier that appears in one channel no longer decides the scale of the tensor, nor is it
clipped by a scale from earlier steps. It is in the weight instead, which is quantized in each step with its own amax.
dgrad reads the weight as it is.

Refuses, with the reason in the report, what is no linear, experts, weights that arrive quantized, fp16, and sites whose
fprop does not ask for it; wgrad is left alone if its own recipe does not.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from operator import getitem
from typing import Any, Final

import torch
from torch import fx

from fp8graph.analysis.stored import stored_weight
from fp8graph.ir import transforms
from fp8graph.ir.compilation import Compilation
from fp8graph.ir.edit import insert
from fp8graph.ir.nodes import GROUPED, RESCALED_KEY, aten, value, value_key
from fp8graph.ir.sites import Gemm, OperandView, Site

_WHAT: Final = "smooth input"
Scales = tuple[fx.Node, fx.Node]  # x * s, r


def smooths(graph: fx.Graph, compilation: Compilation) -> bool:
    """Whether the recipe of some GEMM asks for it."""
    recipes = (decision.recipe for decision in compilation.decisions.values())
    return any(recipe is not None and recipe.smooths for recipe in recipes)


def smooth(graph: fx.Graph, compilation: Compilation) -> None:
    made: dict[Any, Scales] = {}  # linears that read one tensor share its scales
    for site in compilation.sites:
        if not any(_asks(gemm, compilation) for gemm in site.gemms):
            continue
        if (reason := _obstacle(site, compilation)) is not None:
            compilation.refuse(_WHAT, site, reason)
            continue
        site.gemms = [_rewrite(graph, gemm, made, compilation) for gemm in site.gemms]


def _asks(gemm: Gemm, compilation: Compilation) -> bool:
    recipe = compilation.decisions[gemm.node].recipe
    return recipe is not None and recipe.smooths


def _obstacle(site: Site, compilation: Compilation) -> str | None:
    """The reason why the input of this site is quantized as it is."""
    if any(gemm.node.target in GROUPED for gemm in site.gemms):
        return "experts share one matmul, and each has tokens of its own"
    first = site.gemms[0]
    views = {view.operand: view for view in (first.a, first.b)}
    if first.gemm != "fprop" or site.op != "linear" or any(value(view.tensor).ndim != 2 for view in views.values()):
        return "only the product of an activation and a parameter can be smoothed"
    if not _asks(first, compilation):
        return "fprop has another recipe, which does not ask for it"
    if value(first.node).dtype == torch.float16:
        return "fp16 has no room for scaled channels and gradients"
    if stored_weight(site) is not None:
        return "its weight arrives quantized: it cannot be scaled"
    return None


def _rewrite(graph: fx.Graph, gemm: Gemm, made: dict[Any, Scales], compilation: Compilation) -> Gemm:
    """The GEMM with views of scaled operands; the result of wgrad is scaled back."""
    if gemm.gemm == "dgrad" or not _asks(gemm, compilation):
        return gemm
    source = next(view for view in (gemm.a, gemm.b) if view.operand == "input")
    key = value_key(source.tensor), source.flipped
    emit = functools.partial(insert, graph, like=gemm.node)
    if key not in made:
        with graph.inserting_before(gemm.node):
            made[key] = _scales(source, emit)
    scaled, inverse = made[key]
    changed = {"input": dataclasses.replace(source, tensor=scaled, flipped=False)}
    if gemm.gemm == "fprop":
        weight = next(view for view in (gemm.a, gemm.b) if view.operand == "weight")
        with graph.inserting_before(gemm.node):
            product = _scaled(_rowwise(weight, emit), inverse, emit, name="smoothed_weight")  # [N, K]
        changed["weight"] = dataclasses.replace(weight, tensor=product, flipped=False)
    else:
        _scale_back(graph, gemm, inverse, emit)
    return dataclasses.replace(gemm, a=changed.get(gemm.a.operand, gemm.a), b=changed.get(gemm.b.operand, gemm.b))


def _scales(source: OperandView, emit: Callable[..., fx.Node]) -> Scales:
    x = _rowwise(source, emit)  # [M, K]
    both = emit(transforms.smoothing, (x,), name="smoothing")
    scale, inverse = (
        emit(getitem, (both, i), name=name) for i, name in enumerate(("smooth_scale", "smooth_scale_inv"))
    )
    return _scaled(x, scale, emit, name="smoothed_input"), inverse


def _scaled(x: fx.Node, scale: fx.Node, emit: Callable[..., fx.Node], name: str) -> fx.Node:
    product = emit(aten.mul.Tensor, (x, scale), name=name)
    product.meta[RESCALED_KEY] = True
    return product


def _rowwise(view: OperandView, emit: Callable[..., fx.Node]) -> fx.Node:
    return emit(aten.permute.default, (view.tensor, [1, 0])) if view.flipped else view.tensor


def _scale_back(graph: fx.Graph, gemm: Gemm, inverse: fx.Node, emit: Callable[..., fx.Node]) -> None:
    """The gradient of w from that of ``w * r``, for all who read it: [N, K], or [K, N] if x is on the left."""
    readers = list(gemm.node.users)
    with graph.inserting_after(gemm.node):
        along = inverse if gemm.b.operand == "input" else emit(aten.unsqueeze.default, (inverse, 1))
    with graph.inserting_after(gemm.node if along is inverse else along):
        result = _scaled(gemm.node, along, emit, name="smoothed_back")
    for reader in readers:
        reader.replace_input_with(gemm.node, result)
