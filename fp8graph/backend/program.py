"""One Dynamo graph and its compiled variants: what ``Backend`` returns to torch.

The same graph may run under several autocast regions opened outside the compiled code, for several layers
(per-layer compilation shares one graph), and under a changed policy. None of these is visible to Dynamo's
guards, so the callable holds one variant per situation and picks it at call time.

``Programs`` are all of one backend: those that are alive, and the report's rows of those that were freed.
"""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, cast

import torch

from fp8graph.backend.compiling import Compiler, Shared, Variant, Variants
from fp8graph.backend.coverage import check_records
from fp8graph.backend.dynamo_graph import DynamoGraph, Moment, Situation
from fp8graph.compat import autograd, checkpointing, dynamo, fakes
from fp8graph.compat.fakes import FakeTensorMode, detect_fake_mode
from fp8graph.compat.lives import has_no_module, remember_modules
from fp8graph.ir.compilation import Arrived, Condition, Findings
from fp8graph.recipes.autocast import current_region
from fp8graph.report import GraphView
from fp8graph.report.graph_view import announce
from fp8graph.runtime.call import Called, FirstCall, Prepared, PreparedCalls
from fp8graph.runtime.recomputation import Checkpointed
from fp8graph.runtime.stores import ArrivesOtherwise, Caller, Otherwise

KEPT_POLICIES: Final = 4  # that in force and the last ones before it: a switch back to one of them compiles nothing
_alive: Final[weakref.WeakSet[Program]] = weakref.WeakSet()


def programs_of(parameters: Iterable[torch.Tensor]) -> list[Program]:
    """The programs, of whatever backend, that were called with one of ``parameters``."""
    ids = set(map(id, parameters))
    return [program for program in list(_alive) if program.runs(ids)]


