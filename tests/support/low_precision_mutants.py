"""One fault in a correct low-precision graph: what people forget, exchange or do twice; and changes that are none."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any, Final

import torch
from torch import fx

from fp8graph.analysis.scales.states import Source

aten = torch.ops.aten
FP8: Final = (torch.float8_e4m3fn, torch.float8_e5m2)
Mutant = tuple[str, fx.Graph, dict[fx.Node, Source]]


def dtype(node: Any) -> torch.dtype | None:
    val = node.meta.get("val") if isinstance(node, fx.Node) else None
    return val.dtype if isinstance(val, torch.Tensor) else None


def shape(node: Any) -> tuple[int, ...]:
    return tuple(node.meta["val"].shape)


def insert(
    graph: fx.Graph, before: fx.Node, target: Any, *args: Any, like: fx.Node | None = None, **kwargs: Any
) -> fx.Node:
    """A node before another, with a value: that of ``like``, or computed on meta tensors."""
    with graph.inserting_before(before):
        node = graph.call_function(target, args, kwargs)
    if like is not None:
        node.meta = dict(like.meta)
    else:
        metas = fx.map_arg(
            (args, kwargs),
            lambda n: torch.empty_strided(
                n.meta["val"].shape, n.meta["val"].stride(), dtype=n.meta["val"].dtype, device="meta"
            ),
        )
        node.meta = {**before.meta, "val": target(*metas[0], **metas[1])}
    return node


def scaled(graph: fx.Graph) -> Iterator[Any]:
    yield from graph.find_nodes(op="call_function", target=aten._scaled_mm.default)


def casts(graph: fx.Graph) -> Iterator[Any]:
    for node in graph.nodes:
        if node.op == "call_function" and node.target is aten._to_copy.default and dtype(node) in FP8:
            if dtype(node.args[0]) not in FP8 and live(node):
                yield node


def live(node: fx.Node) -> bool:
    """Whether a product reads the node."""
    waiting, met = [node], set()
    while waiting:
        each = waiting.pop()
        if each in met:
            continue
        met.add(each)
        if "mm" in str(each.target):
            return True
        waiting.extend(each.users)
    return False


def undone(graph: fx.Graph) -> Iterator[tuple[Any, int]]:
    """The products or decoded codes that are multiplied or divided by a scale: the node, and the scale's argument."""
    for node in graph.nodes:
        if node.target in (aten.mul.Tensor, aten.div.Tensor) and len(node.args) == 2:
            for i, data in enumerate(node.args):
                other = node.args[1 - i]
                if (
                    from_codes(data)
                    and isinstance(other, fx.Node)
                    and not from_codes(other)
                    and (i == 0 or node.target is aten.mul.Tensor)
                ):
                    if is_scale(other):
                        yield node, 1 - i


def from_codes(node: Any) -> bool:
    while isinstance(node, fx.Node):
        if dtype(node) in FP8:
            return True
        if node.op != "call_function" or not node.all_input_nodes:
            return False
        if "mm" in str(node.target) and "scaled" not in str(node.target):
            return from_codes(node.all_input_nodes[0]) or from_codes(node.all_input_nodes[-1])
        if node.target in (aten.mul.Tensor, aten.div.Tensor):
            return from_codes(node.args[0])
        if (
            "copy" not in str(node.target)
            and "view" not in str(node.target)
            and node.target
            not in (aten.t.default, aten.transpose.int, aten.select.int, aten.slice.Tensor, aten.expand.default)
        ):
            return False
        node = node.all_input_nodes[0]
    return False


def is_scale(node: fx.Node) -> bool:
    waiting, met = [node], set()
    while waiting:
        each = waiting.pop()
        if each in met:
            continue
        met.add(each)
        if each.target in (aten.amax.default, aten.max.default):
            return True
        if each.op == "placeholder":
            return "scale" in each.meta.get("named", "")
        waiting.extend(each.all_input_nodes)
    return False


def ones(graph: fx.Graph, before: fx.Node, like: fx.Node) -> fx.Node:
    return insert(graph, before, aten.full.default, list(shape(like)), 1.0, dtype=torch.float32, like=like)


# Each fault takes a graph that it may change and random numbers; it returns False where it finds no place.


def dropped(graph: fx.Graph, draw: random.Random, sources: dict[fx.Node, Source]) -> bool:
    places: list[Callable[[], None]] = []
    for node in scaled(graph):
        for i in (2, 3):
            if not constant(node.args[i]):
                places.append(lambda node=node, i=i: node.update_arg(i, ones(graph, node, node.args[i])))
    for node, i in undone(graph):
        places.append(lambda node=node, i=i: node.update_arg(i, ones(graph, node, node.args[i])))
    return pick(places, draw)


