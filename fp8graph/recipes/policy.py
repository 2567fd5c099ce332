"""Policy: ordered rules that give each site a recipe per GEMM, and its files. First full match wins.

The idea of ordered, fully matched rules and of reporting the unused ones is qwix's
(``google/qwix``, ``_src/qconfig.py``).
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import math
import os
import re
import stat
import tomllib
from collections.abc import Generator, Iterable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import Any, Final, Protocol, cast

from fp8graph.errors import Fp8GraphError, PolicyError, expect, expect_path
from fp8graph.late import policy_of_checkpoint
from fp8graph.recipes.base import GEMMS, Recipe
from fp8graph.recipes.recipe import RecipeLike, known_recipe, resolve_recipe
from fp8graph.recipes.rules import (
    DEFAULT_OPS,
    INHERIT,
    OPS,
    GemmRecipe,
    Resolution,
    Rule,
    check_costs,
    check_keys,
    check_op,
    normalized,
    pattern_flags,
    recipe_text,
    recipe_to_plain,
    rule_from_dict,
)

WATCH: Final = ("observe", "guard")  # tables of a policy file that are not part of the policy
# settings of a backend that a policy file may have, so that two programs share them
SETTINGS: Final = ("batch_invariant",)
# The files in which a checkpoint says how it is quantized, and the keys by which their contents are known.
CONFIG_FILES: Final = ("config.json", "hf_quant_config.json")
CONFIG_KEYS: Final = frozenset({"quantization_config", "compression_config", "quant_method", "producer"})
_log = logging.getLogger("fp8graph")
# Just above the speed model's own error: measured rates of one kind of GPU differ by 4 % (hardware/speed.py).
MIN_SPEEDUP: Final = 1.05
LEFT_ALONE: Final = 'attention stays in high precision unless a rule with op="attention" asks for it'
_MOST_RULES: Final = 10_000  # a name is compared with each
_MOST_BYTES: Final = 4 << 20  # of a file
_MOST_PARTS: Final = 100  # of a key in TOML: the time to read one grows with their square
_TOML_TEXT: Final = re.compile(r'"(?:[^"\\\n]|\\.)*"|' r"'[^'\n]*'")


class HasConfig(Protocol):
    """A config of transformers, or a quantization config."""

    def to_dict(self) -> dict[str, Any]: ...


@dataclass(frozen=True)
class Policy:
    """Ordered rules: the first full match wins, and ``default`` covers layers that no rule matches.

    Args:
        rules: :class:`Rule` objects.
        default: the recipe of linears and grouped matmuls that no rule matches. Activation x activation
            matmuls (``op="matmul"``) are left alone unless a rule asks for them.
        extends: "default" puts the default policy's rules (heads, MoE routers, adapters, and what the model's family
            keeps in high precision) behind these ones; ``default`` is then its recipe unless it is given.
        min_speedup: a GEMM is rewritten only if the target's speed model predicts at least this speedup over
            bf16 (the default excludes gains within the model's error); 0 rewrites everything that is legal.
            CPUs and emulated GEMMs have no speed model.
        keep_heads: leave linears in high precision that the graph shows to be output heads (tied to an embedding, read
            by the loss, or logits over an embedding's vocabulary), unless a rule that is not optional matches them.
            The default policy does.

    Raises:
        PolicyError, UnsupportedRecipeError: (``ValueError``) for invalid values.
    """

    rules: Sequence[Rule] = ()
    _: KW_ONLY
    default: GemmRecipe = INHERIT  # "tensorwise", or what the policy that is extended says
    min_speedup: float = MIN_SPEEDUP
    extends: str | None = None
    keep_heads: bool = False

    def __post_init__(self) -> None:
        rules: object = self.rules
        if isinstance(rules, Rule) or not isinstance(rules, Iterable):
            raise PolicyError(f"Policy(rules=...): rules must be a list of Rule objects, not {rules!r}.")
        object.__setattr__(self, "rules", tuple(cast(Iterable[Rule], rules)))
        if len(self.rules) > _MOST_RULES:
            raise PolicyError(
                f"Policy(rules=...): there are {len(self.rules)} rules, more than {_MOST_RULES}. "
                "A glob or an expression covers many layers."
            )
        for rule in self.rules:
            if not isinstance(rule, Rule):
                raise PolicyError(f"Policy(rules=...): {rule!r} is not a Rule. Write Rule(pattern, recipe).")
        if self.extends not in (None, "default"):
            raise PolicyError(f'Policy(extends={self.extends!r}): extends must be "default" or left out.')
        if self.default is INHERIT and self.extends is None:
            object.__setattr__(self, "default", "tensorwise")
        object.__setattr__(self, "default", normalized(self.default))
        check_op("*", self._default_recipe())
        speedup: object = self.min_speedup
        if type(speedup) not in (int, float) or not (0 <= self.min_speedup < math.inf):
            raise PolicyError(f"Policy(min_speedup={speedup!r}): min_speedup must be a finite number >= 0.")
        if type(self.keep_heads) is not bool:
            raise PolicyError(f"Policy(keep_heads={self.keep_heads!r}): keep_heads must be True or False.")

    def resolve(self, fqn: str, op: str, head: str = "") -> Resolution:
        """Return the recipes of the three GEMMs of site ``fqn``; ``head``: what shows it to be an output head."""
        expect("Policy.resolve", "fqn", fqn, str, "the full name of a layer")
        if op not in OPS[:-1]:
            raise PolicyError(f"Policy.resolve(op={op!r}): op must be one of {', '.join(OPS[:-1])}.")
        if self.extends is not None:
            raise PolicyError(
                'Policy(extends="default") depends on the model: resolve it with models.extended(policy, families).'
            )
        kept = Resolution(dict.fromkeys(GEMMS), source=f"output head: {head}") if head and self.keep_heads else None
        for index, rule in enumerate(self.rules):
            if rule.matches(fqn, op):
                return (rule.optional and kept) or Resolution(
                    {gemm: rule.recipe_for(gemm) for gemm in GEMMS},
                    source=f"rule {rule.where}",
                    by="rule",
                    rule=index,
                    by_user=not rule.optional,
                )
        if kept is not None:
            return kept
        if op not in DEFAULT_OPS:
            alone = f'no rule: op="{op}" is left alone unless a rule asks for it'
            return Resolution(dict.fromkeys(GEMMS), source=LEFT_ALONE if op == "attention" else alone)
        return Resolution(dict.fromkeys(GEMMS, self._default_recipe()), source="default", by="default")

    def over(self, base: Policy) -> Policy:
        """This policy's rules before those of ``base``, and ``base``'s default where this one names none."""
        default = base.default if self.default is INHERIT else self.default
        heads = self.keep_heads or base.keep_heads
        rules = [*self.rules, *base.rules]
        return dataclasses.replace(self, rules=rules, default=default, extends=None, keep_heads=heads)

    def __str__(self) -> str:
        """Return one line per rule, in order."""
        lines = ["Policy (the first match wins):", *(f"  {rule}" for rule in self.rules)]
        if self.extends is not None:
            lines.append("  then the rules of the default policy: heads, MoE routers, what the model's family keeps")
        if self.keep_heads:
            lines.append("  then what the graph shows to be an output head -> high precision, before optional rules")
        default = "the default policy's recipe" if self.default is INHERIT else recipe_text(self.default)
        lines.append(f"  every other linear -> {default}")
        return "\n".join([*lines, f"  min_speedup {self.min_speedup:g}"])

    @property
    def scheduled(self) -> bool:
        """Whether some rule applies to certain steps only."""
        return any(rule.steps is not None for rule in self.rules)

    def phase(self, step: int) -> int:
        """Return a number that is equal for steps at which the same rules apply."""
        return sum(bound is not None and bound <= step for rule in self.rules for bound in rule.steps or ())

    def at_step(self, step: int) -> Policy:
        """Return the policy of one training step: the rules that apply at that step, without their schedule.

        ``Rule("*", None, steps=(0, 100))`` as the first rule keeps 100 steps in high precision. A backend counts the
        steps of optimizers and moves on by itself; ``backend.set_policy(policy.at_step(step))`` before each step is
        for loops that count otherwise. Graphs about which the next policy decides otherwise are compiled again, once:
        switching back to one used before compiles nothing.

        Raises:
            PolicyError: (a ``ValueError``) for a step that is not a whole number >= 0.
        """
        if type(step) is not int or step < 0:
            raise PolicyError(f"Policy.at_step({step!r}): the step must be a whole number >= 0.")
        there = [r for r in self.rules if r.steps is None or r.steps[0] <= step < (r.steps[1] or math.inf)]
        return dataclasses.replace(self, rules=[dataclasses.replace(rule, steps=None) for rule in there])

    def recipes(self) -> set[Recipe]:
        """Return every recipe that a rule or the default may give."""
        named = [self._default_recipe(), *(rule.recipe_for(gemm) for rule in self.rules for gemm in GEMMS)]
        return {recipe for recipe in named if recipe is not None}

    def resolved(self) -> Policy:
        """Return the policy with recipes in place of their names, as they are registered now."""
        default = self.default if self.default is INHERIT else self._default_recipe()
        return dataclasses.replace(self, rules=[rule.resolved() for rule in self.rules], default=default)

    def identity(self) -> str:
        """Give a text that is equal for policies with equal decisions: names are resolved to their current recipes."""
        recipes = [[rule.recipe_for(gemm) for gemm in GEMMS] for rule in self.rules]
        # repr() of a compiled expression cuts it after 200 characters: use the whole text, and the flags
        patterns = [
            (rule.text, pattern_flags(rule.pattern), rule.op, rule.optional, rule.steps, rule.reason)
            for rule in self.rules
        ]
        default = self._default_recipe()
        return repr((patterns, recipes, default, self.min_speedup, self.extends, self.keep_heads))

    def _default_recipe(self) -> Recipe | None:
        """Return the recipe that ``default`` stands for; None too where another policy's is meant."""
        return None if self.default is INHERIT else resolve_recipe(self.default)

    def to_dict(self) -> dict[str, Any]:
        """Plain values, the structure of a policy file."""
        values: dict[str, Any] = {} if self.extends is None else {"extends": self.extends}
        if self.default is not INHERIT:
            values["default"] = recipe_to_plain(self.default)
        if self.keep_heads:
            values["keep_heads"] = True
        return values | {"min_speedup": self.min_speedup, "rules": [rule.to_dict() for rule in self.rules]}

    @staticmethod
    def from_dict(values: Mapping[str, Any]) -> Policy:
        """Return the inverse of :meth:`to_dict`. Raises PolicyError for an unknown key or a wrong type."""
        keys = {"default", "extends", "keep_heads", "min_speedup", "rules"}
        check_keys("policy", values, {*keys, *WATCH, *SETTINGS}, hint=_smallest())
        others = [f"[{name}]" if name in WATCH else name for name in (*WATCH, *SETTINGS) if name in values]
        if others:
            _log.warning(
                '%s of a policy file is for Backend(path) and options={"policy": path}: a Policy holds rules alone.',
                " and ".join(others),
            )
        rules = values.get("rules", [])
        settings = {k: v for k, v in values.items() if k in keys - {"rules"}}
        try:
            if not isinstance(rules, list):
                raise PolicyError(f"policy: 'rules' must be a list of tables, not {rules!r}.")
            if len(rules) > _MOST_RULES:
                raise PolicyError(f"policy: there are {len(rules)} rules, more than {_MOST_RULES}. Write globs.")
            made = Policy(tuple(rule_from_dict(i, rule) for i, rule in enumerate(rules)), **settings)
            check_costs(made.rules)
            return made
        except RecursionError:  # a message shows the value
            raise PolicyError("policy: tables or lists are nested too deep.") from None

    @staticmethod
    def load(path: str | os.PathLike[str]) -> Policy:
        """Read a ``.toml`` or ``.json`` file. Data only: nothing in it is run.

        Raises:
            PolicyError: the file is missing, malformed, or holds an unknown key; the message names the file.
        """
        expect_path("Policy.load", "path", path)
        with in_file(path):
            return Policy.from_dict(values_of_file(path))

    @staticmethod
    def from_checkpoint(
        folder_or_config: str | os.PathLike[str] | Mapping[str, Any] | HasConfig,
        *,
        recipes: Mapping[str, RecipeLike] | None = None,
    ) -> Policy:
        """Return a policy with exactly the layers that an FP8 checkpoint quantizes, in its recipe.

        All other layers stay in high precision, and the report names the checkpoint. The recipe is the one with which
        engines multiply such weights (scales ``amax / 448``), so that a model that is trained under it and exported is
        served as it was trained. Gradients are quantized as that recipe quantizes them.

        Args:
            folder_or_config: a checkpoint of Hugging Face's FP8 (DeepSeek's), compressed-tensors or ModelOpt: its
                folder, whose files then say which layers are quantized, and in which form; its config.json or
                ``hf_quant_config.json``; either as a dict; its ``quantization_config``, which is also an engine's; or
                an object with ``to_dict()``, as transformers' configs are.
            recipes: by the name of a form of the checkpoint, as ``fp8graph inspect`` shows it: the recipe to train such
                layers with, None for high precision. For forms that no recipe computes: static scales of inputs,
                weights that are quantized alone.

        Raises:
            CheckpointError: there is no such checkpoint, it is of a format that is not known, or no recipe computes
                what one of its layers computes: the message names it.
        """
        return policy_of_checkpoint(folder_or_config, recipes or {})

    @staticmethod
    def coerce(value: Policy | Mapping[str, Any] | str | os.PathLike[str]) -> Policy:
        """Return a policy from a Policy, its dict form, a path, or a checkpoint as :meth:`from_checkpoint` takes it."""
        if isinstance(value, Policy):
            return value
        if is_checkpoint(value):
            return Policy.from_checkpoint(value)
        if isinstance(value, Mapping):
            return Policy.from_dict(value)
        if isinstance(value, (str, os.PathLike)):
            return Policy.load(value)
        hint = " Write Policy([...])." if isinstance(value, (list, Rule)) else ""
        raise PolicyError(f"policy must be a Policy, a dict or a path, not {value!r}.{hint}")


def is_checkpoint(value: object) -> bool:
    """Return whether a policy is given as an FP8 checkpoint: its folder or config file, or its config."""
    if isinstance(value, (str, os.PathLike)):
        name = os.path.basename(os.fspath(cast(str, value)))
        return os.path.isdir(value) or (name in CONFIG_FILES and "rules" not in values_of_file(value))
    return isinstance(value, Mapping) and not CONFIG_KEYS.isdisjoint(cast(Mapping[str, Any], value))


def values_of_file(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Return the content of a ``.toml`` or ``.json`` file of a policy, as plain values. Raises PolicyError."""
    file = Path(path)
    try:
        text = text_of_file(file)
    except (OSError, ValueError) as error:  # no UTF-8, or a name that no file can have
        hint = f" For the recipe of that name, write recipe={path!r}." if known_recipe(path) else ""
        raise PolicyError(f"policy file {file}: cannot be read ({error}).{hint}") from None
    try:
        values = json.loads(text) if file.suffix == ".json" else _toml_values(text)
    except (ValueError, RecursionError) as error:  # both decoders' errors
        kind = "JSON" if file.suffix == ".json" else "TOML"
        yaml = " YAML is not read." if file.suffix in (".yaml", ".yml") else ""
        raise PolicyError(f"policy file {file}: malformed {kind}: {error}.{yaml}{_smallest()}") from None
    if not isinstance(values, dict):
        raise PolicyError(f"policy file {file}: expected a table of rules, not {values!r:.100}.{_smallest()}")
    return cast(dict[str, Any], values)


def _smallest() -> str:
    """Return a sentence, with a space before it, that shows the smallest policy that has a rule, as a file."""
    values = {"rules": [Rule("*.o_proj", "rowwise").to_dict()]}
    toml = "\n".join(f"{name} = {_toml(value)}" for name, value in values.items())
    return f" A policy is a table of rules: {toml} in TOML, {json.dumps(values)} in JSON."


def text_of_file(file: Path) -> str:
    """Return the text of a regular file: a pipe would wait for its writer, and a device may have no end.

    Raises:
        OSError, ValueError: it cannot be read, is no such file or no text, or has more bytes than ``_MOST_BYTES``.
    """
    mode = file.stat().st_mode
    if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):  # of a folder, opening it says so
        raise ValueError("it is not a regular file")
    with file.open("rb") as opened:
        data = opened.read(_MOST_BYTES + 1)
    if len(data) > _MOST_BYTES:
        raise ValueError(f"it has more than {_MOST_BYTES} bytes")
    return data.decode("utf-8").replace("\r\n", "\n").replace("\r", "\n")


def _toml_values(text: str) -> dict[str, Any]:
    keys = re.split(r"[^\w\s.-]|\n", _TOML_TEXT.sub("", text))
    if max(key.count(".") for key in keys) > _MOST_PARTS:
        raise ValueError(f"a key has more than {_MOST_PARTS} parts")
    return tomllib.loads(text)


@contextlib.contextmanager
def in_file(path: str | os.PathLike[str]) -> Generator[None]:
    """Name the file in errors about its content."""
    try:
        yield
    except Fp8GraphError as error:
        text = str(error)
        raise error if text.startswith("policy file ") else type(error)(f"policy file {Path(path)}: {text}") from None


def policy_toml(policy: Policy) -> str:
    """Return the text of a policy file, which ``Policy.load`` reads: the standard library only reads TOML.

    Raises:
        UnsupportedRecipeError: a recipe holds a function.
        PolicyError: a string has no form in UTF-8.
    """
    values = policy.to_dict()
    head = [f"{name} = {_toml(value)}" for name, value in values.items() if name != "rules"]
    return "\n\n".join(["\n".join(head), *map(rule_toml, policy.rules)]) + "\n"


def rule_toml(rule: Rule) -> str:
    """Return one rule of a policy file."""
    return "\n".join(["[[rules]]", *(f"{name} = {_toml(value)}" for name, value in rule.to_dict().items())])


def _toml(value: Any) -> str:
    if isinstance(value, Mapping):
        given = {name: each for name, each in cast(Any, value).items() if each is not None}  # TOML has no null
        return "{ " + ", ".join(f"{name} = {_toml(each)}" for name, each in given.items()) + " }"
    if isinstance(value, list):
        return f"[{', '.join(map(_toml, cast(list[Any], value)))}]"
    if isinstance(value, str) and any("\ud800" <= one <= "\udfff" for one in value):
        raise PolicyError(f"{value!r} cannot be written to a file: half of a surrogate pair is not a character.")
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")  # strings, numbers, booleans
