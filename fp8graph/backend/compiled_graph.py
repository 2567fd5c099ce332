"""One Dynamo graph and its compiled variants: what ``Backend`` returns to torch.

The same graph may run under several autocast regions opened outside the compiled code, for several layers
(per-layer compilation shares one graph), and under a changed policy. None of these is visible to Dynamo's
guards, so the callable holds one variant per situation and picks it at call time.

``CompiledGraphs`` are all of one backend: those that are alive, and the report's rows of those that were freed.
"""

from __future__ import annotations

import dataclasses
import itertools
import weakref
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol, cast

import torch

from fp8graph.backend.compiling import Bound, Variant, compile_variant
from fp8graph.backend.coverage import check_records
from fp8graph.backend.dynamo_graph import DynamoGraph, Situation
from fp8graph.backend.inductor_passes import Stopwatch
from fp8graph.compat import autograd, checkpointing, dynamo, fakes
from fp8graph.compat.anchors import anchor, has_no_module, remember_modules
from fp8graph.compat.fakes import FakeTensorMode, detect_fake_mode
from fp8graph.ir.compilation import Findings
from fp8graph.ir.decisions import Condition, Decisions, GatheredInFP8
from fp8graph.recipes.autocast import current_region
from fp8graph.report import GraphView
from fp8graph.report.graph_view import announce
from fp8graph.runtime.call import BoundCall, FirstCall
from fp8graph.runtime.recomputation import Checkpointed
from fp8graph.runtime.staleness import identities, picker
from fp8graph.runtime.stores import CallContext, GatheredInHighPrecision, Otherwise, Services

KEPT_POLICIES: Final = 4  # that in force and the last ones before it: a switch back to one of them compiles nothing
_alive: Final[weakref.WeakSet[CompiledGraph]] = weakref.WeakSet()
_turns: Final = itertools.count()
Variants = list[tuple[Hashable, Variant]]  # of one graph, under no names; by what decides about their sites


class Owner(Protocol):
    """The part of a backend that hears of calls."""

    @property
    def services(self) -> Services:
        """The parts that its graphs share."""
        ...

    @property
    def stopwatch(self) -> Stopwatch:
        """The seconds in passes."""
        ...

    @property
    def inner_compile(self) -> Callable[..., Any] | None:
        """The compiler that compile_fx calls for each graph after the passes; None: Inductor."""
        ...

    def check_step(self) -> None:
        """Check what was compiled so far: all graphs of a step are known."""
        ...

    def called(self, *, again: bool) -> None:
        """Note a call of a graph, ``again`` or for the first time."""
        ...


def graphs_of(parameters: Iterable[torch.Tensor]) -> list[CompiledGraph]:
    """Return the graphs, of whatever backend, that were called with one of ``parameters``."""
    ids = set(map(id, parameters))
    return [graph for graph in list(_alive) if graph.runs(ids)]


