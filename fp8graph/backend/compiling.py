"""Compile one variant of a Dynamo graph: passes, code generation, and the findings stored with the code.

Layers that are compiled one by one share Dynamo's graph, but their names differ, and policies go by names. So the
decisions are made anew for each layer (``Decided``); if they equal those of a layer that was already compiled, its code
is used. Each layer keeps its own report, scaling state and names of that state.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar, cast

import torch
from torch import fx

from fp8graph.backend.coverage import check_records
from fp8graph.backend.dynamo_graph import DynamoGraph, Situation
from fp8graph.backend.foresee import spare_inputs
from fp8graph.backend.inductor_passes import (
    JointPass,
    LowerPass,
    Stopwatch,
    TooFewInputs,
    add_spare_inputs,
    code_identity,
    copy_dynamo_graph,
    run_eagerly,
    source_hash,
    with_taken_inputs,
)
from fp8graph.backend.stored import Stored
from fp8graph.compat import aot, inductor
from fp8graph.compat.dynamo import has_float_input
from fp8graph.compat.inductor import compile_fx, compile_fx_inner
from fp8graph.ir.compilation import Findings, Known
from fp8graph.ir.extra_inputs import SpareInputs
from fp8graph.ir.naming import names_of
from fp8graph.ir.sites import Site
from fp8graph.passes import STORES
from fp8graph.passes.assign import resolve
from fp8graph.recipes import has_code
from fp8graph.recipes.rules import Resolution
from fp8graph.records import GemmRecord, RefusalRecord, SiteRecord
from fp8graph.report import GraphView
from fp8graph.runtime.recomputation import Recomputations
from fp8graph.runtime.state_dict import Keeper
from fp8graph.runtime.stores import Services, Store


@dataclass(frozen=True, kw_only=True, eq=False)
class Variant:
    """A compiled graph under the names of one layer."""

    run: Callable[..., Any]
    spares: int  # inputs after Dynamo's: those that passes took, and spare ones
    decided: Decided

    @property
    def findings(self) -> Findings:
        return self.decided.findings


Variants = dict[Situation, list[Variant]]  # of one graph


class Compiler:
    """Compiles the variants of one graph."""

    def __init__(self, shared: Shared, graph: DynamoGraph) -> None:
        self._shared = shared
        self._graph = graph

    def known(self, situation: Situation, names: tuple[str, ...], spares: int = 0) -> Known:
        """The frozen input of the passes, for this graph in ``situation`` and with parameters called ``names``."""
        graph, first = self._graph, len(self._graph.sources)
        policy, _ = situation.in_force.of(graph.families)
        return Known(
            policy=policy,
            settings=self._shared.settings,
            region=situation.region,
            recipes=graph.recipes(policy, situation.region),
            sources=graph.sources,
            records_amaxes=graph.gradients,
            amax_group=situation.amax_group,
            spares=SpareInputs(indices=range(first, first + spares)),
            gathered=graph.gathered,
            facts=graph.facts,
            conditions=situation.conditions,
            parameters=graph.parameters(names),
        )

    def variant(self, situation: Situation, names: tuple[str, ...], inputs: Sequence[Any]) -> Variant:
        """Compile the graph for ``inputs``, whose values do not matter."""
        shared, graph, settings = self._shared, self._graph, self._shared.settings
        options, first = self._options()
        identity = self._identity(situation, names)
        known = self.known(situation, names)
        spares = spare_inputs(graph.module, known, training=graph.gradients)
        if situation.in_force.may_rewrite([situation.region, *graph.regions]):
            options = {**inductor.codegen_patches(settings.hardware, inputs), **options}
        kept = not any(has_code(recipe) for recipe in known.recipes) and not has_float_input(graph.module)
        while True:
            joint = JointPass(
                self.known(situation, names, spares),
                identity if kept else None,
                first=first,
                check=check_records if settings.strict else None,
                stopwatch=shared.stopwatch,
            )
            try:
                compiled = self._run_compile_fx(
                    joint,
                    options,
                    inputs,
                    spares,
                    inner_compile=shared.generator.inner_compile,
                    after_passes=lambda joint=joint: self._carry(situation, joint),
                )
                break
            except TooFewInputs as found:
                spares = found.wanted
        stored = self._stored(situation, names, joint, compiled, spares)
        return Variant(run=compiled, spares=spares, decided=Decided.of(stored.findings, known, stored.view))

    def _options(self) -> tuple[dict[str, Any], Any]:
        """The user's options of Inductor, and the pass that the user runs before ours."""
        options = dict(self._shared.settings.inductor)
        return options, options.pop("joint_custom_pre_pass", inductor.default_option("joint_custom_pre_pass"))

    def _run_compile_fx(
        self,
        joint: JointPass,
        options: dict[str, Any],
        inputs: Sequence[Any],
        spares: int,
        *,
        inner_compile: Callable[..., Any] | None,
        after_passes: Callable[[], None] | None = None,
    ) -> Callable[..., Any]:
        options = dict(options)
        first = options.pop("post_grad_custom_pre_pass", inductor.default_option("post_grad_custom_pre_pass"))
        patches = {
            **options,
            "joint_custom_pre_pass": joint,
            "post_grad_custom_pre_pass": LowerPass(code_identity(), first, self._shared.stopwatch),
        }
        if inner_compile is not None:
            patches["force_disable_caches"] = True
        # compile_fx takes the module; Dynamo reads its graph again
        more_options: dict[str, Any] = {}
        if self._shared.settings.compiler == "eager":
            random, more_options["decompositions"] = inductor.draws_as_eager()
            patches |= random
        module = copy_dynamo_graph(self._graph.module, self._graph.gradients)
        more = add_spare_inputs(module, spares, inputs)
        inner = with_taken_inputs(inner_compile or compile_fx_inner)
        inner = joint.noting_saved(inner, tell=inner_compile is not None, then=after_passes)
        run = compile_fx(module, [*inputs, *more], config_patches=patches, inner_compile=inner, **more_options)
        return cast(Callable[..., Any], run)

    @torch.inference_mode(False)  # whatever runs around ``.module``
    def _trace(
        self, situation: Situation, names: tuple[str, ...], spares: int, *, keep_module: bool = False
    ) -> JointPass:
        """Run the passes without code generation: for findings that were not kept, for ``.module``.

        A module that is kept has inputs for all ``spares``: let there be as many as the graph takes.
        """
        known, (_, first) = self.known(situation, names, spares), self._options()
        joint = JointPass(known, "", first=first, keep_module=keep_module, stopwatch=self._shared.stopwatch)
        with torch.set_grad_enabled(self._graph.gradients), self._graph.tracing_anew():
            self._run_compile_fx(joint, {}, self._graph.fake_inputs, spares, inner_compile=run_eagerly)
        return joint

    def _stored(
        self, situation: Situation, names: tuple[str, ...], joint: JointPass, compiled: Callable[..., Any], spares: int
    ) -> Stored:
        """The findings of the passes. On a compile cache hit no pass ran, and torch's entry carries them."""
        found = None
        if joint.records is None:
            content = aot.carried(compiled)
            found = None if content is None else Stored.loaded(content)
            joint = joint if found is not None else self._trace(situation, names, spares)
        found = found or self._found(situation, joint)
        inputs = len(found.findings.titles(self._graph.sources))

        def module() -> fx.GraphModule:
            return cast(fx.GraphModule, self._trace(situation, names, inputs, keep_module=True).module)

        # whoever compiled it first may have called the model something else
        view = dataclasses.replace(found.view, name=self._graph.name, load_module=module)
        return dataclasses.replace(found, view=view)

    def _carry(self, situation: Situation, joint: JointPass) -> None:
        """Put the findings into torch's entry, if torch keeps one of this graph."""
        keeps = self._shared.settings.compiler == "inductor" and joint.uuid() is not None
        if keeps and (content := self._found(situation, joint).dumped()) is not None:
            aot.carry(content)

    def _found(self, situation: Situation, joint: JointPass) -> Stored:
        """The findings of passes that ran."""
        return Stored(view=joint.view(self._graph.name, situation.policy), findings=joint.findings)

    def _identity(self, situation: Situation, names: tuple[str, ...]) -> str:
        """The part of the cache key that torch does not know: our code, the policy, and the names it is applied to."""
        settings = self._shared.settings
        decides = settings.strict, settings.decisions(), settings.hardware, settings.cuda_graphs
        parts = (
            code_identity(),
            repr((situation, names, decides, aot.state_that_decides())),
            self._graph.identity(),
        )
        return hashlib.sha256("\n".join(parts).encode()).hexdigest()


