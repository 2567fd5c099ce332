"""Watch the losses of tensors in quantization while a model trains, and log or apply a rule where they are too large.

The rules that guards put into the policy are applied once, reported, and saved with the state (:class:`Guarded`).
"""

from __future__ import annotations

import dataclasses
import json
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Final, cast

import torch
from torch import Tensor

from fp8graph.compat import distributed
from fp8graph.errors import ConfigError, Fp8GraphError, UnsupportedRecipeError
from fp8graph.passes.observe.findings import NEEDED, Bounds, Crossing, GuardFinding, PolicySite, crossings, proposed
from fp8graph.passes.observe.measuring import Observed
from fp8graph.passes.observe.observation import Observation
from fp8graph.passes.observe.statistics import DueSteps, Graph, Layers, Watched, records
from fp8graph.recipes import GEMMS, HIGH_PRECISION, GemmName, Recipe, RecipeLike, name_of, resolve_recipe
from fp8graph.recipes.policy import Policy
from fp8graph.recipes.rules import Rule, rule_from_dict
from fp8graph.runtime.policies import Policies, Schedule
from fp8graph.runtime.state_dict import refusal
from fp8graph.runtime.stores import Services, Starter, Store

_log = logging.getLogger("fp8graph")

_KEY: Final = "fp8graph.guard"  # of the entry of a state dict


@dataclass(frozen=True, kw_only=True)
class GuardSettings:
    """The arguments of ``Backend.guard``."""

    bounds: Bounds
    steps: DueSteps
    fallbacks: tuple[RecipeLike, ...]
    apply: bool
    reduce: bool

    @staticmethod
    def of(arguments: Mapping[str, Any]) -> GuardSettings:
        """From the values that the user gave, which may be of any type."""
        apply, reduce, recipe = (arguments[name] for name in ("apply", "reduce", "recipe"))
        for name, value in (("apply", apply), ("reduce", reduce)):
            if type(value) is not bool:
                raise ConfigError(f"guard({name}={value!r}): expected True or False.")
        fallbacks: tuple[Any, ...] = tuple(recipe) if isinstance(recipe, (list, tuple)) else (recipe,)  # pyright: ignore[reportUnknownArgumentType]
        if not fallbacks:
            raise ConfigError("guard(recipe=[]): expected a recipe, or a list of them from the first to the last.")
        for each in fallbacks:
            resolve_recipe(each)
        return GuardSettings(
            bounds=Bounds(**{name: arguments[name] for name in ("underflows", "saturated", "sqnr")}),
            steps=DueSteps.of("guard", arguments),
            fallbacks=fallbacks,
            apply=apply,
            reduce=reduce,
        )


