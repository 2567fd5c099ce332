"""Choose one option for each of many decisions: the least time for a given error, for every error at once.

    decisions, each with options (error, seconds)    ->    a walk from no error to the least time, step by step

The walk takes the step that saves most time per error first (the steps are edges of the options' lower convex hulls, so
that each decision's own steps come in order). Every point of it is the best choice for its error if a decision could
be split in two; so it is at most one decision away from the best one there is (Sinha and Zoltners, "The
multiple-choice knapsack problem", 1979).
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

Key = TypeVar("Key", bound=Hashable)


@dataclass(frozen=True, kw_only=True)
class Option:
    """One way to run something."""

    choice: int | None  # what it is, for the caller; None: nothing is changed
    error: float
    seconds: float


@dataclass(frozen=True, kw_only=True)
class Point:
    """One point of the walk: after the options of all steps so far were taken."""

    error: float
    seconds: float


@dataclass(frozen=True)
class Step:
    """One decision moves from an option to the next one of its hull."""

    key: Any
    before: Option
    after: Option

    @property
    def error(self) -> float:
        return self.after.error - self.before.error

    @property
    def saved(self) -> float:
        return self.before.seconds - self.after.seconds


def hull(options: Sequence[Option]) -> list[Option]:
    """The options worth taking, from the least error to the least time, with falling savings per error."""
    kept: list[Option] = []
    for option in sorted(options, key=lambda option: (option.error, option.seconds)):
        if kept and option.seconds >= kept[-1].seconds:
            continue  # more error, and no time saved
        while len(kept) > 1 and not _bends_down(kept[-2], kept[-1], option):
            kept.pop()
        kept.append(option)
    return kept


def _bends_down(first: Option, middle: Option, last: Option) -> bool:
    """Whether the first step saves more per error than the second."""
    return (first.seconds - middle.seconds) * (last.error - middle.error) > (middle.seconds - last.seconds) * (
        middle.error - first.error
    )


def steps(decisions: Mapping[Key, Sequence[Option]]) -> list[Step]:
    """All steps of all decisions, those first that save most time per error."""
    found: list[Step] = []
    for key, options in decisions.items():
        best = hull(options)
        found += [Step(key, before, after) for before, after in zip(best, best[1:], strict=False)]
    # a step without error comes first; sorted() keeps the order of equal ones, so the walk is reproducible
    return sorted(found, key=lambda step: step.error / step.saved)


def start(decisions: Mapping[Key, Sequence[Option]]) -> dict[Key, Option]:
    """The option of least error of each decision."""
    return {key: hull(options)[0] for key, options in decisions.items()}


def total(chosen: Mapping[Key, Option]) -> Point:
    """What a choice comes to."""
    return Point(
        error=sum(option.error for option in chosen.values()), seconds=sum(option.seconds for option in chosen.values())
    )


def curve(decisions: Mapping[Key, Sequence[Option]]) -> list[Point]:
    """The whole walk, from the least error to the least time."""
    first = total(start(decisions))
    points = [first]
    for step in steps(decisions):
        last = points[-1]
        points.append(Point(error=last.error + step.error, seconds=last.seconds - step.saved))
    return points


def within_error(decisions: Mapping[Key, Sequence[Option]], most: float) -> dict[Key, Option]:
    """The choice of least time that the walk finds with an error of at most ``most``.

    Steps that no longer fit are left out, and smaller ones behind them are still taken.
    """
    chosen: dict[Any, Option] = dict(start(decisions))
    error = sum(option.error for option in chosen.values())
    for step in steps(decisions):
        if chosen[step.key] is step.before and error + step.error <= most * (1 + 1e-12):
            chosen[step.key] = step.after
            error += step.error
    return {key: chosen[key] for key in decisions}


def within_seconds(decisions: Mapping[Key, Sequence[Option]], most: float) -> dict[Key, Option] | None:
    """The choice of least error that the walk finds with a time of at most ``most``; None if there is none."""
    chosen: dict[Any, Option] = dict(start(decisions))
    seconds = sum(option.seconds for option in chosen.values())
    taken: list[Step] = []
    for step in steps(decisions):
        if seconds <= most * (1 + 1e-12):
            break
        chosen[step.key] = step.after
        seconds -= step.saved
        taken.append(step)
    if seconds > most * (1 + 1e-9):
        return None
    for step in reversed(taken):  # the last step may have saved more than was needed: take back what is not
        if chosen[step.key] is step.after and seconds + step.saved <= most:
            chosen[step.key] = step.before
            seconds += step.saved
    return {key: chosen[key] for key in decisions}
