"""Choose the policy of a graph: the user's, or the default with the rules of the model's families.

A policy with a schedule is taken as it is at the present step: counted, unless the user moves it himself.

The file of a policy may have tables beside it, [observe] and [guard], which say how training is watched. They are not
part of the policy: they change no code of the steps that are not observed, so that they are neither in the key of
compiled code nor compared between ranks.
"""

from __future__ import annotations

import dataclasses
import logging
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Final, cast
from weakref import WeakValueDictionary

import torch

from fp8graph import hardware
from fp8graph.compat import autograd
from fp8graph.errors import ConfigError
from fp8graph.hardware import Hardware
from fp8graph.ir.settings import choices
from fp8graph.models import extended
from fp8graph.recipes import GEMMS, RECIPE_NAMES, RecipeLike, resolve_recipe
from fp8graph.recipes.policy import SETTINGS, WATCH, Policy, in_file, is_checkpoint, values_of_file
from fp8graph.recipes.rules import replace_recipes
from fp8graph.runtime.parameters import ParameterTable
from fp8graph.runtime.staleness import WeightUpdates
from fp8graph.runtime.state_dict import has_numbers, refusal

PolicyLike = Policy | Mapping[str, Any] | str | os.PathLike[str]
Arguments = Mapping[str, Sequence[str]]  # of the methods of a backend that a policy file has tables for


@dataclass(frozen=True, kw_only=True)
class PolicyFile:
    """A policy, the arguments of ``observe`` and ``guard`` beside it, and settings of the backend."""

    policy: PolicyLike | None
    watch: Mapping[str, Mapping[str, Any]]
    settings: Mapping[str, Any]
    path: str | os.PathLike[str] | None

    @staticmethod
    def of(policy: PolicyLike | None, arguments: Arguments) -> PolicyFile:
        """Of a path, or of a dict with the content of such a file.

        Raises:
            PolicyError: the file cannot be read.
            ConfigError: a table holds an unknown key.
        """
        if is_checkpoint(policy):
            policy = Policy.coerce(cast(Any, policy))
        path = policy if isinstance(policy, str | os.PathLike) else None
        values: Any = values_of_file(path) if path is not None else policy
        watch, settings = dict[str, Any](), dict[str, Any]()
        if isinstance(values, Mapping):
            values = cast(Mapping[str, Any], values)
            with in_file(path) if path is not None else nullcontext():
                watch = {name: _table(name, values[name], f"[{name}]", arguments) for name in WATCH if name in values}
            settings = {name: values[name] for name in SETTINGS if name in values}
            policy = {name: value for name, value in values.items() if name not in (*WATCH, *SETTINGS)}
        return PolicyFile(policy=policy, watch=watch, settings=settings, path=path)

    def named(self) -> AbstractContextManager[None]:
        """Name the file in errors about its values."""
        return in_file(self.path) if self.path is not None else nullcontext()


