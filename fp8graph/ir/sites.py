"""The sites of a program, matmuls with their GEMMs, and the decision for each: plain data between passes.

A feature may find sites of another kind, which have a name, a region and a decision, and no GEMMs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, cast

import torch
from torch import fx

from fp8graph.hardware import Hardware
from fp8graph.ir.naming import Place
from fp8graph.ir.nodes import aten, known_at_run_time_only, static_size
from fp8graph.recipes import GemmName, Layout, OperandName, Recipe
from fp8graph.recipes.rules import Op, Resolution

Execution = Literal["native", "emulated", "high precision"]


def why_not_of_size(shape: Sequence[int | torch.SymInt], *, grouped: bool = False) -> str | None:
    """Return the reason why no operand of this shape is quantized, or None if one is.

    A maximum of nothing has no value, and kernels and tiles depend on a size; groups of rows may all be empty.
    """
    if any(static_size(size) == 0 for size in shape):
        return f"an operand is empty: {list(shape)}"
    if not grouped and any(map(known_at_run_time_only, shape)):
        return f"a size is known at run time only, and may be 0: {list(shape)}"
    return None


@dataclass(frozen=True, kw_only=True)
class OperandView:
    """One argument of a matmul: a tensor under transposes, and the layout that the FP8 GEMM needs of it.

    The rowwise layout is contiguous along the contraction dim of fprop: x [M, K], w [N, K], dy [M, N].
    """

    operand: OperandName
    tensor: fx.Node  # as the program stores it, transposes removed
    flipped: bool  # rowwise orientation = tensor with its last two dims swapped (GPT-2's [K, N] weight)
    layout: Layout
    data: fx.Node | None = None  # the bytes [R, C] that ``tensor`` decodes, if it is a weight that arrives quantized

    @property
    def turned(self) -> bool:
        """Whether the FP8 GEMM reads the transpose of ``tensor``: it contracts the rows."""
        return self.flipped != (self.layout == "columnwise")


@dataclass(frozen=True, kw_only=True, eq=False)
class Gemm:
    """One matmul node ``a @ b``: ``[m, k] @ [k, n]``, with a bias for addmm."""

    node: fx.Node
    gemm: GemmName
    a: OperandView
    b: OperandView

    @property
    def bias(self) -> fx.Node | None:
        """The bias of addmm and baddbmm. It is read from the node, since it may be a rewritten matmul."""
        first, *_ = cast(tuple[fx.Node, ...], self.node.args)
        return first if self.node.target in (aten.addmm.default, aten.baddbmm.default) else None


@dataclass(kw_only=True, eq=False)
class Site:
    """One matmul of the user's program and its GEMMs in forward and backward."""

    place: Place
    fqn: str = ""
    index: int = 0  # among the sites of the same module
    op: Op
    why_no_linear: str = ""  # for a matmul that the program may have written as a linear: why it is not one
    head: str = ""  # for an output head: what in the graph says that it is one
    use: int = 0  # n-th use of the weight; uses with gradients and without are counted apart
    region: str | None  # the innermost autocast region in the compiled code, see autocast.py
    gemms: list[Gemm] = field(default_factory=list[Gemm])

    @property
    def parameter(self) -> int | None:
        """The graph input that the weight comes from."""
        return self.place.parameter


@dataclass(frozen=True, kw_only=True)
class Use:
    """The use of a quantized tensor: as one operand of one site under one recipe."""

    fqn: str
    index: int = field(compare=False)  # among the sites of the same module; for the name only
    use: int  # of the weight in the graph: a layer that runs twice has two; uses without gradients do not count
    parameter: int | None  # graph input that the site's weight comes from
    operand: OperandName
    recipe: Recipe
    direct: bool = field(default=False, compare=False)  # the tensor is that parameter, behind views and casts

    @property
    def is_weight(self) -> bool:
        """Whether the amax of the parameter is that of the tensor."""
        return self.operand == "weight" and self.parameter is not None and self.direct


@dataclass(frozen=True, kw_only=True, eq=False)
class Foreseen:
    """A multiplication by a parameter in Dynamo's graph, before anything is traced, and how `assign` may decide it."""

    site: Site  # without its GEMMs
    recipes: Mapping[GemmName, Recipe | None]
    hardware: Hardware
    sibling_key: Any  # equal for linears of one module that read one tensor, and may be fused
    rows: int  # N of the weight [N, K]; 0 if it is not known
    tokens: int  # M of the input [M, K], as it was traced; 0 if it is not known
    stored: str = ""  # the scaling of a weight that arrives quantized, which no recipe quantizes

    def used(self, *gemms: GemmName) -> set[Recipe]:
        """Return the recipes of some GEMMs."""
        return {recipe for gemm in gemms if (recipe := self.recipes[gemm]) is not None}


@dataclass(frozen=True, kw_only=True)
class Decision:
    """The decision about one GEMM, and the reason."""

    recipe: Recipe | None
    reason: str
    execution: Execution
    resolution: Resolution
    by_profitability: bool = False  # left in high precision because FP8 would not be faster
    speedup: float | None = None  # predicted, over high precision
    dequantized: bool = False  # in high precision, from the numbers that fprop multiplies in FP8
    required: bool = False  # a user's rule or region asks for FP8: strict mode requires it
    stored: fx.Node | None = None  # the weight that arrives quantized, if ``recipe`` is the one that it is stored in
