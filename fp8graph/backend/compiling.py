"""Compile one variant of a Dynamo graph: passes, code generation, and the findings stored with the code.

Layers that are compiled one by one share Dynamo's graph, but their names differ, and policies go by names. They share
the code if all that decides is the same for their sites (``Decisions.key``). Each layer keeps its own report, scaling
state and names of that state (:meth:`Variant.under`).
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import torch
from torch import fx

from fp8graph.backend import stored
from fp8graph.backend.coverage import check_records
from fp8graph.backend.dynamo_graph import DynamoGraph
from fp8graph.backend.foresee import spare_inputs
from fp8graph.backend.inductor_passes import (
    JointPass,
    LowerPass,
    Stopwatch,
    TooFewInputs,
    add_spare_inputs,
    code_identity,
    compile_under,
    copy_dynamo_graph,
    run_eagerly,
    with_taken_inputs,
)
from fp8graph.compat import aot, inductor
from fp8graph.compat.dynamo import has_float_input
from fp8graph.compat.inductor import compile_fx_inner
from fp8graph.ir.compilation import Findings, GraphFacts
from fp8graph.ir.decisions import Decisions, Row, Stacks, explained
from fp8graph.ir.extra_inputs import SpareInputs
from fp8graph.ir.naming import Parameter, names_of
from fp8graph.ir.settings import Settings
from fp8graph.ir.sites import Site
from fp8graph.recipes import has_code
from fp8graph.records import GemmRecord, RefusalRecord, SiteRecord
from fp8graph.report import GraphView


class Bound(NamedTuple):
    """The names that the parameters of a graph are bound to, and the blocks of their models."""

    names: tuple[str, ...] = ()  # "" for one that is not bound; () if none is
    stacks: Stacks = frozenset()


@dataclass(frozen=True, kw_only=True, eq=False)
class Variant:
    """A compiled graph with its findings: as the passes left them, or under the names of one layer."""

    run: Callable[..., Any]
    spares: int  # inputs after Dynamo's: those that passes took, and spare ones
    findings: Findings
    view: GraphView  # without sources in its reasons (``Resolution.explain``) as long as it is under no names

    def key_under(self, decisions: Decisions, parameters: Mapping[int, Parameter]) -> Hashable:
        """Return all that decides about its sites, as ``parameters`` call them: where it is equal, code is shared.

        Sites in graphs of higher-order ops keep their names and their reasons: these must be equal, too.
        """
        findings, bound = self.findings, [parameter.bound for parameter in parameters.values()]
        sites = findings.by_kind if findings.has_subgraphs else _renamed(findings, parameters)
        keys = tuple((kind.__name__, decisions.key(each)) for kind, each in sites.items())
        if not findings.has_subgraphs:
            return keys
        return keys, tuple(bound), tuple(decisions.of(site).source for each in sites.values() for site in each)

    def under(self, decisions: Decisions, parameters: Mapping[int, Parameter]) -> Variant:
        """Return the same code with the names and reasons of one layer, whose ``decisions`` are those of the code."""

        def is_wanted(refused: RefusalRecord) -> bool:
            """Return whether a linear in the place of an op that FP8 leaves as it is would be in FP8."""
            return refused.what != "FP8" or any(decisions.policy.resolve(refused.fqn, "linear").recipes.values())

        policy = decisions.policy.identity()
        if self.findings.has_subgraphs:
            refusals = tuple(filter(is_wanted, self.view.refusals))
            findings = dataclasses.replace(self.findings)  # stores know what each layer takes by its identity
            return dataclasses.replace(
                self, findings=findings, view=dataclasses.replace(self.view, refusals=refusals, policy=policy)
            )
        sites = _renamed(self.findings, parameters)
        moved = {
            (kind, old.fqn, old.index): new
            for kind, every in self.findings.by_kind.items()
            for old, new in zip(every, sites[kind], strict=True)
        }

        def rename(fqn: str, index: int) -> tuple[str, int]:
            site = moved[GemmRecord, fqn, index]
            return site.fqn, site.index

        def explain(row: Row) -> Row:
            site = moved[type(row), row.fqn, row.index]
            return explained(row, site, decisions.of(site))

        def refusal(refused: RefusalRecord) -> RefusalRecord:
            site = moved.get((GemmRecord, refused.fqn, refused.index))  # None: of an op that has no site
            return refused if site is None else dataclasses.replace(refused, fqn=site.fqn, index=site.index)

        findings = dataclasses.replace(
            self.findings,
            sites=sites[GemmRecord],
            others={kind: sites[kind] for kind in self.findings.others},
            extra_inputs=tuple(each.renamed(rename) for each in self.findings.extra_inputs),
        )
        view = dataclasses.replace(
            self.view,
            gemms=tuple(map(explain, self.view.gemms)),
            others=tuple(map(explain, self.view.others)),
            refusals=tuple(filter(is_wanted, map(refusal, self.view.refusals))),
            policy=policy,
        )
        return dataclasses.replace(self, findings=findings, view=view)


def _renamed(findings: Findings, parameters: Mapping[int, Parameter]) -> dict[type[SiteRecord], tuple[Site, ...]]:
    """Return the sites under the names of ``parameters``, by kind."""
    renamed: dict[type[SiteRecord], tuple[Site, ...]] = {}
    for kind, sites in findings.by_kind.items():
        names = names_of([site.place for site in sites], parameters.values())
        renamed[kind] = tuple(
            dataclasses.replace(site, fqn=f, index=i) for site, (f, i) in zip(sites, names, strict=True)
        )
    return renamed


def graph_facts(graph: DynamoGraph, decisions: Decisions, names: Sequence[str], spares: int = 0) -> GraphFacts:
    """Return the frozen input of the passes: ``graph`` with parameters called ``names``, and all that decides on it."""
    first = len(graph.sources)
    return GraphFacts(
        decisions=decisions,
        sources=graph.sources,
        records_amaxes=graph.gradients,
        spares=SpareInputs(indices=range(first, first + spares)),
        buffers=graph.buffers,
        gathered=graph.gathered,
        parameter_facts=graph.parameter_facts,
        parameters=graph.parameters(names),
    )


def compile_variant(
    graph: DynamoGraph,
    decisions: Decisions,
    names: Sequence[str],
    inputs: Sequence[Any],
    stopwatch: Stopwatch,
    inner_compile: Callable[..., Any] | None,
) -> Variant:
    """Compile ``graph`` for ``inputs``, whose values do not matter.

    Args:
        inner_compile: what compile_fx calls for each graph after the passes; None: Inductor.
    """
    settings = decisions.settings
    options, first = _options(settings)
    facts = graph_facts(graph, decisions, names)
    spares = spare_inputs(graph.module, facts, training=graph.gradients)
    if decisions.may_rewrite:
        options = {**inductor.codegen_patches(settings.hardware, inputs), **options}
    keeps = not any(has_code(recipe) for recipe in decisions.recipes) and not has_float_input(graph.module)
    identity = _identity(graph, decisions, names) if keeps else None
    while True:
        joint = JointPass(
            graph_facts(graph, decisions, names, spares),
            identity,
            first=first,
            check=check_records if settings.strict else None,
            stopwatch=stopwatch,
        )

        def carry(joint: JointPass = joint) -> None:
            """Put the findings into torch's entry, if torch keeps one of this graph."""
            if settings.compiler == "inductor" and joint.uuid() is not None:
                content = stored.dumped(joint.view(graph.name), joint.findings)
                if content is not None:
                    aot.carry(content)

        try:
            run = _run_compile_fx(graph, settings, joint, options, inputs, spares, inner_compile, carry)
            break
        except TooFewInputs as error:
            spares = error.wanted
    content = aot.carried(run) if joint.records is None else None  # no pass ran: torch had the code
    if (entry := None if content is None else stored.loaded(content)) is None:
        if joint.records is None:
            joint = _trace(graph, decisions, names, spares, stopwatch)
        entry = joint.view(graph.name), joint.findings
    view, findings = entry
    inputs_in_all = len(findings.titles(graph.sources))

    def module() -> fx.GraphModule:
        joint = _trace(graph, decisions, names, inputs_in_all, stopwatch, keep_module=True)
        return cast(fx.GraphModule, joint.module)

    # whoever compiled it first may have called the model something else
    view = dataclasses.replace(view, name=graph.name, load_module=module)
    return Variant(run=run, spares=spares, findings=findings, view=view)


