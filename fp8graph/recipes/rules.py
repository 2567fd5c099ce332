"""One rule of a policy: the layers it matches, and a recipe for each of their GEMMs."""

from __future__ import annotations

import dataclasses
import enum
import fnmatch
import re
from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import KW_ONLY, dataclass
from typing import Any, Final, Literal, cast

from fp8graph.errors import Fp8GraphError, PolicyError, did_you_mean
from fp8graph.recipes import expressions
from fp8graph.recipes.base import GEMMS, GemmName, Recipe
from fp8graph.recipes.recipe import HIGH_PRECISION, RecipeLike, resolve_recipe

Op = Literal["linear", "matmul", "grouped_mm", "attention", "product"]  # "product": no rule can name it
OPS: Final[tuple[str, ...]] = ("linear", "matmul", "grouped_mm", "attention", "*")
# The ops that `Policy.default` covers. Activation x activation products and attention stay in high precision without a
# rule.
DEFAULT_OPS: Final[tuple[str, ...]] = ("linear", "grouped_mm")
# Of a file's rules. An expression may list layers: ``tune`` writes such.
_LONGEST_GLOB: Final = 4_000
_LONGEST_EXPRESSION: Final = 100_000
_MOST_COST: Final = 1_000_000  # steps of all expressions on one name: a second


class Inherit(enum.Enum):
    """The type of :data:`INHERIT` (an enum, so that copies and pickles stay the same object)."""

    INHERIT = "inherit"

    def __repr__(self) -> str:
        return "INHERIT"


INHERIT: Final = Inherit.INHERIT
GemmRecipe = RecipeLike | Literal[Inherit.INHERIT]


