"""The frozen input of the passes for one graph, and their findings: plain data that passes share."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import fx

from fp8graph.hardware import Hardware, of_device
from fp8graph.ir.decisions import Decisions, Row, explained
from fp8graph.ir.extra_inputs import ExtraInput, SpareInputs
from fp8graph.ir.naming import Parameter, split_source
from fp8graph.ir.nodes import GEMM_KEY, fake_mode_of, value
from fp8graph.ir.settings import Settings
from fp8graph.ir.sites import Decision, Site
from fp8graph.records import GemmRecord, OtherRecord, RefusalRecord, SiteRecord

Kind = TypeVar("Kind", bound=ExtraInput)
Result = TypeVar("Result")


@dataclass(frozen=True, kw_only=True)
class GraphFacts:
    """The facts about a graph that are known before the passes run. No pass changes them."""

    decisions: Decisions  # everything outside the graph that decides about its sites
    sources: tuple[str, ...] = ()  # Dynamo's names of the graph's inputs
    parameters: Mapping[int, Parameter] = field(default_factory=dict[int, Parameter])  # by input index
    buffers: frozenset[int] = frozenset()  # input indices of the modules' buffers
    gathered: frozenset[int] = frozenset()  # those that are whole only while the graph runs
    # what stores say of parameters before the passes run, by store and input index (``Store.fact``)
    parameter_facts: Mapping[str, Mapping[int, Any]] = field(default_factory=dict[str, Mapping[int, Any]])
    subgraph: bool = False  # the body of a higher-order op
    training: bool = False  # the graph has a backward
    reduces_in_graph: bool = False  # amaxes, by collectives of the graph; else after the step
    records_amaxes: bool = True  # False: gradients are off, and scales are read but never changed
    spares: SpareInputs = field(default_factory=SpareInputs)  # inputs that passes can take; counts how many they want

    @property
    def keeps_weights(self) -> bool:
        """Whether the graph takes kept FP8 copies of its weights, and does not quantize them itself."""
        return self.settings.keeps_weights(training=self.training)

    @property
    def settings(self) -> Settings:
        """The user's settings."""
        return self.decisions.settings


@dataclass(kw_only=True)
class Compilation:
    """The findings of the passes in one graph, beside the facts about it. Each field is written by one pass."""

    facts: GraphFacts
    sites: list[Site] = field(default_factory=list[Site])  # match
    decisions: dict[fx.Node, Decision] = field(default_factory=dict[fx.Node, Decision])  # assign
    others: dict[type[OtherRecord], list[Site]] = field(  # sites that are no matmuls, by the class of their rows
        default_factory=dict[type[OtherRecord], "list[Site]"]
    )
    fused: dict[tuple[str, int, str], tuple[str, ...]] = field(  # fuse_linears: (fqn, index, gemm) -> its siblings
        default_factory=dict[tuple[str, int, str], "tuple[str, ...]"]
    )
    extra_inputs: list[ExtraInput] = field(default_factory=list[ExtraInput])  # any, see take()
    rows: list[SiteRecord] = field(default_factory=list[SiteRecord])  # any
    refusals: list[RefusalRecord] = field(default_factory=list[RefusalRecord])  # any
    _results: dict[type[Any], list[Any]] = field(default_factory=dict[type[Any], "list[Any]"])  # see results()

    def hardware_of(self, node: fx.Node) -> Hardware:
        """Return the hardware that ``node`` is decided for: the target, or the device of its result."""
        return self.facts.settings.hardware or of_device(value(node).device)

    def explain(self, row: Row) -> Row:
        """Return a row of a report with the rule, region or default that decided in its reason."""
        sites = self.others[type(row)] if isinstance(row, OtherRecord) else self.sites
        site = next(site for site in sites if (site.fqn, site.index) == (row.fqn, row.index))
        return explained(row, site, self.facts.decisions.of(site))

    def site_of(self, quantized: fx.Node) -> Site | None:
        """Return the site whose GEMM, or what decodes for it if emulated, reads a quantize node; None if none does."""
        gemms = (reader.meta[GEMM_KEY] for x in quantized.users for reader in x.users if GEMM_KEY in reader.meta)
        position, _ = next(gemms, (None, ""))
        return None if position is None else self.sites[position]

    def results(self, kind: type[Result]) -> list[Result]:
        """Results of one class that an earlier pass left for later ones."""
        return self._results.setdefault(kind, [])

    def take(self, graph: fx.Graph, extra_inputs: Sequence[ExtraInput]) -> list[fx.Node] | None:
        """Let the graph take ``extra_inputs``, behind those that passes took before. Each pass calls it once.

        Returns:
            The inputs, in order; None if the graph has too few spare ones. It is then traced again with enough of them.
        """
        self.extra_inputs += extra_inputs
        if not extra_inputs:
            return []
        with fake_mode_of(next(node for node in graph.nodes if isinstance(node.meta.get("val"), torch.Tensor))):
            fakes = [fake for each in extra_inputs for fake in each.stand_ins()]
        return self.facts.spares.take(graph, fakes)

    def amend(self, more: Mapping[tuple[str, int, str], str], dtype: str | None = None) -> None:
        """Add to the reasons in rows of the report, by (fqn, index, gemm). ``dtype``: of their results from now on."""
        for place, row in enumerate(self.rows):
            if isinstance(row, GemmRecord) and (text := more.get((row.fqn, row.index, row.gemm))):
                dtypes = (*row.dtypes[:2], dtype or row.dtypes[2])
                self.rows[place] = dataclasses.replace(row, reason=f"{row.reason}; {text}", dtypes=dtypes)

    def refuse(self, what: str, site: Site, reason: str) -> None:
        """Say in the report why a pass does not change ``site``; see :class:`RefusalRecord`."""
        self.refuse_at(what, site.fqn, site.index, reason)

    def refuse_at(self, what: str, fqn: str, index: int, reason: str) -> None:
        """Return the same for a layer that has no site."""
        record = RefusalRecord(what=what, fqn=fqn, index=index, reason=reason)
        if record not in self.refusals:
            self.refusals.append(record)


