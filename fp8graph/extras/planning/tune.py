"""``fp8graph.tune``: a policy chosen by measurement, for a budget of error or for a speed."""

from __future__ import annotations

import dataclasses
import functools
import importlib
import math
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from torch import nn

from fp8graph import hardware
from fp8graph.compat import wrappers
from fp8graph.errors import ConfigError, expect, expect_batches, expect_path
from fp8graph.extras.planning import choose
from fp8graph.extras.planning.scoring import GemmScore, Loss, Scoring, measure, seconds
from fp8graph.files import write_file
from fp8graph.hardware import Hardware
from fp8graph.ir.settings import Settings
from fp8graph.recipes import GEMMS, Recipe, RecipeLike, resolve_recipe
from fp8graph.recipes.policy import Policy, policy_toml
from fp8graph.recipes.rules import INHERIT, recipe_text
from fp8graph.report.terminal import progress_console

_DEFAULT_TARGET: Final = "sm_90"
Decision = tuple[str, str]  # (group, gemm)


@dataclass(frozen=True, kw_only=True)
class Score:
    """The change that one recipe would make in one GEMM of one layer, and the GEMM's time."""

    site: str  #: the full name of the layer
    op: str  #: "linear"
    group: str  #: the first of the layers that are decided together
    gemm: str  #: fprop, dgrad or wgrad
    candidate: int  #: index among the recipes
    recipe: str  #: its name
    measured: float  #: fprop: sum((dL/dY * change of Y)^2); dgrad: sum(change^2); wgrad: relative square error
    error: float  #: as a share of what FP8 everywhere makes
    seconds: float | None  #: predicted; None: the target has no such GEMM
    high_precision_seconds: float  #: predicted, in bf16


@dataclass(frozen=True, kw_only=True)
class CurvePoint:
    """One policy: its error as a share of that of FP8 everywhere, and the predicted speedup of the GEMMs over bf16."""

    error: float  #: 1: that of FP8 everywhere
    speedup: float  #: of the GEMMs, predicted, over bf16


@dataclass(frozen=True, kw_only=True, repr=False)
class Tuned:
    """The result of :func:`fp8graph.tune`. ``print`` it to see the rules with their scores."""

    policy: Policy  #: what was chosen, ready for ``fp8graph.compile``
    scores: tuple[Score, ...]  #: of each layer, GEMM and recipe
    curve: tuple[CurvePoint, ...]  #: from high precision to the fastest policy
    chosen: CurvePoint  #: of the policy
    uniform: Mapping[str, CurvePoint]  #: each recipe everywhere
    target: str  #: the GPU whose speed is predicted
    left_out: tuple[str, ...] = ()  #: layers that were not measured, and why

    def __repr__(self) -> str:
        return f"<Tuned: error {self.chosen.error:.3f}, {self.chosen.speedup:.3f} x bf16 on {self.target}>"

    def __str__(self) -> str:
        lines = [
            self.summary(),
            *(f"  {name} everywhere: {p.speedup:.3f} times, {p.error:.1%}" for name, p in self.uniform.items()),
            str(self.policy),
        ]
        for (group, gemm), best in self._by_decision().items():
            tried = ", ".join(f"{s.recipe} {s.error:.2%}" for s in best)
            lines.append(f"  {group} {gemm}: {tried}")
        lines += [f"not measured: {text}" for text in self.left_out]
        return "\n".join(lines)

    def _by_decision(self) -> dict[tuple[str, str], list[Score]]:
        """Return the scores of each group and GEMM, one per recipe (of its first layer: the others add theirs)."""
        decisions: dict[tuple[str, str], dict[str, Score]] = {}
        for score in self.scores:
            own = decisions.setdefault((score.group, score.gemm), {})
            before = own.get(score.recipe)
            error = score.error + (0.0 if before is None else before.error)
            own[score.recipe] = dataclasses.replace(score, error=error)
        ordered = sorted(decisions.items(), key=lambda item: -max(score.error for score in item[1].values()))
        return {key: list(own.values()) for key, own in ordered}

    def save(self, path: str | Path) -> None:
        """Write the policy as TOML, for ``Policy.load``, ``Backend(path)`` and ``options={"policy": path}``."""
        expect_path("Tuned.save", "path", path)
        text = f"# fp8graph.tune: {self.summary()}\n{policy_toml(self.policy)}"
        write_file(path, text, f"Tuned.save(path={str(path)!r})")

    def summary(self) -> str:
        """Return one line: the predicted speedup and error of the policy."""
        return (
            f"On {self.target}, predicted: GEMMs {self.chosen.speedup:.3f} times as fast as in bf16, with "
            f"{self.chosen.error:.1%} of the error of FP8 everywhere."
        )

    def plot(self, path: str | Path) -> None:
        """Draw the curve, each recipe everywhere, and the chosen point. Needs matplotlib."""
        try:
            matplotlib = importlib.import_module("matplotlib")
        except ImportError:
            raise ConfigError("Tuned.plot() needs matplotlib: pip install matplotlib.") from None
        matplotlib.use("Agg")
        pyplot = importlib.import_module("matplotlib.pyplot")
        figure, axes = pyplot.subplots(figsize=(7, 4.5), layout="constrained")
        axes.plot([p.speedup for p in self.curve], [p.error for p in self.curve], ".-", label="best choices", zorder=1)
        for name, point in self.uniform.items():
            axes.scatter(point.speedup, point.error, marker="s", label=f"{name} everywhere", zorder=2)
        axes.scatter(self.chosen.speedup, self.chosen.error, s=120, marker="*", color="black", label="chosen", zorder=3)
        axes.set(
            xlabel=f"predicted speedup of the GEMMs over bf16 on {self.target}",
            ylabel="error (FP8 everywhere = 1)",
            title="Error against time",
        )
        axes.grid(alpha=0.3)
        axes.legend(fontsize=8)
        figure.savefig(path, dpi=150)
        pyplot.close(figure)


