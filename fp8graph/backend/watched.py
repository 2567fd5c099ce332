"""The part of a backend that watches training: statistics of observed steps, and guards."""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final, cast

from fp8graph.backend.compiling import Shared
from fp8graph.backend.findings import Site
from fp8graph.backend.guard import Guard, GuardSettings
from fp8graph.backend.policies import Policies
from fp8graph.backend.program import Programs
from fp8graph.backend.statistics import Statistics, Steps, check_globs, observe, texts
from fp8graph.errors import ConfigError, UnsupportedRecipeError
from fp8graph.passes.observe.observation import Observation
from fp8graph.recipes import GEMMS, HIGH_PRECISION, GemmName, Recipe, RecipeLike, name_of
from fp8graph.report import Report


class Watched:
    """``observe`` and ``guard`` of a :class:`~fp8graph.Backend`, and what they found."""

    def __init__(self, shared: Shared) -> None:
        self._shared: Final = shared
        self.programs: Final = Programs()
        self._statistics: Statistics | None = None
        self._guards: list[Guard] = []
        self._layers: list[tuple[str, tuple[str, ...]]] = []  # "observe" or "guard", and the globs it was given

    @property
    def report(self) -> Report:
        """The report on all code compiled so far."""
        raise NotImplementedError

    def _watch(self, asked: Mapping[str, Mapping[str, Any]]) -> None:
        """Call ``observe`` and ``guard`` with the arguments that a file or an option gives."""
        if "observe" in asked:
            self.observe(**asked["observe"])
        if "guard" in asked:
            self.guard(**asked["guard"])

    def check_layers(self) -> None:
        """Raise for globs of :meth:`observe` and :meth:`guard` that match no layer of the bound models.

        Raises:
            ConfigError: names the glob.
        """
        for call, patterns in self._layers:
            self._check_globs(call, patterns)

    def _check_globs(self, call: str, patterns: Sequence[str]) -> None:
        modules = self._shared.names.modules()
        if modules:
            modules |= {site.fqn for site in sites_of(self.programs, self._shared.policies).values()}
        check_globs(call, patterns, modules)

    @property
    def statistics(self) -> Statistics | None:
        """The statistics that the policy file, the option ``observe`` or the last call of :meth:`observe` wants."""
        return self._statistics

    @property
    def guards(self) -> tuple[Guard, ...]:
        """The guards that the policy file, the option ``guard`` or calls of :meth:`guard` made, in order."""
        return tuple(self._guards)

    def observe(
        self,
        *,
        every: int = 100,
        stats: str | Sequence[str] = "all",
        layers: str | Sequence[str] = "*",
        start: int = 0,
        end: int | None = None,
        what_if: Sequence[RecipeLike] = (),
        to_jsonl: str | Path | None = None,
    ) -> Statistics:
        """Measure on some steps, from the next call on, what is in each tensor and what quantization does to it.

        A second variant of each graph is compiled for these steps; all others run the code that they ran. Further
        calls, and guards, ask for more: one variant measures for all of them, and each gets its own steps and layers.

        Args:
            every, start, end: the steps ``start``, ``start + every``, ... before ``end`` (None: no end). A step is one
                of the optimizers'.
            stats: names of statistics, or "all": see ``docs/statistics.md``.
            layers: globs of the layers' names. One that matches no layer of a bound model (:meth:`bind`,
                ``fp8graph.compile``) is an error; if no model is bound, a warning after the first observed step.
            what_if: recipes. What they would make of each tensor is measured, too.
            to_jsonl: a file to which each observed step is appended when the next one begins.

        Raises:
            ConfigError: for arguments that cannot be used.
        """
        shared, programs, policies = self._shared, self.programs, self._shared.policies
        globs = texts("observe", "layers", layers)
        self._check_globs("observe", globs)
        shared.epoch.advance()
        reference = weakref.ref(self)  # its statistics must not keep a backend alive

        def report() -> Report:
            if (backend := reference()) is None:
                raise ConfigError("the page is of a backend's report, and this backend is gone: keep the model alive.")
            return backend.report

        self._statistics = observe(
            shared.services.store(Observation),
            shared.schedule,
            Steps(every=every, start=start, end=end),
            stats,
            layers,
            what_if,
            report=report,
            known_layers=lambda: {site.fqn for site in sites_of(programs, policies).values()},
            owner=self,
            path=to_jsonl,
        )
        self._layers.append(("observe", globs))
        return self._statistics

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
        :class:`~fp8graph.backend.guard.Guard` that this returns. An operand that holds inf or NaN is reported, too.
        It measures as :meth:`observe` does. At the first call after an observed step it reads the numbers, which
        waits for the device; other steps wait for nothing.

        A healthy small Llama (``fp8graph demo``, 20 steps, five FP8 recipes) reaches 4.1 % underflows (columns of a
        gradient, blockwise), 5.4 % saturated (mxfp8) and, after step 0, an sqnr of 19.4 dB (delayed). At step 0 of
        "delayed", when scales are 1, 86 % of a gradient underflow: hence ``start``. In 4 bits (nvfp4) much of a healthy
        tensor is zero (38 %) or the largest number (97 %), so that only the sqnr is judged there (18.7 dB).

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
        settings = GuardSettings.of(
            every=every, start=start, end=end, layers=layers, recipe=recipe, apply=apply, reduce=reduce,
            underflows=underflows, saturated=saturated, sqnr=sqnr,
        )  # fmt: skip
        shared, programs, policies = self._shared, self.programs, self._shared.policies
        self._check_globs("guard", settings.layers)
        guard = Guard(
            settings=settings,
            guarded=shared.guarded,
            observation=shared.services.store(Observation),
            schedule=shared.schedule,
            sites=lambda: sites_of(programs, policies),
        )
        shared.epoch.advance()
        if reduce:
            shared.steps.listen(guard.after_step)
        self._layers.append(("guard", settings.layers))
        self._guards.append(guard)
        return guard


def sites_of(programs: Programs, policies: Policies) -> dict[str, Site]:
    """The sites of all graphs by name, as the policy of now sees them."""
    found: dict[str, Site] = {}
    for program in programs:
        policy, identity = policies.of(program.families)
        for view in program.views:
            for record in view.gemms:
                if (known := found.get(record.name)) is None:
                    resolution = policy.resolve(record.fqn, record.op)
                    recipes, obstacle = _plain(resolution.recipes)
                    known = found[record.name] = Site(
                        fqn=record.fqn,
                        op=record.op,
                        by_user=resolution.by_user,
                        recipes=recipes,
                        runs={},
                        obstacle=obstacle,
                    )
                if view.policy == identity or record.gemm not in known.runs:
                    known.runs[cast(GemmName, record.gemm)] = record.recipe
    return found


def _plain(recipes: Mapping[GemmName, Recipe | None]) -> tuple[dict[GemmName, Any], str]:
    """Recipes as in a policy file, and why one cannot be written to it."""
    found: dict[GemmName, Any] = {}
    for gemm in GEMMS:
        recipe = recipes[gemm]
        try:
            found[gemm] = HIGH_PRECISION if recipe is None else name_of(recipe) or recipe.to_dict()
        except UnsupportedRecipeError as error:
            return {}, str(error).removesuffix(".")
    return found, ""
