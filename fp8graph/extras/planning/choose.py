"""Choose one option for each of many decisions, for every budget of error at once, and write the choice as few rules.

    decisions, each with options (error, seconds)    ->    a walk from no error to the least time, step by step

The walk takes the step that saves most time per error first (the steps are edges of the options' lower convex hulls, so
that each decision's own steps come in order). Every point of it is the best choice for its error if a decision could
be split in two; so it is at most one decision away from the best one there is (Sinha and Zoltners, "The
multiple-choice knapsack problem", 1979).

    {"model.layers.0.up": (t, t, None), "model.layers.1.up": (t, t, None), ...}
        ->  Rule("model.layers.*.up", t, wgrad=None)                all layers of that name
        ->  Rule(re.compile(r"model\\.layers\\.(0|3)\\.up"), ...)   some of them
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from fp8graph.recipes import GEMMS
from fp8graph.recipes.policy import Policy
from fp8graph.recipes.rules import INHERIT, GemmRecipe, Rule
from fp8graph.report.tables import any_layer

Key = TypeVar("Key", bound=Hashable)
Decided = tuple[GemmRecipe, ...]  # the recipes of fprop, dgrad and wgrad; INHERIT: the site has no such GEMM


@dataclass(frozen=True, kw_only=True)
class Option:
    """One way to run something."""

    choice: int | None  # what it is, for the caller; None: nothing is changed
    error: float
    seconds: float


@dataclass(frozen=True, kw_only=True)
class Point:
    """One point of the walk: after the options of all steps so far were taken."""

    error: float
    seconds: float


@dataclass(frozen=True)
class HullStep:
    """One decision moves from an option to the next one of its hull."""

    key: Any
    before: Option
    after: Option

    @property
    def error(self) -> float:
        return self.after.error - self.before.error

    @property
    def saved(self) -> float:
        return self.before.seconds - self.after.seconds


def hull(options: Sequence[Option]) -> list[Option]:
    """Return the options worth taking, from the least error to the least time, with falling savings per error."""
    kept: list[Option] = []
    for option in sorted(options, key=lambda option: (option.error, option.seconds)):
        if kept and option.seconds >= kept[-1].seconds:
            continue  # more error, and no time saved
        while len(kept) > 1 and not _bends_down(kept[-2], kept[-1], option):
            kept.pop()
        kept.append(option)
    return kept


def _bends_down(first: Option, middle: Option, last: Option) -> bool:
    """Return whether the first step saves more per error than the second."""
    return (first.seconds - middle.seconds) * (last.error - middle.error) > (middle.seconds - last.seconds) * (
        middle.error - first.error
    )


def steps(decisions: Mapping[Key, Sequence[Option]]) -> list[HullStep]:
    """Return all steps of all decisions, those first that save most time per error."""
    all_steps: list[HullStep] = []
    for key, options in decisions.items():
        best = hull(options)
        all_steps += [HullStep(key, before, after) for before, after in zip(best, best[1:], strict=False)]
    # a step without error comes first; sorted() keeps the order of equal ones, so the walk is reproducible
    return sorted(all_steps, key=lambda step: step.error / step.saved)


def start(decisions: Mapping[Key, Sequence[Option]]) -> dict[Key, Option]:
    """Return the option of least error of each decision."""
    return {key: hull(options)[0] for key, options in decisions.items()}


def total(chosen: Mapping[Key, Option]) -> Point:
    """Return the error and the time of a choice."""
    return Point(
        error=sum(option.error for option in chosen.values()), seconds=sum(option.seconds for option in chosen.values())
    )


def curve(decisions: Mapping[Key, Sequence[Option]]) -> list[Point]:
    """Return the whole walk, from the least error to the least time."""
    first = total(start(decisions))
    points = [first]
    for step in steps(decisions):
        last = points[-1]
        points.append(Point(error=last.error + step.error, seconds=last.seconds - step.saved))
    return points


def within_error(decisions: Mapping[Key, Sequence[Option]], most: float) -> dict[Key, Option]:
    """Return the choice of least time that the walk finds with an error of at most ``most``.

    Steps that no longer fit are left out, and smaller ones behind them are still taken.
    """
    chosen: dict[Any, Option] = dict(start(decisions))
    error = sum(option.error for option in chosen.values())
    for step in steps(decisions):
        if chosen[step.key] is step.before and error + step.error <= most * (1 + 1e-12):
            chosen[step.key] = step.after
            error += step.error
    return {key: chosen[key] for key in decisions}


def within_seconds(decisions: Mapping[Key, Sequence[Option]], most: float) -> dict[Key, Option] | None:
    """Return the choice of least error that the walk finds with a time of at most ``most``; None if there is none."""
    chosen: dict[Any, Option] = dict(start(decisions))
    seconds = sum(option.seconds for option in chosen.values())
    walk: list[HullStep] = []
    for step in steps(decisions):
        if seconds <= most * (1 + 1e-12):
            break
        chosen[step.key] = step.after
        seconds -= step.saved
        walk.append(step)
    if seconds > most * (1 + 1e-9):
        return None
    for step in reversed(walk):  # the last step may have saved more than was needed: take back what is not
        if chosen[step.key] is step.after and seconds + step.saved <= most:
            chosen[step.key] = step.before
            seconds += step.saved
    return {key: chosen[key] for key in decisions}


def policy_of(decisions: Mapping[tuple[str, str], Decided], *, extends: str | None = "default") -> Policy:
    """Return a policy that decides as ``decisions`` say: the key is a layer's name and the kind of its matmul.

    The most frequent decision about linears, if it is one recipe for all GEMMs, is the policy's default.
    """
    linears = Counter(
        whole for (_, op), d in decisions.items() if op == "linear" and (whole := _whole(d)) is not INHERIT
    )
    default: GemmRecipe = max(linears, key=lambda recipe: linears[recipe]) if linears else None
    rules: list[Rule] = []
    by_family: dict[tuple[str, str], list[str]] = {}
    for fqn, op in decisions:
        by_family.setdefault((_family(fqn), op), []).append(fqn)
    for (family, op), names in by_family.items():
        by_decision: dict[Decided, list[str]] = {}
        for name in names:
            by_decision.setdefault(decisions[name, op], []).append(name)
        for decided, some in by_decision.items():
            if op == "linear" and _whole(decided) == default:
                continue
            pattern = _glob(family, names) if len(by_decision) == 1 else _pattern(some)
            rules.append(_rule(pattern, decided, op))
    return Policy(rules, default=default, extends=extends, min_speedup=0)  # profit was judged before


def _whole(decided: Decided) -> GemmRecipe:
    """Return the recipe of all GEMMs; INHERIT if they have several."""
    own = [recipe for recipe in decided if recipe is not INHERIT]
    return own[0] if own and all(recipe == own[0] for recipe in own) else INHERIT


def _rule(pattern: str | re.Pattern[str], decided: Decided, op: str) -> Rule:
    own = {gemm: recipe for gemm, recipe in zip(GEMMS, decided, strict=True) if recipe is not INHERIT}
    counted: Counter[Any] = Counter(own.values())
    recipe = counted.most_common(1)[0][0]
    others: dict[str, Any] = {gemm: other for gemm, other in own.items() if other != recipe}
    return Rule(pattern, recipe, op=op, **others)


def _family(fqn: str) -> str:
    """Return a name without its numbers, the last one included: "model.layers.*.mlp.up_proj"."""
    return any_layer(f"{fqn}.").removesuffix(".")


def _glob(family: str, names: Sequence[str]) -> str | re.Pattern[str]:
    """Give the glob of a whole family; a name that is alone in it, and names with characters of globs, as they are."""
    if len(names) == 1 or any(c in family for c in "[]?"):
        return _pattern(names)
    return family


def _pattern(names: Sequence[str]) -> str | re.Pattern[str]:
    if len(names) == 1:
        return names[0] if not any(c in names[0] for c in "[]?*") else re.compile(re.escape(names[0]))
    parts = [name.split(".") for name in names]
    if len({len(p) for p in parts}) == 1:
        columns = [list(dict.fromkeys(column)) for column in zip(*parts, strict=True)]
        if sum(len(column) > 1 for column in columns) == 1:  # layers that differ in one number
            joined = (_one_of(column) for column in columns)
            return re.compile(r"\.".join(joined))
    return re.compile("|".join(map(re.escape, names)))


def _one_of(column: Sequence[str]) -> str:
    return re.escape(column[0]) if len(column) == 1 else f"({'|'.join(map(re.escape, column))})"
