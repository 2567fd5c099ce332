"""The scaling state of a backend: pages of delayed scales and amax histories, shared by all graphs it compiled.

A graph takes its state as whole pages (``numerics/history.py``): a page that a compiled graph uses never grows. The
rows of a page are known when a graph is compiled. Their owners are found at each call, by the identity of the
parameters, since one graph may serve many layers. Recompiles, eval graphs and graphs of the same layers find the same
page. A graph that wants the rows in another combination (a changed policy) gets a new page, into which they move. One
that wants a row under another recipe gets a copy of the tensor's newest (``successors.py``).
"""

from __future__ import annotations

import dataclasses
import logging
import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Final, cast

import torch
from torch import Tensor

from fp8graph.compat import autograd, checkpointing, ops
from fp8graph.compat.fakes import FakeTensor
from fp8graph.errors import StateError
from fp8graph.ir import collectives
from fp8graph.ir.decisions import InitialScales
from fp8graph.ir.sites import Use
from fp8graph.numerics.history import HEADER, read_scales
from fp8graph.passes.connect_scales import JoinsReduction, PageLayout
from fp8graph.passes.connect_scales.amax_reduction import Reduction, StagedPage
from fp8graph.passes.connect_scales.pages import (
    GraphPages,
    Page,
    Row,
    RowKey,
    RowOwner,
    as_first,
    keep_scales,
    row_name,
    rows_of_weights,
)  # fmt: skip
from fp8graph.passes.connect_scales.saved import LoadedRows, SavedRow, checked, not_shared, recognizes
from fp8graph.passes.connect_scales.successors import Phases, Successors
from fp8graph.recipes import DelayedScaling, OperandName, Recipe
from fp8graph.runtime.names import Names
from fp8graph.runtime.parameters import ParameterTable
from fp8graph.runtime.staleness import identities
from fp8graph.runtime.state_dict import shown
from fp8graph.runtime.stores import CallContext, KeptScales, Otherwise, Run, Services, Slot, accelerator_of

_log = logging.getLogger("fp8graph")

_LONG: Final = 64  # recorded calls of a graph, in which most tensors should have an amax


