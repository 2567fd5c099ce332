"""Few ordered rules for many decisions: layers that are decided alike share a rule.

{"model.layers.0.up": (t, t, None), "model.layers.1.up": (t, t, None), ...}
    ->  Rule("model.layers.*.up", t, wgrad=None)        all layers of that name
    ->  Rule(re.compile(r"model\\.layers\\.(0|3)\\.up"), ...)   some of them
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from fp8graph.recipes.policy import INHERIT, Policy
from fp8graph.recipes.quantizer import GEMMS
from fp8graph.recipes.rules import GemmRecipe, Rule
from fp8graph.report.tables import any_layer

Decided = tuple[GemmRecipe, ...]  # the recipes of fprop, dgrad and wgrad; INHERIT: of a GEMM that the site lacks


def policy_of(decisions: Mapping[tuple[str, str], Decided], *, extends: str | None = "default") -> Policy:
    """A policy that decides as ``decisions`` say: the key is a layer's name and the kind of its matmul.

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
        alike: dict[Decided, list[str]] = {}
        for name in names:
            alike.setdefault(decisions[name, op], []).append(name)
        for decided, some in alike.items():
            if op == "linear" and _whole(decided) == default:
                continue
            pattern = _glob(family, names) if len(alike) == 1 else _pattern(some)
            rules.append(_rule(pattern, decided, op))
    return Policy(rules, default=default, extends=extends, min_speedup=0)  # profit was judged before


def _whole(decided: Decided) -> GemmRecipe:
    """The recipe of all GEMMs; INHERIT if they have several."""
    own = [recipe for recipe in decided if recipe is not INHERIT]
    return own[0] if own and all(recipe == own[0] for recipe in own) else INHERIT


def _rule(pattern: str | re.Pattern[str], decided: Decided, op: str) -> Rule:
    own = {gemm: recipe for gemm, recipe in zip(GEMMS, decided, strict=True) if recipe is not INHERIT}
    counted: Counter[Any] = Counter(own.values())
    recipe = counted.most_common(1)[0][0]
    others: dict[str, Any] = {gemm: other for gemm, other in own.items() if other != recipe}
    return Rule(pattern, recipe, op=op, **others)


def _family(fqn: str) -> str:
    """A name without its numbers, the last one included: "model.layers.*.mlp.up_proj"."""
    return any_layer(f"{fqn}.").removesuffix(".")


def _glob(family: str, names: Sequence[str]) -> str | re.Pattern[str]:
    """The glob of a whole family; a name that is alone in it, and names with characters of globs, as they are."""
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