_Record = TypeVar("_Record", bound=SiteRecord)
_Kind = type[SiteRecord]  # of sites, by the class of their rows
# by kind and old name: new site, old and new resolution
_Sites = Mapping[tuple[_Kind, str, int], tuple[Site, Resolution, Resolution]]


@dataclass(frozen=True, kw_only=True, eq=False)
class Decided:
    """The decisions about the sites of a compiled graph, as far as they depend on the sites' names."""

    findings: Findings
    resolutions: Mapping[_Kind, Sequence[Resolution]]  # one per site
    view: GraphView

    @staticmethod
    def of(findings: Findings, known: Known, view: GraphView) -> Decided:
        """The decisions about the sites in ``findings`` under the names and the policy of ``known``."""
        return Decided(findings=findings, resolutions=_resolutions(findings.by_kind, known), view=view)

    def under(self, known: Known) -> Decided | None:
        """The same graph under the names of ``known``; None if they need a graph of their own."""
        kinds = self.findings.by_kind
        called = {kind: _called(sites, known) for kind, sites in kinds.items()}
        resolutions = _resolutions(called, known)
        alike = all(
            old.recipes == new.recipes and old.by_user == new.by_user
            for kind in kinds
            for old, new in zip(self.resolutions[kind], resolutions[kind], strict=True)
        )
        before, after = kinds[GemmRecord], called[GemmRecord]
        for each in known.conditions:
            alike &= [each.says_of(site.fqn) for site in before] == [each.says_of(site.fqn) for site in after]
        if not alike or _modules(before) != _modules(after) or self.findings.has_subgraphs:
            return None
        renamed: _Sites = {
            (kind, site.fqn, site.index): (new, old_resolution, resolution)
            for kind, sites in kinds.items()
            for site, new, old_resolution, resolution in zip(
                sites, called[kind], self.resolutions[kind], resolutions[kind], strict=True
            )
        }

        def rename(fqn: str, index: int) -> tuple[str, int]:
            site, *_ = renamed[GemmRecord, fqn, index]
            return site.fqn, site.index

        findings = dataclasses.replace(
            self.findings,
            sites=after,
            others={kind: called[kind] for kind in self.findings.others},
            extra_inputs=tuple(each.renamed(rename) for each in self.findings.extra_inputs),
        )
        view = dataclasses.replace(
            self.view,
            gemms=tuple(_record(gemm, renamed) for gemm in self.view.gemms),
            others=tuple(_record(record, renamed) for record in self.view.others),
            refusals=tuple(_refusal(refusal, renamed) for refusal in self.view.refusals),
        )
        return Decided(findings=findings, resolutions=resolutions, view=view)


