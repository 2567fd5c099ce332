"""Policy: ordered rules that give each site a recipe per GEMM. First full match wins.

The idea of ordered, fully matched rules and of reporting the unused ones is qwix's
(``google/qwix``, ``_src/qconfig.py``).
"""

from __future__ import annotations

import dataclasses
import enum
import fnmatch
import json
import math
import os
import re
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import Any, Final, Literal, cast

from fp8graph.errors import Fp8GraphError, PolicyError
from fp8graph.recipes import GEMMS, HIGH_PRECISION, GemmName, Recipe, RecipeLike, resolve_recipe

Op = Literal["linear", "matmul", "grouped_mm"]
OPS: Final[tuple[str, ...]] = ("linear", "matmul", "grouped_mm", "*")
# What `Policy.default` covers. Activation x activation products are left alone unless a rule asks.
DEFAULT_OPS: Final[tuple[str, ...]] = ("linear", "grouped_mm")
# Above what the speed model cannot tell: measured rates of one kind of GPU differ by 4 % (roofline.py).
MIN_SPEEDUP: Final = 1.05


class _Inherit(enum.Enum):
    """The type of :data:`INHERIT` (an enum, so that copies and pickles stay the same object)."""

    INHERIT = "inherit"

    def __repr__(self) -> str:
        return "INHERIT"


INHERIT: Final = _Inherit.INHERIT
GemmRecipe = RecipeLike | Literal[_Inherit.INHERIT]


@dataclass(frozen=True)
class Rule:
    """One line of a policy.

    Args:
        pattern: a glob over the whole FQN (``fnmatch``, case-sensitive), or a compiled regular
            expression that must match the whole FQN.
        recipe: a recipe object or name; ``None`` or "high_precision" leaves the GEMMs alone.
        op: "linear" (one operand comes from a parameter), "matmul" (both are activations),
            "grouped_mm", or "*".
        fprop, dgrad, wgrad: another recipe for one of the three GEMMs.
        optional: a rule that may match nothing (the general policy's list of usual head names).
        steps: ``(first, end)``: the rule is there from step ``first`` to before step ``end`` (None: for good); see
            :meth:`Policy.at_step`.

    Raises:
        PolicyError: (a ``ValueError``) for a value of the wrong type; ``UnsupportedRecipeError`` for a recipe that
            does not exist.
    """

    pattern: str | re.Pattern[str]
    recipe: RecipeLike
    _: KW_ONLY
    op: str = "linear"
    fprop: GemmRecipe = INHERIT
    dgrad: GemmRecipe = INHERIT
    wgrad: GemmRecipe = INHERIT
    optional: bool = False
    steps: tuple[int, int | None] | None = None

    def __post_init__(self) -> None:
        pattern: object = self.pattern
        if not isinstance(pattern, (str, re.Pattern)) or (
            isinstance(pattern, re.Pattern) and not isinstance(pattern.pattern, str)
        ):
            raise PolicyError(
                f"{self}: the pattern must be a glob (str) or re.compile(...), not {type(pattern).__name__}."
            )
        if self.op not in OPS:
            raise PolicyError(f"{self}: op must be one of {', '.join(OPS)}, not {self.op!r}.")
        if type(self.optional) is not bool:
            raise PolicyError(f"{self}: optional must be True or False.")
        self._check_steps()
        for name in ("recipe", *GEMMS):
            object.__setattr__(self, name, _normal(getattr(self, name)))
        for gemm in GEMMS:
            try:
                self.recipe_for(gemm)
            except Fp8GraphError as error:
                raise type(error)(f"{self}: {error}") from None

    def _check_steps(self) -> None:
        steps: Any = self.steps
        if isinstance(steps, list):  # TOML and JSON have no tuples
            steps = tuple(cast(list[Any], steps))
            object.__setattr__(self, "steps", steps if len(steps) != 1 else (*steps, None))  # TOML has no null
        if self.steps is None:
            return
        first, end = self.steps if isinstance(self.steps, tuple) and len(self.steps) == 2 else (None, None)
        if type(first) is not int or first < 0 or (end is not None and (type(end) is not int or end <= first)):
            raise PolicyError(f"{self}: steps must be (first, end) with 0 <= first < end, or end None; not {steps!r}.")

    def __str__(self) -> str:
        if isinstance(self.pattern, re.Pattern):
            return f"Rule(re.compile({self.pattern.pattern!r}), ...)"
        return f"Rule({self.pattern!r}, ...)"

    @property
    def text(self) -> str:
        """The glob or the regular expression as text."""
        return self.pattern.pattern if isinstance(self.pattern, re.Pattern) else self.pattern

    def matches(self, fqn: str, op: str) -> bool:
        """Whether this rule decides the site ``fqn``."""
        if self.op not in ("*", op):
            return False
        if isinstance(self.pattern, re.Pattern):
            return self.pattern.fullmatch(fqn) is not None
        return fnmatch.fnmatchcase(fqn, self.pattern)

    def recipe_for(self, gemm: GemmName) -> Recipe | None:
        """The recipe of one GEMM; ``None`` leaves it in high precision."""
        own = cast(GemmRecipe, getattr(self, gemm))
        return resolve_recipe(self.recipe if own is INHERIT else own)

    def to_dict(self) -> dict[str, Any]:
        """The form of a policy file: only what differs from the defaults."""
        key = "regex" if isinstance(self.pattern, re.Pattern) else "pattern"
        text = _inline_flags(self.pattern) + self.text
        values: dict[str, Any] = {key: text, "recipe": _recipe_to_plain(self.recipe)}
        if self.op != "linear":
            values["op"] = self.op
        for gemm in GEMMS:
            if (own := getattr(self, gemm)) is not INHERIT:
                values[gemm] = _recipe_to_plain(own)
        if self.optional:
            values["optional"] = True
        if self.steps is not None:
            values["steps"] = [step for step in self.steps if step is not None]
        return values