class Guarded(Store):
    """The guards of a backend (see ``Backend.guard``), and the rules that they applied.

    A later ``set_policy`` of the user replaces the rules with the rest of the policy.
    """

    name: ClassVar = "guard"
    of_stage: ClassVar = False

    def __init__(self, services: Services) -> None:
        self._policies, self._epoch, self._steps = services.policies, services.epoch, services.steps
        self._schedule, self._observation = services.schedule, services.store(Observation)
        self._guards: list[Guard] = []
        self._applied: list[tuple[Rule, str]] = []

    @property
    def started(self) -> Sequence[Guard]:
        return self._guards

    def start(self, backend: Watched, arguments: Mapping[str, Any]) -> Guard:
        layers = Layers("guard", arguments["layers"], backend.programs)
        settings = GuardSettings.of(arguments)
        layers.check(backend.names)
        programs, policies = backend.programs, self._policies
        guard = Guard(
            settings=settings,
            guarded=self,
            observation=self._observation,
            schedule=self._schedule,
            layers=layers,
            sites=lambda: sites_of(programs, policies),
        )
        self._epoch.advance()
        if settings.reduce:
            self._steps.listen(guard.after_step)
        self._guards.append(guard)
        return guard

    def check_layers(self, backend: Watched) -> None:
        for guard in self._guards:
            guard.layers.check(backend.names)

    @property
    def policy(self) -> Policy:
        """The whole policy that is in force, with its schedule."""
        return self._policies.whole

    def apply(self, rules: Iterable[tuple[Rule, str]]) -> None:
        """Put rules before the others, each with its line of the report. One layer has one such rule."""
        new = [*rules]
        earlier = [rule for rule, _ in self._applied]
        policy = with_rules(self.policy, [rule for rule, _ in new], earlier)
        if policy != self.policy:
            self._policies.set(policy)
            self._epoch.advance()
        texts = [text for _, text in self._applied]
        self._applied += [entry for entry in new if entry[1] not in texts]

    @property
    def _in_force(self) -> list[tuple[Rule, str]]:
        layers = [(rule.pattern, rule.op) for rule in self.policy.rules if rule in [r for r, _ in self._applied]]
        return [entry for entry in self._applied if (entry[0].pattern, entry[0].op) in layers]

    def report(self) -> Mapping[str, Any]:
        """Return the rules in force, in words."""
        return {"guard": [text for _, text in self._in_force]}

    def entries(self) -> dict[str, Tensor]:
        """Return the rules, as JSON in UTF-8; none without rules."""
        rules = [{"rule": rule.to_dict(), "text": text} for rule, text in self._in_force]
        return {_KEY: torch.tensor([*json.dumps(rules).encode()], dtype=torch.uint8)} if rules else {}

    def recognizes(self, name: str) -> bool:
        return name == _KEY

    def loader(self, entries: Mapping[str, Any]) -> Callable[[], None]:
        if _KEY not in entries:
            return lambda: None
        try:
            saved = json.loads(bytes(entries[_KEY].tolist()))
            if not isinstance(saved, list):
                raise TypeError(f"found {saved!r}")
        except (AttributeError, TypeError, ValueError, RecursionError) as error:
            raise refusal(f"{_KEY!r} is not a list of rules ({str(error):.200})") from None
        try:
            each = enumerate(cast("list[Any]", saved))
            rules = [(rule_from_dict(i, entry["rule"]), str(entry["text"])) for i, entry in each]
        except (Fp8GraphError, KeyError, TypeError) as error:
            raise refusal(f"a rule of a guard cannot be read ({str(error):.400})") from None
        return lambda: self.apply(rules) if rules else None


def with_rules(policy: Policy, rules: Iterable[Rule], replaced: Iterable[Rule] = ()) -> Policy:
    """``policy`` with other rules before its own. ``replaced``: those that go if a new one is for their layer."""
    last = {(rule.pattern, rule.op): rule for rule in rules}
    gone = [rule for rule in replaced if (rule.pattern, rule.op) in last]
    own = [rule for rule in policy.rules if rule not in gone and rule not in last.values()]
    return dataclasses.replace(policy, rules=[*last.values(), *own])


