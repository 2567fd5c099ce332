"""The scales of a graph's low-precision products, followed from each cast to the product that applies them.

A scale that is applied once to a cast and once, inverted, to the product has no effect on the result but rounding. So
each scale is multiplied by powers of two of its own, one for each element (its exponents), and every node gets the
exponents by which that changes its value. At the end of a product they must be zero. Exponents that are left tell the
fault: those of the cast alone (the scale was lost), twice those (inverted), the opposite (applied twice), or others
(a wrong axis).

Scales are computed from few numbers by any arithmetic: rounded to powers of two, clamped, cast to E8M0. So these nodes
are computed, on made-up maxima and on the same times powers of two. Nodes with data are followed by rules.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final, cast

import torch
from torch import Tensor, fx

from fp8graph.analysis.products import Product, is_low
from fp8graph.analysis.scales.exponents import (
    LARGEST,
    compressed,
    contracted,
    expanded,
    spread,
    spread_operand,
    with_dims,
)
from fp8graph.analysis.scales.nodes import (
    decodes,
    dtype_of,
    holds_amaxes,
    is_small,
    is_table,
    leads_to_cast,
    lies_in_tiles,
    measured,
    measures_behind,
    name_of,
    ndim,
    numel,
    operands_of,
    passes_magnitudes,
    shape_of,
    takes_largest,
)
from fp8graph.analysis.scales.ops import (
    ADDS,
    BOUNDED,
    CLAMPS,
    CONSTANTS,
    DIVIDES,
    JOINS,
    LARGEST_OF,
    MOVES,
    MULTIPLIES,
    PRODUCTS,
    SAME,
    SCALED,
    SUMS,
    WITH_ADDEND,
    WITH_BIAS,
    WRITES,
    aten,
    hints,
)
from fp8graph.analysis.scales.states import (
    E8M0,
    FP8,
    NOTHING,
    STEPS,
    Cast,
    Fault,
    Operands,
    Root,
    Severity,
    Source,
    State,
    Values,
    multiple,
    same_exponents,
)
from fp8graph.compat.ops import OpOverload, named_arguments, pytree
from fp8graph.ir import ops as dialect
from fp8graph.ir.nodes import is_backward

_SAMPLE: Final = 1 << 20  # numbers of a stored weight that are read
_FILLED: Final = 200.0  # the largest code of bytes that had a scale reaches more, whatever rounded that
_BLOCKS: Final[dict[Any, int]] = {E8M0: 32}  # elements of one scale in tiles, by its dtype
_OF_TORCH: Final = ("aten", "prims", "_c10d_functional", "c10d_functional", "fp8graph", "_operator", "inductor")


def faults(
    graph: fx.Graph, sources: Mapping[fx.Node, Source], products: Sequence[Product]
) -> tuple[list[Fault], dict[fx.Node, Operands]]:
    """Return the faults of a graph, forward or joint, and the operands of its products, by node.

    Args:
        sources: by placeholder.
        products: every product of the graph, in order.
    """
    flow = _Flow(graph, sources, products)
    flow.run()
    return flow.faults, flow.operands


class _Flow:
    def __init__(self, graph: fx.Graph, sources: Mapping[fx.Node, Source], products: Sequence[Product]) -> None:
        self.graph = graph
        self.products = {product.node: product for product in products}
        self.sources = sources
        self.states: dict[fx.Node, Any] = {}  # a state, or a list of them
        self.keys: dict[fx.Node, Any] = {}
        self.numbers: dict[Any, int] = {}
        self.roots: dict[Any, Root] = {}
        self.faults: list[Fault] = []
        self.operands: dict[fx.Node, Operands] = {}
        self.random = random.Random(0)
        self.trained: dict[Any, Source] = {}  # the parameters of a training step, by key
        self.cast_by: set[Root] = set()  # the scales of casts
        self.measures: set[fx.Node] = set()  # means and the like, from which a scale is computed
        self.scale_inputs = self._scale_inputs()
        # modules with one number for the scales of both operands, of which nothing says what it is made of
        self.combined = {source.module for source in sources.values() if source.leaf == "alpha"}
        self.reported: set[tuple[str, fx.Node]] = set()

    def run(self) -> None:
        for node in self.graph.nodes:
            self.keys[node] = self._key(node)
        if any(is_backward(node) for node in self.graph.find_nodes(op="placeholder")):
            self.trained = {self.keys[node]: source for node, source in self.sources.items() if source.trains}
        for node in self.graph.nodes:
            if node in self.states:
                continue  # the scale of bytes before it
            if node.op == "placeholder":
                self.states[node] = self._input(node)
            elif node.op == "call_function":
                self.states[node] = self._call(node)
            elif node.op == "output":
                self._leave(node)
            else:
                constant = node.meta.get("constant")
                readable = isinstance(constant, Tensor) and constant.numel() <= LARGEST >> 6
                self.states[node] = self._scale(node, {None: constant}) if readable else NOTHING
            if node in self.products:
                self._list(self.products[node])
        self._list_what_backward_reads()

    # Keys: equal for nodes that compute the same numbers.

    def _key(self, node: fx.Node) -> int:
        if node.op != "call_function" or "rand" in str(node.target):
            key: Any = node
        else:
            parts = fx.map_arg((node.args, dict(node.kwargs)), lambda n: _NodeNumber(self.keys[n]))
            key = (str(node.target), repr(parts))
        return self.numbers.setdefault(key, len(self.numbers))

    def _origin(self, node: fx.Node) -> Any:
        """Return the tensor before views, casts and scales."""
        state = self.states.get(node)
        return self.keys[node] if not isinstance(state, State) or state.origin is None else state.origin

    # Inputs

    def _scale_inputs(self) -> set[fx.Node]:
        """Give the inputs that are scales, by what reads them: a scaled product, a cast, or bytes that they decode."""
        scales: set[fx.Node] = set()
        for node in self.graph.nodes:
            if node.op != "call_function":
                continue
            if node.target in SCALED:
                arguments = named_arguments(node)
                for name in ("scale_a", "scale_b"):
                    scales |= self._inputs_behind(arguments[name])
            elif node.target in (dialect.dequantize, dialect.stored_weight):
                scales |= self._inputs_behind(node.args[1])
            elif node.target in (*MULTIPLIES, *DIVIDES):
                for one, other in (node.args, reversed(node.args)):
                    if not isinstance(other, fx.Node) or not isinstance(one, fx.Node):
                        continue
                    smaller = numel(other) <= max(1, numel(one) // 2)
                    if decodes(one) or smaller and decodes(one, product=True):
                        scales |= self._inputs_behind(other)
                    elif smaller and leads_to_cast(node):
                        self.measures |= measures_behind(other)
                        scales |= {x for x in self._inputs_behind(other) if self._may_be_scale(x)}
        return scales

    def _may_be_scale(self, node: fx.Node) -> bool:
        source = self.sources.get(node)
        if source is None:
            return False
        return "scal" in source.leaf or numel(node) == 1 and not source.trains or self._is_history(node)

    def _is_history(self, node: fx.Node) -> bool:
        """Return whether an input holds amaxes of the steps before."""
        source = self.sources.get(node)
        return source is not None and source.stored and not source.trains and is_small(node) and holds_amaxes(source)

    def _is_of_history(self, node: fx.Node) -> bool:
        """Return whether a largest magnitude is taken of amaxes of the steps before alone."""
        return all(passes_magnitudes(x) or self._is_history(x) for x in measured(node))

    def _inputs_behind(self, node: Any) -> set[fx.Node]:
        """Return the float inputs that are a scale, its inverse or a part of it, through arithmetic on scales alone."""
        waiting, inputs, met = [node], set[fx.Node](), set[fx.Node]()
        while waiting:
            each = waiting.pop()
            if not isinstance(each, fx.Node) or each in met:
                continue
            met.add(each)
            if each.op == "placeholder":
                dtype = dtype_of(each)
                source = self.sources.get(each)
                number = dtype is not None and dtype.is_floating_point and dtype not in FP8
                if source is not None and (number or source.holds_exponents(dtype)):
                    if not (source.trains and ndim(each) > 1) or "scal" in source.leaf:
                        inputs.add(each)
            elif each.op == "call_function" and (each.target not in LARGEST_OF or self._is_of_history(each)):
                # a part of a table is a scale, too
                smaller = each.target not in (aten.slice.Tensor, aten.select.int, *LARGEST_OF)
                waiting.extend(x for x in each.all_input_nodes if not smaller or numel(x) <= numel(each))
        return inputs

    def _input(self, node: fx.Node) -> Any:
        dtype, source = dtype_of(node), self.sources.get(node)
        if dtype is None or source is None:
            return NOTHING
        if "zero_point" in source.leaf:
            return State(zero=True, origin=self.keys[node])
        if dtype in FP8 and ndim(node) > 1:
            return self._stored(node, source, dtype)
        if node not in self.scale_inputs:
            return NOTHING
        twin = self._twin(node, source)
        if source.numbers is not None and not _positive(source.numbers):
            self._fault("scale-value", "error", node, "a scale that is not a positive number")
        key = self.keys[twin or node]
        if key not in self.roots:
            table = is_table(node) and not self._is_history(node)
            self.roots[key] = Root(twin or node, self._steps(shape_of(node)), frozenset(), source, table)
        root = self.roots[key]
        exponents = root.exponents if twin is None else -root.exponents
        return self._scale(node, _made_up(root, exponents, dtype, len(self.roots)))

    def _twin(self, node: fx.Node, source: Source) -> fx.Node | None:
        """Return the input that is the inverse of this one, by its name: ``x_scale`` of ``x_scale_inv``."""
        if not source.leaf.endswith("_inv"):
            return None
        for other, named in self.sources.items():
            if named.name == source.name.removesuffix("_inv") and other in self.scale_inputs:
                return other if shape_of(other) == shape_of(node) else None
        return None

    def _stored(self, node: fx.Node, source: Source, dtype: torch.dtype) -> State:
        """FP8 bytes that are an input, with the scale that belongs to them, if one does for sure."""
        cast_ = Cast(node, dtype, {}, stored=source)
        partner = self._partner(node, source)
        if partner is None and self._has_exponents(source):
            self._fault("opaque", "info", node, "its scales are bytes of E8M0, which are not followed")
            return NOTHING
        if partner is not None:
            state = self.states.get(partner)
            if state is None:
                state = self.states[partner] = self._input(partner)
            scale = self.sources[partner]
            if scale.numbers is not None and bool((scale.numbers.float() == 1).all()):
                self._no_scale(node, source, f"has the scale {scale.leaf} = 1")
            for root, exponents in state.exponents.items():
                sign = self._sign_of_stored(source, scale)
                wide = None if lies_in_tiles(partner) else spread(exponents, shape_of(node))
                if wide is not None and sign is not None:
                    mine = wide * sign
                    degree = multiple(mine, root) if exponents.numel() else None
                    cast_ = replace(cast_, degrees={root: degree if degree is not None else sign})
                    return State({root: compressed(mine)}, (cast_,), origin=self.keys[node])
        return State({}, (cast_,), origin=self.keys[node])

    def _has_exponents(self, source: Source) -> bool:
        """Return whether its module holds scales as the bytes of E8M0, and something reads them."""
        beside = (x for x, other in self.sources.items() if other.module == source.module and "scal" in other.leaf)
        return any(dtype_of(x) == torch.uint8 and x.users for x in beside)

    def _partner(self, node: fx.Node, source: Source) -> fx.Node | None:
        candidates = [
            other for other, named in self.sources.items() if other in self.scale_inputs and named.is_beside(source)
        ]
        stem = source.leaf.removesuffix("_fp8").removesuffix("_data")
        by_name = [x for x in candidates if self.sources[x].leaf.startswith(f"{stem}_") or stem in ("w", "weight", "")]
        activations = [x for x in candidates if self._reads_as_activation(self.sources[x])]
        by_name = [x for x in by_name if x not in activations]
        rest = [x for x in candidates if x not in activations]
        bytes_here = [x for x, named in self.sources.items() if named.module == source.module and dtype_of(x) in FP8]
        if len(bytes_here) > 1:
            exact = [
                x for x in by_name if self.sources[x].leaf.startswith(f"{stem}_") and "scale" in self.sources[x].leaf
            ]
            return exact[0] if len(exact) == 1 else None
        for names in ([x for x in by_name if "scale" in self.sources[x].leaf], by_name, rest):
            if len(names) == 1:
                return names[0]
        return None

    @staticmethod
    def _reads_as_activation(source: Source) -> bool:
        return any(word in source.leaf for word in ("input", "act", "output", "x_", "_x", "grad", "hist"))

    @staticmethod
    def _sign_of_stored(source: Source, scale: Source) -> float | None:
        """-1 for bytes that are multiplied by their scale, 1 for those that are divided by it; None if nothing tells.

        The decoded numbers tell, if one of both is a hundred times nearer to what weights have; else the name.
        """
        named = -1.0 if scale.leaf.endswith(("_inv", "weight_scale")) else None
        if source.tensor is None or scale.numbers is None:
            return named
        numbers, scales = source.tensor.flatten()[:_SAMPLE].float(), scale.numbers.float().abs()
        size, factor = float(numbers.square().mean().sqrt()), float(scales.log2().mean().exp2())
        if not (size > 0 and factor > 0 and math.isfinite(size) and math.isfinite(factor)):
            return named
        multiplied, divided = (abs(math.log10(x) + 1.5) for x in (size * factor, size / factor))
        if abs(multiplied - divided) < 2:
            return named
        return -1.0 if multiplied < divided else 1.0

    # Scales

    def _root_key(self, node: fx.Node) -> Any:
        """Equal for the largest magnitudes of one tensor, whatever views are taken of it before."""
        if node.target in LARGEST_OF and numel(node) == 1:
            return "amax", self._origin(cast(fx.Node, node.args[0]))
        return self.keys[node]

    def _scale(self, node: fx.Node, first: Values, later: Values | None = None) -> Any:
        """Return the state of a node that is computed from scales alone.

        Args:
            first: its value, made up, and changed by each scale that starts in an amax or an input.
            later: changed by scales that are not proportional to those.
        """
        base = first[None]
        if isinstance(base, (tuple, list)):
            return [
                self._scale(
                    node,
                    {root: each[i] for root, each in first.items()},
                    None if later is None else {root: each[i] for root, each in later.items()},
                )
                for i in range(len(base))
            ]
        if not isinstance(base, Tensor):
            return NOTHING
        if len(first) == 1 and not bool(base.float().any()):
            return State(zero=True, origin=self.keys[node], values=first, first=first)
        if not base.is_floating_point() and base.dtype != torch.bool:  # the bits of a scale, or its exponent
            values = first if later is None else later
            bytes_ = base.dtype == torch.uint8  # of E8M0
            steps = {root: compressed(x.float() - base.float()) for root, x in values.items() if bytes_ and root}
            exponents = {root: x for root, x in steps.items() if bool((x != 0).any())}
            return State(exponents, origin=self.keys[node], values=values, first=first)
        for values in (first, later):
            exponents = None if values is None else _changes(values)
            if exponents is not None:
                return State(exponents, origin=self.keys[node], values=values, first=first)
        return self._derived(node, first)

    def _derived(self, node: fx.Node, first: Values) -> State:
        """Return a scale that is proportional to none that it is computed from: one of its own."""
        key, base = self.keys[node], first[None]
        if key not in self.roots:
            roots = [root for root in first if root is not None]
            sources: frozenset[Any] = frozenset().union(*(root.sources for root in roots))
            source = next((root.source for root in roots if root.source is not None), None)
            table = any(root.table for root in roots)
            self.roots[key] = Root(node, self._steps(base.shape), sources, source, table)
        root = self.roots[key]
        changed = (base.double() * 2.0 ** root.exponents.double()).to(base.dtype)
        return State({root: compressed(root.exponents)}, origin=key, values={None: base, root: changed}, first=first)

    def _steps(self, shape: Sequence[int]) -> Tensor:
        """Exponents for the elements of a scale, not all equal."""
        steps = [STEPS[self.random.randrange(3)] for _ in range(math.prod(shape))]
        if len(steps) > 1:
            steps[:2] = self.random.sample(STEPS, 2)
        return torch.tensor(steps).reshape(tuple(shape))

    def _amax(self, node: fx.Node) -> Any:
        """Return the largest magnitudes of a tensor: a scale that starts here, unless it is of scales alone."""
        tensor = cast(fx.Node, node.args[0])
        state = self._state(tensor)
        if state.values is not None:
            return self._compute(node)
        self._must_be_zero(tensor, state)
        val = node.meta["val"]
        if node.target is aten.aminmax.default or node.target is aten.max.dim:
            shape, dtype = tuple(val[0].shape), val[0].dtype
        else:
            shape, dtype = tuple(val.shape), val.dtype
        if not all(isinstance(size, int) for size in shape) or math.prod(shape) > LARGEST:
            return NOTHING
        key = self._root_key(node) if not isinstance(val, (tuple, list)) else self.keys[node]
        if key not in self.roots:
            sources = frozenset(map(self._origin, measured(tensor))).union(*(r.sources for r in state.exponents))
            self.roots[key] = Root(node, self._steps(shape), sources)
        root = self.roots[key]
        scale = self._scale(node, _made_up(root, root.exponents.reshape(shape), dtype, len(self.roots)))
        if node.target is aten.aminmax.default:
            return [scale, scale]
        if node.target is aten.max.dim:
            return [scale, NOTHING]
        return scale

    def _started(self, node: fx.Node, sources: frozenset[Any]) -> State:
        """Return a scale that is computed from others by an op that does not run here, such as a collective."""
        dtype, shape = dtype_of(node), shape_of(node) if dtype_of(node) is not None else ()
        if dtype is None or not dtype.is_floating_point or not is_small(node):
            return NOTHING
        root = self.roots.setdefault(self.keys[node], Root(node, self._steps(shape), sources))
        return cast(State, self._scale(node, _made_up(root, root.exponents, dtype, len(self.roots))))

    def _compute(self, node: fx.Node) -> Any:
        """Run a node on the values of scales and constants: those made up, and those changed by each scale."""
        inputs = node.all_input_nodes
        states = [self._state(x) for x in inputs]
        first = _run(node, [state.first for state in states])
        if first is None:
            return self._started(node, frozenset().union(*(r.sources for each in states for r in each.exponents)))
        same = all(state.first is state.values for state in states)
        return self._scale(node, first, None if same else _run(node, [state.values for state in states]))

    def _paired(self, state: State, scale: State) -> tuple[State, State]:
        """Bytes of the model, and the first of its scales that is applied to them, without their exponents.

        That is for scales that no name says to be those of the bytes.
        """
        for i, each in enumerate(state.casts):
            if each.stored is None or each.degrees:
                continue
            for root in scale.exponents:
                if self._may_belong(root, each.stored) and root not in state.exponents:
                    casts = (*state.casts[:i], replace(each, degrees={root: -1.0}), *state.casts[i + 1 :])
                    rest = {other: x for other, x in scale.exponents.items() if other is not root}
                    return replace(state, casts=casts), replace(scale, exponents=rest)
        return state, scale

    def _may_belong(self, root: Root, stored: Source) -> bool:
        """Return whether a scale may be that of bytes of the model: it is in their module, and nothing else was cast by
        it.
        """
        return root.source is not None and root.source.is_beside(stored) and root not in self.cast_by

    # Nodes

    def _state(self, node: Any) -> State:
        state = self.states.get(node) if isinstance(node, fx.Node) else None
        return state if isinstance(state, State) else NOTHING

    def _call(self, node: fx.Node) -> Any:
        target = node.target
        inputs = node.all_input_nodes
        if getattr(target, "__name__", "") == "getitem" and not isinstance(target, OpOverload):
            state = self.states.get(cast(fx.Node, node.args[0]))
            index = node.args[1]
            return (
                state[index] if isinstance(state, list) and isinstance(index, int) and index < len(state) else NOTHING
            )
        if target in CONSTANTS and numel(node) <= LARGEST >> 6:
            return self._constant(node)
        if target in LARGEST_OF or node in self.measures:
            return self._amax(node) if takes_largest(node) or node in self.measures else self._unknown(node)
        if inputs and all(self._state(x).values is not None for x in inputs) and is_small(node):
            return self._compute(node)
        if target in SAME:
            return self._same(node)
        if target in CLAMPS:
            return self._clamp(node)
        if target is aten.view.dtype:
            return self._reinterpret(node)
        if target in MOVES:
            return self._move(node)
        if target in JOINS:
            return self._join(node)
        if target in WRITES and dtype_of(node) in FP8:
            return self._write(node)
        if target is aten.constant_pad_nd.default:
            return self._pad(node)
        if target in MULTIPLIES:
            return self._multiply(node, 1.0)
        if target in DIVIDES:
            return self._multiply(node, -1.0)
        if target is aten.reciprocal.default:
            state = self._state(inputs[0])
            return replace(_plain(state), exponents={r: -x for r, x in state.exponents.items()}, origin=self.keys[node])
        if target in ADDS:
            return self._add(node)
        if target in SUMS:
            return self._sum(node)
        if target in PRODUCTS:
            return self._product(node)
        if target is dialect.quantize:
            return self._quantize(node)
        if target is dialect.scaled_mm:
            return State(origin=self.keys[node])
        if target in (dialect.dequantize, dialect.stored_weight):
            return self._decode(node)
        if node in self.products and _is_of_torch(target):
            operands = self.products[node].operands
            if any(self._state(x).left for x in operands) and not any(dtype_of(x) in FP8 for x in operands):
                return self._other_product(node)
        return self._unknown(node)

    def _constant(self, node: fx.Node) -> Any:
        """Return a tensor of one number; its shape may be that of any other tensor."""
        arguments = named_arguments(node)
        name = str(node.target)
        number = arguments.get("fill_value", 0.0 if "zeros" in name else arguments.get("s", 1.0))
        if isinstance(number, fx.Node) or not all(isinstance(size, int) for size in shape_of(node)):
            return NOTHING
        return self._scale(node, {None: torch.full(shape_of(node), number, dtype=dtype_of(node))})

    def _same(self, node: fx.Node) -> Any:
        argument = cast(fx.Node, node.args[0])
        state = self._state(argument)
        dtype = dtype_of(node)
        if state.zero:
            return state
        if dtype in FP8 and dtype_of(argument) not in FP8:
            if node.target is hints.saturating_cast.default:
                state = replace(state, clamped=True)
            return self._cast(node, argument, state, cast(torch.dtype, dtype))
        if dtype is not None and not dtype.is_floating_point and dtype != dtype_of(argument):
            return NOTHING
        return replace(state, origin=self._origin(argument), values=None)

    def _clamp(self, node: fx.Node) -> Any:
        argument = cast(fx.Node, node.args[0])
        others = [self._state(x) for x in node.all_input_nodes[1:]]
        if any(other.left for other in others):
            return self._unknown(node)
        return replace(self._state(argument), origin=self._origin(argument), clamped=True, values=None)

    def _cast(self, node: fx.Node, argument: fx.Node, state: State, dtype: torch.dtype) -> State:
        if state.product is not None:
            self._must_be_zero(argument, state)
            state = State(origin=state.origin, bounded=state.bounded, clamped=state.clamped)
        degrees = {root: multiple(x, root) for root, x in state.exponents.items() if bool((x != 0).any())}
        self.cast_by |= degrees.keys()
        self._check_cast(node, argument, state, degrees, dtype)
        return replace(state, casts=(*state.casts, Cast(node, dtype, degrees)), origin=self._origin(argument))

    def _check_cast(
        self, node: fx.Node, argument: fx.Node, state: State, degrees: Mapping[Root, Any], dtype: torch.dtype
    ) -> None:
        origin = self._origin(argument)
        if not degrees:
            if not state.bounded and not state.casts:
                self._fault("scale-constant-1", "warning", node, f"cast to {name_of(dtype)} without a scale")
            return
        own = [root for root in degrees if origin in root.sources]
        live = [root for root in degrees if root.sources and root.source is None]
        if live and not own:
            self._fault(
                "scale-foreign",
                "error",
                node,
                f"the scale of the cast to {name_of(dtype)} is of another tensor: {live[0].text}",
            )
        trained = self.trained.get(origin)
        if trained is not None and not own and not live:
            kept = next(iter(degrees))
            if kept.source is not None and kept.source.update is None:
                text = f"{trained.name} trains, and its scale {kept.text} is not updated"
                self._fault("scale-stale", "warning", node, text)
        if not own and not live and not state.clamped:
            self._fault(
                "no-saturation",
                "warning",
                node,
                f"cast to {name_of(dtype)} without a clamp, by an older scale ({next(iter(degrees)).text})",
            )

    def _reinterpret(self, node: fx.Node) -> Any:
        argument = cast(fx.Node, node.args[0])
        state = self._state(argument)
        dtype = dtype_of(node)
        if state.casts and dtype in FP8 and dtype is not state.casts[-1].dtype:
            before = state.casts[-1].dtype
            if before.itemsize == 1 and before in FP8 and "float4" not in str(before) + str(dtype):
                self._fault(
                    "format", "error", node, f"bytes cast to {name_of(before)} are read as {name_of(cast(Any, dtype))}"
                )
                state = replace(state, casts=(*state.casts[:-1], replace(state.casts[-1], dtype=cast(Any, dtype))))
        if (
            dtype is not None
            and dtype_of(argument) is not None
            and dtype.itemsize != cast(Any, dtype_of(argument)).itemsize
        ):
            return NOTHING
        return replace(state, origin=self._origin(argument), values=None)

    def _move(self, node: fx.Node) -> Any:
        argument = cast(fx.Node, node.args[0])
        state = self._state(argument)
        if state.casts and dtype_of(argument) in FP8 and node.target in (aten.view.default, aten.reshape.default):
            before, after = shape_of(argument), shape_of(node)
            if len(before) == len(after) == 2 and before == after[::-1] and before[0] != before[1] and 1 not in before:
                self._fault("bytes-transposed", "error", node, f"FP8 bytes {list(before)} are viewed as {list(after)}")
                return NOTHING
        return self._moved(node, argument, state)

    def _moved(self, node: fx.Node, argument: fx.Node, state: State) -> Any:
        results = node.meta["val"]
        several = isinstance(results, (tuple, list))
        count = len(results) if several else 1
        moved: list[dict[Root, Tensor]] = [{} for _ in range(count)]
        for root, exponents in state.exponents.items():
            if exponents.numel() == 1:
                for i, each in enumerate(moved):
                    count_of_dims = (results[i] if several else results).ndim
                    each[root] = exponents.reshape([1] * count_of_dims)
                continue
            full = expanded(exponents, shape_of(argument))
            if full is None:
                return self._unknown(node)
            try:
                args, kwargs = fx.map_arg((node.args, dict(node.kwargs)), lambda n, full=full: full)
                outs = cast(Any, node.target)(*args, **kwargs)
            except (RuntimeError, TypeError):
                try:  # strides that the made-up tensor has not
                    outs = aten.reshape.default(full, cast(Any, node.args[1]))
                except (RuntimeError, TypeError):
                    return self._unknown(node)
            for each, out in zip(moved, outs if several else [outs], strict=True):
                each[root] = compressed(out)
        states = [replace(state, exponents=each, origin=self._origin(argument), values=None) for each in moved]
        return states if several else states[0]

    def _join(self, node: fx.Node) -> Any:
        parts = [self._state(x) for x in cast("Sequence[Any]", node.args[0])]
        first = parts[0]
        roots = dict.fromkeys(root for part in parts for root in part.exponents)
        casts = tuple(dict.fromkeys(cast_ for part in parts for cast_ in part.casts)) if roots else first.casts
        exponents: dict[Root, Tensor] = {}
        for root in roots:
            fulls = [
                expanded(part.exponents.get(root, torch.zeros(())), shape_of(x))
                for part, x in zip(parts, cast("Sequence[fx.Node]", node.args[0]), strict=True)
            ]
            if any(full is None for full in fulls):
                return NOTHING
            exponents[root] = compressed(cast(Any, node.target)(fulls, *node.args[1:], **node.kwargs))
        return State(exponents, casts, origin=self.keys[node])

    def _write(self, node: fx.Node) -> Any:
        """FP8 bytes that are written into others, as into a cache: all have the scale of the new ones."""
        state = self._state(named_arguments(node)[WRITES[node.target]])
        if not state.casts or any(x.numel() > 1 for x in state.exponents.values()):
            return NOTHING
        dims = [1] * ndim(node)
        return replace(state, exponents={root: x.reshape(dims) for root, x in state.exponents.items()}, values=None)

    def _pad(self, node: fx.Node) -> Any:
        argument = cast(fx.Node, node.args[0])
        state = self._state(argument)
        if all(x.numel() == 1 for x in state.exponents.values()):
            return replace(state, origin=self._origin(argument), values=None)
        return NOTHING

    def _multiply(self, node: fx.Node, sign: float) -> Any:
        args = list(node.args[:2])
        if not all(isinstance(x, fx.Node) for x in args):
            which = args[0] if isinstance(args[0], fx.Node) else args[1]
            state = self._state(which)
            if sign < 0 and which is args[1]:
                state = replace(state, exponents={r: -x for r, x in state.exponents.items()})
            origin = self._origin(cast(fx.Node, which)) if state.exponents else self.keys[node]
            other = args[1] if which is args[0] else args[0]
            return replace(state, values=None, origin=origin, bounded=state.bounded or other != 1)
        a, b = (self._state(x) for x in args)
        a_scales, b_scales = a.values is not None, b.values is not None
        if b_scales and not a_scales:
            a, b = self._paired(a, b)
        elif a_scales and not b_scales:
            b, a = self._paired(b, a)
        a, b = _anew(a, b), _anew(b, a)
        exponents: dict[Root, Tensor] = dict(a.exponents)
        for root, x in b.exponents.items():
            total = exponents[root] + sign * x if root in exponents else sign * x
            exponents[root] = compressed(total)
        if b_scales and not a_scales:
            origin = self._origin(cast(fx.Node, args[0]))
        elif a_scales and not b_scales and sign > 0:
            origin = self._origin(cast(fx.Node, args[1]))
        else:
            origin = self.keys[node]
        exponents = {root: x for root, x in exponents.items() if bool((x != 0).any())}
        casts = tuple(dict.fromkeys((*a.casts, *b.casts)))
        product = a.product or b.product
        factors = [state for state in (a, b) if state.values is not None and not state.exponents]
        constant = any(bool((cast(Any, state.values)[None] != 1).any()) for state in factors)
        bounded = a.bounded or (sign > 0 and b.bounded) or constant
        return State(exponents, casts, product, origin=origin, bounded=bounded)

    def _add(self, node: fx.Node) -> Any:
        tensors = [x for x in node.args if isinstance(x, fx.Node)]
        if node.target is aten.where.self:
            tensors = tensors[1:]
        states = [self._state(x) for x in tensors]
        if not states:
            return NOTHING
        first = states[0]
        for i, state in enumerate(states):
            if state.zero and len(states) == 2 and node.target is not aten.where.self:
                other = tensors[1 - i]
                return replace(states[1 - i], values=None, origin=self._origin(other))
        if all(same_exponents(first.exponents, state.exponents) for state in states[1:]) and len(states) == 2:
            casts = tuple(dict.fromkeys(cast_ for state in states for cast_ in state.casts))
            return State(first.exponents, casts, first.product, origin=self.keys[node])
        if node.target is aten.where.self and any(state.values is not None for state in states):
            data = [s for s in states if s.values is None]
            if len(data) == 1:
                return replace(data[0], origin=self.keys[node])
        for x, state in zip(tensors, states, strict=True):
            self._must_be_zero(x, state)
        return State(origin=self.keys[node])

    def _sum(self, node: fx.Node) -> Any:
        argument = cast(fx.Node, node.args[0])
        state = self._state(argument)
        if not state.exponents:
            return replace(state, values=None, origin=self.keys[node])
        dims = node.args[1] if len(node.args) > 1 and node.args[1] else range(len(shape_of(argument)))
        dims_in = len(shape_of(argument))
        exponents: dict[Root, Tensor] = {}
        for root, x in state.exponents.items():
            x = x.reshape([1] * (dims_in - x.ndim) + list(x.shape))
            if any(x.shape[d] != 1 for d in cast(Any, dims)):
                self._must_be_zero(argument, state)
                return State(origin=self.keys[node])
            keep = len(node.args) > 2 and bool(node.args[2])
            drop = {d % dims_in for d in cast(Any, dims)}
            exponents[root] = x if keep else x.reshape([s for d, s in enumerate(x.shape) if d not in drop])
        return replace(state, exponents=exponents, values=None, origin=self.keys[node])

    def _unknown(self, node: fx.Node) -> Any:
        """Return what is behind an op that is not linear: what it reads must have no exponents left."""
        target = node.target
        inputs = node.all_input_nodes
        if not _is_of_torch(target) and isinstance(target, OpOverload):
            if node in self.products or any(self._state(x).casts for x in inputs):
                self._fault("opaque", "info", node, f"{target} reads weights or FP8, and is not looked into")
            return NOTHING
        if "_scaled_grouped_mm" in str(target):
            return NOTHING
        if not isinstance(target, OpOverload):
            return NOTHING
        if not is_backward(node) or not str(target).startswith("aten.eq"):
            for x in inputs:
                if (dtype_of(node) is None or cast(Any, dtype_of(node)).is_floating_point) and dtype_of(x) not in FP8:
                    self._must_be_zero(x, self._state(x))
        bounded = any(word in str(target) for word in BOUNDED)
        return State(origin=self.keys[node], bounded=bounded)

    # Products

    def _list(self, product: Product) -> None:
        """Note the operands of a product: the types that their numbers were cast to last, and their scales."""
        casts = [self._dtype(x) for x in product.operands]
        texts = tuple(self._scale_text(x, self._state(x)) for x in self._scales_of(product.node))
        self.operands[product.node] = Operands(tuple(x if x is not None and is_low(x) else None for x in casts), texts)

    def _dtype(self, operand: fx.Node) -> torch.dtype | None:
        """Return the type that the numbers of an operand were cast to last."""
        state = self._state(operand)
        through = state.product is not None  # casts of an earlier product
        return state.casts[-1].dtype if state.casts and not through else dtype_of(operand)

    def _list_what_backward_reads(self) -> None:
        """Note in which dtype backward reads the operands of forward products again, but for the model's tensors."""
        nodes = {key: node for node, key in reversed(self.keys.items())}
        behind = _behind(product.node for product in self.products.values() if not product.backward)
        forward = {self.keys[node] for node in behind}  # computed once, if backward computes the same
        reads: dict[Any, torch.dtype | None] = {}
        for product in self.products.values():
            for x in product.operands if product.backward else ():
                origin, casts = self._origin(x), self._state(x).casts
                if casts and self.keys[casts[-1].node] not in forward:  # again, of what forward keeps
                    reads.setdefault(origin, dtype_of(nodes.get(origin)))
                reads.setdefault(origin, self._dtype(x))
        stored = {self.keys[node] for node, source in self.sources.items() if source.stored}
        for product in self.products.values():
            if not product.backward and reads:
                origins = (self._origin(x) for x in product.operands)
                kept = tuple(None if origin in stored else reads.get(origin) for origin in origins)
                self.operands[product.node] = replace(self.operands[product.node], kept=kept)

    @staticmethod
    def _scales_of(node: fx.Node) -> list[Any]:
        if node.target is dialect.scaled_mm:
            return list(node.args[2:4])
        return [named_arguments(node)[name] for name in ("scale_a", "scale_b")] if node.target in SCALED else []

    def _product(self, node: fx.Node) -> Any:
        arguments, nodes = named_arguments(node), operands_of(node)
        states = [self._operand(x, node) for x in nodes]
        scales = self._scales_of(node)
        for i, scale in enumerate(scales):
            scaled = self._scaled(states[i], self._state(scale), shape_of(nodes[i]), i, scale)
            if scaled is None:
                return NOTHING
            states[i] = scaled
        a, b = states
        if node.target is aten.linear.default:
            b = replace(b, exponents={root: compressed(with_dims(x, 2).t()) for root, x in b.exponents.items()})
        casts = tuple(dict.fromkeys((*a.casts, *b.casts)))
        if not casts:
            return State(origin=self.keys[node])
        result: dict[Root, Tensor] = {}
        for root in dict.fromkeys((*a.exponents, *b.exponents)):
            left = contracted(a.exponents.get(root), b.exponents.get(root))
            if root.table:
                continue
            if left is None:
                inverted = next((x for x in (a, b) if self._is_inverted(x, root)), None)
                if inverted is not None:
                    self._must_be_zero(node, replace(inverted, product=node))
                else:
                    self._fault("scale-axis", "error", node, self._axis_text(root))
                return State(origin=self.keys[node])
            if bool((left != 0).any()):
                result[root] = left
        state = State(result, casts, node, origin=self.keys[node])
        addend = arguments["self" if node.target in WITH_ADDEND else "bias"] if node.target in WITH_BIAS else None
        if isinstance(addend, fx.Node):
            self._must_be_zero(node, state)
            return State(origin=self.keys[node])
        return state

    def _other_product(self, node: fx.Node) -> Any:
        """Return the state behind another product of decoded numbers, such as attention: scales of one number pass.

        Through attention, those of its values do.
        """
        product, results = self.products[node], node.meta["val"]
        several = isinstance(results, (tuple, list))
        states = [self._operand(x, node) for x in product.operands]
        if product.kind == "attention":
            for x, state in zip(product.operands[:2], states, strict=False):
                self._must_be_zero(x, state)
            states = states[2:]
        exponents: dict[Root, Tensor] = {}
        for root, x in ((root, x) for state in states for root, x in state.exponents.items() if not root.table):
            if x.numel() > 1 or several and product.backward:
                text = f"{product.op} multiplies decoded numbers, through which their scales are not followed"
                self._fault("opaque", "info", node, text)
                return NOTHING
            first = results[0] if several else results
            exponents[root] = exponents.get(root, torch.zeros(())) + x.reshape([1] * first.ndim)
        casts = tuple(dict.fromkeys(each for state in states for each in state.casts))
        left = {root: x for root, x in exponents.items() if bool(x.any())}
        state = State(left, casts, node, origin=self.keys[node])
        others = (dtype_of(x) for x in node.all_input_nodes if x not in product.operands)  # None: a size
        if product.kind != "attention" and any(dtype is not None and dtype.is_floating_point for dtype in others):
            self._must_be_zero(node, state)  # a bias
            return State(origin=self.keys[node])
        return [state, *[NOTHING] * (len(results) - 1)] if several else state

    @staticmethod
    def _is_inverted(operand: State, root: Root) -> bool:
        degree = next((each.degrees[root] for each in operand.casts if root in each.degrees), None)
        return bool(degree) and multiple(operand.exponents.get(root, torch.zeros(())), root) == 2 * degree

    def _scaled(
        self, operand: State, scale: State, shape: Sequence[int], i: int, node: fx.Node | None = None
    ) -> State | None:
        """Return an operand [m, k] or [k, n] times its scale; None if it cannot be seen which number scales which.

        Args:
            node: the scale of a scaled product, which may lie in tiles.
        """
        operand, scale = self._paired(operand, scale)
        exponents, block = dict(operand.exponents), _BLOCKS.get(dtype_of(node), 0)
        for root, x in scale.exponents.items():
            full = expanded(x, shape_of(node)) if node is not None and x.numel() > 1 else x
            wide = None if full is None else spread_operand(full, shape, i, block)
            if wide is None:
                return None
            exponents[root] = compressed(exponents[root] + wide if root in exponents else wide)
        return replace(operand, exponents=exponents)

    def _operand(self, node: fx.Node, product: fx.Node) -> State:
        state = self._state(node)
        if state.product is not None and state.product is not product:
            self._must_be_zero(node, state)
            return State(origin=state.origin)
        if not state.casts and state.exponents:
            return replace(state, exponents={})
        return state

    def _scale_text(self, node: Any, state: State) -> str:
        if state.values is not None and not state.exponents:
            return "constant"
        roots = [root.text for root in state.exponents]
        return ", ".join(roots) or str(node)

    def _axis_text(self, root: Root) -> str:
        shape = list(root.exponents.shape)
        return f"the scale {shape} ({root.text}) varies along the contraction, and nothing undoes it there"

    def _quantize(self, node: fx.Node) -> Any:
        argument = cast(fx.Node, node.args[0])
        self._must_be_zero(argument, self._state(argument))
        return [NOTHING] * len(node.meta["val"])

    def _decode(self, node: fx.Node) -> Any:
        """FP8 bytes times their scales, as an op of the dialect."""
        data, scale = (self._state(x) for x in node.args[:2])
        shape = shape_of(cast(fx.Node, node.args[0]))
        scaled = self._scaled(data, scale, shape, 0)
        return NOTHING if scaled is None else replace(scaled, values=None, origin=self.keys[node])

    # Faults

    def _fault(self, rule: str, severity: Severity, node: fx.Node, text: str) -> None:
        if (rule, node) not in self.reported:
            self.reported.add((rule, node))
            self.faults.append(Fault(rule, severity, node, text))

    def _no_scale(self, node: fx.Node, stored: Source, text: str) -> None:
        """Report bytes without a scale: if they fill the range of their type, one is lost."""
        codes = None if stored.tensor is None else stored.tensor.flatten()[:_SAMPLE].float().abs().max()
        if codes is not None and bool(codes >= _FILLED):
            self._fault("scale-lost", "error", node, f"{stored.name} {text}, and has codes up to {float(codes):g}")
        else:
            self._fault("scale-constant-1", "warning", node, f"{stored.name} {text}")

    def _leave(self, output: fx.Node) -> None:
        results = [x for x in pytree.tree_leaves(output.args) if isinstance(x, fx.Node)]
        histories = {source.update for x, source in self.sources.items() if self._is_history(x)}
        scales = [self._state(x) for x in results if x not in histories]
        leaving = {root for state in scales if state.values is not None for root in state.exponents}
        for node in results:
            state = self._state(node)
            if dtype_of(node) in FP8 or any(root in leaving for root in state.exponents):
                continue  # the scale is handed on with it
            self._must_be_zero(node, state)

    def _must_be_zero(self, node: fx.Node, state: State) -> None:
        """Report the exponents that are left of a tensor that was cast to FP8."""
        stored = [each.stored for each in state.casts if each.stored is not None]
        if not state.casts or any(source.module in self.combined for source in stored):
            return
        where = state.product or state.casts[-1].node
        left = {
            root: multiple(x, root) for root, x in state.exponents.items() if bool((x != 0).any()) and not root.table
        }
        quantized = {root: degree for each in state.casts for root, degree in each.degrees.items()}
        for each in state.casts:
            if each.stored is not None and not each.degrees:
                own = (r for r, times in left.items() if times in (1.0, -1.0) and self._may_belong(r, each.stored))
                if (root := next(own, None)) is not None:
                    del left[root]  # a scale that no name says to be that of the bytes
                elif not left:
                    self._no_scale(where, each.stored, "is multiplied without a scale")
        if not left:
            return
        lost = [root for root, times in left.items() if root in quantized and times == quantized[root]]
        twice = [
            root for root, times in left.items() if root in quantized and times and times == -(quantized[root] or 0)
        ]
        inverted = [root for root, times in left.items() if times and times == 2 * (quantized.get(root) or 0)]
        extra = [root for root in left if root not in quantized]
        stored_bytes = {root: each for each in state.casts if each.stored for root in each.degrees}
        if any(left[root] is None for root in left):
            root = next(root for root in left if left[root] is None)
            self._fault(
                "scale-axis", "error", where, f"the scale ({root.text}) is applied along another axis than at the cast"
            )
        elif lost and extra:
            old = any(root.source is not None for root in extra) and any(root.source is None for root in lost)
            new = any(root in stored_bytes for root in lost) and any(root.source is None for root in extra)
            rule = "scale-stale" if old or new else "scale-swapped"
            text = f"cast by {lost[0].text}, multiplied by {extra[0].text}"
            self._fault(rule, "error", where, text)
        elif lost and twice:
            text = f"{twice[0].text} is applied twice, {lost[0].text} never"
            self._fault("scale-swapped", "error", where, text)
        elif inverted:
            self._fault(
                "scale-inverted", "error", where, f"cast and product both multiply by {inverted[0].text}, or divide"
            )
        elif lost:
            self._fault("scale-lost", "error", where, f"cast by {lost[0].text}, which the product does not undo")
        elif extra and any(each.stored is not None and not each.degrees for each in state.casts):
            self._fault("scale-stale", "error", where, f"bytes of the model are multiplied by {extra[0].text}")
        elif twice or extra:
            root = (twice or extra)[0]
            self._fault("scale-twice", "error", where, f"{root.text} is applied more than once")
        else:
            root = next(iter(left))
            self._fault("scale-twice", "error", where, f"{root.text} is applied {left[root]:g} times too often")