@dataclass(frozen=True)
class Resolution:
    """What a policy says about one site: a recipe per GEMM, and who said so."""

    recipes: Mapping[GemmName, Recipe | None]
    source: str  # 'rule 3 "*.mlp.down_proj"', "default", ...
    rule: int | None = None  # index into Policy.rules; None: the default
    by_user: bool = False  # a rule (not the default) asked for it


@dataclass(frozen=True)
class Policy:
    """Ordered rules; the first full match wins; ``default`` covers what no rule matched.

    Args:
        rules: :class:`Rule` objects.
        default: recipe of the linears and grouped matmuls that no rule matches. Activation x activation
            matmuls (``op="matmul"``) are left alone unless a rule asks.
        min_speedup: a GEMM is rewritten only where the speed model of the target predicts at least this
            gain over bf16 (the default leaves out what is within the model's own error); 0 rewrites whatever is legal.
            CPUs and emulated GEMMs have no speed model.

    Raises:
        PolicyError, UnsupportedRecipeError: (``ValueError``) for values that cannot be used.
    """

    rules: Sequence[Rule] = ()
    _: KW_ONLY
    default: RecipeLike = "tensorwise"
    min_speedup: float = MIN_SPEEDUP

    def __post_init__(self) -> None:
        rules: object = self.rules
        if isinstance(rules, Rule) or not isinstance(rules, Iterable):
            raise PolicyError(f"Policy(rules=...): a list of Rule is needed, not {rules!r}.")
        object.__setattr__(self, "rules", tuple(cast(Iterable[Rule], rules)))
        for rule in self.rules:
            if not isinstance(rule, Rule):
                raise PolicyError(f"Policy(rules=...): {rule!r} is not a Rule. Write Rule(pattern, recipe).")
        object.__setattr__(self, "default", _normal(self.default))
        resolve_recipe(self.default)
        speedup: object = self.min_speedup
        if type(speedup) not in (int, float) or not (0 <= self.min_speedup < math.inf):
            raise PolicyError(f"Policy(min_speedup={speedup!r}): a finite number >= 0 is needed.")

    def resolve(self, fqn: str, op: str) -> Resolution:
        """The recipes of the three GEMMs of site ``fqn``."""
        for index, rule in enumerate(self.rules):
            if rule.matches(fqn, op):
                return Resolution(
                    {gemm: rule.recipe_for(gemm) for gemm in GEMMS},
                    source=f'rule {index} "{rule.text}"',
                    rule=index,
                    by_user=not rule.optional,
                )
        if op not in DEFAULT_OPS:
            return Resolution(
                dict.fromkeys(GEMMS),
                source=f'no rule: op="{op}" is left alone unless a rule asks for it',
            )
        return Resolution(dict.fromkeys(GEMMS, resolve_recipe(self.default)), source="default")

    @property
    def scheduled(self) -> bool:
        """Whether some rule is not there in every step."""
        return any(rule.steps is not None for rule in self.rules)

    def at_step(self, step: int) -> Policy:
        """The policy of one training step: the rules that are there then, without their schedule.

        ``Rule("*", None, steps=(0, 100))`` as the first rule keeps 100 steps in high precision. Call
        ``backend.set_policy(policy.at_step(step))`` before each step: a change recompiles, and what was compiled
        for an earlier policy is used again when that comes back.

        Raises:
            PolicyError: (a ``ValueError``) for a step that is not a whole number >= 0.
        """
        if type(step) is not int or step < 0:
            raise PolicyError(f"Policy.at_step({step!r}): a whole number >= 0 is needed.")
        there = [r for r in self.rules if r.steps is None or r.steps[0] <= step < (r.steps[1] or math.inf)]
        return dataclasses.replace(self, rules=[dataclasses.replace(rule, steps=None) for rule in there])

    def recipes(self) -> set[Recipe]:
        """Every recipe that a rule or the default may give."""
        named = [resolve_recipe(self.default), *(rule.recipe_for(gemm) for rule in self.rules for gemm in GEMMS)]
        return {recipe for recipe in named if recipe is not None}

    def identity(self) -> str:
        """A text that is equal for policies that decide alike: names are resolved to what they stand for now."""
        recipes = [[rule.recipe_for(gemm) for gemm in GEMMS] for rule in self.rules]
        # repr() of a compiled expression shows 200 characters of it: the text and the flags say it all
        patterns = [(rule.text, _flags(rule.pattern), rule.op, rule.optional, rule.steps) for rule in self.rules]
        return repr((patterns, recipes, resolve_recipe(self.default), self.min_speedup))

    def to_dict(self) -> dict[str, Any]:
        """Plain values, the structure of a policy file."""
        return {
            "default": _recipe_to_plain(self.default),
            "min_speedup": self.min_speedup,
            "rules": [rule.to_dict() for rule in self.rules],
        }

    @staticmethod
    def from_dict(values: Mapping[str, Any]) -> Policy:
        """The inverse of :meth:`to_dict`. Raises PolicyError for an unknown key or a wrong type."""
        _check_keys("policy", values, {"default", "min_speedup", "rules"})
        rules = values.get("rules", [])
        if not isinstance(rules, list):
            raise PolicyError(f"policy: 'rules' must be a list of tables, not {rules!r}.")
        settings = {k: v for k, v in values.items() if k != "rules"}
        return Policy(tuple(_rule_from_dict(i, rule) for i, rule in enumerate(rules)), **settings)

    @staticmethod
    def load(path: str | os.PathLike[str]) -> Policy:
        """Read a ``.toml`` or ``.json`` file. Data only: nothing in it is run.

        Raises:
            PolicyError: the file is missing, malformed, or holds an unknown key; the message names the file.
        """
        file = Path(path)
        try:
            text = file.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise PolicyError(f"policy file {file}: cannot be read ({error}).") from None
        try:
            values = json.loads(text) if file.suffix == ".json" else tomllib.loads(text)
        except ValueError as error:  # both decoders' errors
            kind = "JSON" if file.suffix == ".json" else "TOML"
            raise PolicyError(f"policy file {file}: malformed {kind}: {error}.") from None
        if not isinstance(values, dict):
            raise PolicyError(f"policy file {file}: a table of rules is needed, not {values!r}.")
        try:
            return Policy.from_dict(cast(dict[str, Any], values))
        except Fp8GraphError as error:
            raise type(error)(f"policy file {file}: {error}") from None

    @staticmethod
    def coerce(value: Policy | Mapping[str, Any] | str | os.PathLike[str]) -> Policy:
        """A policy from what users pass: a Policy, its dict form, or a path."""
        if isinstance(value, Policy):
            return value
        if isinstance(value, Mapping):
            return Policy.from_dict(value)
        if isinstance(value, (str, os.PathLike)):
            return Policy.load(value)
        raise PolicyError(f"policy must be a Policy, a dict or a path, not {value!r}.")