@dataclass(kw_only=True, eq=False)
class Guard:
    """Tensors that lose too much in quantization, as ``backend.guard()`` finds them on observed steps.

    Attributes:
        findings: what was found so far, in order: ``.step .site .operand .layout .recipe .stat .value .bound .gemms
            .rule``, and ``.reason`` where no rule is proposed. ``str()`` says it in words.
    """

    settings: GuardSettings
    guarded: Guarded = field(repr=False)
    observation: Observation = field(repr=False)
    schedule: Schedule = field(repr=False)
    layers: Layers = field(repr=False)
    sites: Callable[[], Mapping[str, PolicySite]] = field(repr=False)
    findings: list[GuardFinding] = field(default_factory=list[GuardFinding])

    def __post_init__(self) -> None:
        self._check_ranks()
        self._finding_keys: set[tuple[str, str, str, str]] = set()
        self._changes: dict[tuple[str, str], dict[GemmName, Any]] = {}  # proposals so far, by fqn and op
        self._at = 0  # the step at which the ranks exchanged findings
        condition = Observed(layers=self.layers.patterns, copies=True, block_size=0)
        self._request = self.observation.measure(condition, self.settings.steps.are_due, self._when_over, keeps=False)

    @property
    def policy(self) -> Policy:
        """The policy in force, with every rule that was proposed: ``guard.policy.to_dict()`` can be saved to a file."""
        rules: list[Rule] = [finding.rule for finding in self.findings if finding.rule is not None]
        return with_rules(self.guarded.policy, rules, rules)

    def stop(self) -> None:
        """End the watch. Findings and applied rules stay."""
        self.observation.stop(self._request)

    def after_step(self, _optimizer: object = None) -> None:
        """With ``reduce=True``, after an optimizer's step: all ranks exchange their findings, if it was observed."""
        now = self.schedule.step()
        if self.settings.reduce and now != self._at and self._request.wants(now - 1):
            self._judge(now)
        self._at = now

    def _when_over(self, now: int) -> None:
        self.layers.warn()
        if not self.settings.reduce:
            self._judge(now)

    def _check_ranks(self) -> None:
        if self.settings.apply and not self.settings.reduce and distributed.number_of_ranks(None) > 1:
            raise ConfigError(
                "guard(apply=True) on several ranks would give each its own policy. Add reduce=True, which lets all "
                "ranks exchange what they found after each observed step, on all ranks alike; or leave out apply=True."
            )

    def _judge(self, now: int) -> None:
        """Read the observed steps that are over, and log or apply the rules that help."""
        self._check_ranks()
        steps = self.observation.unread(self._request, now)
        sites = self.sites()
        all_crossings = crossings(
            records(self.observation.measurements(steps), self._request, NEEDED), self.settings.bounds, sites
        )
        self.observation.forget_steps(steps)
        own = [
            (crossing, sites.get(crossing.site))
            for crossing in all_crossings
            if not crossing.keys <= self._finding_keys
        ]
        if self.settings.reduce:
            everywhere = distributed.gathered_objects(own, None, others=False)
            own = sorted((entry for each in everywhere for entry in each), key=lambda entry: entry[0].order)
        self._tell(own)

    def _tell(self, pairs: Sequence[tuple[Crossing, PolicySite | None]]) -> None:
        rules: dict[tuple[str, str], tuple[Rule, str]] = {}
        new: list[GuardFinding] = []
        for crossing, site in pairs:
            if crossing.keys <= self._finding_keys:
                continue
            self._finding_keys |= crossing.keys
            layer = (site.fqn, site.op) if site is not None else (crossing.site, "")
            changes = self._changes.setdefault(layer, {})
            finding = proposed(crossing, site, self.settings.fallbacks, changes)
            new.append(finding)
            if finding.rule is not None:
                before = f"{rules[layer][1]}; " if layer in rules else f"guard: step {finding.step}: {layer[0]} "
                rules[layer] = finding.rule, before + report_text(finding)
        self.findings += new
        for finding in new:
            _log.warning("guard: %s", finding)
        if self.settings.apply and rules:
            self.guarded.apply(rules.values())
            for _, text in rules.values():
                _log.warning("%s. The rule is applied from now on.", text)


def report_text(finding: GuardFinding) -> str:
    """Return the change that a rule made, and its reason: "dgrad left FP8: 11.2 % of grad_output became zero (...)"."""
    assert finding.rule is not None
    changed: dict[str, list[str]] = {}
    for gemm in finding.gemms:
        recipe = finding.rule.recipe_for(gemm)
        changed.setdefault("left FP8" if recipe is None else f"is {recipe.name}", []).append(gemm)
    parts = [f"{' and '.join(gemms)} {what}" for what, gemms in changed.items()]
    return f"{', '.join(parts)}: {finding.words}"


