"""Choose the policy of a graph: the user's, or the default with the rules of the model's families."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from typing import Any

from fp8graph import hardware
from fp8graph.hardware import Hardware
from fp8graph.models import general_policy, policy_of
from fp8graph.recipes import GEMMS, RecipeLike, resolve_recipe
from fp8graph.recipes.autocast import DISABLED, POLICY
from fp8graph.recipes.policy import Policy

PolicyLike = Policy | Mapping[str, Any] | str | os.PathLike[str]


class Policies:
    """The policy of one backend, which may change during training.

    Args:
        target: the hardware that the default policy is for; None: this machine.
    """

    def __init__(self, target: Hardware | None) -> None:
        self._target = target
        self.set(None)

    def set(self, policy: PolicyLike | None, recipe: RecipeLike = None) -> None:
        """Use another policy; see :meth:`Backend.set_policy`."""
        self.chosen = policy is not None  # whether the user chose the policy
        if policy is None:
            self.current = general_policy((self._target or hardware.of_machine()).default_recipe)
        else:
            self.current = Policy.coerce(policy)
        if recipe is not None:
            resolve_recipe(recipe)
            self.current = Policy(self.current.rules, default=recipe, min_speedup=self.current.min_speedup)
        if self.current.scheduled:
            self.current = self.current.at_step(0)
        self._families: dict[tuple[str, ...], tuple[Policy, str]] = {(): (self.current, self.current.identity())}

    def of(self, families: tuple[str, ...]) -> tuple[Policy, str]:
        """The policy for models of ``families`` (their default, unless the user chose one), and its identity."""
        if self.chosen:
            families = ()
        if families not in self._families:
            policy = policy_of(families, self.current.default)
            self._families[families] = policy, policy.identity()
        return self._families[families]

    def may_rewrite(self, regions: Collection[Any]) -> bool:
        """Whether any GEMM could get a recipe. If none could, Inductor's options stay exactly the user's.

        Args:
            regions: the autocast regions around the call and in the graph.
        """
        recipes = [resolve_recipe(self.current.default)]
        recipes += [rule.recipe_for(gemm) for rule in self.current.rules for gemm in GEMMS]
        quiet = (None, DISABLED, POLICY)
        return any(recipe is not None for recipe in recipes) or any(region not in quiet for region in regions)

    def lines(self) -> list[str]:
        """The policy in words, for a comparison with other ranks."""
        rules = [f"rule {index} {rule!r}" for index, rule in enumerate(self.current.rules)]
        return [*rules, f"default {self.current.default!r}", f"min_speedup {self.current.min_speedup}"]
