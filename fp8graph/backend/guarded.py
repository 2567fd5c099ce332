"""The rules that guards put into a backend's policy: applied once, reported, and saved with its state."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor

from fp8graph.backend.policies import Policies
from fp8graph.errors import Fp8GraphError, StateError
from fp8graph.recipes.policy import Policy
from fp8graph.recipes.rules import Rule, rule_from_dict
from fp8graph.runtime.call import Epoch
from fp8graph.runtime.state_dict import guard_entry


class Guarded:
    """The rules that were applied. A later ``set_policy`` of the user replaces them with the rest of the policy."""

    def __init__(self, policies: Policies, epoch: Epoch) -> None:
        self._policies, self._epoch = policies, epoch
        self._applied: list[tuple[Rule, str]] = []

    @property
    def policy(self) -> Policy:
        """The whole policy that is in force, with its schedule."""
        return self._policies.scheduled or self._policies.asked

    def apply(self, rules: Iterable[tuple[Rule, str]]) -> None:
        """Put rules before the others, each with what the report says of it. One layer has one such rule."""
        new = [*rules]
        known = [rule for rule, _ in self._applied]
        policy = with_rules(self.policy, [rule for rule, _ in new], known)
        if policy != self.policy:
            self._policies.set(policy)
            self._epoch.advance()
        texts = [text for _, text in self._applied]
        self._applied += [entry for entry in new if entry[1] not in texts]

    @property
    def _in_force(self) -> list[tuple[Rule, str]]:
        layers = [(rule.pattern, rule.op) for rule in self.policy.rules if rule in [r for r, _ in self._applied]]
        return [entry for entry in self._applied if (entry[0].pattern, entry[0].op) in layers]

    @property
    def texts(self) -> list[str]:
        """What was applied and is in force, for the report."""
        return [text for _, text in self._in_force]

    def entries(self) -> dict[str, Tensor]:
        """What a state dict has of it."""
        return guard_entry([{"rule": rule.to_dict(), "text": text} for rule, text in self._in_force])

    def loader(self, saved: list[Any]) -> Callable[[], None]:
        """Apply the rules of a state dict when the result is called. Raises StateError now, if they are no rules."""
        try:
            rules = [(rule_from_dict(i, entry["rule"]), str(entry["text"])) for i, entry in enumerate(saved)]
        except (Fp8GraphError, KeyError, TypeError) as error:
            raise StateError(
                f"not a valid fp8graph state dict: a rule of a guard cannot be read ({error}). Nothing was loaded."
            ) from None
        return lambda: self.apply(rules) if rules else None


def with_rules(policy: Policy, rules: Iterable[Rule], replaced: Iterable[Rule] = ()) -> Policy:
    """``policy`` with other rules before its own. ``replaced``: those that go if a new one is for their layer."""
    last = {(rule.pattern, rule.op): rule for rule in rules}
    gone = [rule for rule in replaced if (rule.pattern, rule.op) in last]
    own = [rule for rule in policy.rules if rule not in gone and rule not in last.values()]
    return dataclasses.replace(policy, rules=[*last.values(), *own])