class Program:
    """A callable with the signature of the Dynamo graph.

    It keeps its variants for the last ``KEPT_POLICIES`` policies that it was called under.

    Args:
        inputs: what to compile it for now; None: it is compiled when it is called.
        variants: the dict of compiled variants that it shares with other programs of this graph.
    """

    def __init__(
        self,
        shared: Shared,
        graph: DynamoGraph,
        inputs: Sequence[Any] | None,
        variants: Variants | None = None,
    ) -> None:
        self._shared = shared
        self._graph = graph
        self._compiler = Compiler(shared, graph)
        shared.policies.of(graph.families)  # it may be asked for all of them
        self._compiled: Variants = {} if variants is None else variants
        self._variants: dict[tuple[Situation, tuple[str, ...]], Variant] = {}  # variants by the names of the parameters
        self._policies: list[str] = []  # those of the variants, the last one used at the end
        self._empty = torch.empty(0, device=self._graph.device)  # stands in for inputs that no pass took
        self._prepared = PreparedCalls(shared.epoch, self._graph.positions)
        self._called = Called(self._graph.positions)
        self._strict = shared.settings.strict
        self._first: FirstCall | None = None  # None: not called yet, or long ago
        self._checked = False  # whether all graphs of its first step were looked at
        self.texts: list[GraphView] = []  # views without modules, for a report that outlives this program
        self._taken: list[Findings] = []  # of the variants
        weakref.finalize(self, _forget, shared, self._taken).atexit = False
        _alive.add(self)
        if inputs is not None:
            moment = self._moment(shared.recomputations.of_call(is_made=False))
            moment = _under(moment, self._first_conditions(moment, inputs))
            situation = self._situation(moment, self._arrived(inputs))
            self._variant(situation, self._names(inputs), inputs)
            self._use(situation.policy)

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
        listed: dict[tuple[Situation, tuple[str, ...]], Variant] = {}
        for key, variant in self._variants.items():
            rule = key[0].without(passing=True), key[1]
            if key == rule or rule not in listed:
                listed[rule] = variant
        before = {key: (key[0].without(passing=False), key[1]) for key in listed}
        past = {other for key, other in before.items() if other != key}
        return [variant.decided.view for key, variant in listed.items() if key not in past]

    @property
    def backend(self) -> Any:
        """The backend that it belongs to."""
        return self._shared.generator

    def calls(self) -> Iterator[tuple[dict[int, int], Findings]]:
        """The ids of the parameters of its calls under the present policy, by input, with the findings of its graph."""
        _, present = self._shared.policies.of(self._graph.families)
        for parameters, (policy, findings) in self._called:
            if policy == present:
                yield parameters, findings

    def runs(self, parameters: Collection[int]) -> bool:
        """Whether it was called with one of the parameters that have these ids."""
        return any(x in parameters for called, _ in self._called for x in called.values())

    def __call__(self, *args: Any) -> Any:
        if fakes.called_to_trace(args):
            return self._run_on_fakes(args)
        if self._strict or not self._checked:
            self._check(args)
        if self._graph.gradients is not self._shared.steps.gradients:
            self._shared.steps.switch(gradients=self._graph.gradients)
        if self._shared.schedule.due:
            self._shared.schedule.advance()
        conditions, checkpointed = (), None
        for store in self._shared.deciding:
            if (condition := store.condition(gradients=self._graph.gradients)) is not None:
                conditions = (*conditions, condition)
        if checkpointing.matters():
            checkpointed = self._shared.recomputations.of_call()
            moment = self._moment(checkpointed, conditions)
        else:
            if (region := current_region()) is not None:
                self._shared.recomputations.regions.add(region)
            moment = region, self._shared.groups.now(), self._shared.policies.now, conditions
        call = self._prepared.get(args, moment)
        if call is None:
            with checkpointing.without_modes():
                call = self._prepare(args, Moment(*moment))
        if checkpointed is not None:
            checkpointed.keep(_under(Moment(*moment), call.conditions), records=self._graph.gradients)
        return call.act(args, checkpointed) if call.acting else call.run(*args, *call.more)

    def _check(self, args: Sequence[Any]) -> None:
        """Check what was compiled: all of it once the step of the first call is over; in strict mode always."""
        if autograd.in_backward():
            return
        generator, first, again = self._shared.generator, self._first, self._checked or self._first is not None
        if not self._checked:
            _, policy = self._shared.policies.of(self._graph.families)
            steps, positions = self._shared.steps.count, self._graph.positions
            parameter = args[positions[0]] if positions else None
            if first is None or first.policy != policy:
                self._first = FirstCall(policy, parameter, steps)
            elif first.is_over(parameter, steps):
                generator.check_step()  # where it raises, so does the next call
                self._first, self._checked = None, True
        generator.called(again=again)

    def _moment(self, checkpointed: Checkpointed | None, conditions: tuple[Condition, ...] = ()) -> Moment:
        """The moment of a call. A forward that runs again has that of its first time."""
        if checkpointed is not None and (first := checkpointed.first) is not None:
            repeats = first.records == self._graph.gradients
            returning = tuple(each for each in first.moment.conditions if each.returns)
            return first.moment if repeats else first.moment._replace(conditions=(*conditions, *returning))
        region = current_region()
        self._shared.recomputations.check(region)
        return Moment(region, self._shared.groups.now(), self._shared.policies.now, conditions)

    def _prepare(self, args: Sequence[Any], moment: Moment) -> Prepared:
        """Find the variant and the extra inputs of a call, and keep them for later calls that need the same."""
        shared = self._shared
        if shared.groups.look():
            moment = moment._replace(amax_group=shared.groups.now())
        shared.schedule.meets(args[index] for index in self._graph.positions)
        arrived, names = self._arrived(args), self._names(args)
        conditions, changes = self._first_conditions(moment, args), 0
        while True:
            situation = self._situation(_under(moment, conditions), arrived)
            variant, epoch = self._find(situation, names), shared.epoch.now
            findings = variant.findings
            caller = Caller(
                args=args,
                gradients=self._graph.gradients,
                group=moment.amax_group,
                arrived=arrived,
                conditions=None if changes > 1 or any(each.returns for each in moment.conditions) else conditions,
            )
            try:
                slots = [
                    (store.slot(asked, caller), findings.places[name])
                    for name, store in shared.stores.items()
                    if (asked := findings.by_store.get(name)) is not None
                ]
                break
            except ArrivesOtherwise as found:
                arrived = {index: owner for index, owner in arrived.items() if index not in found.positions}
            except Otherwise as other:
                conditions = tuple(each for each in conditions if each != other.condition)
                changes += 1  # should two variants send the call to each other, that with the condition runs
                conditions += (other.condition,) if other.holds or changes > 1 else ()
        self._called.note(args, (situation.policy, findings))
        if any(has_no_module(args[index]) for index in self._graph.positions):
            remember_modules(*dynamo.modules_on_stack())
        self._graph.let_torch_swap()
        more = [self._empty] * variant.spares
        for slot, places in slots:
            for place, tensor in zip(places, slot.tensors, strict=True):
                more[place] = tensor
        # without such inputs, and names that matter, the call is prepared for any parameters
        by_name = bool(names) and situation.in_force.may_rewrite([situation.region, *self._graph.regions])
        known = any(slot.tensors for slot, _ in slots) or by_name or bool(self._graph.gathered)
        call = Prepared(
            run=variant.run,
            more=more,
            acting=[(slot, places) for slot, places in slots if slot.acts],
            epoch=epoch,
            parameters=self._prepared.ids(args) if known else b"",
            fresh=_all_fresh([slot.fresh for slot, _ in slots if slot.fresh is not None]),
            conditions=conditions,
        )
        self._prepared.keep(args, moment, call)
        return call

    def _run_on_fakes(self, args: Sequence[Any]) -> Any:
        """Run on fake tensors to learn the shapes of the outputs. Their parameters have no scales and no FP8 copies.

        DDPOptimizer (``DistributedDataParallel`` under Dynamo) cuts a graph into buckets, and calls each part on fake
        tensors before it compiles the next.
        """
        rule, names = self._situation(self._moment(None), {}), self._names(args)
        variant = next(
            v for key, v in self._variants.items() if (key[0].without(passing=True), key[1]) == (rule, names)
        )
        with cast(FakeTensorMode, detect_fake_mode(args)):
            taken = variant.findings.stand_ins()
            dead = [torch.empty(0, device=self._empty.device) for _ in range(variant.spares - len(taken))]
            return variant.run(*args, *taken, *dead)

    def _first_conditions(self, moment: Moment, args: Sequence[Any]) -> tuple[Condition, ...]:
        """The conditions, beside those of ``moment``, that a call with these arguments is likely to have."""
        policy, _ = moment.in_force.of(self._graph.families)
        recipes, parameters = self._graph.recipes(policy, moment.region), [args[i] for i in self._graph.positions]
        first = (store.first_condition(recipes, parameters) for store in self._shared.stores.values())
        return tuple(each for each in first if each is not None and each not in moment.conditions)

    def _situation(self, moment: Moment, arrived: Mapping[int, Any]) -> Situation:
        _, policy = moment.in_force.of(self._graph.families)
        if arrived:
            moment = moment._replace(conditions=(*moment.conditions, Arrived(frozenset(arrived))))
        return Situation(policy=policy, **moment._asdict())

    def _list(self, situation: Situation, names: tuple[str, ...], variant: Variant) -> None:
        """Add the text of a new variant, as ``views`` lists it, in the place of those of exceptions from it."""
        rule = situation.without(passing=True), names
        alike = [v for key, v in self._variants.items() if (key[0].without(passing=True), key[1]) == rule]
        if situation.passes and alike:
            return
        if rule not in self._variants:
            for text in (_text(other) for other in alike[:1]):
                self.texts.remove(text)
        self.texts.append(_text(variant))

    def _find(self, situation: Situation, names: tuple[str, ...]) -> Variant:
        variant = self._variants.get((situation, names))
        if variant is None:
            with self._graph.tracing():
                variant = self._variant(situation, names, self._graph.fake_inputs)
        self._use(situation.policy)
        return variant

    def _use(self, policy: str) -> None:
        """Note that calls run under ``policy`` now, and drop the variants of those that were last used long ago."""
        if self._policies[-1:] != [policy]:
            self._policies = [*(known for known in self._policies if known != policy), policy]
            for old in self._policies[:-KEPT_POLICIES]:
                self._drop(old)
            del self._policies[:-KEPT_POLICIES]

    def _drop(self, policy: str) -> None:
        """Free the variants for a policy, the data prepared for their calls, and their rows in the report."""
        gone = [key for key in self._variants if key[0].policy == policy]
        dropped = [self._variants.pop(key).findings for key in gone]
        for situation, _ in gone:  # other programs of this graph that run them hold them, too
            self._compiled.pop(situation, None)
        self._taken[:] = [taken for taken in self._taken if not any(taken is findings for findings in dropped)]
        self.texts[:] = [view for view in self.texts if view.policy != policy]
        _forget(self._shared, dropped)
        self._prepared.drop_outdated()

    def _arrived(self, args: Sequence[Any]) -> dict[int, Any]:
        """The parameters that this call has as a copy alone, by position."""
        arrived: dict[int, Any] = {}
        for store in self._shared.stores.values() if self._graph.gathered else ():
            arrived |= store.arrived(args, self._graph.gathered)
        return arrived

    def _names(self, args: Sequence[Any]) -> tuple[str, ...]:
        """The names that the graph's parameters are bound to, "" for an unbound one; () if nothing is bound."""
        names = self._shared.names
        return tuple(names.get(args[index]) for index in self._graph.positions) if names else ()

    def _variant(self, situation: Situation, names: tuple[str, ...], inputs: Sequence[Any]) -> Variant:
        """The variant for a situation and for parameters called ``names``: one decided the same way, or a new one."""
        known = self._compiled.setdefault(situation, [])
        told = self._compiler.known(situation, names)
        for other in known:
            if (decided := other.decided.under(told)) is not None:
                variant = dataclasses.replace(other, decided=decided)
                break
        else:
            rule = situation.without(passing=True)
            is_first = not any(v for other, v in self._compiled.items() if other.without(passing=True) == rule)
            known.append(variant := self._compiler.variant(situation, names, inputs))
            if is_first:
                announce(variant.decided.view)
        self._list(situation, names, variant)
        self._variants[situation, names] = variant
        self._shared.names.note_graph(names, bound=bool(names or not self._graph.positions))
        self._taken.append(variant.findings)
        if self._strict:
            check_records(variant.decided.view.decisions)
        return variant


