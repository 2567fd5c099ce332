"""Choose the policy of a graph: the user's, or the default with the rules of the model's families."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Collection, Mapping
from typing import Any

from fp8graph import hardware
from fp8graph.hardware import Hardware
from fp8graph.models import extended
from fp8graph.recipes import RecipeLike, resolve_recipe
from fp8graph.recipes.autocast import DISABLED, POLICY
from fp8graph.recipes.policy import Policy

PolicyLike = Policy | Mapping[str, Any] | str | os.PathLike[str]


class InForce:
    """A policy from one change to the next.

    A forward that activation checkpointing repeats keeps the one under which it ran first.
    """

    def __init__(self, asked: Policy, target: Hardware | None) -> None:
        self.asked, self._target = asked, target
        self._resolved: dict[tuple[str, ...], tuple[Policy, str]] = {}
        self.current, _ = self.of(())

    def of(self, families: tuple[str, ...]) -> tuple[Policy, str]:
        """The policy for a graph of models of ``families`` (which add to the default policy), and its identity."""
        if self.asked.extends is None:
            families = ()
        if families not in self._resolved:
            recipe = (self._target or hardware.of_machine()).default_recipe
            policy = extended(self.asked, families, recipe)
            self._resolved[families] = policy, policy.identity()
        return self._resolved[families]

    def may_rewrite(self, regions: Collection[Any]) -> bool:
        """Whether any GEMM could get a recipe. If none could, Inductor's options stay exactly the user's.

        Args:
            regions: the autocast regions around the call and in the graph.
        """
        quiet = (None, DISABLED, POLICY)
        return bool(self.current.recipes()) or any(region not in quiet for region in regions)


class Policies:
    """The policy of one backend, which may change during training.

    Args:
        target: the hardware that the default policy is for; None: this machine.
    """

    def __init__(self, target: Hardware | None) -> None:
        self._target = target
        self._step = 0  # of training
        self._families: set[tuple[str, ...]] = {()}  # of all graphs so far
        self.set(None)

    def set(self, policy: PolicyLike | None, recipe: RecipeLike = None) -> None:
        """Use another policy; see :meth:`Backend.set_policy`."""
        asked = Policy(extends="default") if policy is None else Policy.coerce(policy)
        if recipe is not None:
            resolve_recipe(recipe)
            asked = dataclasses.replace(asked, default=recipe)
        self.now = InForce(asked.at_step(self._step) if asked.scheduled else asked, self._target)
        self.scheduled = asked if asked.scheduled else None  # all of it

    def advance(self, step: int) -> bool:
        """Take a policy with a schedule as it is at ``step``; whether that is another policy than before."""
        before, self._step = self._step, step
        if self.scheduled is None or self.scheduled.phase(before) == self.scheduled.phase(step):
            return False
        self.set(self.scheduled)
        return True

    @property
    def asked(self) -> Policy:
        """The policy as the user gave it, one with a schedule as it is at the step of now."""
        return self.now.asked

    @property
    def current(self) -> Policy:
        """The policy in force, for a model of no known family."""
        return self.now.current

    def of(self, families: tuple[str, ...]) -> tuple[Policy, str]:
        """The policy in force for a graph of models of ``families``, and its identity."""
        self._families.add(families)
        return self.now.of(families)

    def identities(self) -> frozenset[str]:
        """The policies that decide now, one for each choice of families that was met."""
        return frozenset(self.of(families)[1] for families in [*self._families])

    def lines(self) -> list[str]:
        """The policy in words, for a comparison with other ranks."""
        policy = self.scheduled or self.current  # ranks may compile for inference at different steps
        rules = [f"rule {index} {rule!r}" for index, rule in enumerate(policy.rules)]
        heads = ["keep_heads"] if policy.keep_heads else []
        return [*rules, f"default {policy.default!r}", f"min_speedup {policy.min_speedup}", *heads]