def tables(arguments: Arguments, given: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    """Return the arguments of ``Backend`` that are those of its methods, by the method, without those that are None."""
    return {name: _table(name, values, name, arguments) for name, values in given.items() if values is not None}


def _table(name: str, values: Any, where: str, arguments: Arguments) -> Mapping[str, Any]:
    """Return the arguments of ``Backend.observe`` or ``Backend.guard``; ``where``: where they are from."""
    if name not in arguments:
        raise no_pass(where)
    if not isinstance(values, Mapping):
        raise ConfigError(f"{where} must be a table of arguments of Backend.{name}, not {values!r}.")
    values = cast(Mapping[str, Any], values)
    for key in values:
        if key not in arguments[name]:
            raise ConfigError(f"{where} has no key {key!r}{choices('Keys', str(key), arguments[name])}")
    return values


def no_pass(name: str) -> ConfigError:
    """Return the error about a feature whose entry of ``passes/`` is not there."""
    return ConfigError(f"{name}: this build of fp8graph has no pass for it. Install it whole.")


class ResolvedPolicy:
    """A policy with recipes in place of their names, at one step of its schedule. Equal ones are one object.

    Args:
        policy: with recipes as objects, as they were registered when it was set, and without a schedule.
        target: the hardware that the default policy is for; None: this machine.
    """

    def __init__(self, policy: Policy, target: Hardware | None) -> None:
        self._policy, self._target = policy, target
        self._of_families: dict[tuple[str, ...], tuple[Policy, str]] = {}

    def of(self, families: tuple[str, ...]) -> tuple[Policy, str]:
        """Return the policy for models of ``families`` (which add to the default policy), and its identity."""
        if self._policy.extends is None:
            families = ()
        if families not in self._of_families:
            policy = with_default(self._policy, families, self._target).resolved()
            self._of_families[families] = policy, policy.identity()
        return self._of_families[families]


def with_default(policy: Policy, families: tuple[str, ...], target: Hardware | None) -> Policy:
    """Return ``policy`` with what the default policy adds to it for models of ``families`` on ``target``."""
    return extended(policy, families, (target or hardware.of_machine()).default_recipe)


class Policies:
    """The policy of one backend, which may change during training.

    Names of recipes are looked up in :meth:`set`, and nowhere else.

    Attributes:
        now: the policy in force. A forward that activation checkpointing repeats keeps that of its first time.

    Args:
        target: the hardware that the default policy is for; None: this machine.
    """

    now: ResolvedPolicy

    def __init__(self, target: Hardware | None) -> None:
        self._target = target
        self._step = 0  # of training
        self._families: set[tuple[str, ...]] = {()}  # of all graphs so far
        self._made: WeakValueDictionary[str, ResolvedPolicy] = WeakValueDictionary()  # by their identities
        self.set(None)

    def set(self, policy: PolicyLike | None, recipe: RecipeLike = None) -> None:
        """Use another policy; see :meth:`Backend.set_policy`."""
        given = Policy(extends="default") if policy is None else Policy.coerce(policy)
        if recipe is not None:
            resolve_recipe(recipe)
            given = dataclasses.replace(given, default=recipe)
        self._given, self._resolved = given, given.resolved()
        self.has_schedule = given.scheduled  # read in each call
        self._take()

    def _take(self) -> None:
        """Take the policy as it is at the present step."""
        policy = self._resolved.at_step(self._step) if self.has_schedule else self._resolved
        self.now = self._made.setdefault(policy.identity(), ResolvedPolicy(policy, self._target))

    def advance(self, step: int) -> None:
        """Take a policy with a schedule as it is at ``step``."""
        before, self._step = self._step, step
        if self.has_schedule and self._resolved.phase(before) != self._resolved.phase(step):
            self._take()

    @property
    def whole(self) -> Policy:
        """The policy as the user gave it, schedule and names of recipes included, as far as these mean the same now."""
        return _named(self._given, self._resolved, lambda name, recipe: resolve_recipe(name) == recipe)

    @property
    def portable(self) -> Policy:
        """The same for another process, in which the user's own names may mean something else: without these."""
        return _named(self._given, self._resolved, lambda name, _: name in RECIPE_NAMES)

    @property
    def scheduled(self) -> Policy | None:
        """The same if it has a schedule; else None."""
        return self.whole if self.has_schedule else None

    @property
    def current(self) -> Policy:
        """The policy in force, for a model of no known family."""
        whole = self.whole
        return with_default(whole.at_step(self._step) if whole.scheduled else whole, (), self._target)

    def of(self, families: tuple[str, ...]) -> tuple[Policy, str]:
        """Return the policy in force for a graph of models of ``families``, and its identity."""
        self._families.add(families)
        return self.now.of(families)

    def identities(self) -> frozenset[str]:
        """Return the policies that decide now, one for each choice of families that was met."""
        return frozenset(self.of(families)[1] for families in [*self._families])

    def lines(self) -> list[str]:
        """Return the policy in words, to compare it with other ranks': of all steps, which need not be equal."""
        policy = self._resolved if self.has_schedule else self.now.of(())[0]
        plain = [replace_recipes(rule, _name_if_built_in) for rule in policy.rules]
        rules = [f"rule {index} {rule!r}" for index, rule in enumerate(plain)]
        heads = ["keep_heads"] if policy.keep_heads else []
        return [*rules, f"default {_name_if_built_in(policy.default)!r}", f"min_speedup {policy.min_speedup}", *heads]


_log = logging.getLogger("fp8graph")


def _named(given: Policy, resolved: Policy, keeps: Callable[[str, Any], bool]) -> Policy:
    """``resolved`` as it was given, but for names of recipes that are not to be kept."""

    def recipe_of(given: Any, resolved: Any) -> Any:
        return given if not isinstance(given, str) or keeps(given, resolved) else resolved

    rules = [
        dataclasses.replace(a, **{name: recipe_of(getattr(a, name), getattr(b, name)) for name in ("recipe", *GEMMS)})
        for a, b in zip(given.rules, resolved.rules, strict=True)
    ]
    return dataclasses.replace(given, rules=rules, default=recipe_of(given.default, resolved.default))


def _name_if_built_in(recipe: Any) -> Any:
    """Return a recipe under a name that means the same everywhere, if it has one: for people to read."""
    return next((name for name in RECIPE_NAMES if resolve_recipe(name) == recipe), recipe)


_STEP_KEY: Final = "fp8graph.step"  # of training, under a policy with a schedule


class Schedule:
    """Moves a policy with a schedule on, one step of training at a time.

    A step of training is a step of an optimizer that holds parameters of the compiled models, however many backwards
    came before it. Where several hold some, the parameter that was stepped most often says how many there were. Where
    none holds any (it has slices of them, or flat copies), every optimizer counts.

    A step is taken at the next call of compiled code outside of backward: whatever belongs to one step, checkpointed
    forwards too, has one policy.
    """

    def __init__(self, policies: Policies, steps: WeightUpdates) -> None:
        self._policies, self._steps = policies, steps
        self._start = 0  # the step that was loaded
        self._seen = 0  # of the optimizers' steps
        self._trained = ParameterTable[bool]()  # those of compiled models
        self.counts = False  # someone asks for the step, whether the policy has a schedule or not
        self._steps_seen: int | None = None  # the optimizers' steps when it was last asked for
        self._now = 0

    @property
    def runs(self) -> bool:
        """Whether the policy has a schedule that the user does not move himself."""
        return self._policies.has_schedule

    @property
    def due(self) -> bool:
        """Whether an optimizer has stepped since :meth:`advance`. Asked in every call."""
        return self._policies.has_schedule and self._seen != self._steps.count and not autograd.in_backward()

    def track(self, parameters: Iterable[torch.Tensor]) -> None:
        """Learn which parameters the models train."""
        if self.runs or self.counts:
            for parameter in parameters:
                if parameter.requires_grad and not self._trained.of(parameter):
                    self._trained.set(parameter, True)

    def advance(self) -> None:
        """Take the policy as it is at the present step."""
        self._seen = self._steps.count
        if self.runs:
            self._policies.advance(self.step())

    def step(self) -> int:
        """Return the number of steps of training that are over."""
        return self._start + self._steps.of_optimizers([parameter for parameter, _ in self._trained.parameters()])

    def step_of_call(self) -> int:
        """Return the same at a call of compiled code: a recomputation in backward is of the step of its forward."""
        if self._steps_seen != self._steps.count and not autograd.in_backward():
            self._steps_seen, self._now = self._steps.count, self.step()
        return self._now

    def count(self) -> None:
        """Count a step that no optimizer makes."""
        self._start, self._steps_seen = self._start + 1, None

    def entries(self) -> dict[str, torch.Tensor]:
        """Its entry of a state dict: the step of training, where that matters."""
        return {_STEP_KEY: torch.tensor([self.step()])} if self.runs or self.counts else {}

    def recognizes(self, name: str) -> bool:
        return name == _STEP_KEY

    def loader(self, entries: Mapping[str, Any]) -> Callable[[], None]:
        """See :class:`~fp8graph.runtime.state_dict.Keeper`. States without a schedule have no step."""
        if _STEP_KEY not in entries:
            return lambda: self._load(None)
        step = entries[_STEP_KEY]
        is_one = isinstance(step, torch.Tensor) and step.dtype == torch.int64 and step.numel() == 1
        if not is_one or not has_numbers(step) or step.item() < 0:
            raise refusal(f"{_STEP_KEY!r} is not a whole number >= 0")
        return lambda: self._load(int(step.item()))

    def _load(self, step: int | None) -> None:
        """Go on from a saved step; None: it was not saved."""
        if step is not None:
            self._start, self._steps_seen = step, None
            self._steps.restart()
            self.advance()
        elif self.runs:
            _log.warning(
                "the state that was loaded has no step number: it was saved without a schedule, or by an older "
                "fp8graph. The policy's schedule goes on at step %d.",
                self.step(),
            )