def _changes(values: Values) -> dict[Root, Tensor] | None:
    """By which powers of two each scale changes a value; None if it changes it in another way."""
    base = values[None]
    exponents: dict[Root, Tensor] = {}
    for root, changed in values.items():
        if root is None:
            continue
        if not base.is_floating_point():  # bits, or a comparison
            return None if bool((changed != base).any()) else exponents
        same = changed == base  # zeros of a padding, too
        ratio = torch.log2((changed.double() / base.double()).abs()).float().masked_fill(same, 0)
        whole = ratio.round()
        if not bool(((ratio - whole).abs() < 0.05).all()):
            return None
        if bool((whole != 0).any()):
            exponents[root] = compressed(whole)
    return exponents


def _made_up(root: Root, exponents: Tensor, dtype: torch.dtype, seed: int) -> dict[Root | None, Tensor]:
    """Numbers of a scale that starts here, as they are, and changed."""
    base = torch.rand(tuple(exponents.shape), generator=torch.Generator().manual_seed(seed)) + 1.0
    if not dtype.is_floating_point:  # bytes of E8M0
        base = (base * 64).to(dtype)
        return {None: base, root: base + exponents.to(dtype)}
    base = base.to(dtype)
    return {None: base, root: (base.double() * 2.0 ** exponents.double()).to(dtype)}


