"""Statistics in, findings and rules out: which tensors lose too much in quantization, and what would help.

Nothing here knows a backend: ``guard.py`` calls these functions, and acts on their results.
"""

from __future__ import annotations

import dataclasses
import glob
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, cast

from fp8graph.errors import ConfigError, UnsupportedRecipeError
from fp8graph.numerics.scalings import SCALINGS
from fp8graph.recipes import (
    GEMM_LAYOUTS,
    GEMM_OPERANDS,
    GEMMS,
    HIGH_PRECISION,
    GemmName,
    Layout,
    OperandName,
    RecipeLike,
    resolve_recipe,
)
from fp8graph.recipes.policy import rule_toml
from fp8graph.recipes.rules import INHERIT, Rule
from fp8graph.records import StatisticRecord

NEEDED: Final = ("cur_amax", "l1_norm", "underflows%", "saturated%", "sqnr")  # the statistics that are judged


@dataclass(frozen=True, kw_only=True)
class Bounds:
    """The bounds of ``Backend.guard``. None switches a bound off."""

    underflows: float | None = 10.0
    saturated: float | None = 10.0
    sqnr: float | None = 10.0

    def __post_init__(self) -> None:
        for name, low, high in (("underflows", 0, 100), ("saturated", 0, 100), ("sqnr", -math.inf, math.inf)):
            value: Any = getattr(self, name)
            number = type(value) in (int, float) and math.isfinite(value) and low <= value <= high
            if value is not None and not number:
                wanted = "a finite number of dB" if name == "sqnr" else "a number of percent from 0 to 100"
                raise ConfigError(f"guard({name}={value!r}): expected {wanted}, or None for no bound.")

    def crossed(self, stat: str, value: float, *, four_bits: bool) -> float | None:
        """Return the bound that a statistic crosses; None if it crosses none."""
        if stat == "sqnr":
            return self.sqnr if self.sqnr is not None and value < self.sqnr else None
        bound = {"underflows%": self.underflows, "saturated%": self.saturated}.get(stat)
        # of four bits, healthy underflows reach 38 %, and most of the largest numbers are common
        return bound if bound is not None and not four_bits and value > bound else None


@dataclass(frozen=True, kw_only=True)
class PolicySite:
    """One site as the current policy sees it. Plain data, so that ranks can send it to each other."""

    fqn: str
    op: str
    by_user: bool  #: a user's rule names it
    recipes: Mapping[GemmName, Any]  #: by the policy: names, or dicts
    runs: dict[GemmName, str | None]  #: the recipes' names in the graphs
    obstacle: str = ""  #: why no rule can be written for it


@dataclass(frozen=True, kw_only=True)
class Crossing:
    """One tensor that crossed a bound, in one or both of its copies."""

    step: int  #: of the optimizer
    site: str  #: the full name of the layer
    operand: OperandName  #: input, weight or grad_output
    layout: str  #: rowwise, columnwise, or both; "" for the tensor itself
    recipe: str  #: "" for the tensor itself
    stat: str  #: cur_amax: the tensor has inf or NaN
    value: float  #: percent, or dB ("sqnr")
    bound: float | None  #: what it crossed, in the same unit
    gemms: tuple[GemmName, ...]  #: those that read it

    @property
    def keys(self) -> set[tuple[str, str, str, str]]:
        """The keys of warnings that are logged once."""
        return {(self.site, self.operand, self.recipe, gemm) for gemm in self.gemms or ("",)}

    @property
    def order(self) -> tuple[Any, ...]:
        """Equal on all ranks. Of one tensor's crossings, the first is reported."""
        return self.step, self.site, self.operand, self.recipe, _ORDER.index(self.stat), self.layout


_ORDER: Final = ("cur_amax", "underflows%", "saturated%", "sqnr")