def sites_of(graphs: Iterable[Graph], policies: Policies) -> dict[str, PolicySite]:
    """Return the sites of all graphs by name, as the current policy sees them."""
    sites: dict[str, PolicySite] = {}
    for graph in graphs:
        policy, identity = policies.of(graph.families)
        for view in graph.views:
            for record in view.gemms:
                if (site := sites.get(record.name)) is None:
                    resolution = policy.resolve(record.fqn, record.op)
                    recipes, obstacle = _plain(resolution.recipes)
                    site = sites[record.name] = PolicySite(
                        fqn=record.fqn,
                        op=record.op,
                        by_user=resolution.by_user,
                        recipes=recipes,
                        runs={},
                        obstacle=obstacle,
                    )
                if view.policy == identity or record.gemm not in site.runs:
                    site.runs[cast(GemmName, record.gemm)] = record.recipe
    return sites


def _plain(recipes: Mapping[GemmName, Recipe | None]) -> tuple[dict[GemmName, Any], str]:
    """Recipes as in a policy file, and why one cannot be written to it."""
    plain: dict[GemmName, Any] = {}
    for gemm in GEMMS:
        recipe = recipes[gemm]
        try:
            plain[gemm] = HIGH_PRECISION if recipe is None else name_of(recipe) or recipe.to_dict()
        except UnsupportedRecipeError as error:
            return {}, str(error).removesuffix(".")
    return plain, ""


class GuardMethods(Starter):
    """The part of a backend that its users guard with."""

    @property
    def guards(self) -> tuple[Guard, ...]:
        """The guards that the policy file, the option ``guard`` or calls of :meth:`guard` made, in order."""
        return tuple(self.started("guard"))

    def guard(
        self,
        *,
        underflows: float | None = 10.0,
        saturated: float | None = 10.0,
        sqnr: float | None = 10.0,
        every: int = 100,
        start: int = 100,
        end: int | None = None,
        layers: str | Sequence[str] = "*",
        recipe: RecipeLike | Sequence[RecipeLike] = None,
        apply: bool = False,
        reduce: bool = False,
    ) -> Guard:
        """Watch the operands of FP8 GEMMs on some steps, and propose a rule where quantization does too much to one.

        A finding is logged once per layer, operand, recipe and GEMM, with a rule that can be pasted, and kept in the
        :class:`~fp8graph.passes.observe.guard.Guard` that this returns. An operand that holds inf or NaN is reported,
        too. It measures as :meth:`observe` does. At the first call after an observed step it reads the numbers, which
        waits for the device; other steps wait for nothing.

        docs/statistics.md has what a healthy model reaches. At step 0 of delayed scaling with ``initial_scale="one"``
        much of a gradient underflows: hence ``start``. In 4 bits (nvfp4) much of a healthy tensor is zero, or the
        largest number, so that only the sqnr is judged there.

        Args:
            underflows, saturated: bounds in percent of the numbers that become zero, or the largest; None: no bound.
            sqnr: the least signal to noise ratio, in dB; None: no bound.
            every, start, end, layers: as in :meth:`observe`.
            recipe: what to propose for the GEMMs that read the operand: a recipe, or several, from the first to the
                last resort: ``["rowwise", "high_precision"]``. Default: high precision.
            apply: put the rule before the others, from the next call on. The log and the report say so, and
                :meth:`state_dict` holds it, so that a resumed run has the same policy.
            reduce: let all ranks exchange what they found, after the optimizer's step that ends an observed one. All
                of them must call this alike and step alike. With several ranks, ``apply`` needs it.

        Raises:
            ConfigError, UnsupportedRecipeError: (``ValueError``) for arguments that cannot be used.
        """
        return self.start(
            "guard", underflows=underflows, saturated=saturated, sqnr=sqnr, every=every, start=start, end=end,
            layers=layers, recipe=recipe, apply=apply, reduce=reduce,
        )  # fmt: skip
