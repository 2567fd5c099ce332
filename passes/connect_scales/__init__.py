"""Give delayed quantize nodes their scales, and record their amaxes: one read and one update per page.

    qx = quantize(x, scaling="delayed")         ->      scales = read_scales(page, copy)
    qw = quantize(w, scaling="delayed")                 qx = quantize(x, scaling="delayed", scales=scales)
                                                        qw = quantize(w, scaling="delayed", scales=scales, row=1)
                                                        new = update_page(page, [qx.amax, qw.amax], 448.0, 0, "max")
                                                        copy_(page, new)                        (just before output)

    with several ranks                          ->      new = stage_amaxes(page, [qx.amax, qw.amax])

    in a graph without a backend behind it      ->      a = wait(all_reduce([qx.amax, qw.amax], "max", group))
                                                        new = update_page(page, [a[0], a[1]], ...)

    where some tensors have no amax yet     ->      own = initial_scales(scales, [x], None, 0, 448.0, 0)
                                                    qx = quantize(x, scaling="delayed", scales=own)

A page is a graph input (``numerics/history.py``); a graph has one per recipe, FP8 type and direction, normally one for
forward and one for backward. With several ranks, the staged amaxes are reduced after the step (``amax_reduction.py``);
or in the graph, by one all-reduce per page, where nothing runs after a step. Forward's scales are saved for backward,
since the page changes at the end of forward. Backward reads its page when it runs, so that several forwards may come
before it.

A tensor that has no amax yet, under a recipe that begins with its own (``initial_scale="auto"``), is read once more for
that, by a variant of the graph that is compiled for such calls (``InitialScales``). The scale of a parameter is made
before the call (``pages.py``), and that of a weight that is computed from parameters always in its own graph. With too
few spare inputs the graph is not changed; it is traced again with enough of them.

The ops, beside those of ``ir/ops.py``:

    read_scales(page, copy) -> [tensors, 4];  stage_amaxes(page, amaxes) -> page
    initial_scales(scales, parts, offs, row, fp8_max, margin) -> [1, 4]
    update_page(page, amaxes, fp8_max, margin, amax_compute_algo) -> page

Refuses to record amaxes of code that runs without gradients: the whole graph (``records_amaxes``), or a
``torch.no_grad`` region in it.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field
from operator import getitem
from typing import Any, ClassVar, Final, Self, cast

import torch
from torch import fx
from torch.utils.checkpoint import CheckpointPolicy

from fp8graph.ir import collectives, ops
from fp8graph.ir.compilation import Compilation, GraphFacts
from fp8graph.ir.decisions import InitialScales
from fp8graph.ir.edit import inline, insert, set_direction, trace
from fp8graph.ir.extra_inputs import ExtraInput, Rename
from fp8graph.ir.nodes import (
    CACHED_KEY,
    PURPOSE_KEY,
    USES_KEY,
    aten,
    in_order,
    is_backward,
    nodes,
    runs_without_gradients,
    value,
)
from fp8graph.ir.ops import define
from fp8graph.ir.quantize_node import QuantizeNode
from fp8graph.ir.sites import Foreseen, Use
from fp8graph.ir.weight_graphs import WeightGraph
from fp8graph.numerics import history
from fp8graph.recipes import FP8_MAX, GEMMS, DelayedScaling, OperandName

ONE_SCALE: Final = "delayed scaling has one scale on all ranks"  # why amaxes are reduced
_BEGINS_AT_ONE: Final = (
    "delayed scaling begins with scales of 1 in this graph, at which gradients become zero. "
    'initial_scale="auto" needs a second graph for the first step, which compiled models have. Fill the state from a '
    'run that has one, leave the first steps in high precision, or accept it by initial_scale="one".'
)
_WITH_PAGES: Final[tuple[OperandName, ...]] = ("input", "grad_output")


def _read_scales(page: torch.Tensor, _copy: bool) -> torch.Tensor:
    return history.read_scales(page, copy=True)  # an op must not return a view of its argument


def _shape_of_scales(page: torch.Tensor, _copy: bool) -> torch.Tensor:
    return page.new_empty((page.shape[0], history.HEADER))


def _shape_of_one(scales: torch.Tensor, *_settings: Any) -> torch.Tensor:
    return scales.new_empty((1, history.HEADER))


def _shape_of_page(page: torch.Tensor, _amaxes: Sequence[torch.Tensor], *_settings: Any) -> torch.Tensor:
    return page.new_empty(page.shape)


read_scales = define("read_scales", reference=history.read_scales, fake=_shape_of_scales, run=_read_scales)
initial_scales = define("initial_scales", reference=history.initial_scales, fake=_shape_of_one, measures=True)
stage_amaxes = define("stage_amaxes", reference=history.staged_page, fake=_shape_of_page)
update_page = define(
    "update_page",
    "(Tensor page, Tensor[] amaxes, float fp8_max, float margin, str amax_compute_algo) -> Tensor",
    reference=history.updated_page,
    fake=_shape_of_page,
)


@dataclass(frozen=True, kw_only=True)
class PageLayout(ExtraInput):
    """One tensor of scaling state that a graph takes as an input: see ``numerics/history.py``.

    ``rows``: one entry per row of the page, with all uses of its tensor: each gives the row a name.
    """

    store: ClassVar = "scales"
    recipe: DelayedScaling
    fp8_max: float
    backward: bool  # read and updated in backward
    device: torch.device
    rows: tuple[tuple[Use, ...], ...]
    group: str | None = None  # of ranks that reduce its amaxes after a step; None: they are recorded in the graph
    number: int = field(default=0, compare=False)  # among the graph's pages; for the title only

    def stand_ins(self) -> list[torch.Tensor]:
        return [torch.empty(history.page_shape(self.recipe.amax_history_len, len(self.rows)), device=self.device)]

    def initial(self) -> list[torch.Tensor]:
        return [self.new_page()]

    def warning_alone(self) -> str:
        return _BEGINS_AT_ONE if self.recipe.starts_from_own_amax else ""

    def new_page(self) -> torch.Tensor:
        """Return a page before the first step."""
        length, unset = self.recipe.amax_history_len, self.recipe.starts_from_own_amax
        return history.new_page(length, len(self.rows), self.device, unset=unset)

    def titles(self, name: Callable[[int], str]) -> list[str]:
        return [f"scaling state {self.number}"]

    def kind(self) -> Any:
        return self.recipe, self.fp8_max, self.group

    def renamed(self, rename: Rename) -> Self:
        rows = (tuple(_renamed(use, rename) for use in uses) for uses in self.rows)
        return dataclasses.replace(self, rows=tuple(rows))


def _renamed(use: Use, rename: Rename) -> Use:
    fqn, index = rename(use.fqn, use.index)
    return dataclasses.replace(use, fqn=fqn, index=index)


@dataclass(frozen=True, kw_only=True)
class JoinsReduction(ExtraInput):
    """A graph that takes part in the reductions of amaxes over ranks, also if it records none itself."""

    store: ClassVar = "scales"


def is_parameter(uses: Sequence[Use]) -> bool:
    """Return whether a row is of parameters themselves, in all its uses: their amax can be taken before a call."""
    return all(use.is_weight for use in uses)


@dataclass
class _RowOfPage:
    """One tensor's place in a page: all its names, and the quantize nodes that use it."""

    rows: list[Use]
    users: list[fx.Node] = field(default_factory=list[fx.Node])


