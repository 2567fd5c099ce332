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
        self._step = 0  # of training
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
        self.scheduled = self.current if self.current.scheduled else None  # all of it
        if self.scheduled is not None:
            self.current = self.scheduled.at_step(self._step)
        self._families: dict[tuple[str, ...], tuple[Policy, str]] = {(): (self.current, self.current.identity())}

    def advance(self, step: int) -> bool:
        """Take a policy with a schedule as it is at ``step``; whether that is another policy than before."""
        before, self._step = self._step, step
        if self.scheduled is None or self.scheduled.phase(before) == self.scheduled.phase(step):
            return False
        self.set(self.scheduled)
        return True

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
        policy = self.scheduled or self.current  # ranks may compile for inference at different steps
        rules = [f"rule {index} {rule!r}" for index, rule in enumerate(policy.rules)]
        return [*rules, f"default {policy.default!r}", f"min_speedup {policy.min_speedup}"]