def _text(variant: Variant) -> GraphView:
    """The variant's view without modules."""
    return dataclasses.replace(variant.decided.view, load_module=None)


def _identity(view: GraphView) -> Any:
    """The content of a view but for the text after the passes, which differs where a variant is an exception."""
    return view.name, view.policy, view.before, view.gemms, view.others


def _under(moment: Moment, conditions: tuple[Condition, ...]) -> Moment:
    """``moment`` under more conditions."""
    return moment._replace(conditions=(*moment.conditions, *conditions)) if conditions else moment


def _forget(shared: Shared, taken: Sequence[Findings]) -> None:
    """Drop the data prepared for calls of code that is gone. State and parameters may live on."""
    for findings in taken:
        for name, asked in findings.by_store.items():
            if name in shared.stores:
                shared.stores[name].forget(asked)


def _all_fresh(checks: Sequence[Callable[[Sequence[Any]], bool]]) -> Callable[[Sequence[Any]], bool] | None:
    """Whether all of the slots are fresh; None: always."""
    if len(checks) < 2:
        return checks[0] if checks else None
    return lambda args: all(check(args) for check in checks)


KEPT: Final = 256  # number of graphs that are gone and still in the report


@dataclass(eq=False)
class _Entry:
    program: weakref.ref[Program]
    views: list[GraphView]  # without modules: these would keep the graph alive
    gone: bool = False


