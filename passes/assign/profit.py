"""Compare each GEMM in FP8 with high precision, along with those that share a quantization with it: which pay?

    fprop, dgrad, wgrad in FP8: 1.30, 1.20, 0.97   ->   wgrad refused; x and dy are quantized for one GEMM each
    fprop, dgrad                1.15, 1.02         ->   dgrad refused
    fprop                       1.15               ->   accepted

The FP8 GEMMs that read a quantization share its cost in equal parts. A refused GEMM pays nothing, so the others pay
more. This is repeated until every GEMM that is left reaches the required speedup, and so does their sum. What counts
here is the time of the GPU; ``clock.py`` looks at the whole graph, and at the host that launches it.

``choices`` lists the GEMMs as they would run: which are fused, and which share a quantization.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch

from fp8graph.analysis.siblings import are_summed, can_be_slices, sibling_key, size_in_group
from fp8graph.compat.inductor import LARGE
from fp8graph.hardware.speed import Operand, Speed, gemm_launches, gemm_seconds
from fp8graph.ir.compilation import Compilation
from fp8graph.ir.nodes import GROUPED, matmul_arguments, size_hint, value, value_key
from fp8graph.ir.sites import Gemm, OperandView, Site
from fp8graph.recipes import GemmName, Layout, Recipe, Scaling


@dataclass(frozen=True, kw_only=True)
class Quantized:
    """A tensor, or several side by side, that is quantized once for all GEMMs that read it."""

    key: Any  # equal for tensors that are quantized once: which tensor, and how
    elements: int
    fused: bool = True  # as in roofline.Operand
    kept: bool = False
    again: bool = False


@dataclass(frozen=True, kw_only=True)
class Fp8Gemm:
    """One GEMM ``[m, k] @ [k, n]`` as it runs in FP8, and the layouts that it reads."""

    m: int
    n: int
    k: int
    reads: tuple[tuple[Quantized, Layout], ...]


@dataclass(frozen=True, kw_only=True, eq=False)
class Choice:
    """GEMMs that run in FP8 together or not at all."""

    gemms: tuple[Any, ...]  # whose they are, for the caller
    before: tuple[tuple[int, int, int], ...]  # m, n and k of each GEMM in high precision
    products: tuple[Fp8Gemm, ...]  # the GEMMs that they become in FP8: as many, or a fused one
    dtype: torch.dtype
    scaling: Scaling
    speed: Speed | None  # of their device; None: they run in FP8 at any cost

    def seconds(self) -> float:
        """Return the time in high precision."""
        assert self.speed is not None
        return sum(gemm_seconds(self.speed, *sizes, self.dtype) for sizes in self.before)

    def fp8_seconds(self, uses: Uses) -> float:
        """Return the time in FP8, with this choice's share of the quantizations."""
        assert self.speed is not None
        return sum(
            gemm_seconds(self.speed, x.m, x.n, x.k, self.dtype, self.scaling, uses.operands(x)) for x in self.products
        )

    def fp8_launches(self, uses: Uses) -> float:
        """Give the kernels in FP8, with this choice's share of those that quantize; in high precision, one per GEMM."""
        return sum(gemm_launches(self.scaling, uses.operands(product)) for product in self.products)


class Uses:
    """The number of FP8 GEMMs that read each quantization, and their layouts."""

    def __init__(self, choices: Sequence[Choice]) -> None:
        self._layouts: dict[Any, list[Layout]] = {}
        for quantized, layout in (read for c in choices for product in c.products for read in product.reads):
            self._layouts.setdefault(quantized.key, []).append(layout)

    def operands(self, product: Fp8Gemm) -> tuple[Operand, ...]:
        return tuple(self.operand(quantized) for quantized, _ in product.reads)

    def operand(self, quantized: Quantized) -> Operand:
        layouts = self._layouts[quantized.key]
        return Operand(
            elements=quantized.elements,
            layouts=frozenset(layouts),
            users=len(layouts),
            fused=quantized.fused,
            kept=quantized.kept,
            again=quantized.again,
        )