def has_state(graph: fx.Graph, compilation: Compilation) -> bool:
    """Return whether delayed scaling quantizes some tensor in this graph, or in another that ranks may run in its
    place.

    A body of a higher-order op has no state.
    """
    graphs = [graph, *(each.quantizing for each in compilation.extra_inputs if isinstance(each, WeightGraph))]
    uses = (USES_KEY in node.meta for each in graphs for node in nodes(each, (ops.quantize,)))
    return not compilation.facts.subgraph and (any(uses) or _takes_part(compilation.facts))


def _takes_part(facts: GraphFacts) -> bool:
    """Return whether the graph takes part in reductions: whoever trains under a recipe that reduces amaxes, and has
    others.
    """
    reduces = facts.decisions.reduces_amaxes and not facts.reduces_in_graph
    return facts.records_amaxes and facts.decisions.amax_group is not None and reduces


def wanted_pages(foreseen: Callable[[], Sequence[Foreseen]], facts: GraphFacts) -> int:
    """Return one for each recipe, FP8 type and direction. Weights are in the page of inputs, or have one beside the
    graph.
    """
    if not any(recipe.has_state for recipe in facts.decisions.recipes):
        return 0
    pages = {
        (recipe, each.hardware.quantizer(recipe, operand).fp8_max, operand == "grad_output")
        for each in foreseen()
        for recipe in each.used(*GEMMS)
        if recipe.has_state
        for operand in _WITH_PAGES[: 1 + facts.training]
    }
    return len(pages)