def inverted(graph: fx.Graph, draw: random.Random, sources: dict[fx.Node, Source]) -> bool:
    places: list[Callable[[], None]] = []
    for node, i in applied(graph):

        def change(node: Any = node, i: int = i) -> None:
            inverse = insert(graph, node, aten.reciprocal.default, node.args[i], like=node.args[i])
            node.update_arg(i, inverse)

        places.append(change)
    return pick(places, draw)


def twice(graph: fx.Graph, draw: random.Random, sources: dict[fx.Node, Source]) -> bool:
    places: list[Callable[[], None]] = []
    for node, i in applied(graph):

        def change(node: Any = node, i: int = i) -> None:
            square = insert(graph, node, aten.mul.Tensor, node.args[i], node.args[i], like=node.args[i])
            node.update_arg(i, square)

        places.append(change)
    return pick(places, draw)


def swapped(graph: fx.Graph, draw: random.Random, sources: dict[fx.Node, Source]) -> bool:
    """A scale of another tensor: of the other operand, or of another product."""
    places: list[Callable[[], None]] = []
    sites = [(node, i) for node in scaled(graph) for i in (2, 3) if not constant(node.args[i])]
    sites += list(undone(graph))
    before: dict[fx.Node, int] = {node: i for i, node in enumerate(graph.nodes)}
    for node, i in sites:
        for other, j in sites:
            scale = other.args[j]
            if scale is node.args[i] or shape(scale) != shape(node.args[i]) or before[scale] > before[node]:
                continue
            if (node.target is aten.div.Tensor) != (other.target is aten.div.Tensor) or same_root(scale, node.args[i]):
                continue
            places.append(lambda node=node, i=i, scale=scale: node.update_arg(i, scale))
    return pick(places, draw)


def same_root(a: fx.Node, b: fx.Node) -> bool:
    return roots(a) == roots(b)


def roots(node: fx.Node) -> set[Any]:
    waiting, met, ends = [node], set(), set()
    while waiting:
        each = waiting.pop()
        if each in met:
            continue
        met.add(each)
        if each.target in (aten.amax.default, aten.max.default) or each.op == "placeholder":
            source = each
            while (
                source.op == "call_function"
                and source.target is not aten._scaled_mm.default
                and source.all_input_nodes
                and len(source.all_input_nodes) == 1
            ):
                source = source.all_input_nodes[0]
            ends.add(source)
        else:
            waiting.extend(each.all_input_nodes)
    return ends


def stale(graph: fx.Graph, draw: random.Random, sources: dict[fx.Node, Source]) -> bool:
    """A scale of before: a buffer, where the cast reads one of now."""
    places: list[Callable[[], None]] = []
    for node, i in applied(graph):

        def change(node: Any = node, i: int = i) -> None:
            first = next(iter(graph.nodes))
            with graph.inserting_before(first):
                old = graph.placeholder("old_scale")
            old.meta = {"val": node.args[i].meta["val"], "named": "old_scale"}
            sources[old] = Source("kept.old_scale")
            node.update_arg(i, old)

        places.append(change)
    return pick(places, draw)


def wrong_axis(graph: fx.Graph, draw: random.Random, sources: dict[fx.Node, Source]) -> bool:
    """The amax along the other dim of a square tensor, or a scale for rows that multiplies columns."""
    places: list[Callable[[], None]] = []
    for node in graph.nodes:
        if node.target is aten.amax.default and len(node.args) > 2 and node.args[2] and len(shape(node.args[0])) == 2:
            rows, columns = shape(node.args[0])
            if rows == columns and live(node):

                def change(node: Any = node) -> None:
                    cast_of = next(iter(casts_of(node)), None)
                    transposed = None
                    if cast_of is not None:
                        scale = cast_of.args[1]
                        transposed = insert(graph, cast_of, aten.t.default, scale)
                        cast_of.update_arg(1, transposed)

                if casts_of(node):
                    places.append(change)
    for node, i in undone(graph):
        scale = node.args[i]
        if (
            len(shape(scale)) == 2
            and len(shape(node)) == 2
            and shape(node)[0] == shape(node)[1]
            and max(shape(scale)) > 1
        ):

            def flip(node: Any = node, i: int = i) -> None:
                node.update_arg(i, insert(graph, node, aten.t.default, node.args[i]))

            places.append(flip)
    return pick(places, draw)


