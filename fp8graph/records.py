"""The rows of a report, as plain data: one record per GEMM, attention, collective and refusal."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Final, NamedTuple, Self, cast

NATIVE_BY: Final = "native by "  # begins the part of a reason that says by what a kernel is known that was not run


@dataclass(frozen=True, kw_only=True)
class CollectiveRecord:
    """One collective of a graph, or after a step: what each rank sends, in which dtype, and why.

    DDP's and FSDP2's own collectives are not in graphs, and have no record.
    """

    kind: str  #: all_gather, reduce_scatter, all_reduce or all_to_all
    direction: str  #: forward or backward; step: once after both, outside the graphs
    tensor: str  #: the tensor that is sent: "layers.0.up input", or the module that it was traced in
    dtype: str  #: the dtype that is sent: uint8 for FP8
    shape: tuple[int | str, ...]  #: shape of this rank's part; a string if it is dynamic
    ranks: int  #: of its process group
    bytes_sent: int  #: by each rank, in a ring; with the traced sizes where they are dynamic
    reason: str  #: why it is sent in this way; "" if fp8graph changed nothing


@dataclass(frozen=True, kw_only=True)
class RefusalRecord:
    """A rewrite that a pass did not make for one layer, and why."""

    what: str  #: "one GEMM", "kept weight", "FP8 activation", "FP32 gradient", "quantized again", "FP8", "CUDA graphs"
    fqn: str  #: the full name of the layer's module
    index: int  #: among the sites of one module
    reason: str  #: why, in words


class SiteRecord:
    """A row of one site, or of a part of it: the decision, and the reason. Each kind of site has a class of rows."""

    fqn: str  #: the full name of the module
    index: int  #: among the sites of one kind in a module
    flops: int  #: multiplications and additions
    recipe: str | None  #: None: left in high precision
    reason: str  #: the rule or region that decided, or what stands in the way
    execution: str  #: "native", "emulated" or "high precision"
    required: bool  #: a user's rule or region asks for FP8
    rule: int | None  #: index of the policy rule that matched

    @property
    def name(self) -> str:
        """The FQN, with an index for the second and further sites of one kind in a module."""
        return f"{self.fqn}[{self.index}]" if self.index else self.fqn

    @property
    def missing(self) -> bool:
        """Whether a user's rule or region asks for FP8, and yet it runs in high precision."""
        return self.required and self.recipe is None

    @property
    def part(self) -> str:
        """The part of the site that the row is about, in a word."""
        raise NotImplementedError

    def moved(self, fqn: str, index: int, *, rule: int | None, reason: str) -> Self:
        """Return the same decision for the site of another name."""
        return dataclasses.replace(cast(Any, self), fqn=fqn, index=index, rule=rule, reason=reason)


class OtherRecord(SiteRecord):
    """A row of a site that is no matmul. It is not counted as a GEMM, and its class says how it is printed."""

    plural: ClassVar[str]  #: several sites of this kind, in a word
    header: ClassVar[tuple[str, ...]]  #: of its table, without the count
    direction: str  #: forward or backward

    @property
    def title(self) -> str:
        """The site, in two words."""
        raise NotImplementedError

    @property
    def written_out(self) -> bool:
        """Whether its FLOPs are those of matmuls, which have their own rows."""
        return False

    @property
    def opaque(self) -> bool:
        """Whether nobody can count its FLOPs."""
        return False

    def cells(self) -> tuple[str, ...]:
        """Its row in the table, without name and count."""
        raise NotImplementedError

    @classmethod
    def share(cls, rows: Sequence[Any], total: int) -> str:
        """Return one sentence: how many sites of this kind there are, and their share of ``total`` FLOPs."""
        raise NotImplementedError


def percent(share: float) -> str:
    """Rounded down: 100 % is everything."""
    return f"{math.floor(100 * share)} %" if share >= 0.01 or not share else "less than 1 %"