def _normal(recipe: Any) -> Any:
    """One form for each recipe, so that equal policies compare equal; names stay names."""
    if isinstance(recipe, dict):
        return resolve_recipe(cast(dict[str, Any], recipe))
    return None if recipe == HIGH_PRECISION else recipe


def _flags(pattern: str | re.Pattern[str]) -> int | None:
    return pattern.flags if isinstance(pattern, re.Pattern) else None


def _inline_flags(pattern: str | re.Pattern[str]) -> str:
    """``(?i)`` and the like: flags given to re.compile, written into the expression. Empty for a glob."""
    letters = {re.A: "a", re.I: "i", re.L: "L", re.M: "m", re.S: "s", re.X: "x"}
    flags = _flags(pattern) or 0
    text = "".join(letter for flag, letter in letters.items() if flags & flag)
    return f"(?{text})" if text else ""


def _recipe_to_plain(recipe: GemmRecipe) -> Any:
    if isinstance(recipe, Recipe):
        return recipe.to_dict()
    return HIGH_PRECISION if recipe is None else recipe


def _check_keys(where: str, values: object, known: set[str]) -> None:
    if not isinstance(values, Mapping):
        raise PolicyError(f"{where}: a table is needed, not {values!r}.")
    if unknown := sorted(str(k) for k in cast(Mapping[str, Any], values).keys() - known):
        raise PolicyError(f"{where}: unknown key {unknown[0]!r}. Known: {', '.join(sorted(known))}.")


def _rule_from_dict(index: int, values: Any) -> Rule:
    where = f"rule {index}"
    _check_keys(where, values, {"pattern", "regex", "recipe", "op", "optional", "steps", *GEMMS})
    settings = dict(cast(Mapping[str, Any], values))
    if ("pattern" in settings) == ("regex" in settings):
        raise PolicyError(f"{where}: exactly one of 'pattern' (a glob) and 'regex' is needed.")
    if "recipe" not in settings:
        raise PolicyError(f"{where}: 'recipe' is missing (\"{HIGH_PRECISION}\" leaves the layer alone).")
    pattern: Any = settings.pop("pattern", None)
    if (regex := settings.pop("regex", None)) is not None:
        try:
            pattern = re.compile(regex)
        except (re.error, TypeError) as error:
            raise PolicyError(f"{where}: regex {regex!r} does not compile: {error}.") from None
    return Rule(pattern, settings.pop("recipe"), **settings)
