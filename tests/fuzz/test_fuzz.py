"""Random programs: what fp8graph computes of each is what the reference computes, forward and backward.

``FUZZ_CASES=20000 python -m pytest tests/fuzz/test_fuzz.py`` draws more of them (the first 600 are those of CI: 50
for each recipe), a tenth of them through Inductor too with ``FUZZ_INDUCTOR=2000``.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable
from typing import Any, Final

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, seed, settings

import fuzz_reference
from fp8graph.numerics import matmul
from fuzz import RECIPES, Input, Linear, Program, RuleSpec, Step, Weight
from fuzz_draw import programs
from fuzz_reference import assert_right
from helpers import first_fast, first_slow

NAMES: Final = [name for name, recipe in RECIPES.items() if recipe is not None]
PART: Final = 50  # programs of one test, all of one recipe: about 30 seconds
CASES: Final = int(os.environ.get("FUZZ_CASES", PART * len(NAMES)))
INDUCTOR_CASES: Final = int(os.environ.get("FUZZ_INDUCTOR", "8"))  # Inductor takes seconds for each
INDUCTOR_PART: Final = 4


def run_random(number: int, cases: int, compiler: str) -> None:
    """About ``cases`` programs, which ``number`` alone decides about."""
    passed: set[Program] = set()

    @seed(number)
    @settings(
        max_examples=cases * 3 // 2,  # a third are drawn twice
        deadline=None,
        database=None,
        derandomize=True,
        print_blob=True,
        # one process draws and compiles: slow drawing is compiling; large programs are redrawn now and then
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.large_base_example],
        phases=(Phase.generate, Phase.shrink),
    )
    @given(program=programs(NAMES[number % len(NAMES)]))
    def run(program: Program) -> None:
        if program not in passed:
            assert_right(program, compiler)
            passed.add(program)

    run()


@first_slow("part", range(-(-CASES // PART)))
def test_random_programs(part: int) -> None:
    run_random(part, min(PART, CASES - part * PART), "eager")


@pytest.mark.release
@pytest.mark.parametrize("part", range(-(-INDUCTOR_CASES // INDUCTOR_PART)))
def test_random_programs_through_inductor(part: int) -> None:
    run_random(part + 100_000, min(INDUCTOR_PART, INDUCTOR_CASES - part * INDUCTOR_PART), "inductor")


REGRESSIONS: Final[dict[str, Program]] = {
    # the second copy, in another padding, was made with the scale that the first had just recorded: they knew their row
    # by different names
    "a cached weight on either side of a product": Program(
        inputs=(Input(shape=(32, 32)),),
        steps=(Step("functional", (0,)), Step("weight_first", (1,))),
        outputs=(2,),
        weights=(Weight(shape=(32, 32)),),
        recipe="delayed",
    ),
    # compiler="eager": a view of what is cut out of a padded result was impossible
    "heads in front of a linear of odd size": Program(
        inputs=(Input(shape=(1, 16)),),
        steps=(Step("silu", (0,)), Step("heads", (1,), numbers=(4,)), Step("linear", (2,))),
        outputs=(3,),
        linears=(Linear(inputs=4, outputs=4),),
    ),
    # left with the strides of the padded result: the caller's view(-1) failed
    "an odd size that leaves the graph": Program(
        inputs=(Input(shape=(2, 16)),),
        steps=(Step("linear", (0,)), Step("transpose", (1,))),
        outputs=(1, 2),
        linears=(Linear(inputs=16, outputs=5),),
    ),
    # the fuzzer's own: inf - inf in its measure of errors
    "an overflow of half precision": Program(
        inputs=(Input(shape=(2, 40, 40), trains=False),),
        steps=(Step("values", (0, 0)), Step("values", (1, 1)), Step("values", (2, 2))),
        outputs=(3,),
        dtype="float16",
        recipe="nvfp4_rows",
        rules=(RuleSpec(pattern="*", recipe="nvfp4_rows", op="matmul"),),
        seed=172,
    ),
    # in half precision Inductor's code for a CPU stored the amaxes of the weight's columns twice under one name
    "a frozen weight and its transpose by rows": Program(
        inputs=(Input(shape=(3, 3)),),
        steps=(Step("linear", (0,)), Step("transposed_use", (1,))),
        outputs=(2,),
        linears=(Linear(inputs=3, outputs=64, trains=False),),
        dtype="float16",
        recipe="rowwise",
        cache_weights=False,
    ),
    # the same by tiles of 32
    "a frozen weight and its transpose by tiles": Program(
        inputs=(Input(shape=(3, 3)),),
        steps=(Step("linear", (0,)), Step("transposed_use", (1,))),
        outputs=(2,),
        linears=(Linear(inputs=3, outputs=64, trains=False),),
        dtype="float16",
        recipe="mxfp8",
        cache_weights=False,
    ),
    # the fuzzer's own: all rows are equal, and so are their roundings; with noise of their own one raised the amax
    "equal rows": Program(
        inputs=(Input(shape=(32, 32), strides="expanded"),),
        steps=(Step("linear", (0,)), Step("linear", (1,), 1), Step("cat", (2, 2), numbers=(-2,))),
        outputs=(3,),
        linears=(Linear(inputs=32, outputs=16, bias=True), Linear(inputs=16, outputs=17)),
        dtype="float16",
        rules=(RuleSpec(pattern="*", recipe="tensorwise", op="matmul"),),
        fuse_linears=False,
        cache_weights=False,
        magnitude=4.0,
        seed=173,
    ),
    # the fuzzer's own: an element on a boundary that eight computations with noise left where it was
    "a tie after three products": Program(
        inputs=(Input(shape=(24, 24)), Input(shape=(48, 48))),
        steps=(
            Step("sliced_columns", (1,), numbers=(1, 49)),
            Step("sliced_rows", (2,), 1, (0, 40)),
            Step("sliced_columns", (3,), 2, (1, 41)),
            Step("every_other_row", (4,)),
            Step("cat", (5, 5), numbers=(-2,)),
        ),
        outputs=(6,),
        weights=(Weight(shape=(24, 52)), Weight(shape=(43, 24)), Weight(shape=(5, 44))),
        dtype="float32",
        recipe="rowwise_exact",
        rules=(
            RuleSpec(pattern="linears.*", recipe="delayed"),
            RuleSpec(pattern="*", recipe="rowwise_exact", op="matmul"),
        ),
        fuse_linears=False,
        cache_weights=False,
        seed=45,
    ),
    # the fuzzer's own: an element on a boundary of FP8, which four computations with noise all left on one side
    "a tie after a matmul": Program(
        inputs=(
            Input(shape=(32, 32), strides="expanded", trains=False),
            Input(shape=(2, 16, 16), strides="transposed"),
        ),
        steps=(
            Step("sliced_rows", (1,), numbers=(16, 33)),
            Step("einsum", (2,), 1),
            Step("linear", (3,)),
            Step("norm", (4,)),
        ),
        outputs=(5, 3),
        linears=(Linear(inputs=40, outputs=16),),
        weights=(Weight(shape=(36, 16)), Weight(shape=(40, 17))),
        norms=(("layer_norm", 16, False),),
        rules=(
            RuleSpec(pattern="weights.0", recipe="rowwise_exact", op="matmul", wgrad="tensorwise"),
            RuleSpec(pattern="weights.1", recipe="rowwise", op="*", dgrad="rowwise"),
        ),
        recipe="tensorwise",
        fuse_linears=False,
        seed=231,
    ),
    # dgrad wants the weight padded otherwise: the second copy was made with the scale that the first had just recorded
    "a frozen weight that a transposed input uses too": Program(
        inputs=(Input(shape=(1, 3, 3), trains=False), Input(shape=(3, 3), strides="transposed")),
        steps=(Step("linear", (1,)), Step("silu", (2,)), Step("silu", (3,)), Step("linear", (4,))),
        outputs=(5,),
        linears=(Linear(inputs=3, outputs=3, trains=False),),
        recipe="delayed_recent",
        fuse_linears=False,
        cache_weights="update",
    ),
    # under delayed scaling the root's matmul and the first weight's layer had one row of state: one scale for both
    "the root's matmul beside the first weight": Program(
        inputs=(Input(shape=(2, 16)), Input(shape=(2, 16))),
        steps=(Step("einsum_scores", (0, 1)), Step("linear", (2,))),
        outputs=(3, 2),
        linears=(Linear(inputs=2, outputs=24),),
        recipe="delayed",
        rules=(RuleSpec(pattern="*", recipe="delayed", op="matmul"),),
    ),
    # the weight of an einsum was quantized a second time for dgrad, with the scale that the first time had made
    "an einsum's weight under delayed scaling": Program(
        inputs=(Input(shape=(2, 40, 8)),),
        steps=(Step("einsum", (0,)),),
        outputs=(1,),
        weights=(Weight(shape=(40, 8)),),
        recipe="delayed",
    ),
    # the two gradients of x @ x were taken for each other: the rule for wgrad decided about dgrad
    "x @ x with two recipes": Program(
        inputs=(Input(shape=(8, 8)),),
        steps=(Step("values", (0, 0)),),
        outputs=(1,),
        rules=(RuleSpec(pattern="*", recipe="nvfp4", op="*", wgrad="high_precision"),),
    ),
}


@pytest.mark.parametrize("compiler", ["eager", pytest.param("inductor", marks=pytest.mark.release)])
@first_fast("name", REGRESSIONS)
def test_regressions(name: str, compiler: str) -> None:
    assert_right(REGRESSIONS[name], compiler)


# Every kind of product, siblings and a tied weight, all the layouts: what a mistake is planted into.
PLANTED: Final = Program(
    inputs=(Input(shape=(24, 33)), Input(shape=(24, 33), strides="transposed")),
    steps=(
        Step("linear", (0,)),
        Step("linear", (0,), 1),
        Step("mul", (2, 3)),
        Step("columns", (4,)),
        Step("scores", (5, 1)),
    ),
    outputs=(6, 2),
    linears=(Linear(inputs=33, outputs=48, bias=True), Linear(inputs=33, outputs=48)),
    weights=(Weight(shape=(48, 33)),),
    rules=(RuleSpec(pattern="*", recipe="tensorwise", op="matmul"),),
    fuse_linears=False,
)


def _mistaken(change: Callable[[list[Any], dict[str, Any]], Any], original: Any) -> Any:
    def function(*args: Any, **kwargs: Any) -> Any:
        arguments = list(args)
        change(arguments, kwargs)
        return original(*arguments, **kwargs)

    return function


def _double_scale(arguments: list[Any], _: dict[str, Any]) -> None:
    arguments[2] = arguments[2] * 2


def _reversed_rows(arguments: list[Any], _: dict[str, Any]) -> None:
    arguments[0] = arguments[0].view(torch.uint8).flip(0).view(arguments[0].dtype)


def _one_element_missing(arguments: list[Any], _: dict[str, Any]) -> None:
    arguments[0] = arguments[0].clone()
    arguments[0].view(torch.uint8)[0, 0] = 0


MISTAKES: Final[dict[str, Callable[[list[Any], dict[str, Any]], None]]] = {
    "a scale times 2": _double_scale,
    "rows in another order": _reversed_rows,
    "an element is missing": _one_element_missing,
}


PLANTED_IN: Final = ("tensorwise", "delayed", "rowwise")


@first_fast("recipe", PLANTED_IN)
def test_without_a_mistake(recipe: str) -> None:
    assert_right(dataclasses.replace(PLANTED, recipe=recipe))


@first_fast("mistake", MISTAKES)
@first_fast("recipe", PLANTED_IN, others=pytest.mark.release)
def test_a_mistake_is_found(recipe: str, mistake: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(matmul, "scaled_mm", _mistaken(MISTAKES[mistake], matmul.scaled_mm))
    with pytest.raises(AssertionError, match="dB, at least"):
        assert_right(dataclasses.replace(PLANTED, recipe=recipe))


def test_a_wrong_decision_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fuzz_reference, "expected_recipe", lambda *_: None)
    with pytest.raises(AssertionError):
        assert_right(PLANTED)