def casts_of(amax: fx.Node) -> list[fx.Node]:
    """The multiplications by a scale for rows that lead to a cast."""
    waiting, met, places = [amax], set(), []
    while waiting:
        for user in waiting.pop().users:
            if user in met or user.target is aten._scaled_mm.default:
                continue
            met.add(user)
            if user.target in (aten.mul.Tensor, aten.div.Tensor) and shape(user) == shape(amax.all_input_nodes[0]):
                if isinstance(user.args[1], fx.Node) and shape(user.args[1]) == shape(amax):
                    places.append(user)
            else:
                waiting.append(user)
    return places


def transposed_bytes(graph: fx.Graph, draw: random.Random, sources: dict[fx.Node, Source]) -> bool:
    places: list[Callable[[], None]] = []
    for node in graph.find_nodes(op="call_function", target=aten.t.default):
        if dtype(node) in FP8 and shape(node)[0] != shape(node)[1] and live(node):

            def change(node: Any = node) -> None:
                node.target, node.args = aten.view.default, (node.args[0], list(shape(node)))

            places.append(change)
    return pick(places, draw)


def other_format(graph: fx.Graph, draw: random.Random, sources: dict[fx.Node, Source]) -> bool:
    places: list[Callable[[], None]] = []
    codes = [*casts(graph), *(n for n in graph.find_nodes(op="placeholder") if dtype(n) in FP8)]
    for node in codes:

        def change(node: Any = node) -> None:
            after = node.next
            while after.op == "placeholder":
                after = after.next
            other = FP8[1 - FP8.index(dtype(node))]
            users = list(node.users)
            bits = insert(graph, after, aten.view.dtype, node, torch.uint8)
            read = insert(graph, after, aten.view.dtype, bits, other)
            for user in users:
                user.replace_input_with(node, read)

        places.append(change)
    return pick(places, draw)


def no_clamp(graph: fx.Graph, draw: random.Random, sources: dict[fx.Node, Source]) -> bool:
    """The clamp before a cast by a scale that is older than the tensor."""
    places: list[Callable[[], None]] = []
    for node in casts(graph):
        clamp = node.args[0]
        if clamp.target is aten.clamp.default:
            factor = clamp.args[0]
            scale = factor.args[1] if isinstance(factor, fx.Node) and len(factor.args) > 1 else None
            if isinstance(scale, fx.Node) and scale.op == "placeholder":
                places.append(lambda clamp=clamp: clamp.replace_all_uses_with(clamp.args[0]))
    return pick(places, draw)


def no_cast_scale(graph: fx.Graph, draw: random.Random, sources: dict[fx.Node, Source]) -> bool:
    """The tensor is cast as it is, and the product is multiplied by the scale."""
    places: list[Callable[[], None]] = []
    for node in casts(graph):
        factor = node.args[0]
        while factor.target in (aten.clamp.default, aten._to_copy.default):
            factor = factor.args[0]
        if (
            factor.target in (aten.mul.Tensor, aten.div.Tensor)
            and isinstance(factor.args[1], fx.Node)
            and is_scale(factor.args[1])
        ):
            places.append(lambda factor=factor: factor.update_arg(1, ones(graph, factor, factor.args[1])))
    return pick(places, draw)


# Changes that keep what a graph computes, but for rounding.


def inverted_twice(graph: fx.Graph, draw: random.Random, sources: dict[fx.Node, Source]) -> bool:
    places: list[Callable[[], None]] = []
    for node, i in applied(graph):

        def change(node: Any = node, i: int = i) -> None:
            scale = node.args[i]
            once = insert(graph, node, aten.reciprocal.default, scale, like=scale)
            node.update_arg(i, insert(graph, node, aten.reciprocal.default, once, like=scale))

        places.append(change)
    return pick(places, draw)


def halved_and_doubled(graph: fx.Graph, draw: random.Random, sources: dict[fx.Node, Source]) -> bool:
    places: list[Callable[[], None]] = []
    for node, i in applied(graph):

        def change(node: Any = node, i: int = i) -> None:
            scale = node.args[i]
            half = insert(graph, node, aten.mul.Tensor, scale, 0.5, like=scale)
            node.update_arg(i, insert(graph, node, aten.div.Tensor, half, 0.5, like=scale))

        places.append(change)
    return pick(places, draw)