class CompiledGraph:
    """A callable with the signature of the Dynamo graph.

    It keeps its variants for the last ``KEPT_POLICIES`` policies that it was called under.

    Args:
        inputs: what to compile it for now; None: it is compiled when it is called.
        variants: the compiled variants that it shares with those of other backends for this graph.
    """

    def __init__(
        self, backend: Owner, graph: DynamoGraph, inputs: Sequence[Any] | None, variants: Variants | None = None
    ) -> None:
        self.backend, self._services, self._graph = backend, backend.services, graph
        self._services.policies.of(graph.families)  # it may be asked for all of them
        self._compiled: Variants = [] if variants is None else variants
        self._variants: dict[tuple[Situation, Bound], Variant] = {}  # under the names of the parameters
        self._policies: list[str] = []  # identities of those of the variants, the last one used at the end
        self._empty = torch.empty(0, device=graph.device)  # stands in for inputs that no pass took
        self._pick = picker(graph.positions)
        self._first = graph.positions[0] if graph.positions else None
        # by the id of the first parameter, or 0: layers may share the graph, and a first parameter
        self._calls: dict[tuple[int, Situation], list[BoundCall]] = {}
        self._epoch = self._services.epoch
        self._strict = self._services.settings.strict
        self._first_call: FirstCall | None = None  # None: not called yet, or long ago
        self._checked = False  # whether all graphs of its first step were looked at
        self.texts: list[GraphView] = []  # views without modules, for a report that outlives this graph
        self._findings: list[Findings] = []  # of the variants
        weakref.finalize(self, _forget, self._services, self._findings).atexit = False
        _alive.add(self)
        if inputs is not None:
            situation = self._situation(self._services.recomputations.of_call(is_made=False))
            first = self._first_conditions(situation, inputs)
            self._variant(self._whole(situation, first, self._arrived(inputs)), self._bound(inputs), inputs)
            self._use(situation.policy.of(graph.families)[1])

    @property
    def families(self) -> tuple[str, ...]:
        """The families of the models that this graph is of, which add to the default policy."""
        return self._graph.families

    @property
    def views(self) -> list[GraphView]:
        """The report's view of each variant, repeated for each layer that runs it.

        A condition that lasts is the rule from then on: the variant without it is not run any more. One that passes is
        an exception, whose variant has the GEMMs of the one without it, and is listed where that is not there.
        """
        listed: dict[tuple[Situation, Bound], Variant] = {}
        for key, variant in self._variants.items():
            rule = key[0].without(passing=True), key[1]
            if key == rule or rule not in listed:
                listed[rule] = variant
        before = {key: (key[0].without(passing=False), key[1]) for key in listed}
        past = {other for key, other in before.items() if other != key}
        return [variant.view for key, variant in listed.items() if key not in past]

    def calls(self) -> Iterator[tuple[dict[int, int], Findings]]:
        """Yield the ids of its calls' parameters under the present policy, by input, with the findings of its graph."""
        _, present = self._services.policies.of(self._graph.families)
        every = sorted(itertools.chain(*list(self._calls.values())), key=lambda call: call.turn)
        last = {call.parameters: call for call in every if call.is_alive() and call.policy == present}
        for parameters, call in last.items():
            yield dict(zip(self._graph.positions, parameters, strict=True)), call.findings

    def runs(self, parameters: Collection[int]) -> bool:
        """Return whether it was called with one of the parameters that have these ids."""
        every = list(itertools.chain(*list(self._calls.values())))
        return any(call.is_alive() and any(x in parameters for x in call.parameters) for call in every)

    def __call__(self, *args: Any) -> Any:
        if fakes.called_to_trace(args):
            return self._run_on_fakes(args)
        if self._strict or not self._checked:
            self._check(args)
        services, gradients = self._services, self._graph.gradients
        if gradients is not services.steps.gradients:
            services.steps.switch(gradients=gradients)
        if services.schedule.due:
            services.schedule.advance()
        conditions, checkpointed = (), None
        for store in services.deciding:
            if (condition := store.condition(gradients=gradients)) is not None:
                conditions = (*conditions, condition)
        if checkpointing.matters():
            checkpointed = services.recomputations.of_call()
            situation = self._situation(checkpointed, conditions)
        else:
            if (region := current_region()) is not None:
                services.recomputations.regions.add(region)
            situation = services.policies.now, region, services.groups.now(), conditions
        first = 0 if self._first is None else id(args[self._first])
        for call in self._calls.get((first, situation), ()):  # pyright: ignore[reportCallIssue, reportArgumentType]
            if (
                call.epoch == self._epoch.now
                and (not call.ids or call.ids == identities(self._pick(args)))
                and (call.fresh is None or call.fresh(args))
            ):
                if call.policy is not self._policies[-1]:
                    self._use(call.policy)
                break
        else:
            with checkpointing.without_modes():
                call = self._bind(args, Situation(*situation))
        if checkpointed is not None:
            checkpointed.keep(Situation(*situation).under(*call.conditions), records=gradients)
        return call.act(args, checkpointed) if call.acting else call.run(*args, *call.more)

    def _check(self, args: Sequence[Any]) -> None:
        """Check what was compiled: all of it once the step of the first call is over; in strict mode always."""
        if autograd.in_backward():
            return
        first, again = self._first_call, self._checked or self._first_call is not None
        if not self._checked:
            _, policy = self._services.policies.of(self._graph.families)
            steps, parameter = self._services.steps.count, None if self._first is None else args[self._first]
            if first is None or first.policy != policy:
                self._first_call = FirstCall(policy, parameter, steps)
            elif first.is_over(parameter, steps):
                self.backend.check_step()  # where it raises, so does the next call
                self._first_call, self._checked = None, True
        self.backend.called(again=again)

    def _situation(self, checkpointed: Checkpointed | None, conditions: tuple[Condition, ...] = ()) -> Situation:
        """Return the situation of a call. A forward that runs again has that of its first time."""
        if checkpointed is not None and (first := checkpointed.first) is not None:
            repeats = first.records == self._graph.gradients
            returning = tuple(each for each in first.situation.conditions if each.returns)
            return first.situation if repeats else first.situation._replace(conditions=(*conditions, *returning))
        services, region = self._services, current_region()
        services.recomputations.check(region)
        return Situation(services.policies.now, region, services.groups.now(), conditions)

    def _bind(self, args: Sequence[Any], situation: Situation) -> BoundCall:
        """Bind a call to its variant and to the extra inputs of that, for later calls that need the same."""
        services, key = self._services, (0 if self._first is None else id(args[self._first]), situation)
        if services.groups.detect_stage():
            situation = situation._replace(amax_group=services.groups.now())
        parameters = self._pick(args)
        services.schedule.track(parameters)
        arrived, bound = self._arrived(args), self._bound(args)
        conditions, changes = self._first_conditions(situation, args), 0
        while True:
            whole = self._whole(situation, conditions, arrived)
            variant, epoch = self._find(whole, bound), services.epoch.now
            findings = variant.findings
            context = CallContext(
                args=args,
                gradients=self._graph.gradients,
                group=situation.amax_group,
                arrived=arrived,
                conditions=None if changes > 1 or any(each.returns for each in situation.conditions) else conditions,
            )
            try:
                slots = [
                    (store.slot(extra_inputs, context), findings.places[name])
                    for name, store in services.stores.items()
                    if (extra_inputs := findings.by_store.get(name)) is not None
                ]
                break
            except GatheredInHighPrecision as error:
                arrived = {index: owner for index, owner in arrived.items() if index not in error.positions}
            except Otherwise as error:
                conditions = tuple(each for each in conditions if each != error.condition)
                changes += 1  # should two variants send the call to each other, that with the condition runs
                conditions += (error.condition,) if error.holds or changes > 1 else ()
        if any(map(has_no_module, parameters)):
            remember_modules(*dynamo.modules_on_stack())
        self._graph.let_torch_swap()
        more = [self._empty] * variant.spares
        for slot, places in slots:
            for place, tensor in zip(places, slot.tensors, strict=True):
                more[place] = tensor
        # without such inputs, and names that matter, the call is prepared for any parameters
        by_name = bool(bound.names) and self._decisions(whole, bound).may_rewrite
        for_these = any(slot.tensors for slot, _ in slots) or by_name or bool(self._graph.gathered)
        call = BoundCall(
            run=variant.run,
            more=more,
            acting=[(slot, places) for slot, places in slots if slot.acts],
            fresh=_all_fresh([slot.fresh for slot, _ in slots if slot.fresh is not None]),
            epoch=epoch,
            ids=identities(parameters) if for_these else b"",
            parameters=tuple(map(id, parameters)),
            alive=self._watch(key, parameters),
            policy=self._policies[-1],
            findings=findings,
            conditions=conditions,
            turn=next(_turns),
        )
        for calls in list(self._calls.values()):
            for each in [each for each in calls if each.epoch not in (epoch, -1)]:
                released = each.released()
                if each in calls:
                    calls[calls.index(each)] = released
        calls = self._calls.setdefault(key, [])
        _take_out(calls, lambda each: each.parameters == call.parameters)
        calls.insert(0, call)
        self._calls[key] = calls
        return call

    def _watch(self, key: tuple[int, Situation], parameters: Sequence[torch.Tensor]) -> list[weakref.ref[Any]]:
        """Drop the calls of ``parameters`` when one of these is freed: its id may then be used again."""
        calls = self._calls

        def forget(_: Any) -> None:
            _take_out(calls.get(key, []), lambda call: not call.is_alive())
            if not calls.get(key):
                calls.pop(key, None)

        return [weakref.ref(anchor(parameter), forget) for parameter in parameters]

    def _run_on_fakes(self, args: Sequence[Any]) -> Any:
        """Run on fake tensors to learn the shapes of the outputs. Their parameters have no scales and no FP8 copies.

        DDPOptimizer (``DistributedDataParallel`` under Dynamo) cuts a graph into buckets, and calls each part on fake
        tensors before it compiles the next.
        """
        rule, bound = self._situation(None), self._bound(args)
        alike = (v for key, v in self._variants.items() if (key[0].without(passing=True), key[1]) == (rule, bound))
        variant = next(alike, None) or self._find(rule, bound)
        with cast(FakeTensorMode, detect_fake_mode(args)):
            stand_ins = variant.findings.stand_ins()
            dead = [torch.empty(0, device=self._empty.device) for _ in range(variant.spares - len(stand_ins))]
            return variant.run(*args, *stand_ins, *dead)

    def _first_conditions(self, situation: Situation, args: Sequence[Any]) -> tuple[Condition, ...]:
        """Return the conditions, beside those of ``situation``, that a call with these arguments is likely to have."""
        recipes, parameters = self._decisions(situation, Bound()).recipes, self._pick(args)
        likely = (store.first_condition(recipes, parameters) for store in self._services.stores.values())
        return tuple(each for each in likely if each is not None and each not in situation.conditions)

    def _whole(self, situation: Situation, conditions: Sequence[Condition], arrived: Mapping[int, Any]) -> Situation:
        """``situation`` with all that only a call's arguments show."""
        return situation.under(*conditions, *([GatheredInFP8(frozenset(arrived))] if arrived else []))

    def _decisions(self, situation: Situation, bound: Bound) -> Decisions:
        return self._graph.decisions(situation, self._services.settings, *bound)

    def _list(self, situation: Situation, bound: Bound, variant: Variant) -> None:
        """Add the text of a new variant, as ``views`` lists it, in the place of those of exceptions from it."""
        rule = situation.without(passing=True), bound
        alike = [v for key, v in self._variants.items() if (key[0].without(passing=True), key[1]) == rule]
        if situation.passes and alike:
            return
        if rule not in self._variants:
            for text in (_text(other) for other in alike[:1]):
                self.texts.remove(text)
        self.texts.append(_text(variant))

    def _find(self, situation: Situation, bound: Bound) -> Variant:
        variant = self._variants.get((situation, bound))
        if variant is None:
            with self._graph.tracing():
                variant = self._variant(situation, bound, self._graph.fake_inputs)
        self._use(situation.policy.of(self._graph.families)[1])
        return variant

    def _use(self, policy: str) -> None:
        """Note that calls run under ``policy`` now, and drop the variants of those that were last used long ago."""
        self._policies = [*(other for other in self._policies if other != policy), policy]
        for old in self._policies[:-KEPT_POLICIES]:
            self._drop(old)
        del self._policies[:-KEPT_POLICIES]

    def _drop(self, policy: str) -> None:
        """Free the variants for a policy alone, the data prepared for their calls, and their rows in the report."""
        gone = [key for key, variant in self._variants.items() if variant.view.policy == policy]
        dropped = [self._variants.pop(key) for key in gone]
        unused = {id(variant.run) for variant in dropped} - {id(variant.run) for variant in self._variants.values()}
        # graphs of other backends that run them hold them, too
        self._compiled[:] = [(key, variant) for key, variant in self._compiled if id(variant.run) not in unused]
        findings = [variant.findings for variant in dropped]
        self._findings[:] = [every for every in self._findings if not any(every is each for each in findings)]
        self.texts[:] = [view for view in self.texts if view.policy != policy]
        for key, calls in list(self._calls.items()):
            _take_out(calls, lambda call: call.policy == policy)
            if not calls:
                self._calls.pop(key, None)
        _forget(self._services, findings)

    def _arrived(self, args: Sequence[Any]) -> dict[int, Any]:
        """Return the parameters that were gathered in FP8 only, by input position."""
        arrived: dict[int, Any] = {}
        for store in self._services.stores.values() if self._graph.gathered else ():
            arrived |= store.arrived(args, self._graph.gathered)
        return arrived

    def _bound(self, args: Sequence[Any]) -> Bound:
        names, parameters = self._services.names, [args[index] for index in self._graph.positions]
        return Bound(tuple(map(names.get, parameters)), names.stacks(parameters)) if names else Bound()

    def _variant(self, situation: Situation, bound: Bound, inputs: Sequence[Any]) -> Variant:
        """Return the variant for a situation and for ``bound`` parameters: one decided the same way, or a new one."""
        decisions, parameters = self._decisions(situation, bound), self._graph.parameters(bound.names)
        for key, compiled in self._compiled:
            if compiled.key_under(decisions, parameters) == key:
                variant = compiled.under(decisions, parameters)
                break
        else:
            owner, names = self.backend, bound.names
            compiled = compile_variant(self._graph, decisions, names, inputs, owner.stopwatch, owner.inner_compile)
            variant = compiled.under(decisions, parameters)
            rule = situation.without(passing=True)
            if not any(other.without(passing=True) == rule for other, _ in self._variants):
                announce(variant.view)
            self._compiled.append((compiled.key_under(decisions, parameters), compiled))
        self._list(situation, bound, variant)
        self._variants[situation, bound] = variant
        self._services.names.note_graph(bound.names, bound=bool(bound.names or not self._graph.positions))
        self._findings.append(variant.findings)
        if self._strict:
            check_records(variant.view.decisions)
        return variant