@dataclass(frozen=True, kw_only=True)
class GuardFinding(Crossing):
    """A tensor that crossed a bound, and the rule that would help."""

    rule: Rule | None  #: to put before the others of the policy
    reason: str  #: why there is no rule; "" if there is one

    @property
    def words(self) -> str:
        """The finding in words: "11.2 % of grad_output became zero (tensorwise, rowwise; more than 10 %)"."""
        if self.stat == "cur_amax":
            return f"{self.operand} holds inf or NaN before it is quantized"
        copy = f"{self.recipe}, {self.layout if self.layout != 'both' else 'both layouts'}"
        if self.stat == "sqnr":
            return f"{self.operand} has an sqnr of {self.value:.3g} dB ({copy}; less than {self.bound:g} dB)"
        became = "zero" if self.stat == "underflows%" else "the largest number"
        return f"{self.value:.3g} % of {self.operand} became {became} ({copy}; more than {self.bound:g} %)"

    def __str__(self) -> str:
        text = f"step {self.step}: {self.site}: {self.words}."
        if self.rule is None:
            return f"{text} {self.reason}"
        return (
            f"{text} It is read by {' and '.join(self.gemms)}. A rule that helps, before the others of the policy:\n"
            f"{python(self.rule)}\nor, in a policy file:\n{rule_toml(self.rule)}"
        )


def crossings(records: Iterable[StatisticRecord], bounds: Bounds, sites: Mapping[str, PolicySite]) -> list[Crossing]:
    """Return the tensors that cross a bound, in an order that does not depend on that of the records."""
    values: dict[tuple[int, str, str, str], dict[str, dict[str, float]]] = {}  #: ... -> layout -> statistics
    for r in records:
        if r.operand in ("input", "weight", "grad_output") and not r.what_if:
            key = r.step, r.site, r.operand, r.recipe
            values.setdefault(key, {}).setdefault(r.layout, {})[r.stat] = r.value
    results: list[Crossing] = []
    not_finite: set[tuple[int, str, str]] = set()
    for (step, site, operand, recipe), layouts in sorted(values.items()):
        operand = cast(OperandName, operand)
        if not recipe:
            amax = layouts[""].get("cur_amax", 0.0)
            if not (math.isfinite(amax) and math.isfinite(layouts[""].get("l1_norm", 0.0))):
                not_finite.add((step, site, operand))
                results.append(
                    Crossing(step=step, site=site, operand=operand, layout="", recipe="", stat="cur_amax", value=amax,
                             bound=None, gemms=())
                )  # fmt: skip
            continue
        if (step, site, operand) in not_finite:  # "" sorts before every recipe: what its copies say means nothing
            continue
        four_bits = _has_four_bits(recipe)
        for stat in _ORDER[1:]:
            bad: dict[Layout, tuple[float, float]] = {
                cast(Layout, layout): (value, bound)
                for layout, stats in layouts.items()
                if (value := stats.get(stat)) is not None
                and (bound := bounds.crossed(stat, value, four_bits=four_bits)) is not None
            }
            if not bad:
                continue
            worst, bound = (min if stat == "sqnr" else max)(bad.values())
            results.append(
                Crossing(
                    step=step,
                    site=site,
                    operand=operand,
                    layout="both" if len(bad) > 1 else next(iter(bad)),
                    recipe=recipe,
                    stat=stat,
                    value=worst,
                    bound=bound,
                    gemms=_readers(operand, bad, layouts, recipe, sites.get(site)),
                )
            )
    return sorted(results, key=lambda crossing: crossing.order)


def _readers(
    operand: OperandName, bad: Iterable[Layout], made: Iterable[str], recipe: str, site: PolicySite | None
) -> tuple[GemmName, ...]:
    """Return the GEMMs that read the bad copies."""
    gemms: list[GemmName] = [gemm for gemm in GEMMS if operand in GEMM_OPERANDS[gemm]]
    if len([*made]) > 1:
        gemms = [gemm for gemm in gemms if _layout(gemm, operand) in bad]
    running: list[GemmName] = [gemm for gemm in gemms if site is not None and site.runs.get(gemm) == recipe]
    return tuple(running or gemms)


