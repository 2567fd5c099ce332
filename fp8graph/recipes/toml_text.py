"""Policies as TOML, which ``Policy.load`` reads. The standard library only reads TOML."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, cast

from fp8graph.errors import PolicyError
from fp8graph.recipes.policy import Policy
from fp8graph.recipes.rules import Rule


def policy_toml(policy: Policy) -> str:
    """The text of a policy file.

    Raises:
        UnsupportedRecipeError: a recipe holds a function.
        PolicyError: a string has no form in UTF-8.
    """
    values = policy.to_dict()
    head = [f"{name} = {_value(value)}" for name, value in values.items() if name != "rules"]
    return "\n\n".join(["\n".join(head), *map(rule_toml, policy.rules)]) + "\n"


def rule_toml(rule: Rule) -> str:
    """One rule of a policy file."""
    return "\n".join(["[[rules]]", *(f"{name} = {_value(value)}" for name, value in rule.to_dict().items())])


def _value(value: Any) -> str:
    if isinstance(value, Mapping):
        given = {name: each for name, each in cast(Any, value).items() if each is not None}  # TOML has no null
        return "{ " + ", ".join(f"{name} = {_value(each)}" for name, each in given.items()) + " }"
    if isinstance(value, list):
        return f"[{', '.join(map(_value, cast(list[Any], value)))}]"
    if isinstance(value, str) and any("\ud800" <= one <= "\udfff" for one in value):
        raise PolicyError(f"{value!r} cannot be written to a file: half of a surrogate pair is no character.")
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")  # strings, numbers, booleans
