"""The rows of a report, as plain data: one record per GEMM, attention, collective and refusal."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple


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

    what: str  #: "one GEMM", "kept weight", "FP8 activation", "FP32 gradient", "quantized again" or "FP8"
    fqn: str  #: the full name of the layer's module
    index: int  #: among the sites of one module
    reason: str  #: why, in words


@dataclass(frozen=True, kw_only=True)
class GemmRecord:
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
    def name(self) -> str:
        """The FQN, with an index for the second and further sites of one module."""
        return f"{self.fqn}[{self.index}]" if self.index else self.fqn

    @property
    def missing(self) -> bool:
        """Whether a user's rule or region asks for FP8 and it would pay, and yet this GEMM runs in high precision."""
        return self.required and self.recipe is None and not self.by_profitability


@dataclass(frozen=True, kw_only=True)
class AttentionRecord:
    """One row: the decision about one attention in one direction, and the reason. It is not counted as a GEMM."""

    fqn: str  #: the full name of the module that attends
    index: int  #: among the attentions of one module
    form: str  #: the op, in words: "flash", "flex", ...; "written out" as matmuls, which have rows of their own
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

    @property
    def name(self) -> str:
        """The FQN, with an index for the second and further attentions of one module."""
        return f"{self.fqn}[{self.index}]" if self.index else self.fqn

    @property
    def written_out(self) -> bool:
        """Whether its FLOPs are those of matmuls, which have rows of their own."""
        return self.form == "written out"

    @property
    def missing(self) -> bool:
        """Whether a user's rule asks for FP8, and yet it runs in high precision."""
        return self.required and self.recipe is None


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
