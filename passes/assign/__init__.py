"""Decide for every GEMM between a recipe and high precision, native and emulated, and give the reason.

    site "lm_head" fprop                 ->   None, 'output head: the loss reads its output'
    site "mlp.up_proj" wgrad             ->   Float8CurrentScaling, native, "default"

The first of these that says something decides: a user's rule for the layer, the form in which its weight arrives
quantized (``analysis/stored.py``), an autocast region in the compiled code, the region around the call, the policy
(``ir/decisions.py``).
Refuses (leaves in high precision) GEMMs that FP8 cannot do: those of integers, complex numbers, float64, operands of
two dtypes and empty tensors, batched matmuls that no rule names, and backward matmuls without a forward one. Refuses,
too, GEMMs that would not be faster on the target (``profit.py``, ``clock.py``, ``Policy.min_speedup``). The graph is
not changed.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any, Final

import torch
from torch import fx

from fp8graph.analysis.products import reads_codes
from fp8graph.analysis.stored import as_stored, stored_view, why_not_as_stored
from fp8graph.compat.ops import OpOverload
from fp8graph.compat.products import is_of_torch
from fp8graph.hardware import Hardware
from fp8graph.ir.compilation import Compilation
from fp8graph.ir.nodes import GROUPED, matmul_arguments, size_hint, static_size, value
from fp8graph.ir.sites import Decision, Gemm, OperandView, Site
from fp8graph.ir.text import short
from fp8graph.numerics.scalings import SCALINGS
from fp8graph.passes.assign.clock import Timed, in_time, others_of
from fp8graph.passes.assign.legality import is_batched, refuse_fused_ops, why_not_in_fp8
from fp8graph.passes.assign.profit import batch_of, choices, high_precision_seconds, judge
from fp8graph.recipes import FNUZ, Quantizer, Recipe
from fp8graph.recipes.rules import DECISION, SOURCE, Resolution
from fp8graph.records import NATIVE_BY, GemmRecord

_NO_FORWARD: Final = "a backward matmul; no forward one of its operands was found"
# backward of torch.cond, while_loop, map and scan
_FORWARD_ELSEWHERE: Final = "the backward of a higher-order op is a graph of its own, without the forward matmul"


def assign(graph: fx.Graph, compilation: Compilation) -> None:
    decisions = compilation.decisions
    orphaned = _FORWARD_ELSEWHERE if compilation.facts.subgraph else ""
    for site in compilation.sites:
        resolution = compilation.facts.decisions.of(site)
        stored = next(filter(None, map(stored_view, site.gemms)), None)
        of_weight = as_stored(resolution, stored.tensor, flipped=stored.flipped) if stored is not None else None
        for gemm in site.gemms:
            decisions[gemm.node] = (
                _decide_stored(gemm, of_weight, compilation)
                if of_weight is not None
                else decide(gemm, resolution, compilation)
                if site.gemms[0].gemm == "fprop"
                else Decision(
                    recipe=None,
                    reason=orphaned or _why_no_forward(gemm),
                    execution="high precision",
                    resolution=resolution,
                )
            )
    refuse_fused_ops(graph, compilation)
    _refuse_slow(graph, compilation)
    for site in compilation.sites:
        for gemm in site.gemms:
            decision = decisions[gemm.node]
            if decision.dequantized and (obstacle := _why_not_dequantized(site, decisions[site.gemms[0].node])):
                changed = replace(decision, dequantized=False, reason=f"{obstacle} ({decision.reason})")
                in_fp8 = decisions[site.gemms[0].node].recipe is not None  # but not read by backward
                decisions[gemm.node] = replace(changed, required=in_fp8 and decision.resolution.by_user)
    compilation.rows += [_row(site, gemm, compilation) for site in compilation.sites for gemm in site.gemms]


def _why_no_forward(gemm: Gemm) -> str:
    """Give the reason of a backward matmul that stands alone: its weight may be decoded by an op of another library."""
    for view in (gemm.a, gemm.b):
        op = view.tensor.target
        if isinstance(op, OpOverload) and not is_of_torch(op) and reads_codes(view.tensor):
            return (
                f"{op.overloadpacket} decodes its weight for backward alone: forward multiplies inside one op of "
                f"{op.namespace}"
            )
    return _NO_FORWARD


def _refuse_slow(graph: fx.Graph, compilation: Compilation) -> None:
    """Leave GEMMs in high precision that FP8 does not make faster: by the GPU's time, and then by the clock.

    With ``batch_invariant=True`` none: that depends on the number of tokens, and a decoding step would have other bits.
    """
    settings, policy = compilation.facts.settings, compilation.facts.decisions.policy
    decisions, bar = compilation.decisions, 0.0 if settings.batch_invariant else policy.min_speedup
    candidates = list(choices(compilation))
    speeds = [choice.speed for choice in candidates if choice.speed is not None]
    if not speeds:
        return
    speedups = judge(candidates, bar)
    # what arrives quantized would be dequantized first in high precision
    free = [c for c in speedups if all(decisions[gemm.node].stored is None for gemm in c.gemms)]
    timed = in_time(
        candidates,
        [choice for choice in free if speedups[choice] >= bar],
        others_of(graph, candidates, speeds[0], compilation),
        bar,
        fixed=[choice for choice in candidates if choice not in free],
    )
    for choice in free:
        for gemm in choice.gemms:
            decision = with_speedup(decisions[gemm.node], speedups[choice], bar)
            if decision.recipe is not None and choice not in timed.chosen:
                decision = _not_in_time(decisions[gemm.node], timed, bar)
            decisions[gemm.node] = decision
    if timed.now.waits:
        advice = 'options={"mode": "reduce-overhead"} records CUDA graphs, which launch nothing'
        compilation.refuse_at("CUDA graphs", "", 0, f"the host sets the pace: {timed.now} (predicted); {advice}")


def with_speedup(decision: Decision, speedup: float, bar: float) -> Decision:
    """Return the decision with its predicted speedup; it becomes high precision if that is below ``bar``."""
    if speedup >= bar:
        return replace(decision, speedup=speedup, reason=f"{decision.reason}; predicted {speedup:.2f}x")
    return _refused(decision, speedup, f"min_speedup is {bar:g}")


def _not_in_time(decision: Decision, timed: Timed, bar: float) -> Decision:
    """Return the decision in high precision: with this GEMM in FP8, too, the graph would take longer by the clock."""
    pace = f"for the graph, whose pace the host would set: {timed.then}; {1e3 * timed.now.seconds:.2g} ms without it"
    return _refused(decision, timed.now.seconds / timed.then.seconds, f"{pace}; min_speedup is {bar:g}")


def _refused(decision: Decision, speedup: float, why: str) -> Decision:
    assert decision.recipe is not None
    return replace(
        decision,
        recipe=None,
        # rounded down: 1.049 is not 1.05
        reason=f"not faster in FP8: predicted {math.floor(100 * speedup) / 100:.2f}x"
        f"{' ' if why.startswith('for') else ', '}{why} ({SOURCE} asked for {decision.recipe.name})",
        execution="high precision",
        by_profitability=True,
        speedup=speedup,
    )


def decide(gemm: Gemm, resolution: Resolution, compilation: Compilation, stored: OperandView | None = None) -> Decision:
    """Return the decision about one GEMM; ``stored``: its weight, if the bytes of that are multiplied as they are."""
    recipe = resolution.recipes[gemm.gemm]

    def left_alone(reason: str, **more: Any) -> Decision:
        return Decision(recipe=None, reason=reason, execution="high precision", resolution=resolution, **more)

    if recipe is None:
        return left_alone(DECISION)
    if not recipe.covers(gemm.gemm):
        if recipe.dequantizes(gemm.gemm):
            how = f'{recipe.name} with backward_override="dequantized" reads the FP8 numbers of fprop, decoded'
            return left_alone(f"{SOURCE}: {how}", dequantized=True)
        override = ' with backward_override="high_precision"' if recipe.backward_override == "high_precision" else ""
        return left_alone(f"{SOURCE}: {recipe.name}{override} leaves {gemm.gemm} in high precision")
    source = f" ({SOURCE} asked for {recipe.name})"
    obstacle = why_not_in_fp8(gemm, resolution)
    if obstacle is None and compilation.facts.subgraph and recipe.has_state:
        obstacle = "delayed scaling has no state inside a higher-order op"
    if obstacle is not None:
        return left_alone(obstacle + source, required=resolution.by_user)
    obstacle = _emulation(gemm, recipe, compilation, stored)
    if obstacle is not None and gemm.node.target in GROUPED and not resolution.by_user:
        if compilation.hardware_of(gemm.node).speed is not None:  # a loop over experts, in place of one fast kernel
            return left_alone(f"{obstacle}; a rule that names it gets it emulated{source}")
    notes = [DECISION, *([f"emulated: {obstacle}"] if obstacle else _padding(gemm, recipe, compilation))]
    if obstacle is None:
        kind, grouped = SCALINGS[recipe.quantizer(gemm.a.operand).scaling], gemm.node.target in GROUPED
        checked = compilation.hardware_of(gemm.node).evidence_without_device(kind.gemm, grouped=grouped)
        notes += [f"{NATIVE_BY}{checked}"] if checked else []
    return Decision(
        recipe=recipe,
        reason="; ".join(notes),
        execution="emulated" if obstacle else "native",
        resolution=resolution,
        required=resolution.by_user,
    )


def _why_not_dequantized(site: Site, fprop: Decision) -> str:
    """Return the reason why a GEMM of backward reads the program's input or weight, and not what fprop multiplies."""
    if fprop.recipe is None:
        return "fprop is in high precision, and so is what it multiplies"
    if site.gemms[0].node.target in GROUPED:
        return "experts have scales per group of rows, which no decoding reads: backward reads the program's tensors"
    return ""