def connect_scales(graph: fx.Graph, compilation: Compilation) -> None:
    for place, each in enumerate(compilation.extra_inputs):
        if isinstance(each, WeightGraph):  # of a weight that is quantized beside the graph: with a page of its own
            # whatever variant of the graph takes the copy that it makes
            decisions = dataclasses.replace(compilation.facts.decisions, conditions=(InitialScales(),))
            facts = dataclasses.replace(compilation.facts, decisions=decisions)
            compilation.extra_inputs[place] = each.passed(connect_scales, facts)
    pages: dict[Any, list[_RowOfPage]] = {}
    for node in nodes(graph, (ops.quantize,)):
        rows = cast(list[Use], node.meta.get(USES_KEY, []))
        if rows and not node.meta.get(CACHED_KEY):
            recipe = cast(DelayedScaling, rows[0].recipe)
            arguments = QuantizeNode(node).arguments
            key = (recipe, FP8_MAX[arguments.dtype], is_backward(node), value(arguments.x).device)
            of_forward = (*key[:2], False, key[3])
            if any(rows[0] in each.rows for each in pages.get(of_forward, ())):
                key = of_forward  # backward quantizes it once more, padded otherwise: with the scale that forward took
            entries = pages.setdefault(key, [])
            entry = next((c for c in entries if rows[0] in c.rows), None)
            if entry is None:
                entries.append(entry := _RowOfPage(rows))
            entry.users.append(node)
    in_graph = compilation.facts.reduces_in_graph
    layouts = [
        PageLayout(
            number=number,
            recipe=recipe,
            fp8_max=fp8_max,
            backward=backward,
            device=device,
            rows=tuple(tuple(c.rows) for c in entries),
            group=compilation.facts.decisions.amax_group if recipe.reduce_amax and not in_graph else None,
        )
        for number, ((recipe, fp8_max, backward, device), entries) in enumerate(pages.items())
    ]
    inputs = compilation.take(graph, layouts)
    if inputs is None:
        return
    for page, layout, entries in zip(inputs, layouts, pages.values(), strict=True):
        update = _connect(graph, page, layout, entries, compilation.facts)
        if update is not None:
            if in_graph and layout.recipe.reduce_amax and compilation.facts.decisions.amax_group is not None:
                _reduce(graph, update, compilation.facts.decisions.amax_group)
            _record(graph, update)
    if _takes_part(compilation.facts):
        compilation.extra_inputs.append(JoinsReduction())


@dataclass
class _Update:
    """The amaxes that go into a page."""

    page: fx.Node
    layout: PageLayout
    amaxes: list[fx.Node]
    like: fx.Node  # any of the quantize nodes


def _connect(
    graph: fx.Graph, page: fx.Node, layout: PageLayout, entries: Sequence[_RowOfPage], facts: GraphFacts
) -> _Update | None:
    record = facts.records_amaxes
    begins = layout.recipe.starts_from_own_amax and facts.decisions.condition(InitialScales) is not None
    users = {user for entry in entries for user in entry.users}
    first = in_order(users)[0]
    tag = "must_be_in_backward" if layout.backward else first.meta.get("partitioner_tag")
    with graph.inserting_before(first if layout.backward else _first_operation(graph)):
        # forward's scales are needed in backward, after the update; backward's until its end
        copy = record and not layout.backward
        scales = insert(graph, read_scales, (page, copy), like=first, name="scales")
    set_direction(scales, tag)
    scales.meta["recompute"] = CheckpointPolicy.MUST_SAVE  # the page changes before backward
    for position, entry in enumerate(entries):
        if begins and not is_parameter(entry.rows):
            _begin(graph, entry, layout, scales, position)
            continue
        for user in entry.users:
            QuantizeNode(user).ask(scales=scales, row=position)
    amaxes = [_amax(graph, entry) if record else None for entry in entries]
    if all(amax is None for amax in amaxes):
        return None
    with _at_the_end(graph, first):
        zero = None
        if None in amaxes:
            zero = insert(graph, aten.new_zeros.default, (page, []), like=first, name="not_seen")
    return _Update(page, layout, [cast(fx.Node, amax or zero) for amax in amaxes], first)