@dataclass(frozen=True, kw_only=True)
class Findings:
    """The findings that a graph's caller needs, whether the passes ran now or its code came from the cache."""

    sites: tuple[Site, ...] = ()  # matmuls, without their GEMMs
    others: Mapping[type[OtherRecord], tuple[Site, ...]] = field(  # the other sites, by the class of their rows
        default_factory=dict[type[OtherRecord], "tuple[Site, ...]"]
    )
    extra_inputs: tuple[ExtraInput, ...] = ()  # in the order in which the graph takes them, behind Dynamo's inputs
    has_subgraphs: bool = False  # whether a higher-order op has matmuls in graphs of its own

    @property
    def by_kind(self) -> Mapping[type[SiteRecord], tuple[Site, ...]]:
        """All sites, by the class of their rows."""
        return {GemmRecord: self.sites, **self.others}

    @functools.cached_property
    def by_store(self) -> Mapping[str, tuple[ExtraInput, ...]]:
        """The extra inputs by their store. The same objects each time: stores know them by identity."""
        stores: dict[str, list[ExtraInput]] = {}
        for each in self.extra_inputs:
            stores.setdefault(each.store, []).append(each)
        return {store: tuple(extra_inputs) for store, extra_inputs in stores.items()}

    @functools.cached_property
    def places(self) -> Mapping[str, tuple[int, ...]]:
        """The places of each store's tensors among all that the graph takes."""
        stores = [each.store for each in self.extra_inputs for _ in each.titles(str)]
        return {store: tuple(i for i, other in enumerate(stores) if other == store) for store in self.by_store}

    def of(self, kind: type[Kind]) -> list[Kind]:
        """Return the extra inputs of one class."""
        return [each for each in self.extra_inputs if isinstance(each, kind)]

    def titles(self, sources: Sequence[str]) -> list[str]:
        """Return the names of the tensors that the graph takes. ``sources``: Dynamo's names of its other inputs."""
        return [title for each in self.extra_inputs for title in each.titles(lambda i: split_source(sources[i])[1])]

    def stand_ins(self) -> list[torch.Tensor]:
        """Empty tensors for those, in the active fake mode."""
        return [fake for each in self.extra_inputs for fake in each.stand_ins()]

    def and_those_of(self, compilation: Compilation) -> Findings:
        """These findings and those in one more graph: a higher-order op has graphs of its own, without extra inputs."""
        sites = (dataclasses.replace(site, gemms=[]) for site in compilation.sites)
        others = {kind: (*self.others.get(kind, ()), *more) for kind, more in compilation.others.items()}
        return Findings(
            sites=(*self.sites, *sites),
            others={**self.others, **others},
            extra_inputs=(*self.extra_inputs, *compilation.extra_inputs),
            has_subgraphs=self.has_subgraphs
            or (compilation.facts.subgraph and bool(compilation.sites or any(compilation.others.values()))),
        )
