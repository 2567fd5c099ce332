"""Rules before those of a policy, and what is saved of them."""

from __future__ import annotations

import json

import pytest
import torch

from fp8graph import Backend, Policy, Rule
from fp8graph.errors import StateError
from fp8graph.passes.observe.guard import Guarded, with_rules
from fp8graph.runtime.policies import Policies

FIRST, SECOND = Rule("up", "tensorwise", dgrad=None), Rule("up", None)
USERS = Policy([Rule("up", "tensorwise"), Rule("*", None, steps=(0, 10))], default="tensorwise")


def guarded() -> tuple[Guarded, Policies]:
    backend = Backend(USERS)
    return backend.store(Guarded), backend.services.policies


def test_one_rule_per_layer_before_the_users() -> None:
    policy = with_rules(USERS, [FIRST])
    assert policy.rules == (FIRST, *USERS.rules)
    assert with_rules(policy, [SECOND], [FIRST]).rules == (SECOND, *USERS.rules)
    assert with_rules(policy, [FIRST]) == policy
    assert with_rules(USERS, [FIRST, SECOND]).rules == (SECOND, *USERS.rules)


def test_a_schedule_is_kept() -> None:
    own, policies = guarded()
    own.apply([(FIRST, "why")])
    assert own.policy.rules == (FIRST, *USERS.rules)
    assert policies.current == own.policy.at_step(0)
    policies.advance(10)
    assert policies.current == own.policy.at_step(10)


def test_saved_rules_are_the_current_rules() -> None:
    own, policies = guarded()
    assert own.entries() == {}
    own.apply([(FIRST, "first")])
    own.apply([(SECOND, "second")])
    assert own.report()["guard"] == ["first", "second"]
    other, _ = guarded()
    other.loader(own.entries())()
    assert (other.policy, other.report()["guard"]) == (own.policy, own.report()["guard"])
    policies.set(USERS)
    assert (own.report()["guard"], own.entries()) == ([], {})


def test_rules_that_cannot_be_read() -> None:
    own, _ = guarded()
    for wrong in ({"rule": {"pattern": 3}, "text": ""}, {"text": ""}, 3):
        with pytest.raises(StateError, match="a rule of a guard cannot be read"):
            own.loader({"fp8graph.guard": torch.tensor([*json.dumps([wrong]).encode()], dtype=torch.uint8)})
    assert own.policy == USERS