@dataclass(frozen=True)
class Rule:
    """One rule of a policy: the layers it matches, and a recipe for each of their GEMMs.

    Args:
        pattern: a glob over the whole FQN (``fnmatch``, case-sensitive), or a compiled regular
            expression that must match the whole FQN. A string that has ``\\.``, ``\\d``, ``\\w`` or ``\\s`` is refused.
        recipe: a recipe object or name; ``None`` or "high_precision" leaves the GEMMs alone.
        op: "linear" (one operand comes from a parameter), "matmul" (both are activations),
            "grouped_mm", "attention" (its backward if the recipe has ``attention_backward``), or "*". The latter means
            every GEMM, and attention if the recipe is high precision: attention in FP8 needs a rule with its name.
        fprop, dgrad, wgrad: another recipe for one of the three GEMMs, which attention does not have.
        optional: the rule may match nothing (as in the general policy's list of usual head names).
        steps: ``(first, end)``: the rule applies from step ``first`` until before step ``end`` (None: forever); see
            :meth:`Policy.at_step`.
        reason: why the rule is there. The report shows it where the rule decided.

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
    reason: str = ""

    def __post_init__(self) -> None:
        pattern: object = self.pattern
        if not isinstance(pattern, (str, re.Pattern)) or (
            isinstance(pattern, re.Pattern) and not isinstance(pattern.pattern, str)
        ):
            raise PolicyError(
                f"{self._described}: the pattern must be a glob (str) or re.compile(...), not {type(pattern).__name__}."
            )
        if pattern == "":
            raise PolicyError(f'{self._described}: the pattern is empty: no layer has this name. "*" matches all.')
        if isinstance(pattern, str) and (escape := re.search(r"\\[.dws]", pattern)):
            raise PolicyError(
                f"{self._described}: the pattern has {escape[0]}, and a string is a glob, not a regular expression: "
                "for one, write re.compile(...), or regex = in place of pattern = in a file."
            )
        if self.op not in OPS:
            raise PolicyError(f"{self._described}: op must be one of {', '.join(OPS)}, not {self.op!r}.")
        if type(self.optional) is not bool:
            raise PolicyError(f"{self._described}: optional must be True or False.")
        if not isinstance(self.reason, str):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise PolicyError(f"{self._described}: reason must be a text, not {self.reason!r}.")
        if self.op == "attention" and (given := [gemm for gemm in GEMMS if getattr(self, gemm) is not INHERIT]):
            raise PolicyError(
                f'{self._described}: op="attention" takes no {", ".join(given)}: attention has no such GEMMs. '
                "Its forward runs as recipe says, its backward if the recipe has attention_backward=True."
            )
        self._check_steps()
        for name in ("recipe", *GEMMS):
            object.__setattr__(self, name, normalized(getattr(self, name)))
        for gemm in GEMMS:
            try:
                check_op(self.op, self.recipe_for(gemm))
            except Fp8GraphError as error:
                raise type(error)(f"{self._described}: {error}") from None

    def _check_steps(self) -> None:
        steps: Any = self.steps
        if isinstance(steps, list):  # TOML and JSON have no tuples
            steps = tuple(cast(list[Any], steps))
            object.__setattr__(self, "steps", steps if len(steps) != 1 else (*steps, None))  # TOML has no null
        if self.steps is None:
            return
        first, end = self.steps if isinstance(self.steps, tuple) and len(self.steps) == 2 else (None, None)
        if type(first) is not int or first < 0 or (end is not None and (type(end) is not int or end <= first)):
            raise PolicyError(
                f"{self._described}: steps must be (first, end) with 0 <= first < end, or end None; not {steps!r}."
            )

    def __str__(self) -> str:
        """Return the rule as a line: ``"*.down_proj" (steps 0 to 99) -> delayed, wgrad: high precision``."""
        given = [f"{gemm}: {recipe_text(getattr(self, gemm))}" for gemm in GEMMS if getattr(self, gemm) is not INHERIT]
        return f"{self.where} -> {', '.join([recipe_text(self.recipe), *given])}"

    @property
    def where(self) -> str:
        """The sites that the rule is for: its pattern, with the op, the steps and the reason where they are given."""
        more = [] if self.op == "linear" else [f"op {self.op}"]
        if self.steps is not None:
            first, end = self.steps
            more.append(f"from step {first}" if end is None else f"steps {first} to {end - 1}")
        if self.reason:
            more.append(self.reason)
        pattern = f"/{self.text}/" if isinstance(self.pattern, re.Pattern) else f'"{self.text}"'
        return f"{pattern} ({', '.join(more)})" if more else pattern

    @property
    def _described(self) -> str:
        """The rule in an error message, which may be about its other arguments."""
        if isinstance(self.pattern, re.Pattern):
            return f"Rule(re.compile({self.pattern.pattern!r}), ...)"
        return f"Rule({self.pattern!r}, ...)"

    @property
    def text(self) -> str:
        """The glob or the regular expression as text."""
        return self.pattern.pattern if isinstance(self.pattern, re.Pattern) else self.pattern

    def matches(self, fqn: str, op: str) -> bool:
        """Return whether this rule applies to the site ``fqn``."""
        if self.op not in ("*", op):
            return False
        if self.op == "*" and op == "attention" and any(self.recipe_for(gemm) is not None for gemm in GEMMS):
            return False
        if isinstance(self.pattern, re.Pattern):
            try:
                return expressions.matches(self.pattern, fqn)
            except ValueError as error:
                raise PolicyError(f"{self._described}: the expression {error}.") from None
        return fnmatch.fnmatchcase(fqn, self.pattern)

    def recipe_for(self, gemm: GemmName) -> Recipe | None:
        """Return the recipe of one GEMM; ``None`` leaves it in high precision."""
        recipe = cast(GemmRecipe, getattr(self, gemm))
        return resolve_recipe(self.recipe if recipe is INHERIT else recipe)

    def resolved(self) -> Rule:
        """Return the rule with recipes in place of their names, as they are registered now."""
        return replace_recipes(self, lambda recipe: recipe if recipe is INHERIT else resolve_recipe(recipe))

    def to_dict(self) -> dict[str, Any]:
        """Return the rule as in a policy file: only the fields that differ from the defaults."""
        key = "regex" if isinstance(self.pattern, re.Pattern) else "pattern"
        text = _inline_flags(self.pattern) + self.text
        values: dict[str, Any] = {key: text, "recipe": recipe_to_plain(self.recipe)}
        if self.op != "linear":
            values["op"] = self.op
        for gemm in GEMMS:
            if (recipe := getattr(self, gemm)) is not INHERIT:
                values[gemm] = recipe_to_plain(recipe)
        if self.optional:
            values["optional"] = True
        if self.steps is not None:
            values["steps"] = [step for step in self.steps if step is not None]
        if self.reason:
            values["reason"] = self.reason
        return values


def replace_recipes(rule: Rule, change: Callable[[Any], Any]) -> Rule:
    """Return ``rule`` with ``change(recipe)`` in place of each of its recipes."""
    before = {name: getattr(rule, name) for name in ("recipe", *GEMMS)}
    after = {name: change(recipe) for name, recipe in before.items()}
    return rule if before == after else dataclasses.replace(rule, **after)


# In the reasons that passes write they stand for the rule, region or default that decided, which layers that share code
# need not share. Private characters of Unicode: no name has them.
SOURCE: Final = "\ue000"  # 'rule "*.up"', "default"
DECISION: Final = "\ue001"  # with its recipe, where a rule names one: 'rule "*.up" -> tensorwise', "default"


@dataclass(frozen=True)
class Resolution:
    """A policy's or a region's answer for one site: a recipe per GEMM, and the rule that it comes from."""

    recipes: Mapping[GemmName, Recipe | None]
    source: str  # 'rule "*.mlp.down_proj"', "default", ...
    by: Literal["rule", "default", "region", "block", ""] = ""  # the kind of the source
    rule: int | None = None  # index into Policy.rules; None: the default
    by_user: bool = False  # a rule requires it, not the default

    @property
    def switches_off(self) -> bool:
        """Whether it leaves the site in high precision, whatever its weight is: by a default or a region."""
        return self.by in ("default", "region") and not any(self.recipes.values())

    @property
    def key(self) -> Hashable:
        """Equal for answers that make the same code."""
        return tuple(self.recipes[gemm] for gemm in GEMMS), self.by_user, self.switches_off

    def explain(self, reason: str, recipe: str | None) -> str:
        """Return a pass's ``reason`` for a row in which a GEMM has ``recipe``, by name, with the source in it."""
        decision = self.source
        if self.by == "rule" or (self.by == "default" and recipe is None):
            decision += f" -> {recipe or 'high precision'}"
        return reason.replace(DECISION, decision).replace(SOURCE, self.source)