class ScalingState(KeptScales):
    """All pages of one backend."""

    name: ClassVar = PageLayout.store

    def __init__(self, services: Services) -> None:
        self._epoch = services.epoch  # it is advanced when graphs have to look for their pages again
        self.ranks = services.groups  # of the present call
        self._steps, self._names, self._policies = services.steps, services.names, services.policies
        self._owners = ParameterTable[RowOwner](self._gone)
        self._nobody = RowOwner()  # of the rows of models without parameters
        self._rows: dict[RowKey, Row] = {}
        self._successors, self._phases = Successors(), Phases(services.policies)
        self._loaded = LoadedRows()
        self._loads = 0  # how many states were loaded: all ranks load the same
        self._groups: set[str | None] = set()  # groups that amaxes were reduced over; None: this rank alone
        self._graphs = ParameterTable[GraphPages]()  # of earlier calls: to look up a thousand rows takes milliseconds
        self._turn = 0
        self._reductions: dict[str, Reduction] = {}  # by group
        self._staged: dict[str, list[StagedPage]] | None = None  # by group; None: not known
        self._warned = False  # of layers with one name
        self.recordings = 0  # number of calls that recorded amaxes, or staged them
        self._step_is_over = False  # staged amaxes may be committed
        self.before_commit: list[Callable[[], None]] = []  # they stage amaxes from outside of graphs
        self._without_backward: set[tuple[int, ...]] = set()  # forwards of this step that have no backward
        self._commits_after_steps = False

    def _gone(self, owner: RowOwner) -> None:
        # several ranks drop layers at their next look-up: all at the same time, whenever memory is freed
        if not self._reductions:
            self._forget_rows(owner)

    def slot(self, extra_inputs: Sequence[PageLayout | JoinsReduction], context: CallContext) -> Slot:
        """Return the pages of a graph, and its part in the reductions of a step."""
        layouts = _layouts_of(extra_inputs)
        group = str(context.group) if len(layouts) < len(extra_inputs) else None
        slot = _Read(
            tensors=(), state=self, requests=extra_inputs, layouts=layouts, group=group, records=context.gradients
        )
        slot.take_part(context.args)
        records = context.gradients or context.records
        if layouts:
            pages = self.pages(extra_inputs, context.args, records=records)
            slot.tensors = [page.tensor for page in pages]
            # a call on fake tensors only looks at the model
            if context.conditions is not None and not any(isinstance(x, FakeTensor) for x in context.args):
                slot.fresh = self._begin(pages, InitialScales() in context.conditions)
        if layouts and context.gradients and not self.ranks.same_in_stage(context.group):
            self._groups.add(context.group)
        return slot

    def first_condition(self, recipes: Collection[Recipe], parameters: Sequence[Tensor]) -> InitialScales | None:
        if self._loads or not any(recipe.starts_from_own_amax for recipe in recipes):
            return None
        if any(isinstance(parameter, FakeTensor) for parameter in parameters):
            return None  # of a model that is only looked at
        owners = filter(None, map(self._owners.of, parameters))
        pages = {self._rows[key].page for owner in owners for key in owner.keys}
        return InitialScales() if not pages or any([page.look() for page in pages]) else None

    def _begin(self, pages: Sequence[Page], begins: bool) -> Callable[[Any], bool] | None:
        """Look whether tensors of a graph have no scale yet, for which its variant that ``begins`` is.

        Returns:
            A check whether the next call needs that, too. Each look waits for the device, so calls are looked at less
            and less often: the variant is right for tensors that have a scale, and a little slower.

        Raises:
            Otherwise: the call needs the other variant.
        """
        if any([page.look() for page in pages]) != begins:
            raise Otherwise(InitialScales(), holds=not begins)
        calls, recordings = 0, self.recordings

        def unset(_: Any) -> bool:
            nonlocal calls, recordings
            if recordings == self.recordings:
                return True
            calls, recordings = calls + 1, self.recordings
            if calls > 2 and calls & (calls - 1):
                return True
            still = any([page.look() for page in pages])
            if still and calls == _LONG:
                self._say_unset(pages)
            return still

        return unset if begins else None

    def _say_unset(self, pages: Sequence[Page]) -> None:
        """Log which tensors still have no scale."""
        names = [row.name for row in self._rows.values() if row.page in pages and row.has_no_scale()]
        _log.warning(
            "%d tensors have had no amax in %d calls of their graph, the first %s: they are zero, inf or NaN, or no "
            "backward runs. The graph waits for one, and reads every tensor once more in each call, as the recipe "
            "tensorwise does. Call a model that you do not train under torch.no_grad().",
            len(names),
            _LONG,
            shown(_place(names[0])),
        )

    def pages(
        self, extra_inputs: Sequence[PageLayout | JoinsReduction], args: Sequence[Any], *, records: bool = False
    ) -> Sequence[Page]:
        """Return the pages for one call of a graph.

        Args:
            extra_inputs: the pages that the graph wants. The same sequence finds the same pages at once.
            args: its inputs, the parameters among them.
            records: amaxes are recorded in them.
        """
        parameters: list[Tensor] = [x for x in args if isinstance(x, torch.nn.Parameter)]
        key = id(extra_inputs), identities(tuple(parameters))
        graph, phase, in_backward = self._graphs.get(key), self._phases.now(), autograd.in_backward()
        moved = graph is None or any(page.moved for page in graph.pages)
        if graph is None or moved or (graph.phase != phase and not in_backward):
            self._forget_dead_layers()
            graph = self._graphs.keep(key, self._look_up(extra_inputs, args, next(iter(parameters), None)), parameters)
        graph.turn = self._turn = self._turn + 1
        if not in_backward:  # a repeated forward belongs to the phase of the first
            if graph.follows:
                graph.follows = self._follow(_layouts_of(extra_inputs), graph, phase)
            if records and not graph.records:
                graph.records = True
                for own in (own for rows in graph.names for several in rows for own in several):
                    self._successors.used(own, phase)
        if graph.weights and not in_backward and not self.ranks.is_dry_run():
            for row, owners in graph.weights:
                row.follow([args[index] for index in owners])
        return graph.pages

    def _look_up(
        self, extra_inputs: Sequence[PageLayout | JoinsReduction], args: Sequence[Any], anchor: Tensor | None
    ) -> GraphPages:
        layouts = _layouts_of(extra_inputs)
        pages = [self._page(layout, args, anchor) for layout in layouts]
        names = [[[self._key(row, args, anchor) for row in rows] for rows in layout.rows] for layout in layouts]
        rows = [[self._rows[several[0]] for several in each] for each in names]
        weights = [weight for pair in zip(layouts, rows, strict=True) for weight in rows_of_weights(*pair)]
        return GraphPages(requests=extra_inputs, pages=pages, names=names, weights=weights, phase=self._phases.now())

    def _follow(self, layouts: Sequence[PageLayout], graph: GraphPages, phase: int) -> bool:
        """Let outdated rows follow the newest of their tensors; whether some have to in the next call, too."""
        again = False
        for layout, rows in zip(layouts, graph.names, strict=True):
            for names in rows:
                newer = next(filter(None, (self._successors.newer(key, phase) for key in names)), None)
                if newer is not None:
                    again = True
                    row = self._rows[newer]
                    state = self._successors.converted(row.saved(), layout, row.name, phase)
                    if state is not None:
                        self._rows[names[0]].write(*state)
        return again

    def forget(self, extra_inputs: Sequence[PageLayout | JoinsReduction]) -> None:
        """Drop the look-ups of a graph that is gone. The scales stay, for other graphs of its layers."""
        for key, _ in self._graphs.items():
            if key[0] == id(extra_inputs):
                self._graphs.drop(key)

    def reduces(self, group: str, device: torch.device) -> None:
        """Take part in the reductions over ``group`` from now on, whatever this rank's graphs stage."""
        if group not in self._reductions:
            self._reductions[group] = Reduction(group, device, self._of_other_ranks)
        if not self._commits_after_steps:
            self._commits_after_steps, reference = True, weakref.ref(self)

            def after_step(*_: Any) -> None:
                # Dynamo would trace the commit into a compiled optimizer.step: leave it to the next forward
                if not torch.compiler.is_compiling() and (state := reference()) is not None:
                    state.commit(ends_step=True)

            autograd.after_optimizer_steps(self, after_step)

    def commit(self, *, ends_step: bool = False) -> None:
        """If a step is over (``ends_step``: an optimizer's), reduce its amaxes over the ranks and record them."""
        if not self._step_is_over or autograd.in_backward():
            return
        self._step_is_over = False
        self._without_backward.clear()
        for stage in self.before_commit:
            stage()
        step = (
            2 * self._steps.of_optimizers([x for x, _ in self._owners.parameters()]) + ends_step
            if self._reductions
            else 0
        )
        with torch.no_grad():
            for group, reduction in sorted(self._reductions.items()):
                pages = self._staged_pages().get(group, [])
                with autograd.unnoticed_writes([page.tensor for page in pages]):
                    if collectives.ranks_of(group):  # else it was destroyed
                        reduction.commit(pages, step, self._loads)

    def watch(self, results: Any, pages: Sequence[Tensor]) -> None:
        """Watch the results of a forward to know when its step is over.

        It is over when backward has begun or, without a backward, when the same layers are called again. ``pages``
        identify the layers, as one graph may serve many.
        """

        def over(*_: Any) -> None:
            self._step_is_over = True

        functions = {x.grad_fn for x in results if isinstance(x, Tensor) and x.grad_fn is not None}
        for function in functions:
            function.register_prehook(over)
        if not functions:
            key = tuple(map(id, pages))
            self._step_is_over |= key in self._without_backward
            self._without_backward.add(key)

    def report(self) -> Mapping[str, Any]:
        """Return the collective of each commit, and the names of loaded rows that no layer has asked for."""
        reductions = [reduction.record() for _, reduction in sorted(self._reductions.items())]
        return {"reductions": reductions, "unused_state": sorted(self._loaded)}

    def _staged_pages(self) -> dict[str, list[StagedPage]]:
        """Return the pages that are reduced, by group."""
        if self._staged is None:
            staged: dict[str, list[StagedPage]] = {}
            names: dict[Page, list[list[str]]] = {}
            seen: dict[str, int] = {}
            for row in list(self._rows.values()):
                if row.page.layout.group is not None:
                    # layers that are compiled one by one share a name, unless their model is bound
                    again = seen[row.name] = seen.get(row.name, -1) + 1
                    if again and not self._warned:
                        self._warned = True
                        _log.warning(
                            "several layers are called %s. Ranks distinguish their amaxes by the order in which they "
                            "first ran. Call backend.bind(model), so that each layer has its full name.",
                            row.name.partition("|")[0],
                        )
                    rows = names.setdefault(row.page, [[] for _ in row.page.layout.rows])
                    rows[row.index].append(f"{row.name}~{again}" if again else row.name)
            for page, rows in names.items():
                one = StagedPage(tensor=page.tensor, layout=page.layout, names=[tuple(row) for row in rows])
                staged.setdefault(str(page.layout.group), []).append(one)
            self._staged = staged
        return self._staged

    def _page(self, layout: PageLayout, args: Sequence[Any], anchor: Tensor | None) -> Page:
        entries = [[self._key(row, args, anchor) for row in rows] for rows in layout.rows]
        rows = [next((self._rows[key] for key in keys if key in self._rows), None) for keys in entries]
        first = rows[0]
        if first is not None and first.page.fits(layout):
            if all(row is not None and row.page is first.page and row.index == i for i, row in enumerate(rows)):
                self._name(layout, entries, first.page, args)
                return first.page
        self._epoch.advance()
        page = Page.new(layout)
        sources: dict[Page, tuple[list[int], list[int]]] = {}
        for index, row in enumerate(rows):
            if row is not None:
                to, indices = sources.setdefault(row.page, ([], []))
                to.append(index)
                indices.append(row.index)
        with torch.no_grad():
            for source, (to, indices) in sources.items():
                page.tensor[to] = source.rows_for(layout, indices)
                source.moved = True
            if layout.group is None:
                page.tensor[:, HEADER] = 0.0  # staged for ranks that are gone
        self._name(layout, entries, page, args)
        return page

    def _name(self, layout: PageLayout, entries: Sequence[Sequence[RowKey]], page: Page, args: Sequence[Any]) -> None:
        """Map every name of each row to it, and fill new rows with the state that was loaded for them."""
        names = self._names
        for index, (keys, rows) in enumerate(zip(entries, layout.rows, strict=True)):
            fresh = not any(key in self._rows for key in keys)
            for key, row in zip(keys, rows, strict=True):
                earlier = self._rows.get(key)
                bound = names.get(args[row.parameter]) if names and row.parameter is not None else ""
                # a bound weight's own name; else the module's name and the index of the matmul in it
                name = row_name(bound.removesuffix(".weight"), key) if bound else row_name(row.fqn, key, row.index)
                if earlier is not None and not bound:
                    name = earlier.name  # it may have been bound to other names
                self._rows[key] = Row(page, index, name, earlier and earlier.seen)
                self._staged = None
                if earlier is not None:
                    continue
                key.owner.keys.append(key)
                of_others = any(name in reduction.absent for reduction in self._reductions.values())
                state, copied = self._loaded_exactly(name, layout), None
                if state is None and fresh:
                    copied = self._copied(key, layout)
                    state = copied if copied is not None else self._of_another_recipe(name, layout)
                phase = self._phases.now() if of_others else 0
                self._successors.add(key, copied=copied is not None, phase=phase)
                if state is not None:
                    self._rows[key].write(*state)
                    fresh = False

    def rename(self, names: Names) -> None:
        """Call the rows of parameters that have been bound by their full names, before they are used again."""
        for parameter, owner in self._owners.parameters():
            bound = names.get(parameter)
            for key in owner.keys if bound else ():
                if key.site is None:
                    self._rows[key].name = row_name(bound.removesuffix(".weight"), key)
        self._staged = None

    def _loaded_exactly(self, name: str, layout: PageLayout) -> tuple[Tensor, Tensor] | None:
        """Return the state of a new row, if ``load_state_dict`` loaded it or other ranks had it before."""
        if (loaded := self._loaded.take(name, layout.fp8_max)) is not None:
            return loaded
        for reduction in self._reductions.values():
            if name in reduction.absent:
                page = reduction.absent.pop(name)
                return SavedRow.of(page.tensor[0], page.layout.fp8_max).under(layout.fp8_max)
        return None

    def _copied(self, key: RowKey, layout: PageLayout) -> tuple[Tensor, Tensor] | None:
        """Return the state of a new row of a tensor that has a row under another recipe."""
        if (newest := self._successors.newest(key)) is None:
            return None
        row = self._rows[newest]
        return self._successors.converted(row.saved(), layout, row.name, self._phases.now())

    def _of_another_recipe(self, name: str, layout: PageLayout) -> tuple[Tensor, Tensor] | None:
        """Return the state of a new row whose tensor other ranks had under another recipe, or ``load_state_dict``
        loaded.
        """
        place = _place(name)
        absent = [page for each in self._reductions.values() for other, page in each.absent.items() if place in other]
        same = [page for page in absent if _place(page.names[0][0]) == place]
        if same:
            saved = SavedRow.of(same[-1].tensor[0], same[-1].layout.fp8_max)
        else:
            saved = self._loaded.under_another_recipe(name, layout.recipe.amax_history_len)
        return None if saved is None else self._successors.converted(saved, layout, name, self._phases.now())

    def _of_other_ranks(self, name: str, layout: PageLayout) -> tuple[Tensor, Tensor] | None:
        """Return the state of a row that other ranks have begun, which copied theirs of the same tensor, too."""
        if (loaded := self._loaded_exactly(name, layout)) is not None:
            return loaded
        key = next((key for key, row in self._rows.items() if row.name.startswith(f"{_place(name)}|")), None)
        if key is None:
            return self._of_another_recipe(name, layout)
        newest = max(filter(None, (key, self._successors.newest(key))), key=self._successors.last)
        return self._successors.converted(self._rows[newest].saved(), layout, name, self._phases.now())

    def _key(self, row: Use, args: Sequence[Any], anchor: Tensor | None) -> RowKey:
        parameter = args[row.parameter] if row.parameter is not None else anchor
        owner = self._nobody
        if parameter is not None:
            owner = self._owners.of(parameter) or self._owners.set(parameter, RowOwner())
        recipe, site = cast(DelayedScaling, row.recipe), row.fqn if row.parameter is None else None
        return RowKey(owner=owner, site=site, use=row.use, operand=row.operand, recipe=recipe)

    def scales_in(self, tensor: Tensor) -> Tensor:
        return read_scales(tensor, copy=True)

    def stage(self, tensors: Sequence[Tensor], amaxes: Sequence[Sequence[Tensor]]) -> None:
        with torch.no_grad(), autograd.unnoticed_writes(tensors):
            largest = ops.largest_of_each([torch.stack([*several]) for several in amaxes])
            ops.raise_each([tensor[0, HEADER] for tensor in tensors], largest)

    def row(self, parameter: Tensor, operand: OperandName, recipe: DelayedScaling) -> SavedRow | None:
        """Return a copy of the row of ``parameter``'s layer, when it is used first; None if there is none."""
        first = RowKey(self._owners.of(parameter) or self._nobody, None, 0, operand, recipe)
        key = first if first in self._rows else self._successors.newest(first)
        return None if key is None else self._rows[key].saved()

    def peek(self, extra_input: PageLayout, owners: Sequence[Tensor], parameters: Sequence[Tensor]) -> Tensor:
        """Return a page with the scale of a weight, which the linears in it share."""
        page = Page.new(dataclasses.replace(extra_input, rows=extra_input.rows[:1], device=owners[0].device))
        rows = (self.row(owner, "weight", extra_input.recipe) for owner in owners)
        weight = Row(page, 0, "")
        if (row := next(filter(None, rows), None)) is not None:
            weight.write(*row.under(extra_input.fp8_max, extra_input.recipe.amax_history_len))
        for row, _ in rows_of_weights(page.layout, [weight]) if page.look() else ():
            row.begin(parameters)
        return page.tensor

    def input_scale_inv(self, extra_input: PageLayout, owner: Tensor) -> Tensor | None:
        """None before training has recorded any amax."""
        row = self.row(owner, "input", extra_input.recipe)
        return row.scale.reshape(()).reciprocal() if row is not None and row.amax_history.any() else None

    def _forget_rows(self, owner: RowOwner) -> None:
        for key in owner.keys:
            self._rows.pop(key, None)
            self._successors.drop(key)
        owner.keys.clear()
        self._staged = None

    def _forget_dead_layers(self) -> None:
        """Drop the rows of parameters that no longer exist, so that their pages can be freed."""
        for owner in {key.owner for key in self._rows} - {*self._owners.values(), self._nobody}:
            self._forget_rows(owner)

    def _alive(self) -> dict[str, Row]:
        """Return the rows of the layers that still exist, by name, without those whose tensor has a newer one."""
        self._forget_dead_layers()
        named: dict[str, list[tuple[RowKey, Row]]] = {}
        for key, row in list(self._rows.items()):
            if not self._successors.outdated(key):
                named.setdefault(row.name, []).append((key, row))
        rows: dict[str, Row] = {}
        for row in [row for alike in named.values() for row in self._of_models(alike)]:
            if row.name in rows:
                raise StateError(
                    f"two layers are called {row.name.partition('|')[0]!r}. Names are relative to the compiled code. "
                    "Call backend.bind(model), which gives every layer its full name, and for each of several models "
                    "backend.bind(model, name=...)."
                )
            rows[row.name] = row
        return rows

    def _of_models(self, alike: Sequence[tuple[RowKey, Row]]) -> list[Row]:
        """Return the rows of one name, without those of what a bound model had there before, if there are others.

        That is another parameter; or, for a module that has a parameter now and had none then (or the reverse, as
        torch.nn.utils.prune does), what was looked up last.
        """
        if len(alike) > 1:
            held = self._names.held()
            owners = {owner for parameter, owner in self._owners.parameters() if id(parameter) in held}
            alike = [(key, row) for key, row in alike if key.owner in owners] or alike
            if len({key.site is None for key, _ in alike}) > 1:
                of_rows = ((rows, graph.turn) for graph in self._graphs.values() for rows in graph.names)
                turns = {several[0]: turn for rows, turn in of_rows for several in rows}
                alike = [max(alike, key=lambda item: turns.get(item[0], 0))]
        return [row for _, row in alike]

    def entries(self) -> dict[str, Tensor]:
        """``{"<layer>.<operand>|<recipe>|scale": [1], "...|amax_history": [length], ...}``."""
        result: dict[str, Tensor] = {}
        for name, row in self._alive().items():
            result.update(row.saved().entries(name))
        for reduction in self._reductions.values():  # ranks that did not run a layer save the same state as the others
            for name, page in reduction.absent.items():
                result.update(SavedRow.of(page.tensor[0], page.layout.fp8_max).entries(name))
        result.update(self._loaded.entries())  # loaded state of layers that have not run is saved again
        return result

    def not_shared(self) -> str:
        return not_shared([*self._alive(), *self._loaded], self._groups)

    def recognizes(self, name: str) -> bool:
        return recognizes(name)

    def loader(self, entries: Mapping[str, Any]) -> Callable[[], None]:
        rows, existing = checked(entries), self._alive()
        places = {*map(_place, rows)}
        if missing := sorted(name for name in existing if _place(name) not in places):
            raise StateError(
                f"the state dict does not fit: {len(missing)} of {len(existing)} tensors are missing, the first is "
                f"{shown(_place(missing[0]))}; the dict has nothing for it. Nothing was loaded."
            )
        return lambda: self._load(rows, existing)

    def _policies_have_state(self) -> bool:
        """Return whether some recipe of the policy has a state, at any step of its schedule."""
        policies = [self._policies.current, *([self._policies.scheduled] if self._policies.scheduled else [])]
        return any(recipe.has_state for policy in policies for recipe in policy.recipes())

    def _load(self, rows: Mapping[str, SavedRow], existing: Mapping[str, Row]) -> None:
        self._loads += bool(rows)  # a model that is unpickled loads what it had, perhaps nothing
        self._loaded.replace(dict(rows))
        self._successors.restart()
        if rows and not existing and not self._policies_have_state():
            _log.warning(
                "the loaded scaling state has %d tensors, the first %s, and no recipe of the policy has a state: "
                "nothing but an autocast region will use it. It is saved again as it is.",
                len(rows),
                shown(_place(next(iter(rows)))),
            )
        of_place: dict[str, str] = {_place(name): name for name in existing if name in rows}
        with torch.no_grad():
            for name, row in sorted(existing.items(), key=lambda item: item[0] not in rows):  # exact ones first
                layout = row.page.layout
                state = self._loaded.take(name, layout.fp8_max)
                if state is None:
                    same = existing.get(of_place.get(_place(name), ""))
                    other = same.saved() if same is not None else None
                    other = other or self._loaded.under_another_recipe(name, layout.recipe.amax_history_len)
                    state = other and self._successors.converted(other, layout, name, self._phases.now())
                if state is None:
                    state = torch.ones(1), torch.zeros(layout.recipe.amax_history_len)
                row.write(*state)
        for row in self._rows.values():
            row.seen = None  # the weights that are loaded with it are those that the scales fit
        for reduction in self._reductions.values():
            reduction.forget()
        self._epoch.advance()  # some may have no scale any more