def tune(
    model: nn.Module,
    batches: Iterable[Any],
    *,
    recipes: Sequence[RecipeLike] | None = None,
    loss: Loss | None = None,
    target: Any = None,
    budget: float | None = None,
    min_speedup: float | None = None,
    seed: int = 0,
    resume: str | Path | None = None,
    progress: bool | None = None,
) -> Tuned:
    """Measure what each recipe would change in each GEMM, and choose the fastest policy within a budget of error.

    A few batches run forward and backward, in high precision, through a graph that measures, for each linear and each
    of its three GEMMs, the error that each recipe makes: for fprop ``sum((dL/dY * change of Y)^2)``, for dgrad
    ``sum((change of dX)^2)`` for each linear whose gradient it goes into, for wgrad the square of the relative error.
    The model is not trained, and its gradients are kept. Linears that read one tensor (q, k and v; gate and up) are
    decided together; what the default policy keeps in high precision stays there. The roofline of ``target`` predicts
    the time of each GEMM.

    Errors of one kind of GEMM are divided by what they come to when all linears run in the fastest of ``recipes``, and
    the three kinds have equal weight: FP8 everywhere has an error of 1.

    Args:
        model: in the mode in which it is trained.
        batches: of the data that it is trained on; each is a dict (``model(**batch)``), a tuple (``model(*batch)``), or
            a tensor. Four to sixteen are enough for a start.
        recipes: the candidates, names or objects; None: those per tensor, row and tile that ``target`` multiplies.
            Delayed scaling is measured with scales from the tensor itself, which it comes to in steady training.
        loss: of ``(output, batch)``; None: the output's ``loss``, or the output.
        target: the GPU, as in :class:`Backend`; None: this machine's, or if that has no speed model, "sm_90".
        budget: of the error that FP8 everywhere would make, spend at most this share (0 to 1); None: 0.5.
        min_speedup: in place of ``budget``: the least error at which the GEMMs are this much faster than in bf16.
        seed: of random numbers (dropout) in the batches.
        resume: a file for what was measured, written after each batch. Of the batches that are in it, only the first
            runs again: its graphs say which layers there are.
        progress: show a progress bar (needs rich); None: on a terminal.

    Returns:
        The policy, all scores, and the curve of error against time.

    Raises:
        ConfigError: (a ``ValueError``) for arguments that cannot be used, a model without a loss, or if no policy is
            as fast as ``min_speedup`` says.
    """
    expect("tune", "model", model, nn.Module, "a model, an nn.Module")
    expect_batches("tune", "batches", batches)
    expect("tune", "loss", loss, object if loss is None or callable(loss) else (), "a function, or None")
    target = str(target) if isinstance(target, os.PathLike) else target
    device = _device(model, target)
    candidates, labels = _candidates(recipes, device)
    budget = _budget(budget, min_speedup)
    if resume is not None:
        expect_path("tune", "resume", resume)
    path = None if resume is None else Path(resume)
    bar: Callable[[Iterable[Any]], Iterable[Any]] = functools.partial(_bar, shown=progress)
    measurements, backend = measure(
        model,
        batches,
        [candidate.without_state for candidate in candidates],
        labels,
        target=target if target is not None else device.name,
        loss=loss,
        seed=seed,
        resume=path,
        progress=bar,
    )
    return _choose(measurements, backend, candidates, labels, device, budget, min_speedup)