def _has_four_bits(name: str) -> bool:
    try:
        recipe = resolve_recipe(name)
    except UnsupportedRecipeError:  # a user's own class, whose name is not registered
        return False
    return recipe is not None and SCALINGS[recipe.quantizer("input").scaling].packed > 1


def _layout(gemm: GemmName, operand: OperandName) -> Layout:
    """Return the copy of ``operand`` that ``gemm`` reads where both are made."""
    return GEMM_LAYOUTS[gemm][GEMM_OPERANDS[gemm].index(operand)]


def proposed(
    crossing: Crossing, site: PolicySite | None, fallbacks: Sequence[RecipeLike], earlier: dict[GemmName, Any]
) -> GuardFinding:
    """Return the finding, with the rule that would help.

    Args:
        fallbacks: recipes, from the first to the last resort.
        earlier: proposals for other GEMMs of this layer, which the rule repeats. Those of this one are added.
    """
    rule, reason = None, ""
    if crossing.stat == "cur_amax":
        reason = (
            "No recipe helps: look at what computes it. A loss scaler skips such steps, and the first ones that it "
            "tries are often among them."
        )
    elif site is None or site.obstacle:
        reason = f"No rule is proposed: {site.obstacle if site is not None else 'its graph is gone'}."
    else:
        changes: dict[GemmName, Any] = {
            gemm: _fallback(crossing.recipe, site.recipes[gemm], fallbacks) for gemm in crossing.gemms
        }
        if not all(_is_named(site.recipes[gemm], crossing.recipe) for gemm in changes):
            reason = (
                f"No rule is proposed: the policy of now does not give it {crossing.recipe}. An autocast region does, "
                "which is stronger than rules, or the policy has changed since."
            )
        elif any(change is None for change in changes.values()):
            reason = "No rule is proposed: it has the last recipe of guard(recipe=...) already."
        else:
            earlier |= changes
            rule = _rule(site, earlier)
    return GuardFinding(**dataclasses.asdict(crossing), rule=rule, reason=reason)


def _is_named(plain: Any, name: str) -> bool:
    recipe = resolve_recipe(plain)
    return recipe is not None and recipe.name == name


def _fallback(measured: str, now: Any, fallbacks: Sequence[RecipeLike]) -> Any:
    """Return the next recipe to try, as plain data; None: there is none."""
    recipes = [resolve_recipe(each) for each in fallbacks]
    present = resolve_recipe(now)
    place = next((i for i, recipe in enumerate(recipes) if recipe == present), -1)
    rest = fallbacks[place + 1 :]
    return (HIGH_PRECISION if rest[0] is None else rest[0]) if rest else None


def _rule(site: PolicySite, changes: Mapping[GemmName, Any]) -> Rule:
    """Return the rule that gives a site its current recipes, but for ``changes``."""
    recipes = {**site.recipes, **changes}
    rest = [recipes[gemm] for gemm in GEMMS if gemm not in changes]
    base = rest[0] if rest else recipes["fprop"]
    others = {gemm: recipe for gemm, recipe in recipes.items() if recipe != base}
    own: dict[str, Any] = {"op": site.op, "optional": not site.by_user, **others}
    return Rule(glob.escape(site.fqn), base, **own)


def python(rule: Rule) -> str:
    """Return the rule as code: ``Rule("model.layers.0.mlp.down_proj", "tensorwise", wgrad=None)``."""
    values = rule.to_dict()
    arguments = [json.dumps(values["pattern"], ensure_ascii=False), _code(values["recipe"])]
    arguments += [f"op={_code(rule.op)}"] if rule.op != "linear" else []
    arguments += [f"{gemm}={_code(values[gemm])}" for gemm in GEMMS if getattr(rule, gemm) is not INHERIT]
    return f"Rule({', '.join([*arguments, *(['optional=True'] if rule.optional else [])])})"


def _code(recipe: Any) -> str:
    if isinstance(recipe, str):
        return "None" if recipe == HIGH_PRECISION else json.dumps(recipe, ensure_ascii=False)
    return repr(recipe)
