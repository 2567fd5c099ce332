"""A hypothesis strategy that draws programs (``fuzz.py``)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Final

from hypothesis import strategies

from fuzz import (
    OF_ACTIVATIONS,
    POINTWISE_NAMES,
    PRODUCTS,
    RECIPES,
    Dtype,
    Input,
    Linear,
    Program,
    RuleSpec,
    Step,
    Strides,
    Weight,
)

SIZES: Final = (1, 2, 3, 5, 8, 16, 16, 17, 24, 32, 32, 33, 40, 48, 64)
_STRIDES: Final[tuple[Strides, ...]] = ("contiguous", "contiguous", "contiguous", "transposed", "sliced", "expanded")
_DTYPES: Final[tuple[Dtype, ...]] = ("float32", "float32", "bfloat16", "float16")
_VIEWS: Final = (
    "transpose",
    "every_other_row",
    "without_first_column",
    "flatten",
    "contiguous",
    "detach",
    "unflatten",
    "heads",
    "merge",
    "through_float64",
)
_MAX_PRODUCTS: Final = 3  # each costs a tenth of a second to compile
_MAX_ELEMENTS: Final = 6000


class _Builder:
    """Draws a program step by step; knows the shape of every value."""

    def __init__(self, draw: Any, recipe: str) -> None:
        self.draw = draw
        self.inputs: list[Input] = []
        self.linears: list[Linear] = []
        self.weights: list[Weight] = []
        self.norms: list[tuple[str, int, bool]] = []
        self.steps: list[Step] = []
        self.shapes: list[tuple[int, ...]] = []
        self.origins: list[int] = []  # the value that each one is a view of, or itself
        self.parts: set[int] = set()  # results of split and chunk
        self.products = 0
        self.recipe = recipe

    def one_of(self, values: Sequence[Any]) -> Any:
        return self.draw(strategies.sampled_from(values))

    def size(self) -> int:
        """Often one that is there already: programs of equal sizes are those that share, group and tie."""
        known = [size for shape in self.shapes for size in shape if size > 1]
        return self.one_of(known) if known and not self.often() else self.one_of(SIZES)

    def often(self) -> bool:
        return self.draw(strategies.integers(0, 3)) > 0

    def add_input(self) -> None:
        sizes = [self.size(), self.one_of(SIZES[2:])]
        if not self.often():  # a square looks the same transposed
            sizes[0] = sizes[1]
        if not self.often():
            sizes.insert(0, self.one_of((1, 2, 3)))
        self.inputs.append(Input(shape=tuple(sizes), strides=self.one_of(_STRIDES), trains=self.often()))
        self.shapes.append(tuple(sizes))
        self.origins.append(len(self.origins))

    def add(
        self, op: str, sources: tuple[int, ...], *shapes: tuple[int, ...], which: int = 0, numbers: Any = ()
    ) -> None:
        self.steps.append(Step(op, sources, which, tuple(numbers)))
        for shape in shapes:
            if op in ("split", "chunk"):
                self.parts.add(len(self.shapes))
            self.origins.append(self.origins[sources[0]] if op in _VIEWS else len(self.shapes))
            self.shapes.append(shape)
        self.products += op in PRODUCTS

    def add_weight(self, *shape: int) -> int:
        same = [i for i, weight in enumerate(self.weights) if weight.shape == shape]
        if same and self.often():
            return self.one_of(same)
        self.weights.append(Weight(shape=(shape[0], shape[1]), trains=self.often()))
        return len(self.weights) - 1

    def add_linear(self, inputs: int) -> int:
        known = [i for i, linear in enumerate(self.linears) if linear.inputs == inputs]
        if known and not self.often():
            return self.one_of(known)
        if known and not self.often():
            tied = self.one_of(known)
            outputs, trains = self.linears[tied].outputs, self.linears[tied].trains
        else:  # siblings of one size are what grouping is about
            tied, trains = None, self.often()
            outputs = self.linears[known[0]].outputs if known and self.often() else max(self.size(), 2)
        bias = not self.often()
        self.linears.append(Linear(inputs=inputs, outputs=outputs, bias=bias, trains=trains, tied=tied))
        return len(self.linears) - 1

    def step(self) -> None:
        # the newest value most of the time: programs get deep, and branch now and then
        x = len(self.shapes) - 1 if self.often() else self.draw(strategies.integers(0, len(self.shapes) - 1))
        if self.products < _MAX_PRODUCTS and self.often():
            self.product(x)
        else:
            self.other(x)

    def product(self, x: int) -> None:
        *leading, columns = self.shapes[x]
        # torch multiplies and sums where a size is one, on some devices and layouts: no matmul, or half of one, arrives
        n = max(self.size(), 2)
        if columns == 1 or math.prod(leading) == 1:
            return
        op = self.one_of(["linear"] * 6 + list(PRODUCTS))
        start = self.one_of((0, 1, 16))
        if op == "linear":
            which = self.add_linear(columns)
            self.add(op, (x,), (*leading, self.linears[which].outputs), which=which)
        elif op == "transposed_use":
            fitting = [i for i, linear in enumerate(self.linears) if linear.outputs == columns]
            if fitting:
                which = self.one_of(fitting)
                self.add(op, (x,), (*leading, self.linears[which].inputs), which=which)
        elif op in ("functional", "einsum"):
            self.add(op, (x,), (*leading, n), which=self.add_weight(n, columns))
        elif op == "columns":
            self.add(op, (x,), (*leading, n), which=self.add_weight(columns, n))
        elif op == "sliced_rows":
            which = self.add_weight(n + start + 3, columns)
            self.add(op, (x,), (*leading, n), which=which, numbers=(start, start + n))
        elif op == "sliced_columns":
            which = self.add_weight(n, columns + start + 3)
            self.add(op, (x,), (*leading, n), which=which, numbers=(start, start + columns))
        elif op == "weight_first" and len(leading) == 1:
            self.add(op, (x,), (n, columns), which=self.add_weight(n, leading[0]))
        elif op == "addmm" and len(leading) == 1:
            addends = [
                i for i, shape in enumerate(self.shapes) if len(shape) == 2 and shape[0] == leading[0] and shape[1] > 1
            ]
            if not addends:
                return
            addend = self.one_of(addends)
            which = self.add_weight(columns, n := self.shapes[addend][1])
            self.add(op, (addend, x), (leading[0], n), which=which, numbers=self.factors())
        elif op in OF_ACTIVATIONS:
            self.product_of_activations(op, x)

    def factors(self) -> tuple[float, float]:
        return self.one_of(((1.0, 1.0), (1.0, 1.0), (0.0, 1.0), (0.5, 1.0), (1.0, -2.0)))

    def product_of_activations(self, op: str, x: int) -> None:
        *batch, rows, columns = self.shapes[x]
        contracted = -2 if op == "values" else -1
        others = [i for i, s in enumerate(self.shapes) if list(s[:-2]) == batch and s[contracted] == columns]
        # x @ x.T: its gradients are dy @ x and dy.T @ x, and where dy is square nothing tells which one is dgrad
        others = [i for i in others if op == "values" or self.origins[i] != self.origins[x]]
        others = [i for i in others if self.shapes[i][-3 - contracted] > 1]
        if not others or rows == 1:
            return
        other = self.one_of(others)
        shape = (*batch, rows, self.shapes[other][-3 - contracted])
        if op != "baddbmm":
            self.add(op, (x, other), shape)
            return
        addends = [i for i, s in enumerate(self.shapes) if s == shape and len(s) == 3]
        if addends:
            self.add(op, (self.one_of(addends), x, other), shape, numbers=self.factors())

    def other(self, x: int) -> None:
        shape = self.shapes[x]
        *leading, columns = shape
        ops = ["norm", "norm", "add", "add", "mul", "cat", "chunk", "split", "unflatten", "heads", "merge"]
        op = self.one_of([*POINTWISE_NAMES, *ops])
        same = [i for i, other in enumerate(self.shapes) if other == shape]
        if op == "norm":
            if columns >= 4:  # of fewer elements a norm is a sign
                self.norms.append((self.one_of(("layer_norm", "rms_norm")), columns, self.often()))
                self.add(op, (x,), shape, which=len(self.norms) - 1)
        elif op in ("add", "mul"):
            self.add(op, (x, self.one_of(same)), shape)
        elif op == "cat":
            parts, dim = (x, self.one_of(same)), self.one_of((-1, -2))
            joined = list(shape)
            joined[dim] *= 2
            self.add(op, parts, tuple(joined), numbers=(dim,))
        elif op == "chunk" and columns >= 2:
            first = -(-columns // 2)
            self.add(op, (x,), (*leading, first), (*leading, columns - first))
        elif op == "split" and columns >= 3:
            first = self.draw(strategies.integers(1, columns - 2))
            sizes = (first, 1, columns - first - 1)
            self.add(op, (x,), *((*leading, size) for size in sizes), numbers=sizes)
        elif op == "unflatten" and len(shape) == 2 and shape[0] % 2 == 0:
            self.add(op, (x,), (2, shape[0] // 2, columns), numbers=(2,))
        elif op == "heads" and len(shape) == 2 and columns % 2 == 0:
            heads = 4 if columns % 4 == 0 and self.often() else 2
            self.add(op, (x,), (heads, shape[0], columns // heads), numbers=(heads,))
        elif op == "merge" and len(shape) == 3:
            self.add(op, (x,), (shape[1], shape[0] * columns))
        elif op in POINTWISE_NAMES:
            self.pointwise(op, x)

    def pointwise(self, op: str, x: int) -> None:
        *leading, columns = shape = self.shapes[x]
        if op == "detach" and (self.origins[x] != x or x in self.parts):
            # torch up to 2.15 at least: of an output that is a view of a result and another that is detached from it
            # AOTAutograd makes one from the wrong tensor: it raises ("incorrect out shape", "shape is invalid for input
            # of size") or is wrong, with every backend (tests/compat/test_inductor.py)
            return
        if op == "softmax" and columns < 4:  # of one element it is constant
            return
        if op == "transpose":
            shape = (*shape[:-2], columns, shape[-2])
        elif op == "flatten":
            shape = (math.prod(leading), columns)
        elif op == "every_other_row":
            shape = (*shape[:-2], -(-shape[-2] // 2), columns)
        elif op == "without_first_column":
            if columns == 1:
                return
            shape = (*leading, columns - 1)
        self.add(op, (x,), shape)

    def rule(self) -> RuleSpec:
        names = [f"linears.{i}" for i in range(len(self.linears))] + [f"weights.{i}" for i in range(len(self.weights))]
        others = ("high_precision", "high_precision", self.recipe, *RECIPES)
        own = {gemm: self.one_of(others) if not self.often() else None for gemm in ("fprop", "dgrad", "wgrad")}
        return RuleSpec(
            pattern=self.one_of(("*", "linears.*", "weights.*", *names)),
            recipe=self.one_of(others),
            op=self.one_of(("linear", "matmul", "*")),
            **own,
        )


@strategies.composite
def programs(draw: Any, recipe: str) -> Program:
    """Programs whose policy gives ``recipe`` to what no rule names."""
    builder = _Builder(draw, recipe)
    for _ in range(draw(strategies.integers(1, 2))):
        builder.add_input()
    for _ in range(draw(strategies.integers(2, 7))):
        if all(math.prod(shape) <= _MAX_ELEMENTS for shape in builder.shapes):
            builder.step()
    if not builder.products:
        builder.add(
            "functional", (0,), (*builder.shapes[0][:-1], 24), which=builder.add_weight(24, builder.shapes[0][-1])
        )
    last = len(builder.shapes) - 1
    more = draw(strategies.lists(strategies.integers(len(builder.inputs), last), max_size=2))
    rules = [builder.rule() for _ in range(draw(strategies.sampled_from((0, 0, 1, 2))))]
    if draw(strategies.booleans()):  # activation x activation products are in high precision without a rule
        rules.append(RuleSpec(pattern="*", recipe=recipe, op="matmul"))
    return Program(
        inputs=tuple(builder.inputs),
        steps=tuple(builder.steps),
        outputs=tuple(dict.fromkeys((last, *more))),
        linears=tuple(builder.linears),
        weights=tuple(builder.weights),
        norms=tuple(builder.norms),
        dtype=builder.one_of(_DTYPES),
        recipe=recipe,
        rules=tuple(rules),
        fuse_linears=draw(strategies.booleans()),
        save=builder.one_of(("speed", "speed", "memory")),
        cache_weights=builder.one_of((True, "update", False)),
        magnitude=builder.one_of((1.0, 1.0, 0.05, 4.0)),
        seed=draw(strategies.integers(0, 999)),
    )