def judge(choices: Sequence[Choice], min_speedup: float) -> dict[Choice, float]:
    """Return the predicted speedup of every choice that has a speed: at least ``min_speedup`` for those to run in FP8.

    For a refused choice, it is the speedup that was predicted when it was refused.
    """
    speedups: dict[Choice, float] = {}
    left = list(choices)
    while True:
        uses = Uses(left)
        for choice in left:
            if choice.speed is not None:
                speedups[choice] = choice.seconds() / choice.fp8_seconds(uses)
        accepted = [choice for choice in left if speedups.get(choice, min_speedup) >= min_speedup]
        if len(accepted) == len(left):
            return speedups
        left = accepted


# the store of kept copies (``ExtraInput.store``); a build that has no pass `hoist_weights` does not have it
_COPIES: Final = "weights"
_Planned = tuple[Site, dict[GemmName, Gemm]]  # a site and those of its GEMMs that have a recipe


def choices(compilation: Compilation) -> Iterator[Choice]:
    """Yield every GEMM that has a recipe; siblings (``analysis/siblings.py``) form one choice.

    Yields nothing if no device has a known speed: there is nothing to choose then.
    """
    gemms = [gemm for site in compilation.sites for gemm in site.gemms if _recipe(gemm, compilation) is not None]
    if all(_speed(gemm, compilation) is None for gemm in gemms):
        return
    families: dict[object, list[_Planned]] = {}
    owners: dict[object, set[int]] = {}  # of weights and gradients, by site
    for position, site in enumerate(compilation.sites):
        for view in (view for gemm in site.gemms for view in (gemm.a, gemm.b)):
            owners.setdefault(value_key(view.tensor), set()).add(position)
    for position, site in enumerate(compilation.sites):
        planned: dict[GemmName, Gemm] = {g.gemm: g for g in site.gemms if _recipe(g, compilation) is not None}
        if planned:
            views = [view for gemm in planned.values() for view in (gemm.a, gemm.b) if view.operand != "input"]
            alone = not compilation.facts.settings.fuses_linears or any(
                len(owners[value_key(view.tensor)]) > 1 for view in views
            )
            family = None if alone else _family(site, planned, compilation)
            families.setdefault(position if family is None else family, []).append((site, planned))
    for family in families.values():
        dgrads = [planned["dgrad"].node for _, planned in family if "dgrad" in planned]
        if len(family) > 1 and are_summed(dgrads):
            yield from (_joint(name, family, compilation) for name in family[0][1])
        else:
            yield from (_single(gemm, compilation) for _, planned in family for gemm in planned.values())


def _recipe(gemm: Gemm, compilation: Compilation) -> Recipe | None:
    return compilation.decisions[gemm.node].recipe


def _family(site: Site, planned: dict[GemmName, Gemm], compilation: Compilation) -> object:
    """Return a key equal for linears that would be fused, None for those that never are."""
    recipes = {name: _recipe(gemm, compilation) for name, gemm in planned.items()}
    own = [
        recipe.quantizer(view.operand).block
        for name, gemm in planned.items()
        for view in (gemm.a, gemm.b)
        if view.operand != "input" and (recipe := recipes[name]) is not None
    ]
    native = all(compilation.decisions[gemm.node].execution == "native" for gemm in planned.values())
    if "fprop" not in planned or not native or isinstance(size_in_group(site, own), str):
        return None
    fprop = planned["fprop"]
    dtypes = value(fprop.b.tensor).dtype, value(fprop.node).dtype
    return *sibling_key(site), value_key(fprop.a.tensor), *recipes.items(), fprop.bias is None, *dtypes


def _single(gemm: Gemm, compilation: Compilation) -> Choice:
    m, n, k = sizes(gemm)
    reads = _reads([[gemm.a], [gemm.b]], gemm, compilation)
    product = Fp8Gemm(m=m, n=n, k=k, reads=reads)
    return _choice([gemm], [product], compilation)


