"""The frozen input of the passes for one graph, and their findings: plain data that passes share."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import fx

from fp8graph.compat.fsdp import Shard
from fp8graph.hardware import Hardware, of_device
from fp8graph.ir.attention import Attention
from fp8graph.ir.extra_inputs import Gradient, PageLayout, QuantizedWeight, SpareInputs, StatisticsPage
from fp8graph.ir.nodes import value
from fp8graph.ir.observed import Observed
from fp8graph.ir.places import Parameter
from fp8graph.ir.settings import Settings
from fp8graph.ir.sites import Decision, Site
from fp8graph.ir.sources import split_source
from fp8graph.recipes import Recipe
from fp8graph.recipes.policy import Policy
from fp8graph.records import RefusalRecord


@dataclass(frozen=True, kw_only=True)
class Known:
    """The facts about a graph that are known before the passes run. No pass changes them."""

    policy: Policy
    settings: Settings = field(default_factory=Settings)
    region: str | Recipe | None = None  # the autocast region around the whole call
    sources: tuple[str, ...] = ()  # Dynamo's names of the graph's inputs
    parameters: Mapping[int, Parameter] = field(default_factory=dict[int, Parameter])  # by input index
    # parameters that are whole only while the graph runs (FSDP2): what is known of their shards
    gathered: Mapping[int, Shard] = field(default_factory=dict[int, Shard])
    sent: frozenset[int] = frozenset()  # those of them that were gathered in FP8
    # the parameters, and why wgrad cannot add to their FP32 gradients (None if it can)
    gradients: Mapping[int, str | None] = field(default_factory=dict[int, "str | None"])
    observed: Observed | None = None  # what is measured in this variant
    subgraph: bool = False  # the body of a higher-order op
    training: bool = False  # the graph has a backward
    amax_group: str | None = None  # name of the group over which amaxes are reduced; None: this rank alone
    records_amaxes: bool = True  # False: gradients are off, and scales are read but never changed
    spares: SpareInputs = field(default_factory=SpareInputs)  # inputs that passes can take; counts how many they want

    @property
    def keeps_weights(self) -> bool:
        """Whether the graph takes kept FP8 copies of its weights, and does not quantize them itself."""
        return self.settings.keeps_weights(training=self.training)


@dataclass(kw_only=True)
class Compilation:
    """The findings of the passes in one graph, beside the known facts. Each field is written by one pass."""

    known: Known
    sites: list[Site] = field(default_factory=list[Site])  # match
    decisions: dict[fx.Node, Decision] = field(default_factory=dict[fx.Node, Decision])  # assign
    attention: list[Attention] = field(default_factory=list[Attention])  # find_attention
    fused: dict[tuple[str, int, str], tuple[str, ...]] = field(  # fuse_linears: (fqn, index, gemm) -> its siblings
        default_factory=dict[tuple[str, int, str], "tuple[str, ...]"]
    )
    statistics: tuple[StatisticsPage, ...] = ()  # observe
    weights: tuple[QuantizedWeight, ...] = ()  # hoist_weights
    sendable: tuple[QuantizedWeight, ...] = ()  # hoist_weights
    read: frozenset[int] = frozenset()  # hoist_weights
    quantized: tuple[QuantizedWeight, ...] = ()  # note_weights
    pages: tuple[PageLayout, ...] = ()  # connect_scales
    gradients: tuple[Gradient, ...] = ()  # accumulate_wgrad
    accumulated: dict[tuple[str, int], str] = field(  # accumulate_wgrad: (fqn, index) -> what it moves
        default_factory=dict[tuple[str, int], str]
    )
    refusals: list[RefusalRecord] = field(default_factory=list[RefusalRecord])  # any

    def hardware_of(self, node: fx.Node) -> Hardware:
        """The hardware that ``node`` is decided for: the target, or the device of its result."""
        return self.known.settings.hardware or of_device(value(node).device)

    def refuse(self, what: str, site: Site, reason: str) -> None:
        """Say in the report why a pass does not change ``site``; see :class:`RefusalRecord`."""
        self.refuse_at(what, site.fqn, site.index, reason)

    def refuse_at(self, what: str, fqn: str, index: int, reason: str) -> None:
        """The same for a layer that has no site."""
        record = RefusalRecord(what=what, fqn=fqn, index=index, reason=reason)
        if record not in self.refusals:
            self.refusals.append(record)


@dataclass(frozen=True, kw_only=True)
class Findings:
    """The findings that a graph's caller needs, whether the passes ran now or its code came from the cache."""

    sites: tuple[Site, ...] = ()  # sites, without their GEMMs
    attention: tuple[Site, ...] = ()  # attentions
    weights: tuple[QuantizedWeight, ...] = ()  # weights whose copies the graph takes as inputs
    quantized: tuple[QuantizedWeight, ...] = ()  # other weights, which the graph itself quantizes
    sendable: tuple[QuantizedWeight, ...] = ()  # weights that FSDP2 may gather in FP8 from now on
    read: frozenset[int] = frozenset()  # of the parameters gathered in FP8: those that are read in high precision
    pages: tuple[PageLayout, ...] = ()  # pages of scaling state, which the graph takes after the copies
    gradients: tuple[Gradient, ...] = ()  # those that it takes after the pages, to add to them
    statistics: tuple[StatisticsPage, ...] = ()  # those that it takes first of all
    sent: frozenset[int] = frozenset()  # the parameters that FSDP2 gathered in FP8
    has_subgraphs: bool = False  # whether a higher-order op has matmuls in graphs of its own

    @functools.cached_property
    def own_weights(self) -> tuple[QuantizedWeight, ...]:
        """Those that are quantized before the call: all but those that FSDP2 gathered in FP8."""
        return tuple(weight for weight in self.weights if not {*weight.parameters} & self.sent)

    @functools.cached_property
    def sent_weights(self) -> tuple[QuantizedWeight, ...]:
        """Those that FSDP2 gathered in FP8."""
        return tuple(weight for weight in self.weights if {*weight.parameters} & self.sent)

    @property
    def inputs(self) -> int:
        """The number of inputs that the graph takes after Dynamo's."""
        copies = sum(len(weight.outputs) for weight in self.weights)
        return len(self.statistics) + copies + len(self.pages) + len(self.gradients)

    def names(self, sources: Sequence[str]) -> list[str]:
        """What those are called: after the parameters that they are made of, whose ``sources`` are Dynamo's."""

        def made_of(weight: QuantizedWeight) -> str:
            return ", ".join(split_source(sources[index])[1] for index in weight.parameters)

        copies = [f"{made_of(weight)} {output}" for weight in self.weights for output in weight.outputs]
        pages = (f"scaling state {index}" for index in range(len(self.pages)))
        statistics = (f"statistics of {'backward' if page.backward else 'forward'}" for page in self.statistics)
        gradients = (f"{split_source(sources[x.parameter])[1]} gradient" for x in self.gradients)
        return [*statistics, *copies, *pages, *gradients]

    def stand_ins(self) -> list[torch.Tensor]:
        """Empty tensors for the inputs after Dynamo's, in order, in the active fake mode."""
        copies = (x for weight in self.weights for x in weight.stand_ins())
        first, last = ([x.stand_in() for x in of] for of in (self.statistics, (*self.pages, *self.gradients)))
        return [*first, *copies, *last]

    def and_those_of(self, compilation: Compilation) -> Findings:
        """These findings and those in one more graph: a higher-order op has graphs of its own, without extra inputs."""
        sites = (dataclasses.replace(site, gemms=[]) for site in compilation.sites)
        return Findings(
            sites=(*self.sites, *sites),
            attention=(*self.attention, *(attention.site for attention in compilation.attention)),
            weights=compilation.weights or self.weights,
            quantized=compilation.quantized or self.quantized,
            sendable=compilation.sendable or self.sendable,
            read=compilation.read | self.read,
            sent=compilation.known.sent,
            pages=compilation.pages or self.pages,
            statistics=compilation.statistics or self.statistics,
            gradients=compilation.gradients or self.gradients,
            has_subgraphs=self.has_subgraphs
            or (compilation.known.subgraph and bool(compilation.sites or compilation.attention)),
        )