def _begin(graph: fx.Graph, entry: _RowOfPage, layout: PageLayout, scales: fx.Node, row: int) -> None:
    """Let the users of a row take their scale from their own amax, if the row has none."""
    made: dict[Any, fx.Node] = {}
    for user in in_order(entry.users):
        arguments = QuantizeNode(user).arguments
        tensor = arguments.offs, *arguments.parts
        if tensor not in made:
            args = (scales, [*arguments.parts], arguments.offs, row, layout.fp8_max, float(layout.recipe.margin))
            with graph.inserting_before(user):
                made[tensor] = insert(graph, initial_scales, args, like=user, name="initial_scales")
            made[tensor].meta["recompute"] = CheckpointPolicy.MUST_SAVE
        QuantizeNode(user).ask(scales=made[tensor], row=0)


def _reduce(graph: fx.Graph, update: _Update, group: str) -> None:
    """Let the amaxes be the largest of all ranks, which have the same graph."""
    with _at_the_end(graph, update.like):
        body = trace(lambda *amaxes: history.largest_to_send(amaxes), update.amaxes)
        packed = inline(graph, body, update.amaxes, like=update.like)
        sent = insert(graph, collectives.ALL_REDUCE, (packed, "max", group), like=update.like)
        sent.meta[PURPOSE_KEY] = ONE_SCALE
        reduced = insert(graph, collectives.WAIT, (sent,), like=update.like, name="reduced_amaxes")
        places = range(len(update.amaxes))
        update.amaxes = [insert(graph, aten.select.int, (reduced, 0, place), like=update.like) for place in places]


def _record(graph: fx.Graph, update: _Update) -> None:
    tag = update.like.meta.get("partitioner_tag")
    with _at_the_end(graph, update.like):
        new = _updated(graph, update)
    (output,) = graph.find_nodes(op="output")
    with graph.inserting_before(output):
        copy = insert(graph, aten.copy_.default, (update.page, new), like=update.like)
    set_direction(copy, tag and ("must_be_in_backward" if update.layout.backward else "must_be_in_forward"))


@contextlib.contextmanager
def _at_the_end(graph: fx.Graph, like: fx.Node) -> Generator[None]:
    """Insert nodes before the output, in the direction (forward or backward) of ``like``."""
    (output,) = graph.find_nodes(op="output")
    before = set(graph.nodes)
    with graph.inserting_before(output):
        yield
    for node in set(graph.nodes) - before:
        set_direction(node, like.meta.get("partitioner_tag"))


def _amax(graph: fx.Graph, entry: _RowOfPage) -> fx.Node | None:
    """Return the amax of the tensor in this step: of its first use with gradients."""
    for user in entry.users:
        if runs_without_gradients(user):
            continue
        names = QuantizeNode(user).names
        with graph.inserting_after(next(reversed(user.users))):
            return insert(graph, getitem, (user, names.index("amax")), like=user, name="amax")
    return None


def _updated(graph: fx.Graph, update: _Update) -> fx.Node:
    page, amaxes, layout, like = update.page, update.amaxes, update.layout, update.like
    recipe = layout.recipe
    if layout.group is not None:
        return insert(graph, stage_amaxes, (page, amaxes), like=like, name="staged_page")
    if isinstance(recipe.amax_compute_algo, str) and recipe.scaling_factor_compute_algo is None:
        args = (page, amaxes, layout.fp8_max, float(recipe.margin), recipe.amax_compute_algo)
        return insert(graph, update_page, args, like=like, name="updated_page")

    def updated(page: torch.Tensor, *amaxes: torch.Tensor) -> torch.Tensor:
        settings = (recipe.margin, recipe.amax_compute_algo, recipe.scaling_factor_compute_algo, recipe)
        return history.updated_page(page, amaxes, layout.fp8_max, *settings)

    # the user's functions are not ops: their traces go into the graph
    return cast(fx.Node, inline(graph, trace(updated, [page, *amaxes]), [page, *amaxes], like=like))


def _first_operation(graph: fx.Graph) -> fx.Node:
    return next(node for node in graph.nodes if node.op != "placeholder")