def _choose(
    measurements: Sequence[GemmScore],
    backend: Scoring,
    candidates: Sequence[Recipe],
    labels: Sequence[str],
    device: Hardware,
    budget: float,
    min_speedup: float | None,
) -> Tuned:
    if not measurements:
        raise ConfigError("tune() found nothing to decide: no linear of the model has a backward in a compiled graph.")
    scores = _scores(measurements, candidates, labels, device)
    decisions: dict[Decision, list[choose.Option]] = {}
    for key in dict.fromkeys((score.group, score.gemm) for score in scores):
        own = [score for score in scores if (score.group, score.gemm) == key]
        alone = sum(s.high_precision_seconds for s in own if s.candidate == own[0].candidate)
        decisions[key] = [choose.Option(choice=None, error=0.0, seconds=alone)]
        for candidate in dict.fromkeys(score.candidate for score in own):
            these = [score for score in own if score.candidate == candidate]
            if all(score.seconds is not None for score in these):
                time = sum(score.seconds or 0.0 for score in these)
                error = sum(score.error for score in these)
                decisions[key].append(choose.Option(choice=candidate, error=error, seconds=time))
    plain = sum(options[0].seconds for options in decisions.values())
    if min_speedup is None:
        chosen = choose.within_error(decisions, budget)
    else:
        quick = choose.within_seconds(decisions, plain / min_speedup)
        if quick is None:
            best = plain / choose.curve(decisions)[-1].seconds
            raise ConfigError(
                f"tune(min_speedup={min_speedup:g}): the fastest policy is predicted to be {best:.3f} times as fast "
                f"as bf16 on {device.name}. Ask for less, or for a target or batches for which FP8 pays."
            )
        chosen = quick
    sites = dict.fromkeys((score.site, score.op, score.group) for score in scores)
    decided: dict[tuple[str, str], choose.Decided] = {}
    for site, op, group in sites:
        options = [chosen.get((group, gemm)) for gemm in GEMMS]
        decided[site, op] = tuple(
            INHERIT if option is None else None if option.choice is None else _named(candidates, labels, option.choice)
            for option in options
        )
    come_to = choose.total(chosen)
    return Tuned(
        policy=choose.policy_of(decided),
        scores=tuple(scores),
        curve=tuple(CurvePoint(error=p.error, speedup=plain / p.seconds) for p in choose.curve(decisions)),
        chosen=CurvePoint(error=come_to.error, speedup=plain / come_to.seconds),
        uniform={
            label: CurvePoint(error=point.error, speedup=plain / point.seconds)
            for index, label in enumerate(labels)
            if (point := _uniform(decisions, index)) is not None
        },
        target=device.name,
        left_out=tuple(backend.scores.left_out(backend.report.refusals)),
    )