def multiplied_after_the_product(graph: fx.Graph, draw: random.Random, sources: dict[fx.Node, Source]) -> bool:
    """A scale of one number goes from the product to its result."""
    places: list[Callable[[], None]] = []
    for node in scaled(graph):
        for i in (2, 3):
            if not constant(node.args[i]) and shape(node.args[i]) == ():

                def change(node: Any = node, i: int = i) -> None:
                    scale, users, after = node.args[i], list(node.users), node.next
                    node.update_arg(i, ones(graph, node, scale))
                    result = insert(graph, after, aten.mul.Tensor, node, scale, like=node)
                    for user in users:
                        user.replace_input_with(node, result)

                places.append(change)
    return pick(places, draw)


def cast_to_wider(graph: fx.Graph, draw: random.Random, sources: dict[fx.Node, Source]) -> bool:
    places: list[Callable[[], None]] = []
    for node, i in applied(graph):

        def change(node: Any = node, i: int = i) -> None:
            scale = node.args[i]
            wide = insert(graph, node, aten._to_copy.default, scale, dtype=torch.float64)
            node.update_arg(i, insert(graph, node, aten._to_copy.default, wide, dtype=dtype(scale)))

        places.append(change)
    return pick(places, draw)


def copied_bytes(graph: fx.Graph, draw: random.Random, sources: dict[fx.Node, Source]) -> bool:
    """The codes through their bits, and back."""
    places: list[Callable[[], None]] = []
    for node in casts(graph):

        def change(node: Any = node) -> None:
            after, users = node.next, list(node.users)
            bits = insert(graph, after, aten.view.dtype, node, torch.uint8)
            copy = insert(graph, after, aten.clone.default, bits)
            codes = insert(graph, after, aten.view.dtype, copy, dtype(node))
            for user in users:
                user.replace_input_with(node, codes)

        places.append(change)
    return pick(places, draw)


def applied(graph: fx.Graph) -> list[tuple[Any, int]]:
    """Every place where a product, or its result, takes a scale: the node, and the argument. E8M0 has no arithmetic."""
    numbers = ((node, i) for node in scaled(graph) for i in (2, 3) if dtype(node.args[i]) is torch.float32)
    return [*((node, i) for node, i in numbers if not constant(node.args[i])), *undone(graph)]


def constant(node: fx.Node) -> bool:
    return node.target in (aten.full.default, aten.ones.default, aten.new_ones.default)


def pick(places: list[Callable[[], None]], draw: random.Random) -> bool:
    if not places:
        return False
    draw.choice(places)()
    return True


FAULTS: Final[dict[str, Callable[..., bool]]] = {
    "dropped": dropped,
    "inverted": inverted,
    "twice": twice,
    "swapped": swapped,
    "stale": stale,
    "wrong axis": wrong_axis,
    "transposed bytes": transposed_bytes,
    "other format": other_format,
    "no clamp": no_clamp,
    "not applied at the cast": no_cast_scale,
}


NEUTRAL: Final[dict[str, Callable[..., bool]]] = {
    "inverted twice": inverted_twice,
    "halved and doubled": halved_and_doubled,
    "multiplied after": multiplied_after_the_product,
    "cast to wider": cast_to_wider,
    "copied bytes": copied_bytes,
}


def copied(graph: fx.Graph, sources: dict[fx.Node, Source]) -> tuple[fx.Graph, dict[fx.Node, Source]]:
    copy, copies = fx.Graph(), dict[fx.Node, fx.Node]()
    copy.output(copy.graph_copy(graph, copies))
    for node, source in sources.items():
        copies[node].meta["named"] = source.leaf
    updates = {node: x.update and copies[x.update] for node, x in sources.items()}
    return copy, {copies[node]: replace(source, update=updates[node]) for node, source in sources.items()}


def mutants(
    programs: dict[str, list[tuple[fx.Graph, dict[fx.Node, Source]]]],
    count: int,
    seed: int,
    kinds: Mapping[str, Callable[..., bool]] = FAULTS,
) -> Iterator[Mutant]:
    """``count`` mutants of graphs, kinds in turn, with what was done to which program."""
    draw = random.Random(seed)
    names, made, turn = sorted(programs), 0, 0
    while made < count:
        kind = list(kinds)[turn % len(kinds)]
        turn += 1
        for name in draw.sample(names, len(names)):
            if not programs[name]:
                continue
            graph, sources = copied(*draw.choice(programs[name]))
            if kinds[kind](graph, draw, sources):
                made += 1
                graph.eliminate_dead_code()
                yield f"{kind} in {name}", graph, sources
                break