def _take_out(calls: list[BoundCall], is_over: Callable[[BoundCall], bool]) -> None:
    """Take calls out of a list, in place: others may go at any moment, when a parameter of theirs is freed."""
    for call in [*calls]:
        if is_over(call) and call in calls:
            calls.remove(call)


def _text(variant: Variant) -> GraphView:
    """Return the variant's view without modules."""
    return dataclasses.replace(variant.view, load_module=None)


def _identity(view: GraphView) -> Any:
    """Return the content of a view but for the text after the passes, which differs where a variant is an exception."""
    return view.name, view.policy, view.before, view.gemms, view.others


def _forget(services: Services, dropped: Sequence[Findings]) -> None:
    """Drop the data prepared for calls of code that is gone. State and parameters may live on."""
    for findings in dropped:
        for name, extra_inputs in findings.by_store.items():
            if name in services.stores:
                services.stores[name].forget(extra_inputs)


def _all_fresh(checks: Sequence[Callable[[Sequence[Any]], bool]]) -> Callable[[Sequence[Any]], bool] | None:
    """Return whether all of the slots are fresh; None: always."""
    if len(checks) < 2:
        return checks[0] if checks else None
    return lambda args: all(check(args) for check in checks)


KEPT: Final = 256  # number of graphs that are gone and still in the report