def check_op(op: str, recipe: Recipe | None) -> None:
    """Raise PolicyError for a recipe with fields that ``op`` does not know."""
    if op != "attention" and recipe is not None and (field := recipe.only_for_attention):
        raise PolicyError(
            f'{field}=True is for attention alone: write Rule(pattern, {recipe_text(recipe)}, op="attention").'
        )


def normalized(recipe: Any) -> Any:
    """Return one form for each recipe, so that equal policies compare equal; names stay names."""
    if isinstance(recipe, dict):
        return resolve_recipe(cast(dict[str, Any], recipe))
    return None if recipe == HIGH_PRECISION else recipe


def pattern_flags(pattern: str | re.Pattern[str]) -> int | None:
    return pattern.flags if isinstance(pattern, re.Pattern) else None


def _inline_flags(pattern: str | re.Pattern[str]) -> str:
    """``(?i)`` and the like: flags given to re.compile, written into the expression. Empty for a glob."""
    letters = {re.A: "a", re.I: "i", re.L: "L", re.M: "m", re.S: "s", re.X: "x"}
    flags = pattern_flags(pattern) or 0
    text = "".join(letter for flag, letter in letters.items() if flags & flag)
    return f"(?{text})" if text else ""


def recipe_to_plain(recipe: GemmRecipe) -> Any:
    if isinstance(recipe, Recipe):
        return recipe.to_dict()
    return HIGH_PRECISION if recipe is None else recipe


def recipe_text(recipe: GemmRecipe) -> str:
    """Return a recipe for people: its name, or its class with what differs from the defaults."""
    if recipe is None:
        return "high precision"
    if not isinstance(recipe, Recipe):
        return str(recipe)
    fields = {f.name: getattr(recipe, f.name) for f in dataclasses.fields(recipe) if f.init}
    changed = {name: value for name, value in fields.items() if value != getattr(type(recipe)(), name)}
    arguments = ", ".join(f"{name}={getattr(value, 'name', value)!r}" for name, value in changed.items())
    return f"{type(recipe).__name__}({arguments})"


def check_keys(where: str, values: object, names: set[str], *, hint: str = "") -> None:
    if not isinstance(values, Mapping):
        raise PolicyError(f"{where}: expected a table, not {values!r}.")
    if unknown := sorted(str(k) for k in cast(Mapping[str, Any], values).keys() - names):
        meant = did_you_mean(unknown[0], names)
        raise PolicyError(f"{where}: unknown key {unknown[0]!r}.{meant} Known: {', '.join(sorted(names))}.{hint}")


def rule_from_dict(index: int, values: Any) -> Rule:
    where = f"rule {index}"
    check_keys(where, values, {"pattern", "regex", "recipe", "op", "optional", "steps", "reason", *GEMMS})
    settings = dict(cast(Mapping[str, Any], values))
    if ("pattern" in settings) == ("regex" in settings):
        raise PolicyError(f"{where}: exactly one of 'pattern' (a glob) and 'regex' is needed.")
    if "recipe" not in settings:
        raise PolicyError(f"{where}: 'recipe' is missing (\"{HIGH_PRECISION}\" leaves the layer alone).")
    pattern: Any = settings.pop("pattern", None)
    if (regex := settings.pop("regex", None)) is not None:
        pattern = _compiled(where, regex)
    elif isinstance(pattern, str) and len(pattern) > _LONGEST_GLOB:
        raise PolicyError(f"{where}: pattern {pattern!r:.100} is longer than {_LONGEST_GLOB} characters.")
    return Rule(pattern, settings.pop("recipe"), **settings)


def _compiled(where: str, regex: Any) -> re.Pattern[str]:
    """Return an expression of a file: it may not hang who loads it."""
    expect = f"{where}: regex {regex!r:.100}"
    if not isinstance(regex, str):
        raise PolicyError(f"{expect} must be a text.")
    if len(regex) > _LONGEST_EXPRESSION:
        raise PolicyError(f"{expect} has {len(regex)} characters, more than {_LONGEST_EXPRESSION}.")
    try:
        made = re.compile(regex)
    except (re.error, OverflowError, RecursionError) as error:
        raise PolicyError(f"{expect} does not compile: {error}.") from None
    try:
        expressions.cost(made)
    except ValueError as error:
        raise PolicyError(
            f"{expect} {error}: a policy file's must be matched in bounded time. Write names, or a glob as 'pattern'."
        ) from None
    return made


def check_costs(rules: Iterable[Rule]) -> None:
    """
    Raises:
        PolicyError: to match one name with all the expressions of a file could take too long.
    """
    spent = sum(expressions.cost(rule.pattern) for rule in rules if isinstance(rule.pattern, re.Pattern))
    if spent > _MOST_COST:
        raise PolicyError(
            f"policy: its expressions take up to {spent} steps per name, more than {_MOST_COST}. "
            "Write names, or globs as 'pattern'."
        )