def _options(settings: Settings) -> tuple[dict[str, Any], Any]:
    """Return the user's options of Inductor, and the pass that the user runs before ours."""
    options = dict(settings.inductor)
    return options, options.pop("joint_custom_pre_pass", inductor.default_option("joint_custom_pre_pass"))


def _run_compile_fx(
    graph: DynamoGraph,
    settings: Settings,
    joint: JointPass,
    options: Mapping[str, Any],
    inputs: Sequence[Any],
    spares: int,
    inner_compile: Callable[..., Any] | None,
    after_passes: Callable[[], None] | None = None,
) -> Callable[..., Any]:
    options = dict(options)
    first = options.pop("post_grad_custom_pre_pass", inductor.default_option("post_grad_custom_pre_pass"))
    patches = {
        **options,
        "joint_custom_pre_pass": joint,
        "post_grad_custom_pre_pass": LowerPass(code_identity(), first, joint.stopwatch),
    }
    if inner_compile is not None:
        patches["force_disable_caches"] = True
    module = copy_dynamo_graph(graph.module, graph.gradients)  # compile_fx takes it; Dynamo reads its graph again
    more = add_spare_inputs(module, spares, inputs)
    inner = with_taken_inputs(inner_compile or compile_fx_inner)
    inner = joint.noting_saved(inner, tell=inner_compile is not None, then=after_passes)
    return compile_under(settings, module, [*inputs, *more], patches, inner_compile=inner)


