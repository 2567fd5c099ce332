"""Each low-precision product of a graph beside the float64 product of what its operands were before their casts.

The graph runs on real numbers. A tensor that is multiplied by a scale and cast is followed with its number before that
(the shadow) and the variance that rounding gives it: casts and the scales of a cast are the identity on the shadow,
products and sums are computed in float64. A result that differs from its shadow by more than rounding is unexplained.
Each product starts from the program's own numbers, so that it is judged by its own error, not by what it inherits.
"""

from __future__ import annotations

import itertools
import math
import operator
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, Literal, NamedTuple, cast

import torch
from torch import Tensor, fx

from fp8graph.analysis.scales.exponents import spread_operand
from fp8graph.analysis.scales.nodes import holds_amaxes, operands_of
from fp8graph.analysis.scales.ops import (
    CLAMPS,
    CONSTANTS,
    DIVIDES,
    JOINS,
    LARGEST_OF,
    MOVES,
    MULTIPLIES,
    PRODUCTS,
    REDUCTIONS,
    SAME,
    SCALED,
    SUMS,
    WITH_ADDEND,
    WITH_BIAS,
    aten,
    hints,
)
from fp8graph.analysis.scales.states import FP8, Source
from fp8graph.compat import aot
from fp8graph.compat.ops import OpOverload, named_arguments, pytree, schema
from fp8graph.ir.nodes import backward_nodes

UNEXPLAINED: Final = 4.0  # times the expected error
SATURATED: Final = 0.01  # of the numbers of an operand
FLUSHED: Final = 0.5
_PER_ROW: Final = 2.0  # the bound of a row or column, in units of that of all
_FEWEST: Final = 16  # elements of a row that is judged by itself
_NAMES: Final = {1: "column", 2: "row"}  # of dims, counted from the last
_OTHER: Final = 2.0**-8  # the relative error of roundings to bf16, and of sums in FP32 or less
_ALTERNATIVES: Final = 4
_LARGEST: Final = {torch.float8_e4m3fn: (448.0, 3, -6), torch.float8_e5m2: (57344.0, 2, -14)}
_MOVES: Final = {
    *MOVES,
    aten.index.Tensor,
    aten.index_select.default,
    aten.constant_pad_nd.default,
    hints.arrange.default,
}
_UNARY: Final = SAME - {aten.relu.default, aten.abs.default}
# Ops that may yet apply a scale to what they read, or leave parts of it out: no verdict.
_DOUBTFUL: Final = (
    "index",
    "scatter",
    "gather",
    "copy",
    "strided",
    "embed",
    "sort",
    "topk",
    "view",
    "grouped",
    "eq",
    "isnan",
)


@dataclass(frozen=True)
class Unexplained:
    """A product whose result differs from its shadow by more than rounding, both errors relative to the shadow."""

    node: fx.Node
    error: float
    expected: float
    part: str = ""  # " in row 3", if the others are explained


@dataclass(frozen=True)
class Lost:
    """A cast that loses a share of its numbers: at the end of the type's range, or as zeros."""

    node: fx.Node
    dtype: torch.dtype
    rule: Literal["saturated", "flushed"]
    share: float


@dataclass(frozen=True)
class _Factor:
    """A factor of a scale: the tensors that it is computed from, none for a constant."""

    value: Tensor
    inverted: bool = False
    roots: frozenset[Any] = frozenset()
    sure: bool = False  # a scale for certain: from a largest magnitude, or so named


@dataclass(frozen=True)
class _Scale:
    factors: tuple[_Factor, ...]


@dataclass(frozen=True)
class _Scaled:
    """A tensor that scales multiplied: with how many of them undone, and the roots of those; and as it is."""

    candidates: tuple[tuple[Tensor, frozenset[Any]], ...]
    scaled: Tensor  # before it is clamped


@dataclass(frozen=True)
class _Number:
    exact: Tensor  # float64
    variance: Tensor
    rounded: Tensor  # what the codes stand for, where they are no further off than by rounding
    undone: frozenset[Any]  # the roots of the scales that its casts have, or should have, and it has not
    doubtful: bool = False  # some scale may belong to its casts, or not

    def each(self, value: Callable[[Tensor], Any], variance: Callable[[Tensor], Any]) -> _Number:
        """Return the number after an op that is linear in it."""
        exact = value(self.exact)
        rounded = exact if self.rounded is self.exact else value(self.rounded)
        return replace(self, exact=exact, rounded=rounded, variance=variance(self.variance))

    def times(self, factor: Tensor) -> _Number:
        return self.each(lambda x: x * factor, lambda v: v * factor.square())