def _scores(
    measurements: Sequence[GemmScore], candidates: Sequence[Recipe], labels: Sequence[str], device: Hardware
) -> list[Score]:
    """Return every measured error as a share of what the fastest recipe makes everywhere, with the predicted times."""
    members: dict[str, set[str]] = {}
    for one in measurements:
        members.setdefault(one.group, set()).add(one.site)

    def time(one: GemmScore, recipe: Recipe | None) -> float | None:
        return seconds(one, recipe, device, len(members[one.group]))

    times = [time(one, candidates[one.candidate]) for one in measurements]
    plain = [time(one, None) or 0.0 for one in measurements]
    totals = {
        index: sum(
            min(t, p) if t is not None else p
            for one, t, p in zip(measurements, times, plain, strict=True)
            if one.candidate == index
        )
        for index in range(len(candidates))
    }
    fastest = min(totals, key=lambda index: totals[index])
    kinds = list(dict.fromkeys(one.gemm for one in measurements))
    whole = {kind: sum(o.error for o in measurements if o.gemm == kind and o.candidate == fastest) for kind in kinds}
    return [
        Score(
            site=one.site,
            op=one.op,
            group=one.group,
            gemm=one.gemm,
            candidate=one.candidate,
            recipe=labels[one.candidate],
            measured=one.error,
            error=one.error / whole[one.gemm] / len(kinds) if whole[one.gemm] > 0 else 0.0,
            seconds=t,
            high_precision_seconds=p,
        )
        for one, t, p in zip(measurements, times, plain, strict=True)
    ]


def _uniform(decisions: Mapping[Decision, Sequence[choose.Option]], candidate: int) -> choose.Point | None:
    """Return one recipe for every GEMM that it can multiply."""
    chosen = {
        key: next((option for option in options if option.choice == candidate), options[0])
        for key, options in decisions.items()
    }
    return choose.total(chosen) if any(option.choice is not None for option in chosen.values()) else None


def _named(candidates: Sequence[Recipe], labels: Sequence[str], index: int) -> RecipeLike:
    """Return the name that the caller gave, if it is one; else the recipe."""
    try:
        return labels[index] if resolve_recipe(labels[index]) == candidates[index] else candidates[index]
    except ValueError:
        return candidates[index]


def _candidates(recipes: Sequence[RecipeLike] | None, device: Hardware) -> tuple[list[Recipe], list[str]]:
    if recipes is None:
        names = ("tensorwise", "rowwise", "blockwise", "mxfp8")
        recipes = [n for n in names if (r := resolve_recipe(n)) and device.multiplies(r.quantizer("input").scaling)]
    if isinstance(recipes, (str, Recipe)) or not recipes:
        raise ConfigError(f'tune(recipes={recipes!r}): give a list of recipes, such as ["tensorwise", "rowwise"].')
    resolved = [(resolve_recipe(recipe), recipe) for recipe in recipes]
    resolved = [(recipe, given) for recipe, given in resolved if recipe is not None]  # always a candidate
    if not resolved:
        raise ConfigError("tune(recipes=...): high precision is always a candidate; name some recipe.")
    labels = [given if isinstance(given, str) else recipe_text(recipe) for recipe, given in resolved]
    return [recipe for recipe, _ in resolved if recipe is not None], labels


def _device(model: nn.Module, target: Any) -> Hardware:
    if target is not None:
        device = Settings(target=target).hardware
        if device is None or device.speed is None:
            raise ConfigError(f"tune(target={target!r}): its speed is not known, and without it nothing can be chosen.")
        return device
    parameter = next(wrappers.original_module(model).parameters(), None)
    own = hardware.of_device(parameter.device if parameter is not None else torch.device("cpu"))
    return own if own.speed is not None else hardware.from_target(_DEFAULT_TARGET)


def _budget(budget: float | None, min_speedup: float | None) -> float:
    """Return the budget; 0.5 if none is given."""
    if budget is not None and min_speedup is not None:
        raise ConfigError("tune(): budget and min_speedup are two goals; give one of them.")
    if budget is None:
        budget = 0.5
    if type(budget) not in (int, float) or not 0 <= budget <= 1:
        raise ConfigError(f"tune(budget={budget!r}): budget must be a number from 0 to 1.")
    if min_speedup is not None and (type(min_speedup) not in (int, float) or not 0 < min_speedup < math.inf):
        raise ConfigError(f"tune(min_speedup={min_speedup!r}): min_speedup must be a number above 0.")
    return budget


def _bar(batches: Iterable[Any], *, shown: bool | None) -> Iterable[Any]:
    if shown is False or (shown is None and progress_console() is None):
        return batches
    try:
        from rich.console import Console
        from rich.progress import track
    except ImportError:
        raise ConfigError("tune(progress=True) needs rich: pip install rich.") from None
    return track(batches, "measuring", console=Console(stderr=True))