def _joint(name: GemmName, family: Sequence[_Planned], compilation: Compilation) -> Choice:
    """Give one GEMM of all siblings; fprop multiplies slices of the joined weight where its result cannot be sliced."""
    gemms = [planned[name] for _, planned in family]
    sides = [gemm.a for gemm in gemms], [gemm.b for gemm in gemms]
    reads = _reads([views[:1] if views[0].operand == "input" else views for views in sides], gemms[0], compilation)
    parts = [sizes(gemm) for gemm in gemms]
    if name == "fprop" and not can_be_slices([gemm.node for gemm in gemms]):
        return _choice(gemms, [Fp8Gemm(m=m, n=n, k=k, reads=reads) for m, n, k in parts], compilation)
    m, n, k = parts[0]
    if name == "fprop":
        n = sum(n for _, n, _ in parts)
    elif name == "dgrad":
        k = sum(k for *_, k in parts)
    elif gemms[0].a.operand == "grad_output":  # dy.T @ x
        m = sum(m for m, *_ in parts)
    else:
        n = sum(n for _, n, _ in parts)
    return _choice(gemms, [Fp8Gemm(m=m, n=n, k=k, reads=reads)], compilation)


def _choice(gemms: Sequence[Gemm], products: Sequence[Fp8Gemm], compilation: Compilation) -> Choice:
    first = gemms[0]
    recipe = _recipe(first, compilation)
    assert recipe is not None
    return Choice(
        gemms=tuple(gemms),
        before=tuple(map(sizes, gemms)),
        products=tuple(products),
        dtype=value(first.node).dtype,
        scaling=recipe.quantizer(first.a.operand).scaling,
        speed=_speed(first, compilation),
    )


def _reads(
    sides: Sequence[Sequence[OperandView]], gemm: Gemm, compilation: Compilation
) -> tuple[tuple[Quantized, Layout], ...]:
    return tuple((_quantized(views, gemm, compilation), views[0].layout) for views in sides)


def _quantized(views: Sequence[OperandView], gemm: Gemm, compilation: Compilation) -> Quantized:
    recipe = _recipe(gemm, compilation)
    assert recipe is not None
    first = views[0]
    keys = tuple(value_key(view.tensor) for view in views)
    elements = sum(math.prod(map(size_hint, value(view.tensor).shape)) for view in views)
    weight = first.operand == "weight"
    return Quantized(
        key=(keys, recipe.quantizer(first.operand)),
        elements=elements,
        fused=not weight,
        kept=weight and _keeps_weights(compilation),
        again=weight and elements >= LARGE and gemm.node.target not in GROUPED,  # see save_for_backward
    )


def _keeps_weights(compilation: Compilation) -> bool:
    facts = compilation.facts
    return facts.keeps_weights and _COPIES in facts.parameter_facts and not facts.gathered


def _speed(gemm: Gemm, compilation: Compilation) -> Speed | None:
    """Return the speed of the device that runs this GEMM; None if it is not known, or if the GEMM is emulated."""
    speed = compilation.hardware_of(gemm.node).speed
    if speed is None or compilation.decisions[gemm.node].execution != "native":
        return None
    return speed.replayed() if compilation.facts.settings.cuda_graphs else speed


def high_precision_seconds(gemm: Gemm, compilation: Compilation) -> float | None:
    """Return the predicted time in high precision, if the device has a speed model and FP8 is not emulated."""
    speed, out = compilation.hardware_of(gemm.node).speed, value(gemm.node)
    emulated = compilation.decisions[gemm.node].execution == "emulated"
    if speed is None or emulated or out.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        return None
    return gemm_seconds(speed, *sizes(gemm), out.dtype, batch=batch_of(gemm))


def batch_of(gemm: Gemm) -> int:
    """Return the products of a batched matmul; the groups of one share k or m."""
    return 1 if gemm.node.target in GROUPED else math.prod(map(size_hint, value(gemm.node).shape[:-2]))


def sizes(gemm: Gemm) -> tuple[int, int, int]:
    """m, n and k of ``[m, k] @ [k, n]``; for a dynamic size, the one that was traced."""
    *_, m, n = (size_hint(size) for size in value(gemm.node).shape)
    return m, n, size_hint(value(matmul_arguments(gemm.node)[0]).shape[-1])