class _Error(NamedTuple):
    units: float = 0.0  # of the expected error, by the bound of that part
    relative: float = 0.0
    expected: float = 0.0
    part: str = ""


@dataclass(frozen=True)
class _Shadow:
    """FP8 codes, decoded codes or a product of such, beside what they stand for: the one of the numbers that fits."""

    numbers: tuple[_Number, ...]
    product: fx.Node | None = None
    applied: bool = False  # some scale since the cast
    error: _Error = _Error()


class ShadowRun:
    """The runs of one graph, on one batch after the other."""

    def __init__(self, module: fx.GraphModule, sources: Mapping[fx.Node, Source]) -> None:
        self.module = module
        self.sources = sources
        self.backward = backward_nodes(module.graph)
        self.unexplained: list[Unexplained] = []
        self.lost: list[Lost] = []
        self.ratios: list[float] = []  # of all products that were judged
        self._states: dict[fx.Node, Any] = {}
        self._values: dict[fx.Node, Any] = {}
        self._inputs: dict[fx.Node, Any] = {}
        self._judged: set[fx.Node] = set()  # what follows starts from the program's own numbers

    @torch.no_grad()
    def __call__(self, inputs: Sequence[Any]) -> Any:
        """Run the graph; its faults are kept for :attr:`unexplained`, in the order of the program."""
        uses = Counter(x for node in self.module.graph.nodes for x in node.all_input_nodes)
        waiting = iter(inputs)
        self._values, self._states, self._judged = {}, {}, set()
        for node in self.module.graph.nodes:
            if node.op == "output":
                self._leave(node)
                results = fx.map_arg(node.args[0], self._values.__getitem__)
                self._values, self._states, self._inputs = {}, {}, {}
                return results
            if node.op == "placeholder":
                self._inputs[node] = self._values[node] = next(waiting)
                self._states[node] = self._input(node)
            elif node.op == "get_attr":
                self._values[node] = constant_of(self.module, node)
                self._states[node] = self._constant(node)
            else:
                self._values[node] = compute(node, self._values.__getitem__)
                self._states[node] = self._followed_by(node)
            for each in node.all_input_nodes:
                uses[each] -= 1
                if not uses[each]:
                    self._values.pop(each, None)
                    self._states.pop(each, None)
        return None

    # States

    def _state(self, node: Any) -> Any:
        state = self._states.get(node)
        judged = isinstance(state, _Shadow) and state.product in self._judged and not self._is_result(state)
        return None if judged else state

    def _input(self, node: fx.Node) -> Any:
        value, source = self._inputs[node], self.sources.get(node)
        if not isinstance(value, Tensor) or source is None:
            return None
        if value.dtype in FP8:
            return _Shadow((_plain(value),)) if value.dtype in _LARGEST and value.ndim > 1 else None
        named = "scal" in source.leaf or holds_amaxes(source)
        if value.is_floating_point() and (named or value.numel() == 1) and not (source.trains and not named):
            return _Scale((_Factor(value, roots=frozenset({node}), sure=named and value.numel() == 1),))
        return None

    def _followed_by(self, node: fx.Node) -> Any:
        try:
            return self._call(node)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError:  # an op that does not run on a shadow
            return None

    def _constant(self, node: fx.Node) -> Any:
        value = self._values[node]
        return _Scale((_Factor(value),)) if isinstance(value, Tensor) and value.numel() == 1 else None

    def _call(self, node: fx.Node) -> Any:
        target, value = node.target, self._values[node]
        if target is operator.getitem:
            state = self._state(cast(fx.Node, node.args[0]))
            return state[cast(int, node.args[1])] if isinstance(state, list) else state
        if target in PRODUCTS:
            return self._product(node)
        if target in CONSTANTS:
            return _Scale((_Factor(value),)) if isinstance(value, Tensor) else None
        argument = node.args[0] if node.args else None
        inputs = [self._state(x) for x in node.all_input_nodes]
        if target in (*MULTIPLIES, *DIVIDES):
            return self._multiplied(node)
        if isinstance(argument, fx.Node) and self._becomes_fp8(node, argument):
            return self._cast(node, argument)
        if inputs and all(isinstance(x, _Scale) for x in inputs):
            return self._of_scales(node, cast("list[_Scale]", inputs))
        if (target in LARGEST_OF or target in REDUCTIONS) and isinstance(argument, fx.Node):
            return self._reduced(node, argument)
        if any(isinstance(x, _Shadow) for x in inputs):
            followed = self._followed(node)
            if followed is not NotImplemented:
                return followed
            self._judge(node)
            return None
        if isinstance(argument, fx.Node) and isinstance(state := self._state(argument), _Scaled):
            if target in CLAMPS or target in SAME and target not in (aten.relu.default, aten.abs.default):
                return state
            if target in _MOVES:
                return self._moved_candidates(node, state)
        return None

    def _becomes_fp8(self, node: fx.Node, argument: fx.Node) -> bool:
        value, before = self._values[node], self._values[argument]
        if not isinstance(value, Tensor) or not isinstance(before, Tensor) or node.target not in SAME:
            return False
        return value.dtype in FP8 and before.dtype not in FP8

    # Scales

    def _of_scales(self, node: fx.Node, inputs: list[_Scale]) -> Any:
        """Return a number that is computed from scales alone."""
        value = self._values[node]
        if node.target is aten.reciprocal.default:
            return _Scale(tuple(replace(x, inverted=not x.inverted) for x in inputs[0].factors))
        factors = [x for scale in inputs for x in scale.factors]
        roots = frozenset(root for x in factors for root in x.roots)
        sure = all(x.sure for x in factors if x.roots)

        def whole(x: Any) -> Any:
            return (
                _Scale((_Factor(x, False, roots, sure),)) if isinstance(x, Tensor) and x.is_floating_point() else None
            )

        if isinstance(value, (tuple, list)):
            return [whole(x) for x in value]
        if isinstance(value, Tensor) and not value.is_floating_point():
            return _Scale((_Factor(value, False, roots, sure),))  # the bits of a scale
        moved = node.target in MOVES or node.target in SAME
        if moved and len(inputs) == 1 and len(factors) > 1 and len(node.all_input_nodes) == 1:
            shape = self._values[node.all_input_nodes[0]].shape
            try:
                parts = [compute(node, lambda _, f=f: f.value.expand(shape)) for f in factors]
            except RuntimeError:
                return whole(value)
            return _Scale(tuple(replace(f, value=x) for f, x in zip(factors, parts, strict=True)))
        return whole(value)

    def _reduced(self, node: fx.Node, argument: fx.Node) -> Any:
        state, value, before = self._state(argument), self._values[node], self._values[argument]
        if isinstance(state, _Shadow):
            if node.target in SUMS and (followed := self._followed(node)) is not NotImplemented:
                return followed
            self._judge(node)
        if not isinstance(before, Tensor) or not before.is_floating_point():
            return None
        sure = node.target in LARGEST_OF
        roots = _own(argument)
        if isinstance(value, (tuple, list)):
            return [_Scale((_Factor(x, False, roots, sure),)) for x in value]
        if value.numel() < before.numel() or value.numel() == 1:
            return _Scale((_Factor(value, False, roots, sure),))
        return None

    def _multiplied(self, node: fx.Node) -> Any:
        left, right = node.args[0], node.args[1]
        divides = node.target in DIVIDES
        a, b = self._scale_of(left), self._scale_of(right)
        if a is not None and b is not None:
            if not any(x.roots for x in (*a.factors, *b.factors)):
                value = self._values[node]
                return _Scale((_Factor(value),)) if isinstance(value, Tensor) else None
            return _Scale(_joined(a.factors, _turned(b.factors, divides)))
        if a is not None and divides:  # a scale divided by data
            self._judge(node)
            return None
        data, scale = (left, b) if b is not None else (right, a)
        if scale is None or not isinstance(data, fx.Node):
            if any(isinstance(self._state(x), _Shadow) for x in node.all_input_nodes):
                self._judge(node)
            return None
        factors = _turned(scale.factors, divides)
        state = self._state(data)
        if isinstance(state, _Shadow):
            own = any(not x.roots.isdisjoint(number.undone) for x in factors for number in state.numbers)
            if own or not self._is_result(state):
                return self._applied(node, state, factors)
            self._verdict(state, data)
            state = None
        value, before = self._values[node], self._values[data]
        if not isinstance(value, Tensor) or not isinstance(before, Tensor) or value.shape != before.shape:
            return None
        candidates = state.candidates if isinstance(state, _Scaled) else ((before, _own(data)),)
        roots = frozenset(root for x in factors for root in x.roots)
        undone = [(x, mine | roots) for x, mine in candidates]
        if not all(x.sure for x in factors):
            undone.append((value, _own(node) if roots else _own(node) | _own(data)))  # of a constant times it as well
        return _Scaled(tuple(undone), value) if len(undone) <= _ALTERNATIVES else None

    def _scale_of(self, argument: Any) -> _Scale | None:
        if isinstance(argument, (int, float)):
            return _Scale((_Factor(torch.tensor(float(argument), dtype=torch.float64)),))
        state = self._state(argument) if isinstance(argument, fx.Node) else None
        return state if isinstance(state, _Scale) else None

    # Casts

    def _cast(self, node: fx.Node, argument: fx.Node) -> Any:
        codes, before, state = self._values[node], self._values[argument], self._state(argument)
        if codes.dtype not in _LARGEST:
            return None
        largest, mantissa, least = _LARGEST[codes.dtype]
        if isinstance(state, _Shadow):
            self._judge(node)
            state = None
        candidates = state.candidates if isinstance(state, _Scaled) else ((before, _own(argument)),)
        sources = {root for _, roots in candidates for root in roots if isinstance(root, fx.Node)}
        if node in self.backward and any(root.op == "placeholder" for root in sources):
            return None  # a stored scale of gradients, and the gradients are made up
        scaled = (state.scaled if isinstance(state, _Scaled) else before).double().abs()
        exponents = torch.floor(torch.log2(codes.double().abs().clamp(min=2.0**least)))
        spacing = torch.exp2(exponents - mantissa)
        numbers: list[_Number] = []
        for x, roots in candidates:
            exact = x.double()
            unit = torch.where(scaled > 0, exact.abs() / scaled, 0.0)
            decoded, step = codes.double().abs() * unit * exact.sign(), spacing * unit
            rounded = torch.where((decoded - exact).abs() <= step, decoded, exact)
            numbers.append(_Number(exact, step.square() / 12, rounded, roots))
        beyond = float((scaled > largest * (1 + 2.0 ** -(mantissa + 1))).double().mean())
        if beyond > SATURATED:
            self.lost.append(Lost(node, codes.dtype, "saturated", beyond))
        numbered = scaled > 0
        zeros = float(((codes.double() == 0) & numbered).sum()) / max(1.0, float(numbered.sum()))
        if zeros > FLUSHED:
            self.lost.append(Lost(node, codes.dtype, "flushed", zeros))
        return _Shadow(tuple(numbers))

    # Shadows

    def _applied(self, node: fx.Node, state: _Shadow, factors: tuple[_Factor, ...]) -> Any:
        """Return the codes, or their product, times a scale: the shadow stays as it is if its casts have that scale."""
        value = self._values[node]
        numbers: list[_Number] = []
        for number in state.numbers:
            choices = [self._choices(factor, number.undone, state.error.units > 1.5) for factor in factors]
            doubtful = number.doubtful or any(_is_foreign(factor, number.undone) for factor in factors)
            for chosen in itertools.product(*choices):
                changed = replace(number, doubtful=doubtful)
                try:
                    for factor, honest in zip(factors, chosen, strict=True):
                        if honest:
                            f = factor.value.double().to(number.exact.device)
                            changed = changed.times(f.reciprocal() if factor.inverted else f)
                    if changed.exact.shape != value.shape:
                        changed = changed.each(lambda x: x.expand(value.shape), lambda v: v.expand(value.shape))
                except RuntimeError:
                    return None
                numbers.append(changed)
        if len(numbers) > _ALTERNATIVES * 2:
            return None
        return _decoded(self._measured(replace(state, numbers=tuple(numbers), applied=True), value), value)

    def _choices(self, factor: _Factor, undone: frozenset[Any], wrong: bool) -> tuple[bool, ...]:
        """Return whether a factor changes the shadow: not if the casts have it; both if nothing tells."""
        if not factor.roots:
            return (True, False) if wrong and undone else (True,)
        if factor.roots <= undone or self._is_twin(factor, undone):
            return (False,)
        return (True, False) if _is_foreign(factor, undone) or not factor.roots.isdisjoint(undone) else (True,)

    def _measured(self, state: _Shadow, value: Tensor) -> _Shadow:
        errors = [_error(value, x) for x in state.numbers]
        return replace(state, error=min(errors))

    def _followed(self, node: fx.Node) -> Any:
        """Return the state of an op that is linear in the shadow; NotImplemented for others."""
        target, value = node.target, self._values[node]
        argument = node.args[0]
        state = self._state(argument) if isinstance(argument, fx.Node) else None
        if isinstance(state, _Shadow) and target in _UNARY:
            sign = -1 if target is aten.neg.default else 1
            numbers = tuple(n.each(lambda x: sign * x, lambda v: v) for n in state.numbers)
            return _decoded(replace(state, numbers=numbers), value)
        if isinstance(state, _Shadow) and target is aten.view.dtype:
            same = value.element_size() == self._values[cast(fx.Node, argument)].element_size()
            return state if same else None
        if isinstance(state, _Shadow) and (target in _MOVES or target in SUMS):
            return self._moved(node, state)
        if target in JOINS or target in (aten.add.Tensor, aten.sub.Tensor, aten.where.self):
            return self._together(node)
        return NotImplemented

    def _moved_candidates(self, node: fx.Node, state: _Scaled) -> Any:
        try:
            moved = [(compute(node, self._with(node, x)), roots) for x, roots in state.candidates]
            scaled: Any = compute(node, self._with(node, state.scaled))
        except RuntimeError:
            return None
        if isinstance(scaled, (tuple, list)):
            return [_Scaled(tuple((x[i], roots) for x, roots in moved), scaled[i]) for i in range(len(scaled))]
        return _Scaled(tuple(moved), scaled)

    def _moved(self, node: fx.Node, state: _Shadow) -> Any:
        def move(x: Tensor) -> Any:
            return compute(node, self._with(node, x), exact=True)

        def spread(v: Tensor) -> Any:
            moved = move(v)
            return moved * (moved.numel() / v.numel()) if "mean" in str(node.target) else moved

        try:
            numbers = [number.each(move, spread) for number in state.numbers]
        except RuntimeError:
            return None
        parts: Any = numbers[0].exact
        if isinstance(parts, (tuple, list)):
            return [
                replace(state, numbers=tuple(n.each(lambda x, i=i: x[i], lambda v, i=i: v[i]) for n in numbers))
                for i in range(len(parts))
            ]
        moved = replace(state, numbers=tuple(numbers))
        return self._measured(moved, self._values[node]) if node.target in SUMS else moved

    def _with(self, node: fx.Node, first: Tensor) -> Callable[[fx.Node], Any]:
        """Return the values of a node's arguments, with another first one."""
        return lambda x: first if x is node.args[0] else self._values[x]

    def _together(self, node: fx.Node) -> Any:
        value = self._values[node]
        parts = [x for x in node.all_input_nodes if isinstance(self._state(x), _Shadow)]
        states = [cast(_Shadow, self._state(x)) for x in parts]
        numbers: list[_Number] = []
        for chosen in itertools.islice(itertools.product(*(x.numbers for x in states)), _ALTERNATIVES + 1):

            def joined(tensors: Sequence[Tensor]) -> Any:
                given = self._values | dict(zip(parts, tensors, strict=True))
                return compute(node, lambda each: _double(given[each]), exact=True)

            variances = dict(zip(parts, (x.variance for x in chosen), strict=True))
            try:
                exact, rounded = joined([x.exact for x in chosen]), joined([x.rounded for x in chosen])
                variance = compute(
                    node,
                    lambda x, v=variances: v[x] if x in v else _zero(self._values[x]),
                    target=aten.add.Tensor if node.target is aten.sub.Tensor else None,
                    exact=True,
                )
            except RuntimeError:
                return None
            undone = frozenset(root for x in chosen for root in x.undone)
            numbers.append(_Number(exact, variance, rounded, undone, any(x.doubtful for x in chosen)))
        if len(numbers) > _ALTERNATIVES:
            return None
        product = next((x.product for x in states if x.product is not None), None)
        return self._measured(_Shadow(tuple(numbers), product, any(x.applied for x in states)), value)

    # Products

    def _product(self, node: fx.Node) -> Any:
        arguments = named_arguments(node)
        nodes = operands_of(node)
        states = [self._state(x) for x in nodes]
        if not any(isinstance(x, _Shadow) for x in states):
            if any(self._values[x].dtype in FP8 for x in nodes):
                return None
            for each in node.all_input_nodes:
                if each not in nodes and isinstance(self._state(each), _Shadow):
                    self._judge(node)
            return None
        operands: list[tuple[_Number, ...]] = []
        for i, (x, state) in enumerate(zip(nodes, states, strict=True)):
            if isinstance(state, _Shadow) and state.product is not None and state.applied:
                self._verdict(state, x)
                state = None
            numbers = state.numbers if isinstance(state, _Shadow) else (_plain(self._values[x]),)
            if node.target in SCALED:
                scaled = self._with_scale(numbers, cast(fx.Node, arguments[("scale_a", "scale_b")[i]]), i)
                if scaled is None:
                    return None
                numbers = scaled
            operands.append(numbers)
        value = self._values[node]
        addend = arguments["self" if node.target in WITH_ADDEND else "bias"] if node.target in WITH_BIAS else None
        results: list[_Number] = []
        for a, b in itertools.islice(itertools.product(*operands), _ALTERNATIVES + 1):
            result = _times(a, b, transposed=node.target is aten.linear.default)
            if isinstance(addend, fx.Node):
                if arguments.get("beta", 1) != 1 or arguments.get("alpha", 1) != 1:
                    return None
                bias = self._values[addend].double()
                result = result.each(lambda x, bias=bias: x + bias, lambda v: v)
            results.append(result)
        if len(results) > _ALTERNATIVES:
            return None
        measured = self._measured(_Shadow(tuple(results), node, node.target in SCALED), value)
        return measured

    def _with_scale(self, numbers: tuple[_Number, ...], scale: fx.Node, i: int) -> tuple[_Number, ...] | None:
        """Return an operand of a scaled product times its scale."""
        state = self._state(scale)
        factors = state.factors if isinstance(state, _Scale) else (_Factor(self._values[scale]),)
        scaled: list[_Number] = []
        for number in numbers:
            for factor in factors:
                if factor.roots and factor.roots <= number.undone or self._is_twin(factor, number.undone):
                    continue
                f = _over_operand(factor.value.to(number.exact.device), number.exact.shape, i)
                if f is None:
                    return None
                f = f.reciprocal() if factor.inverted else f
                number = replace(number.times(f), doubtful=number.doubtful or _is_foreign(factor, number.undone))
            scaled.append(number)
        return tuple(scaled)

    def _is_twin(self, factor: _Factor, undone: frozenset[Any]) -> bool:
        """Return whether a scale is an input of the graph that is equal to a scale of the casts, or its inverse."""
        if not _is_foreign(factor, undone) or factor.value.numel() != 1:
            return False
        for root in undone:
            if isinstance(root, fx.Node) and (scale := self._inputs[root]).numel() == 1:
                one = math.log(abs(float(factor.value)) or 1.0), math.log(abs(float(scale)) or 1.0)
                if abs(one[0] + one[1]) < 0.02 or abs(one[0] - one[1]) < 0.02 or self._is_inverse(factor, root):
                    return True
        return False

    def _is_inverse(self, factor: _Factor, root: fx.Node) -> bool:
        names = [self.sources[x].name for x in factor.roots if isinstance(x, fx.Node)]
        return any(name.removesuffix("_inv") == self.sources[root].name.removesuffix("_inv") for name in names)

    # Verdicts

    def _judge(self, node: fx.Node) -> None:
        """Judge what a node reads that is no longer followed."""
        if any(word in str(node.target) for word in _DOUBTFUL) or getattr(node.target, "namespace", "") not in (
            "aten",
            "prims",
            "",
        ):
            return
        for each in node.all_input_nodes:
            state = self._state(each)
            if isinstance(state, _Shadow) and (state.product is not None or state.applied):
                small = [
                    x
                    for x in node.all_input_nodes
                    if x is not each and 1 < _numel(self._values[x]) < _numel(self._values[each])
                ]
                if small and node.target in (*MULTIPLIES, *DIVIDES):
                    continue  # it may be a scale
                self._verdict(state, each)

    def _is_result(self, state: _Shadow) -> bool:
        """Return whether it needs no more scales: a product, or decoded codes, as its shadow says."""
        return (state.product is not None or state.applied) and state.error.units <= UNEXPLAINED

    def _leave(self, output: fx.Node) -> None:
        updates = aot.updates(output)
        leaving = [
            x for i, x in enumerate(pytree.tree_leaves(output.args)) if isinstance(x, fx.Node) and i not in updates
        ]
        scales = {
            root
            for x in leaving
            if isinstance(scale := self._state(x), _Scale)
            for factor in scale.factors
            for root in factor.roots
        }
        for each in leaving:
            state = self._state(each)
            if isinstance(state, _Shadow) and state.product is not None:
                if not any(not x.undone.isdisjoint(scales) for x in state.numbers):
                    self._verdict(state, each)

    def _verdict(self, state: _Shadow, node: fx.Node) -> None:
        ratio, error, expected, part = state.error
        self._judged.add(state.product or node)
        self.ratios.append(ratio)
        where = state.product or node
        if any(number.doubtful for number in state.numbers):
            return
        if ratio > UNEXPLAINED and all(x.node is not where for x in self.unexplained):
            self.unexplained.append(Unexplained(where, error, expected, part))