@dataclass(frozen=True, kw_only=True)
class GemmRecord(SiteRecord):
    """One row: the decision about one GEMM, and the reason.

    A site, one matmul of the user's program, has up to three of them: fprop ``y = x @ w.T``, dgrad ``dx = dy @ w`` and
    wgrad ``dw = dy.T @ x``, with x [M, K], w [N, K] and dy [M, N].
    """

    fqn: str  #: the full name of the module that multiplies
    index: int  #: among the sites of one module
    op: str  #: "linear", "matmul" (both operands are activations) or "grouped_mm" (experts)
    gemm: str  #: fprop, dgrad or wgrad
    m: int | str  #: [m, k] @ [k, n] as this GEMM ran, before padding; a string when the size is dynamic
    n: int | str  #: columns of the result
    k: int | str  #: what is contracted
    flops: int  #: multiplications and additions; of the traced sizes where they are dynamic
    recipe: str | None  #: None: left in high precision
    reason: str  #: the rule, region or default that decided, or what stands in the way
    dtypes: tuple[str, str, str]  #: a, b, result
    execution: str  #: "native" (multiplied in FP8), "emulated" (decoded, then multiplied) or "high precision"
    required: bool  #: a user's rule or region asks for FP8
    by_profitability: bool  #: left in high precision because FP8 would not be faster
    speedup: float | None  #: predicted, over high precision; None if it is not known or there is nothing to gain
    seconds: float | None  #: predicted in high precision; None without a speed model, or if the GEMM is emulated
    bytes_read: int  #: bytes of a and b as this GEMM reads them, without scales
    rule: int | None  #: index of the policy rule that matched the site

    @property
    def missing(self) -> bool:
        """Whether a user's rule or region asks for FP8 and it would pay, and yet this GEMM runs in high precision."""
        return super().missing and not self.by_profitability

    @property
    def part(self) -> str:
        return self.gemm


@dataclass(frozen=True, kw_only=True)
class AttentionRecord(OtherRecord):
    """One row: the decision about one attention in one direction, and the reason. It is not counted as a GEMM."""

    fqn: str  #: the full name of the module that attends
    index: int  #: among the attentions of one module
    form: str  #: the op, in words: "flash", "flex", ...; "written out" as matmuls, which have their own rows
    direction: str  #: forward or backward
    batch: int | str  #: a string when the size is dynamic, as all sizes here
    heads: int | str  #: of queries
    kv_heads: int | str  #: of keys and values
    queries: int | str  #: tokens
    keys: int | str  #: tokens
    head_size: int | str  #: of queries and keys
    value_size: int | str
    causal: bool  #: by an argument of the op; a mask that is a tensor may be causal, too
    masked: bool  #: a tensor is added to the scores, or a function changes them
    dropout: bool  #: probabilities are dropped
    flops: int  #: multiplications and additions; half if causal
    recipe: str | None  #: None: left in high precision
    reason: str  #: the rule or region that decided, or what stands in the way
    dtypes: tuple[str, str]  #: of q, k and v, or of the gradients that a backward in FP8 reads; of the result
    execution: str  #: "native", "emulated" or "high precision"
    required: bool  #: a user's rule asks for FP8
    rule: int | None  #: index of the policy rule that matched

    plural: ClassVar[str] = "attentions"
    header: ClassVar[tuple[str, ...]] = (
        "attention",
        "form",
        "direction",
        "batch x heads x queries x keys x size",
        "recipe",
        "dtypes",
        "execution",
        "reason",
    )

    @property
    def written_out(self) -> bool:
        return self.form == "written out"

    @property
    def part(self) -> str:
        return "attention"

    @property
    def title(self) -> str:
        return f"{self.form} attention"

    def cells(self) -> tuple[str, ...]:
        heads, sizes = _pair(self.heads, self.kv_heads), _pair(self.head_size, self.value_size)
        return (
            ", ".join([self.form, *(name for name in ("causal", "masked", "dropout") if getattr(self, name))]),
            self.direction,
            f"{self.batch} x {heads} x {self.queries} x {self.keys} x {sizes}",
            self.recipe or "-",
            " -> ".join(self.dtypes),
            self.execution,
            self.reason,
        )

    @classmethod
    def share(cls, rows: Sequence[Self], total: int) -> str:
        flops = sum(row.flops for row in rows)
        fp8 = [row for row in rows if row.recipe is not None and row.direction == "forward"]
        back = sum(row.recipe is not None and row.direction == "backward" for row in rows)
        forward = [row for row in rows if row.direction == "forward"]
        line = f"{len(forward)} attention{'s' * (len(forward) != 1)}{' with backward' * (len(rows) > len(forward))}: "
        line += f"{percent(flops / total)} of the FLOPs of all products" if total else "no FLOPs"
        emulated = sum(row.execution == "emulated" for row in fp8)
        line += f"; {len(fp8)} in FP8" + f" ({emulated} emulated)" * bool(emulated) if fp8 else "; in high precision"
        line += f", {back} of them in backward, too" if back else ""
        written = sum(row.written_out for row in forward)
        return line + (f"; {written} written out as matmuls, which are GEMMs above" if written else "")


def _pair(one: int | str, other: int | str) -> str:
    return str(one) if one == other else f"{one}:{other}"


OPAQUE: Final = "unknown FLOPs"  # the execution of a product that nobody can count


