"""The circumstances that a call depends on, beside its arguments."""

from __future__ import annotations

import dataclasses
from typing import Any

from fp8graph.errors import Fp8GraphError
from fp8graph.ir.observed import Observed
from fp8graph.recipes import Recipe
from fp8graph.recipes.autocast import region_recipe
from fp8graph.recipes.rules import INHERIT


@dataclasses.dataclass(frozen=True, kw_only=True)
class Situation:
    """Everything outside the graph, but for names, that decides how it is rewritten."""

    policy: str
    region: str | Recipe | None
    amax_group: str | None  # process group of the amax reduction
    sent: frozenset[int] = frozenset()  # parameters that FSDP2 gathered in FP8
    observed: Observed | None = None  # what is measured, on the steps that ask for it


def region_text(region: Any) -> str:
    """A region's present meaning: a recipe that is registered again under its name is another recipe."""
    try:
        recipe = region_recipe(region)
    except Fp8GraphError:
        return "unknown"  # the pass `assign` raises this error, and says where
    return "policy" if recipe is INHERIT else repr(recipe)
