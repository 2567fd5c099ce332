"""One compiled graph under several names.

Layers that are compiled one by one share Dynamo's graph, but their names differ, and policies go by names. So the
decisions are made anew for each layer; if they equal those of a layer that was already compiled, its code is used.
Each layer keeps its own report, scaling state and names of that state.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from fp8graph.analysis.naming import names_of
from fp8graph.ir.compilation import Findings, Known
from fp8graph.ir.sites import Site
from fp8graph.passes.assign import resolve
from fp8graph.recipes.rules import Resolution
from fp8graph.records import AttentionRecord, GemmRecord, RefusalRecord
from fp8graph.report import GraphView

_Record = TypeVar("_Record", GemmRecord, AttentionRecord)
_Sites = Mapping[tuple[str, int], tuple[Site, Resolution, Resolution]]  # by old name: new site, old and new resolution


@dataclass(frozen=True, kw_only=True, eq=False)
class Decided:
    """The decisions about the sites of a compiled graph, as far as they depend on the sites' names."""

    findings: Findings
    resolutions: Sequence[Resolution]  # one per site, then one per attention
    view: GraphView

    @staticmethod
    def of(findings: Findings, known: Known, view: GraphView) -> Decided:
        """The decisions about the sites in ``findings`` under the names and the policy of ``known``."""
        sites = (*findings.sites, *findings.attention)
        return Decided(findings=findings, resolutions=[resolve(site, known) for site in sites], view=view)

    def under(self, known: Known) -> Decided | None:
        """The same graph under the names of ``known``; None if they need a graph of their own."""
        sites = self.findings.sites
        called, attention = _called(sites, known), _called(self.findings.attention, known)
        resolutions = [resolve(site, known) for site in (*called, *attention)]
        alike = all(
            old.recipes == new.recipes and old.by_user == new.by_user
            for old, new in zip(self.resolutions, resolutions, strict=True)
        )
        if known.observed is not None:
            takes = [[known.observed.takes(site.fqn) for site in of] for of in (sites, called)]
            alike &= takes[0] == takes[1]
        if not alike or _modules(sites) != _modules(called) or self.findings.has_subgraphs:
            return None
        renamed: _Sites = {
            (site.fqn, site.index): (new, old_resolution, resolution)
            for site, new, old_resolution, resolution in zip(sites, called, self.resolutions, resolutions, strict=False)
        }
        renamed_attention: _Sites = {
            (site.fqn, site.index): (new, self.resolutions[i], resolutions[i])
            for i, (site, new) in enumerate(zip(self.findings.attention, attention, strict=True), len(sites))
        }

        def rename(fqn: str, index: int) -> tuple[str, int]:
            site, *_ = renamed[fqn, index]
            return site.fqn, site.index

        findings = dataclasses.replace(
            self.findings,
            sites=tuple(called),
            attention=tuple(attention),
            extra_inputs=tuple(each.renamed(rename) for each in self.findings.extra_inputs),
        )
        view = dataclasses.replace(
            self.view,
            gemms=tuple(_record(gemm, renamed) for gemm in self.view.gemms),
            attention=tuple(_record(record, renamed_attention) for record in self.view.attention),
            refusals=tuple(_refusal(refusal, renamed) for refusal in self.view.refusals),
        )
        return Decided(findings=findings, resolutions=resolutions, view=view)


def _called(sites: Sequence[Site], known: Known) -> list[Site]:
    """``sites`` under the names of ``known``."""
    names = names_of([site.place for site in sites], known.parameters.values())
    return [dataclasses.replace(site, fqn=f, index=i) for site, (f, i) in zip(sites, names, strict=True)]


def _modules(sites: Sequence[Site]) -> list[tuple[int, int]]:
    """The sites that share a module, and their numbers: linears of one module may be fused."""
    numbers: dict[str, int] = {}
    return [(numbers.setdefault(site.fqn.rpartition(".")[0], len(numbers)), site.index) for site in sites]


def _record(record: _Record, renamed: _Sites) -> _Record:
    site, old, new = renamed[record.fqn, record.index]
    reason = record.reason.replace(old.source, new.source)  # another rule may give the same resolution
    return dataclasses.replace(record, fqn=site.fqn, index=site.index, rule=new.rule, reason=reason)


def _refusal(refusal: RefusalRecord, renamed: _Sites) -> RefusalRecord:
    if (refusal.fqn, refusal.index) not in renamed:
        return refusal  # of an op that is no site
    site, *_ = renamed[refusal.fqn, refusal.index]
    return dataclasses.replace(refusal, fqn=site.fqn, index=site.index)