@dataclass(frozen=True, kw_only=True)
class ProductRecord(OtherRecord):
    """One row: a multiplication of matrices that fp8graph lists and never rewrites. It is not counted as a GEMM.

    That is low precision of the program's own, a convolution, an op of another library. No rule names it, so that
    neither strict mode nor ``Report.check`` asks for it.
    """

    fqn: str  #: the full name of the module that multiplies
    index: int  #: among such products of one module
    kind: str  #: in words: "scaled matmul", "convolution", "custom op", ...
    op: str  #: its name: "aten._scaled_mm"
    direction: str  #: forward or backward
    shapes: tuple[str, ...]  #: of the operands, of another library's op all that it may multiply
    dtypes: tuple[str, ...]  #: of these
    low: str  #: the one among them that has eight bits or fewer; "" if all have more
    flops: int  #: multiplications and additions, of the traced sizes; 0 if nobody can count them
    recipe: str | None = None  #: it is as the program wrote it
    reason: str  #: why it is left as it is
    execution: str  #: "low precision", "high precision", or "unknown FLOPs"
    required: bool = False  #: no rule asks for it
    rule: int | None = None  #: index of the policy rule that leaves the linear that it would be as it is

    plural: ClassVar[str] = "products"
    header: ClassVar[tuple[str, ...]] = (
        "other product",
        "kind",
        "direction",
        "op",
        "operands",
        "dtypes",
        "execution",
        "reason",
    )

    @property
    def opaque(self) -> bool:
        return self.execution == OPAQUE

    @property
    def part(self) -> str:
        return self.kind

    @property
    def title(self) -> str:
        return self.kind

    def moved(self, fqn: str, index: int, *, rule: int | None, reason: str) -> Self:
        return dataclasses.replace(self, fqn=fqn, index=index, rule=rule, reason=reason)

    def cells(self) -> tuple[str, ...]:
        shapes, dtypes = (" x ".join(texts) for texts in (self.shapes, self.dtypes))
        return self.kind, self.direction, self.op, shapes, dtypes, self.execution, self.reason

    @classmethod
    def share(cls, rows: Sequence[Self], total: int) -> str:
        kinds: dict[str, list[Self]] = {}
        for row in rows:
            kinds.setdefault(row.kind + (f" in {row.low}" if row.low else ""), []).append(row)
        parts: list[str] = []
        for kind, alike in kinds.items():
            flops, opaque = sum(row.flops for row in alike), any(row.opaque for row in alike)
            parts.append(f"{kind} ({len(alike)}), {'unknown FLOPs' if opaque else percent(flops / max(total, 1))}")
        return f"products that are left as they are, with their parts of the FLOPs of all: {'; '.join(parts)}"


# The kinds of sites beside matmuls, by the names of their rows in a report.
OTHERS: Final[Mapping[str, type[OtherRecord]]] = {"attention": AttentionRecord, "other_products": ProductRecord}


class Shares(NamedTuple):
    """The FLOPs of rows: those of all products that can be counted, and of the parts that run in low precision."""

    total: int  #: GEMMs, attentions and all other products
    fp8: int  #: those that fp8graph put into FP8
    elsewhere: int  #: those that the program multiplies in low precision itself
    opaque: int  #: the number of products that nobody can count


def shares(gemms: Sequence[GemmRecord], others: Sequence[OtherRecord]) -> Shares:
    """Return the FLOPs of all products that these rows describe. Matmuls of an attention that is written out count
    once.
    """
    rows: list[SiteRecord] = [*gemms, *others]
    return Shares(
        total=sum(row.flops for row in (*gemms, *(row for row in others if not row.written_out))),
        fp8=sum(row.flops for row in rows if row.recipe is not None),
        elsewhere=sum(row.flops for row in others if isinstance(row, ProductRecord) and row.low),
        opaque=sum(row.opaque for row in others),
    )


class Origin(NamedTuple):
    """The place that a node of a graph comes from."""

    module: str  #: the FQN of the module that it was traced in, relative to the frame; of an input: its name
    source: str  #: the line of the model, as "file:line code"; "" if it is not known
    backward: bool


@dataclass(frozen=True, kw_only=True)
class StatisticRecord:
    """One number that was measured at one step: see ``docs/statistics.md``."""

    step: int  #: of the optimizer, from 0
    site: str  #: the name of the layer
    operand: str  #: input, weight or grad_output; output, dgrad or wgrad: what a GEMM returns
    layout: str  #: rowwise or columnwise; "" for the tensor itself
    recipe: str  #: that quantizes the tensor; "" for the tensor itself
    what_if: bool  #: no GEMM reads this copy
    stat: str  #: the name of the statistic
    value: float  #: in percent where the name ends with "%", in dB ("sqnr"), else in units of the tensor