def _run(node: fx.Node, inputs: Sequence[Any]) -> dict[Root | None, Any] | None:
    """Run a node on scales and constants; None if it does not run."""
    roots: dict[Root | None, None] = dict.fromkeys([None, *(root for values in inputs for root in values)])
    results: dict[Root | None, Any] = {}
    try:
        for root in roots:
            given = dict(zip(node.all_input_nodes, (x.get(root, x[None]) for x in inputs), strict=True))
            args, kwargs = fx.map_arg((node.args, dict(node.kwargs)), given.__getitem__)
            if "device" in kwargs:
                kwargs = {**kwargs, "device": torch.device("cpu")}
            with torch.no_grad():
                results[root] = cast(Any, node.target)(*args, **kwargs)
    except (RuntimeError, TypeError, NotImplementedError, ValueError):
        return None
    return results


def _is_of_torch(target: Any) -> bool:
    """Return whether an op's arithmetic is torch's or ours."""
    return getattr(target, "namespace", "_operator") in _OF_TORCH


class _NodeNumber(int):
    def __repr__(self) -> str:
        return f"%{int(self)}"


def _positive(scale: Tensor) -> bool:
    numbers = scale.flatten()[:_SAMPLE].float()
    return bool((torch.isfinite(numbers) & (numbers > 0)).all())


def _behind(nodes: Iterable[fx.Node]) -> set[fx.Node]:
    """Return the nodes, and those that they are computed from."""
    waiting, behind = list(nodes), set[fx.Node]()
    while waiting:
        if (node := waiting.pop()) not in behind:
            behind.add(node)
            waiting.extend(node.all_input_nodes)
    return behind


def _anew(state: State, factor: State) -> State:
    """Return the result of a product that a scale multiplies which none of its operands was cast by: a tensor like
    others.
    """
    scales = {root for each in state.casts for root in each.degrees if not root.table}
    resolved = state.product is not None and not state.left and all(each.degrees for each in state.casts)
    if factor.values is None or not resolved or not scales.isdisjoint(factor.exponents):
        return state
    return replace(state, casts=(), product=None)


def _plain(state: State) -> State:
    return replace(state, values=None, clamped=False)