def _layouts_of(extra_inputs: Sequence[PageLayout | JoinsReduction]) -> list[PageLayout]:
    """Return the pages among the extra inputs that a graph asks for."""
    return [each for each in extra_inputs if isinstance(each, PageLayout)]


def _place(name: str) -> str:
    """Return the tensor that a row's name is for."""
    return name.partition("|")[0]


@dataclass(kw_only=True, eq=False)
class _Read(Slot):
    """The pages that a graph reads and may record amaxes in."""

    acts: ClassVar[bool] = True
    state: ScalingState
    requests: Sequence[PageLayout | JoinsReduction]
    layouts: Sequence[PageLayout]
    group: str | None  # of the ranks that reduce amaxes after each step; None: the graph takes no part
    records: bool

    def take_part(self, args: Sequence[Any]) -> None:
        """Record the amaxes of the last step on all ranks, before this call reads scales."""
        if self.group is not None:
            self.state.ranks.expect_equal_steps(self.group)
            # with reentrant checkpointing, only the backward runs the graph for training
            self.state.reduces(self.group, accelerator_of(args))
            with checkpointing.without_modes():
                self.state.commit()

    def before(self, run: Run) -> Sequence[Tensor]:
        self.take_part(run.args)
        self.state.recordings += self.records
        pages = self.tensors
        if self.layouts:  # a weight that was written takes its own scale
            self.state.pages(self.requests, run.args, records=self.records)
        if run.checkpointed is not None:
            keep_scales(run.checkpointed, self.layouts, pages)
        if self.state.ranks.is_dry_run():
            return [page.clone() for page in pages]
        if run.checkpointed is None or not pages:
            return pages
        return run.enter(as_first(run.checkpointed, self.layouts, pages, records=self.records))

    def after(self, run: Run, results: Any) -> None:
        if self.group is not None and not self.state.ranks.is_dry_run():
            self.state.watch(results, self.tensors)