def run_plainly(module: fx.GraphModule, inputs: Sequence[Any]) -> Any:
    """Run a graph node by node."""
    return _Plain(module).run(*inputs)


class _Plain(fx.Interpreter):
    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        return (
            _scaled_product(target, args, kwargs) if target in SCALED else super().call_function(target, args, kwargs)
        )


def compute(node: fx.Node, value: Callable[[fx.Node], Any], *, target: Any = None, exact: bool = False) -> Any:
    """Return the value of a call, with other values of its arguments; ``exact``: without casts."""
    args, kwargs = cast(Any, fx.map_arg((node.args, dict(node.kwargs)), value))
    target = target or node.target
    if exact and "dtype" in kwargs:
        kwargs = {name: x for name, x in kwargs.items() if name != "dtype"}
    if target is aten.copy_.default:
        return args[1].to(args[0].dtype).expand(args[0].shape)
    if isinstance(target, OpOverload) and schema(target).is_mutable:
        args, kwargs = pytree.tree_map_only(Tensor, torch.clone, (args, kwargs))
    return _scaled_product(target, args, kwargs) if target in SCALED else target(*args, **kwargs)


def _scaled_product(target: Any, args: Any, kwargs: Any) -> Tensor:
    """``_scaled_mm``, multiplied in FP32 where this device has no kernel for such scales."""
    try:
        return cast(Tensor, target(*args, **kwargs))
    except (RuntimeError, NotImplementedError, ValueError):
        names = [argument.name for argument in schema(target).arguments]
        given = dict(zip(names, args, strict=False)) | kwargs
        operands: list[Tensor] = []
        for i, (name, scale) in enumerate((("self", "scale_a"), ("mat2", "scale_b"))):
            x = given[name].float()
            wide = _over_operand(given[scale], x.shape, i)
            if wide is None:
                raise
            operands.append(x * wide.float())
        product, bias = torch.matmul(*operands), given.get("bias")
        return (product if bias is None else product + bias.float()).to(given.get("out_dtype") or torch.bfloat16)


