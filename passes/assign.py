"""Decide: a recipe for every GEMM or high precision, native or emulated, each with its reason.

    site "lm_head" fprop                 ->   None, 'rule 0 "lm_head": high precision'
    site "mlp.up_proj" wgrad             ->   Float8CurrentScaling, native, "default"

Order of authority: an autocast region in the compiled code, the region around the call, the policy. Refuses
(leaves alone) what FP8 cannot do: integers, complex, float64, operands of two dtypes, empty tensors, batched
matmuls that nobody asked for, backward matmuls without a forward one; and what would not be faster on the target
(``fp8graph/roofline.py``, ``Policy.min_speedup``). The graph is not changed.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import fx

from fp8graph import hardware
from fp8graph.autocast import DISABLED, region_recipe
from fp8graph.errors import Fp8GraphError
from fp8graph.graph import GROUPED, matmul_arguments, size_hint, static_size, value, value_key
from fp8graph.legality import is_batched, why_not
from fp8graph.policy import DEFAULT_OPS, INHERIT, Resolution
from fp8graph.recipes import GEMMS, DelayedScaling, Recipe
from fp8graph.roofline import Operand, predicted_speedup
from fp8graph.sites import Compilation, Decision, Gemm, Site


def assign(graph: fx.Graph, compilation: Compilation) -> None:
    for view in (view for site in compilation.sites for gemm in site.gemms for view in (gemm.a, gemm.b)):
        compilation.operand_uses.setdefault(value_key(view.tensor), []).append(view.layout)
    for site in compilation.sites:
        resolution = resolve(site, compilation)
        for gemm in site.gemms:
            compilation.plan[gemm.node] = (
                decide(gemm, resolution, compilation)
                if site.gemms[0].gemm == "fprop"
                else Decision(
                    recipe=None,
                    reason="a backward matmul without a forward one",
                    execution="high precision",
                    resolution=resolution,
                )
            )


def resolve(site: Site, compilation: Compilation) -> Resolution:
    """Who decides about ``site``: the innermost region that says something, else the policy."""
    resolution = compilation.policy.resolve(site.fqn, site.op)
    region = compilation.region if site.region is None else site.region
    try:
        recipe = region_recipe(region)
    except Fp8GraphError as error:
        raise type(error)(f"{site.fqn or 'the model'}: autocast: {error}") from None
    if recipe is INHERIT:
        return resolution
    if recipe is None:  # covers every op: the user switched FP8 off here
        return Resolution(dict.fromkeys(GEMMS), source=DISABLED, rule=resolution.rule)
    if site.op not in DEFAULT_OPS:
        return resolution
    assert isinstance(recipe, Recipe)
    text = region if isinstance(region, str) else type(recipe).__name__
    return Resolution(
        dict.fromkeys(GEMMS, recipe),
        source=f"autocast({text})",
        rule=resolution.rule,
        by_user=True,
    )


def decide(gemm: Gemm, resolution: Resolution, compilation: Compilation) -> Decision:
    """The decision about one GEMM."""
    recipe = resolution.recipes[gemm.gemm]

    def left_alone(reason: str, **more: Any) -> Decision:
        return Decision(recipe=None, reason=reason, execution="high precision", resolution=resolution, **more)

    if recipe is None:
        says_so = not resolution.source.startswith("rule") and resolution.source != "default"
        return left_alone(resolution.source if says_so else f"{resolution.source}: high precision")
    if not recipe.covers(gemm.gemm):
        return left_alone(f"{resolution.source}: {recipe.name} leaves {gemm.gemm} in high precision")
    asked = f" ({resolution.source} asked for {recipe.name})"
    obstacle = why_not(gemm, resolution)
    if obstacle is None and compilation.subgraph and isinstance(recipe, DelayedScaling):
        obstacle = "delayed scaling has no state inside a higher-order op"
    if obstacle is not None:
        return left_alone(obstacle + asked, required=resolution.by_user)
    obstacle = _emulation(gemm, recipe, compilation)
    if obstacle is not None and gemm.node.target in GROUPED and not resolution.by_user:
        if _device(gemm, compilation).speed is not None:  # a loop over experts, in place of one fast kernel
            return left_alone(f"{obstacle}; a rule that names it gets it emulated{asked}")
    speedup = None if obstacle else _speedup(gemm, recipe, compilation)
    if speedup is not None and speedup < compilation.policy.min_speedup:
        why = f"not faster in FP8: predicted {speedup:.2f}x, min_speedup is {compilation.policy.min_speedup:g}"
        return left_alone(why + asked, by_profitability=True, speedup=speedup, required=resolution.by_user)
    notes = [resolution.source, *([f"emulated: {obstacle}"] if obstacle else _padding(gemm, recipe))]
    notes += [f"predicted {speedup:.2f}x"] if speedup is not None else []
    return Decision(
        recipe=recipe,
        reason="; ".join(notes),
        execution="emulated" if obstacle else "native",
        speedup=speedup,
        resolution=resolution,
        required=resolution.by_user,
    )


def _emulation(gemm: Gemm, recipe: Recipe, compilation: Compilation) -> str | None:
    """Why this GEMM is emulated, or None if the device multiplies it."""
    if is_batched(gemm):
        return "torch has no scaled bmm"
    device = _device(gemm, compilation)
    a, b = (recipe.quantizer(view.operand) for view in (gemm.a, gemm.b))
    return device.obstacle(a, b, value(gemm.node).dtype, grouped=gemm.node.target in GROUPED)


def _device(gemm: Gemm, compilation: Compilation) -> hardware.Hardware:
    return compilation.hardware or hardware.of_device(value(gemm.node).device)


def _speedup(gemm: Gemm, recipe: Recipe, compilation: Compilation) -> float | None:
    """How much faster this GEMM would be in FP8 on its device, or None if its speed is not known."""
    speed = _device(gemm, compilation).speed
    if speed is None:
        return None
    operands: list[Operand] = []
    for view in (gemm.a, gemm.b):
        shape = [size_hint(size) for size in value(view.tensor).shape]
        uses = compilation.operand_uses.get(value_key(view.tensor), [view.layout])
        operands.append(
            Operand(
                elements=math.prod(shape),
                layouts=len(set(uses)),
                users=len(uses),
                kept=view.operand == "weight" and compilation.cache_weights and not compilation.gathered,
            )
        )
    *_, m, n = (size_hint(size) for size in value(gemm.node).shape)
    k = size_hint(contraction_size(gemm))
    scaling = recipe.quantizer(gemm.a.operand).scaling
    return predicted_speedup(speed, m, n, k, value(gemm.node).dtype, scaling, (operands[0], operands[1]))


def _padding(gemm: Gemm, recipe: Recipe) -> list[str]:
    *_, m, n = value(gemm.node).shape
    multiples = hardware.alignment(*(recipe.quantizer(view.operand) for view in (gemm.a, gemm.b)))
    sizes = {"m": static_size(m), "n": static_size(n), "k": static_size(contraction_size(gemm))}
    return [
        f"{name} {size} padded to {size + -size % multiple}"
        for (name, size), multiple in zip(sizes.items(), multiples, strict=True)
        if size is not None and size % multiple
    ]


def contraction_size(gemm: Gemm) -> int | torch.SymInt:
    """k of ``[m, k] @ [k, n]``."""
    return value(matmul_arguments(gemm.node)[0]).shape[-1]
