"""The walk from no error to the least time, against every choice there is."""

from __future__ import annotations

import itertools
import random

from fp8graph.extras.planning.choose import Option, curve, hull, start, steps, total, within_error, within_seconds
from helpers import in_one_test

Decisions = dict[str, list[Option]]


def option(error: float, seconds: float, choice: int | None = 0) -> Option:
    return Option(choice=choice, error=error, seconds=seconds)


def random_decisions(seed: int, count: int = 6) -> Decisions:
    numbers = random.Random(seed)
    return {
        str(i): [option(0.0, 1.0 + numbers.random(), None)]
        + [option(numbers.random(), 2 * numbers.random(), j) for j in range(3)]
        for i in range(count)
    }


def every_choice(decisions: Decisions) -> list[tuple[float, float]]:
    return [
        (sum(o.error for o in chosen), sum(o.seconds for o in chosen))
        for chosen in itertools.product(*decisions.values())
    ]


def test_dominated_option_is_not_on_the_hull() -> None:
    options = [option(0, 10, None), option(1, 5, 1), option(2, 6, 2), option(3, 1, 3)]
    assert [o.choice for o in hull(options)] == [None, 1, 3]


def test_option_below_the_hull_is_skipped() -> None:
    options = [option(0, 10, None), option(1, 9.5, 1), option(2, 2, 2)]
    assert [o.choice for o in hull(options)] == [None, 2]


def test_a_faster_option_without_error_is_the_start() -> None:
    decisions = {"a": [option(0.0, 2.0, None), option(0.0, 1.0, 1)]}
    assert start(decisions)["a"].choice == 1
    assert steps(decisions) == []


def test_steps_save_less_and_less_per_error() -> None:
    for decisions in map(random_decisions, range(20)):
        rates = [step.saved / step.error for step in steps(decisions)]
        assert rates == sorted(rates, reverse=True)
        points = curve(decisions)
        assert all(a.error <= b.error and a.seconds >= b.seconds for a, b in itertools.pairwise(points))


@in_one_test("seed", range(20))
def test_within_a_bound_it_is_at_most_one_decision_from_the_best(seed: int) -> None:
    decisions = random_decisions(seed)
    points, choices = curve(decisions), every_choice(decisions)
    most_saved = max((step.saved for step in steps(decisions)), default=0.0)
    most_error = max((step.error for step in steps(decisions)), default=0.0)
    for share in (0.0, 0.2, 0.5, 0.8, 1.0):
        bound = share * points[-1].error
        found = total(within_error(decisions, bound))
        assert found.error <= bound * (1 + 1e-9)
        best = min(seconds for error, seconds in choices if error <= bound * (1 + 1e-9))
        assert best - 1e-12 <= found.seconds <= best + most_saved + 1e-12

        bound = points[-1].seconds + share * (points[0].seconds - points[-1].seconds)
        chosen = within_seconds(decisions, bound)
        assert chosen is not None
        found = total(chosen)
        assert found.seconds <= bound * (1 + 1e-9)
        best = min(error for error, seconds in choices if seconds <= bound * (1 + 1e-9))
        assert best - 1e-12 <= found.error <= best + most_error + 1e-12


def test_a_time_that_no_choice_reaches() -> None:
    assert within_seconds({"a": [option(0, 2, None), option(1, 1)]}, 0.5) is None


def test_the_walk_is_the_same_every_time() -> None:
    decisions = {name: [option(0, 1, None), option(0.5, 0.5)] for name in "abcdef"}  # all alike
    assert [step.key for step in steps(decisions)] == list("abcdef")
    assert [key for key, o in within_error(decisions, 1.0).items() if o.choice is not None] == ["a", "b"]