def _decide_stored(gemm: Gemm, resolution: Resolution, compilation: Compilation) -> Decision:
    """Return the decision about one GEMM of a weight that arrives quantized: if it reads that, it multiplies it as it
    is.
    """
    view = stored_view(gemm)
    decision = decide(gemm, resolution, compilation, view)
    recipe = decision.recipe.name if decision.recipe is not None else None
    decision = replace(decision, reason=resolution.explain(decision.reason, recipe))  # the policy did not decide
    if decision.recipe is None or view is None:
        return decision
    if (obstacle := why_not_as_stored(gemm, view)) is not None:
        return replace(decision, recipe=None, reason=obstacle, execution="high precision")
    return replace(decision, stored=view.tensor)


def _emulation(gemm: Gemm, recipe: Recipe, compilation: Compilation, stored: OperandView | None) -> str | None:
    """Return the reason why this GEMM is emulated; None if the device has a kernel for it."""
    if is_batched(gemm):
        return "torch has no scaled bmm"
    device = compilation.hardware_of(gemm.node)
    a, b = (_quantizer(device, recipe, view, stored) for view in (gemm.a, gemm.b))
    if (a.dtype in FNUZ) != (b.dtype in FNUZ):
        return f"{device.name} does not multiply {short(a.dtype)} by {short(b.dtype)}"
    return device.obstacle(a, b, value(gemm.node).dtype, grouped=gemm.node.target in GROUPED)


