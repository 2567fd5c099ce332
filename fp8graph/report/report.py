"""The report: what was rewritten, what was not, and why; for people (``print``) and for machines (``to_dict``)."""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fp8graph.errors import Fp8CoverageError, UnsupportedRecipeError, expect_path
from fp8graph.files import write_file
from fp8graph.hardware.device import NO_FP8
from fp8graph.offline import KernelRecord
from fp8graph.recipes.policy import Policy
from fp8graph.recipes.rules import Rule
from fp8graph.records import (
    AttentionRecord,
    CollectiveRecord,
    GemmRecord,
    OtherRecord,
    ProductRecord,
    RefusalRecord,
    SiteRecord,
    StatisticRecord,
    shares,
)
from fp8graph.report.graph_view import GraphView
from fp8graph.report.page import Losses, page, page_data
from fp8graph.report.tables import (
    aligned,
    by_kind,
    collective_rows,
    gemm_rows,
    other_rows,
    refusal_rows,
    sites,
    size_text,
    summary,
)


@dataclass(frozen=True, kw_only=True, repr=False)
class Report:
    """All graphs that one backend compiled: which GEMMs run in FP8, which do not, and why."""

    graphs: list[GraphView]
    policy: Policy
    identities: frozenset[str]  #: of the policy, as it is for each family of models
    eager_frames: list[str] = field(default_factory=list[str])  #: frames that fell back to eager, and why
    skipped_frames: list[str] = field(default_factory=list[str])  #: functions that Dynamo cannot trace, and why
    in_no_graph: list[str] = field(default_factory=list[str])  #: layers not called yet, or run in eager
    fp8_in_no_graph: list[str] = field(default_factory=list[str])  #: those of them that hold FP8 weights
    unused_state: list[str] = field(default_factory=list[str])  #: loaded scaling state that no layer has asked for
    forgotten: int = 0  #: graphs that were freed with their models and are no longer listed
    pass_seconds: float = 0.0  #: the time that fp8graph's own passes took
    reductions: list[CollectiveRecord] = field(default_factory=list[CollectiveRecord])  #: after each step
    weights: int = 0  #: the number of weights that are kept in FP8, outside the graphs
    weights_until_updated: bool = False  #: they are kept where gradients are computed, too, until they are updated
    weight_bytes: int = 0  #: the memory that their FP8 copies take
    gradient_bytes: int = 0  #: the memory of FP32 gradients that stay between steps, for wgrad to add to
    refusals_of_calls: list[RefusalRecord] = field(default_factory=list[RefusalRecord])  #: decided while they ran
    guard: list[str] = field(default_factory=list[str])  #: rules that a guard applied, and why
    load_kernels: Callable[[], list[KernelRecord]] | None = field(default=None, compare=False, repr=False)

    @property
    def in_force(self) -> list[GraphView]:
        """The graphs under the policy in force. Those of an earlier policy stay in ``graphs``, and run no more."""
        return [graph for graph in self.graphs if graph.policy in self.identities]

    @property
    def gemms(self) -> list[GemmRecord]:
        """All GEMMs of the graphs under the policy in force."""
        return [gemm for graph in self.in_force for gemm in graph.gemms]

    @property
    def attention(self) -> list[AttentionRecord]:
        """All attentions of these graphs, which are not counted as GEMMs; one row for each direction."""
        return [attention for graph in self.in_force for attention in graph.attention]

    @property
    def others(self) -> list[OtherRecord]:
        """All rows of sites that are no matmuls, in these graphs."""
        return [row for graph in self.in_force for row in graph.others]

    @property
    def products(self) -> list[SiteRecord]:
        """Everything in these graphs that multiplies matrices, whoever wrote it: shares of FLOPs are of all of these.

        GEMMs, attentions but those that are written out as GEMMs, and what fp8graph lists and never rewrites
        (:class:`ProductRecord`): low precision of the program's own, convolutions, ops of other libraries.
        """
        return [*self.gemms, *(row for row in self.others if not row.written_out)]

    @property
    def decisions(self) -> list[SiteRecord]:
        """The rows of all sites of these graphs: GEMMs, and then the others."""
        return [*self.gemms, *self.others]

    @property
    def collectives(self) -> list[CollectiveRecord]:
        """All collectives of these graphs, and the bytes that each rank sends. DDP's and FSDP2's are not in graphs."""
        return [*(collective for graph in self.in_force for collective in graph.collectives), *self.reductions]

    @property
    def refusals(self) -> list[RefusalRecord]:
        """The reasons why linears were not fused, weights not kept, activations not saved in FP8."""
        return [*(refusal for graph in self.in_force for refusal in graph.refusals), *self.refusals_of_calls]

    @functools.cached_property
    def kernels(self) -> list[KernelRecord]:
        """Every kernel that Inductor generates for the target GPU, in order. The first access generates them.

        Raises:
            ValueError: if the report is not from ``explain``, or its target is not a GPU.
        """
        if self.load_kernels is None:
            raise ValueError('only explain(model, ..., target="sm_90"), or another GPU as target, generates kernels')
        return self.load_kernels()

    @property
    def unused_rules(self) -> list[str]:
        """Rules of the current policy that matched no site, except optional rules."""
        return [f"rule {rule}" for rule in self._unused_rules()]

    def _unused_rules(self) -> list[Rule]:
        used = {record.rule for record in self.decisions}
        return [rule for index, rule in enumerate(self.policy.rules) if index not in used and not rule.optional]

    def check(self) -> None:
        """Raise unless every GEMM and every attention that the rules ask for runs in FP8.

        It covers what rules can name. Other products, which fp8graph never rewrites, are in :attr:`products`.

        Raises:
            Fp8CoverageError: a GEMM that a user's rule or autocast region names is not in FP8 (although it would
                pay), a user's rule matched nothing, or code ran in eager.
        """
        problems = [f"{row.name} {row.part}: not in FP8: {row.reason}" for row in self.decisions if row.missing]
        problems += self.unmatched()
        problems += [f"not compiled: {frame}" for frame in self.eager_frames]
        if problems:
            raise Fp8CoverageError("FP8 coverage check failed:\n  " + "\n  ".join(problems))

    def unmatched(self) -> list[str]:
        """Get a line for each of :attr:`unused_rules`, with names that there are; none before anything was compiled."""
        products = [row for row in self.others if isinstance(row, ProductRecord)]
        names = sorted({record.fqn for record in self.decisions} - {product.fqn for product in products})
        some = ", ".join(names[:6]) + (", ..." if len(names) > 6 else "")
        lines: list[str] = []
        for rule in self._unused_rules() if self.in_force else []:
            op = "linear" if rule.op == "*" else rule.op
            other = next((product for product in products if rule.matches(product.fqn, op)), None)
            more = f"{other.fqn} is a {other.kind}, which no rule names" if other else f"Sites: {some or 'none'}"
            lines.append(f"rule {rule} matched nothing. {more}")
        return lines

    def to_dict(self) -> dict[str, Any]:
        """Return the report as plain values, ready for JSON."""
        return {
            "graphs": [graph.to_dict() for graph in self.graphs],
            "in_force": [index for index, graph in enumerate(self.graphs) if graph.policy in self.identities],
            "policy": self._plain_policy(),
            "unused_rules": self.unused_rules,
            **{
                name: getattr(self, name)
                for name in ("eager_frames", "skipped_frames", "in_no_graph", "fp8_in_no_graph", "unused_state")
            },
            "reductions": [dataclasses.asdict(reduction) for reduction in self.reductions],
            "weights": self.weights,
            "weight_bytes": self.weight_bytes,
            "gradient_bytes": self.gradient_bytes,
            "guard": self.guard,
            "flops": shares(self.gemms, self.others)._asdict(),
        }

    def _plain_policy(self) -> Any:
        try:
            return self.policy.to_dict()
        except UnsupportedRecipeError:  # a recipe with functions cannot be read back
            return self.policy.identity()

    def __getstate__(self) -> dict[str, Any]:
        """Return the part that is pickled and copied: rows and texts, without kernels that were not generated yet."""
        return vars(self) | {"load_kernels": None}

    def to_html(
        self,
        path: str | Path,
        *,
        statistics: Iterable[StatisticRecord] | None = None,
        losses: Losses | None = None,
    ) -> None:
        """Write one self-contained HTML page: tables, each layer as a graph, its text after each pass.

        Args:
            statistics: of ``backend.observe()``; the page shows them as heat maps and curves.
            losses: by step, or a list that begins with step 0; drawn above the statistics.
        """
        expect_path("Report.to_html", "path", path)
        write_file(path, page(page_data(self, statistics, losses)), f"Report.to_html(path={str(path)!r})")

    def summary(self) -> str:
        """Return one line: how many GEMMs run in FP8 under the policy in force, how much of the multiplying that is,
        and what Dynamo runs in eager instead; or that there is no graph yet.
        """
        older = len(self.graphs) - len(self.in_force)
        called = "called under this policy" if older else "called"
        waiting = f"no graph: the model has not been {called} yet, or Dynamo compiled nothing of it"
        parts = [summary(self.gemms, self.others, len(self.in_force)) if self.in_force else waiting]
        if older:
            parts.append("1 graph of an earlier policy" if older == 1 else f"{older} graphs of earlier policies")
            parts[-1] += ", not counted"
        if self.eager_frames:
            first, *others = self.eager_frames
            parts.append(f"not compiled: {first}" + (f", and {len(others)} more" if others else ""))
        return "; ".join(parts)

    def __repr__(self) -> str:
        return f"<Report: {self.summary()}>"

    def __str__(self) -> str:
        table = aligned(gemm_rows(self.gemms), ruled=True)
        others = [line for rows in by_kind(self.others) for line in aligned(other_rows(rows), ruled=True)]
        sent = aligned(collective_rows(self.collectives), ruled=True) if self.collectives else []
        refused = aligned(refusal_rows(self.refusals), ruled=True) if self.refusals else []
        return "\n".join([self.summary(), *table, *others, *self.notes(), *sent, *refused])

    def notes(self) -> list[str]:
        """Further facts, one sentence each."""
        without = [m[1] for g in self.gemms if (m := re.search(rf"emulated: (\w+) {NO_FP8}", g.reason))]
        lines = [
            f"{name} {NO_FP8}: FP8 is emulated there, for its numerics; bf16 is faster" for name in sorted(set(without))
        ]
        total = shares(self.gemms, self.others).total
        lines += [type(rows[0]).share(rows, total) for rows in by_kind(self.others)]
        for direction in ("forward", "backward", "step"):
            records = [c for c in self.collectives if c.direction == direction]
            if records:
                sent = sum(c.bytes_sent for c in records)
                lines.append(f"{direction}: {len(records)} collectives, in which each rank sends {size_text(sent)}")
        if self.weights:
            size = size_text(self.weight_bytes)
            kept = (
                "until an update of them is noticed: a step of an optimizer, a write in place, refresh_weights()"
                if self.weights_until_updated
                else "where no gradients are computed, as long as they do not change"
            )
            lines.append(f"{self.weights} weights kept in FP8, {size} of copies, {kept}")
        if self.gradient_bytes:
            lines.append(
                f"{size_text(self.gradient_bytes)} of FP32 gradients that stay between steps, for wgrad to add to"
            )
        if self.forgotten:
            lines.append(f"{self.forgotten} older graphs, whose models are gone, are no longer listed")
        lines += self.guard
        lines += [f"{rule} matched nothing" for rule in self.unused_rules]
        lines += [f"not compiled: {frame}" for frame in self.eager_frames]
        lines += [f"runs in eager, with its own matmuls in high precision: {frame}" for frame in self.skipped_frames]
        if self.graphs and self.in_no_graph:
            lines.append(f"in no graph (not called yet, or run in eager): {sites(self.in_no_graph)}")
        if self.graphs and self.fp8_in_no_graph:
            lines.append(
                f"of these, with FP8 weights: {sites(self.fp8_in_no_graph)}. Were they called, compile the model with "
                "fp8graph.compile, or call fp8graph.adopt(model) before torch.compile"
            )
        lines += [f"loaded state that no layer has asked for: {name}" for name in self.unused_state]
        return lines