class Programs:
    """The compiled graphs, none of which is kept alive here.

    torch keeps them alive until the model (or the function) is gone, or until ``torch._dynamo.reset()``. The report's
    rows stay longer, as text: for the last ``KEPT`` graphs, and once for graphs that were alike (models compiled in a
    loop).
    """

    def __init__(self) -> None:
        self._entries: list[_Entry] = []  # in the order of compilation
        self.forgotten = 0  # number of graphs that are gone and no longer in the report

    def __iter__(self) -> Iterator[Program]:
        """The programs that are alive."""
        return iter([program for entry in self._entries if (program := entry.program()) is not None])

    def add(self, program: Program) -> None:
        self._merge_those_gone()  # else they add up if nobody asks for a report
        self._entries.append(_Entry(weakref.ref(program), program.texts))

    def views(self) -> list[GraphView]:
        """The report's view of each graph, with the modules of those that are alive."""
        self._merge_those_gone()
        views: list[GraphView] = []
        for entry in self._entries:
            program = entry.program()
            views += entry.views if program is None else program.views
        return views

    def _merge_those_gone(self) -> None:
        for entry in [entry for entry in self._entries if not entry.gone and entry.program() is None]:
            entry.gone, alike = True, [*map(_identity, entry.views)]
            for other in self._entries:
                if other.gone and other is not entry:
                    other.views = [view for view in other.views if _identity(view) not in alike]
        gone = [entry for entry in self._entries if entry.gone and entry.views]
        old = gone[: max(0, len(gone) - KEPT)]
        self.forgotten += sum(len(entry.views) for entry in old)
        self._entries = [entry for entry in self._entries if (entry.views or not entry.gone) and entry not in old]