def _quantizer(device: Hardware, recipe: Recipe, view: OperandView, stored: OperandView | None) -> Quantizer:
    """Return the quantizer of one operand; a weight that is multiplied as it is ``stored`` keeps its type."""
    quantizer = device.quantizer(recipe, view.operand)
    if view is not stored or view.data is None or SCALINGS[quantizer.scaling].packed > 1:
        return quantizer
    return replace(quantizer, dtype=value(view.data).dtype)


def _padding(gemm: Gemm, recipe: Recipe, compilation: Compilation) -> list[str]:
    *_, m, n = value(gemm.node).shape
    device = compilation.hardware_of(gemm.node)
    multiples = device.alignment(*(device.quantizer(recipe, view.operand) for view in (gemm.a, gemm.b)))
    paddings: list[str] = []
    for name, size, multiple in zip("mnk", (m, n, _contraction_size(gemm)), multiples, strict=True):
        number = static_size(size)
        if multiple > 1 and number is None:
            paddings.append(f"{name} {size} padded to a multiple of {multiple}")
        elif number is not None and number % multiple:
            paddings.append(f"{name} {number} padded to {number + -number % multiple}")
    return paddings


def _contraction_size(gemm: Gemm) -> int | torch.SymInt:
    """k of ``[m, k] @ [k, n]``."""
    return value(matmul_arguments(gemm.node)[0]).shape[-1]


def _row(site: Site, gemm: Gemm, compilation: Compilation) -> GemmRecord:
    """Return the row of the report, made while the matmul is still there."""
    decision = compilation.decisions[gemm.node]
    out = value(gemm.node)
    a, b = map(value, matmul_arguments(gemm.node))
    dtypes = [short(a.dtype), short(b.dtype)]
    bits = [8 * a.itemsize, 8 * b.itemsize]
    if decision.recipe is not None:
        device = compilation.hardware_of(gemm.node)
        stored = stored_view(gemm) if decision.stored is not None else None
        types = [_quantizer(device, decision.recipe, view, stored).dtype for view in (gemm.a, gemm.b)]
        dtypes = ["fp4" if dtype == torch.uint8 else short(dtype) for dtype in types]  # two in one uint8
        bits = [4 if dtype == torch.uint8 else 8 for dtype in types]
    sizes = [size if isinstance(size, int) else str(size) for size in (*out.shape[-2:], a.shape[-1])]
    m, n, k = map(size_hint, (*out.shape[-2:], a.shape[-1]))
    return GemmRecord(
        fqn=site.fqn,
        index=site.index,
        op=site.op,
        gemm=gemm.gemm,
        m=sizes[0],
        n=sizes[1],
        k=sizes[2],
        flops=2 * batch_of(gemm) * m * n * k,
        recipe=decision.recipe.name if decision.recipe is not None else None,
        reason=decision.reason,
        dtypes=(dtypes[0], dtypes[1], short(out.dtype)),
        execution=decision.execution,
        required=decision.required,
        by_profitability=decision.by_profitability,
        speedup=decision.speedup,
        rule=decision.resolution.rule,
        seconds=high_precision_seconds(gemm, compilation),
        bytes_read=sum(math.prod(map(size_hint, x.shape)) * of // 8 for x, of in zip((a, b), bits, strict=True)),
    )