def constant_of(module: fx.GraphModule, node: fx.Node) -> Any:
    """Return the value of a get_attr node: the numbers, where the graph has a fake of them."""
    value: Any = node.meta.get("constant")
    if value is None:
        value = module
        for part in str(node.target).split("."):
            value = getattr(value, part)
    constant = getattr(value, "constant", None)
    return constant if isinstance(constant, Tensor) else value


def _own(node: fx.Node) -> frozenset[Any]:
    """Return the root of the scales that are reduced from a tensor, whatever views are taken of it; other roots are
    inputs.
    """
    while node.op == "call_function" and (node.target in SAME or node.target in MOVES):
        if not isinstance(argument := node.args[0], fx.Node):
            break
        node = argument
    return frozenset({("reduced", node)})


def _plain(x: Tensor) -> _Number:
    exact = x.double()
    return _Number(exact, torch.zeros_like(exact), exact, frozenset())


def _double(x: Any) -> Any:
    return x.double() if isinstance(x, Tensor) and x.is_floating_point() else x


def _zero(x: Any) -> Any:
    if not isinstance(x, Tensor):
        return 0.0
    return torch.zeros_like(x, dtype=torch.float64) if x.is_floating_point() else x


def _numel(x: Any) -> int:
    return x.numel() if isinstance(x, Tensor) else 0