@torch.inference_mode(False)  # whatever runs around ``.module``
def _trace(
    graph: DynamoGraph,
    decisions: Decisions,
    names: Sequence[str],
    spares: int,
    stopwatch: Stopwatch,
    *,
    keep_module: bool = False,
) -> JointPass:
    """Run the passes without code generation: for findings that were not kept, for ``.module``.

    A module that is kept has inputs for all ``spares``: let there be as many as the graph takes.
    """
    _, first = _options(decisions.settings)
    facts = graph_facts(graph, decisions, names, spares)
    joint = JointPass(facts, "", first=first, keep_module=keep_module, stopwatch=stopwatch)
    with torch.set_grad_enabled(graph.gradients), graph.tracing_anew():
        _run_compile_fx(graph, decisions.settings, joint, {}, graph.fake_inputs, spares, run_eagerly)
    return joint


def _has_cpu_tensors(graph: DynamoGraph) -> bool:
    return any(isinstance(x, torch.Tensor) and x.device.type == "cpu" for x in graph.fake_inputs)


def _identity(graph: DynamoGraph, decisions: Decisions, names: Sequence[str]) -> str:
    """Return the part of the cache key that torch does not know: our code, and what decides about the graph's sites."""
    parts = (
        code_identity(),
        decisions.text(graph.possible_names(names)),
        repr((tuple(names) if graph.has_subgraphs else (), aot.state_that_decides())),
        # Inductor's C++ has the width of this CPU's vectors in its loops, and torch's key has not (torch 2.11 to 2.15)
        torch.backends.cpu.get_cpu_capability() if _has_cpu_tensors(graph) else "",
        graph.identity(),
    )
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()