@dataclass(eq=False)
class _Entry:
    graph: weakref.ref[CompiledGraph]
    views: list[GraphView]  # without modules: these would keep the graph alive
    gone: bool = False


class CompiledGraphs:
    """The compiled graphs, none of which is kept alive here.

    torch keeps them alive until the model (or the function) is gone, or until ``torch._dynamo.reset()``. The report's
    rows stay longer, as text: for the last ``KEPT`` graphs, and once for graphs that were alike (models compiled in a
    loop).
    """

    def __init__(self) -> None:
        self._entries: list[_Entry] = []  # in the order of compilation
        self.forgotten = 0  # number of graphs that are gone and no longer in the report

    def __iter__(self) -> Iterator[CompiledGraph]:
        """Iterate over the graphs that are alive."""
        return iter([graph for entry in self._entries if (graph := entry.graph()) is not None])

    def add(self, graph: CompiledGraph) -> None:
        self._merge_those_gone()  # else they add up if nobody asks for a report
        self._entries.append(_Entry(weakref.ref(graph), graph.texts))

    def views(self) -> list[GraphView]:
        """Return the report's view of each graph, with the modules of those that are alive."""
        self._merge_those_gone()
        views: list[GraphView] = []
        for entry in self._entries:
            graph = entry.graph()
            views += entry.views if graph is None else graph.views
        return views

    def _merge_those_gone(self) -> None:
        for entry in [entry for entry in self._entries if not entry.gone and entry.graph() is None]:
            entry.gone, alike = True, [*map(_identity, entry.views)]
            for other in self._entries:
                if other.gone and other is not entry:
                    other.views = [view for view in other.views if _identity(view) not in alike]
        gone = [entry for entry in self._entries if entry.gone and entry.views]
        old = gone[: max(0, len(gone) - KEPT)]
        self.forgotten += sum(len(entry.views) for entry in old)
        self._entries = [entry for entry in self._entries if (entry.views or not entry.gone) and entry not in old]