def _turned(factors: tuple[_Factor, ...], inverted: bool) -> tuple[_Factor, ...]:
    return tuple(replace(x, inverted=not x.inverted) for x in factors) if inverted else factors


def _joined(a: tuple[_Factor, ...], b: tuple[_Factor, ...]) -> tuple[_Factor, ...]:
    """Return the factors of a product of scales; constants belong to the first that is none."""
    factors = [x for x in (*a, *b) if x.roots]
    constants = [x for x in (*a, *b) if not x.roots]
    for constant in constants:
        first = factors[0]
        by = constant.value.to(first.value.device)
        divided = constant.inverted != first.inverted
        factors[0] = replace(first, value=first.value / by if divided else first.value * by)
    return tuple(factors)


def _is_foreign(factor: _Factor, undone: frozenset[Any]) -> bool:
    """Return whether a scale and one of the casts are inputs, and others: nothing says whether they belong together."""
    mine, casts = ({x for x in roots if isinstance(x, fx.Node)} for roots in (factor.roots, undone))
    return bool(mine and casts and not mine & casts)


def _times(a: _Number, b: _Number, transposed: bool) -> _Number:
    """Return the product of two operands, and the variance of its elements."""
    (x, v), (y, w) = ((n.exact, n.variance + (_OTHER / 2 * n.exact).square() / 3) for n in (a, b))
    z = b.rounded
    if transposed:
        y, w, z = (each.transpose(-1, -2) for each in (y, w, z))
    variance = torch.matmul(v, y.square()) + torch.matmul(x.square() + v, w)
    return _Number(
        torch.matmul(x, y), variance, torch.matmul(a.rounded, z), a.undone | b.undone, a.doubtful or b.doubtful
    )