def _resolutions(kinds: Mapping[_Kind, Sequence[Site]], known: Known) -> dict[_Kind, list[Resolution]]:
    return {kind: [resolve(site, known) for site in sites] for kind, sites in kinds.items()}


def _called(sites: Sequence[Site], known: Known) -> tuple[Site, ...]:
    """``sites`` of one kind under the names of ``known``."""
    names = names_of([site.place for site in sites], known.parameters.values())
    return tuple(dataclasses.replace(site, fqn=f, index=i) for site, (f, i) in zip(sites, names, strict=True))


def _modules(sites: Sequence[Site]) -> list[tuple[int, int]]:
    """The sites that share a module, and their numbers: linears of one module may be fused."""
    numbers: dict[str, int] = {}
    return [(numbers.setdefault(site.fqn.rpartition(".")[0], len(numbers)), site.index) for site in sites]


def _record(record: _Record, renamed: _Sites) -> _Record:
    site, old, new = renamed[type(record), record.fqn, record.index]
    reason = record.reason.replace(old.source, new.source)  # another rule may give the same resolution
    return record.moved(site.fqn, site.index, rule=new.rule, reason=reason)


def _refusal(refusal: RefusalRecord, renamed: _Sites) -> RefusalRecord:
    if (GemmRecord, refusal.fqn, refusal.index) not in renamed:
        return refusal  # of an op that has no site
    site, *_ = renamed[GemmRecord, refusal.fqn, refusal.index]
    return dataclasses.replace(refusal, fqn=site.fqn, index=site.index)


class Generator(Protocol):
    """The part of a backend that generates code for rewritten graphs and checks how they were rewritten."""

    @property
    def inner_compile(self) -> Callable[..., Any] | None:
        """The compiler that compile_fx calls for each graph after the passes; None: Inductor."""
        ...

    def check_step(self) -> None:
        """Check what was compiled so far: all graphs of a step are known."""
        ...

    def called(self, *, again: bool) -> None:
        """Note a call of a graph; in strict mode of each, of others of the first ones.

        Args:
            again: not its first one.
        """
        ...


@dataclass(frozen=True, kw_only=True, eq=False)
class Shared(Services):
    """The parts of a backend that its graphs share: settings, policy, and the state that outlives a call."""

    generator: Generator
    recomputations: Recomputations = field(default_factory=Recomputations)
    stopwatch: Stopwatch = field(default_factory=Stopwatch)

    @functools.cached_property
    def stores(self) -> Mapping[str, Store]:
        """All of them by name, each before those that depend on it."""
        return {kind.name: self.store(kind) for kind in STORES}

    @functools.cached_property
    def keepers(self) -> Sequence[Keeper]:
        """Whatever has entries in a state dict, in the order in which they are loaded."""
        return [self.schedule, *self.stores.values()]

    @functools.cached_property
    def deciding(self) -> Sequence[Store]:
        """The stores that may have a condition."""
        return [store for store in self.stores.values() if type(store).condition is not Store.condition]

    def decides(self, *, training: bool) -> str:
        """All that decides about the rewriting of graphs, line by line, for a comparison with other ranks."""
        lines = [*self.policies.lines()]
        if self.schedule.runs and training:
            lines.append(f"step {self.schedule.step()}")
        lines += [f"{name} {value}" for name, value in self.settings.decisions().items()]
        lines += [f"torch {torch.__version__}", f"fp8graph {source_hash()[:12]}"]
        return re.sub(" at 0x[0-9a-f]+", "", "\n".join(lines))  # a function has another address on each rank
