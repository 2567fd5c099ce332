"""The circumstances that a call depends on, beside its arguments."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

from fp8graph.backend.policies import InForce
from fp8graph.errors import Fp8GraphError
from fp8graph.ir.observed import Observed
from fp8graph.recipes import Recipe
from fp8graph.recipes.autocast import region_recipe
from fp8graph.recipes.rules import INHERIT


class Moment(NamedTuple):
    """The part of a situation that the time of a call decides. A forward is repeated as it was the first time."""

    region: str | Recipe | None
    amax_group: str | None
    in_force: InForce
    observed: Observed | None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Situation:
    """Everything outside the graph, but for names, that decides how it is rewritten."""

    policy: str
    region: str | Recipe | None
    amax_group: str | None  # process group of the amax reduction
    sent: frozenset[int] = frozenset()  # parameters that FSDP2 gathered in FP8
    observed: Observed | None = None  # what is measured, on the steps that ask for it
    in_force: InForce = dataclasses.field(repr=False, compare=False)  # what ``policy`` is the identity of


def region_text(region: Any) -> str:
    """A region's present meaning: a recipe that is registered again under its name is another recipe."""
    try:
        recipe = region_recipe(region)
    except Fp8GraphError:
        return "unknown"  # the pass `assign` raises this error, and says where
    return "policy" if recipe is INHERIT else repr(recipe)