def _decoded(state: _Shadow, value: Tensor) -> _Shadow:
    """Give the same, with the decoded codes as the program has them, where they are no further off than by rounding."""
    if state.product is not None or not state.applied:
        return state
    numbers: list[_Number] = []
    for x in state.numbers:
        off, step = (value.double() - x.exact).abs(), (12 * x.variance).sqrt()
        near = off <= step + 2 * _OTHER * x.exact.abs()
        numbers.append(replace(x, rounded=torch.where(near, value.double(), x.exact)))
    return replace(state, numbers=tuple(numbers))


def _over_operand(scale: Tensor, shape: Sequence[int], i: int) -> Tensor | None:
    """Return a scale of a scaled product, for each element of its operand."""
    block = 32 if scale.dtype == torch.float8_e8m0fnu else 0
    return spread_operand(scale.float().double(), shape, i, block if scale.numel() > 1 else 0)


def _error(value: Tensor, number: _Number) -> _Error:
    """Return the error of a result.

    That of a row or a column counts, too, with a wider bound: it is a sum of fewer roundings. Equal numbers are rounded
    alike, and their errors add up. So the result of the rounded numbers is as good as the exact one.
    """
    exact, variance = number.exact.broadcast_to(value.shape), number.variance.broadcast_to(value.shape)
    if not bool(torch.isfinite(exact).all()):
        return _Error()
    squares = (value.double() - exact).square()
    if not bool(torch.isfinite(squares).all()):
        return _Error(math.inf, math.inf, _relative(variance.sum(), exact.square().sum()))
    error = _worst(squares, variance, exact)
    if error.units > 1.5 and number.rounded is not number.exact:
        error = min(error, _worst((value.double() - number.rounded).square(), variance, exact))
    return error


def _worst(squares: Tensor, variance: Tensor, exact: Tensor) -> _Error:
    """Return the error of all elements, if that is beyond its bound, or else of the row or column with the largest."""
    dims, sizes = range(squares.ndim), exact.square()
    worst = _Error()
    for kept in (None, *dims):
        if kept is not None and not 1 < squares.shape[kept] <= squares.numel() // _FEWEST:
            continue
        errors, expected, size = (x.sum([d for d in dims if d != kept]).reshape(-1) for x in (squares, variance, sizes))
        units = torch.where(errors > 0, errors / (expected + size * (_OTHER**2 / 3)), 0.0).sqrt()
        place = int(units.argmax())
        part = "" if kept is None else f" in {_NAMES.get(squares.ndim - kept, f'part {kept} of dim')} {place}"
        relative, rounding = (_relative(x[place], size[place]) for x in (errors, expected))
        by_bound = float(units[place]) / (1 if kept is None else _PER_ROW)
        worst = max(worst, _Error(by_bound, relative, rounding, part))
        if kept is None and worst.units > UNEXPLAINED:
            break
    return worst


def _relative(squares: Tensor, size: Tensor) -> float:
    return math.sqrt(float(squares) / float(size)) if float(size) else (math.inf if float(squares) else 0.0)
