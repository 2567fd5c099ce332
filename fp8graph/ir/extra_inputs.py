"""The inputs that a graph takes beside Dynamo's: FP8 copies of weights, pages of scaling state, FP32 gradients."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import cast

import torch
from torch import fx

from fp8graph.ir.keys import TAKEN_KEY
from fp8graph.ir.nodes import value
from fp8graph.ir.sources import graph_inputs
from fp8graph.numerics import history
from fp8graph.recipes import DelayedScaling, OperandName, Recipe


@dataclass(frozen=True, kw_only=True)
class StateRow:
    """The owner of a scale: one tensor of one site under one recipe (delayed scaling)."""

    fqn: str
    index: int = field(compare=False)  # among the sites of the same module; for the name only
    use: int  # of the weight in the graph: a layer that runs twice has two rows; uses without gradients do not count
    parameter: int | None  # graph input that the site's weight comes from
    operand: OperandName
    recipe: Recipe
    direct: bool = field(default=False, compare=False)  # the tensor is that parameter, behind views and casts

    @property
    def is_weight(self) -> bool:
        """Whether the amax of the parameter is that of the tensor."""
        return self.operand == "weight" and self.parameter is not None and self.direct


@dataclass(frozen=True, kw_only=True)
class PageLayout:
    """One tensor of scaling state that a graph takes as an input: see ``numerics/history.py``.

    ``rows``: one entry per row of the page. Tensors that are quantized once for several sites share a row, and the
    entry lists the names of all these sites' rows.
    """

    recipe: DelayedScaling
    fp8_max: float
    backward: bool  # read and updated in backward
    device: torch.device
    rows: tuple[tuple[StateRow, ...], ...]
    group: str | None = None  # of ranks that reduce its amaxes after a step; None: they are recorded in the graph

    def stand_in(self) -> torch.Tensor:
        """An empty page, in the active fake mode."""
        return torch.empty(history.page_shape(self.recipe.amax_history_len, len(self.rows)), device=self.device)


@dataclass(frozen=True, kw_only=True)
class Gradient:
    """The FP32 gradient of a parameter, which a graph takes as an input to add wgrad's result to it."""

    parameter: int  # graph input
    shape: tuple[int, ...]
    device: torch.device

    def stand_in(self) -> torch.Tensor:
        """An empty one, in the active fake mode."""
        return torch.empty(self.shape, device=self.device)


@dataclass(frozen=True, kw_only=True)
class ObservedTensor:
    """One vector of statistics in a :class:`StatisticsPage`."""

    names: tuple[tuple[str, int], ...]  # (fqn, index) of the sites that it belongs to
    tensor: str  # "input", "weight", "grad_output", or the result: "output", "dgrad", "wgrad"
    layout: str  # of the copy; "" for the tensor itself
    recipe: str  # "" for the tensor itself
    what_if: bool  # no GEMM reads the copy
    group: str = ""  # of an error: equal for sites that read one input
    parts: tuple[str, ...]  # what each number is


@dataclass(frozen=True, kw_only=True)
class StatisticsPage:
    """A tensor [numbers] that an observed graph takes as an input, and fills: one in forward, one in backward."""

    backward: bool
    device: torch.device
    tensors: tuple[ObservedTensor, ...]

    def stand_in(self) -> torch.Tensor:
        """An empty one, in the active fake mode."""
        return torch.empty(sum(len(tensor.parts) for tensor in self.tensors), device=self.device)


@dataclass(frozen=True, kw_only=True, eq=False)
class QuantizedWeight:
    """A weight whose FP8 copy a graph takes as inputs, and how to make that copy (``runtime/weight_cache.py``)."""

    name: str  # name of the module that uses it, for the report
    parameters: tuple[int, ...]  # graph inputs that it is computed from
    quantizing: fx.Graph  # dialect graph: parameters, and its page with delayed scaling -> the outputs
    recording: fx.Graph  # the same, and the page is updated
    linears: int  # how many weights it joins
    signature: str  # equal for weights that are computed in the same way, whatever their layouts
    layouts: tuple[tuple[int, ...], tuple[int, ...]]  # rowwise and columnwise multiples, () if not needed
    outputs: tuple[str, ...]  # the outputs that the graph takes, see ``numerics.output_names``
    page: PageLayout | None  # its scaling state
    records: bool  # the graph trains it with delayed scaling

    made: tuple[str, ...]  # all outputs of ``quantizing``

    def made_outputs(self) -> dict[str, torch.Tensor]:
        """The fake values of the outputs, by name."""
        (output,) = self.quantizing.find_nodes(op="output")
        nodes = cast("list[fx.Node]", output.args[0])
        return dict(zip(self.made, map(value, nodes), strict=True))

    def stand_ins(self) -> list[torch.Tensor]:
        """Empty tensors for the inputs that the graph takes, in the active fake mode."""
        made = self.made_outputs()
        outputs = [made[name] for name in self.outputs]
        return [torch.empty(val.shape, dtype=val.dtype, device=val.device) for val in outputs]


@dataclass(kw_only=True)
class SpareInputs:
    """Graph inputs without a meaning yet. A pass that needs tensors from outside takes some and gives them one.

    AOTAutograd has to know all inputs before the passes run, but only the passes find out which inputs they need
    (scaling state, FP8 copies of weights). So a graph is traced with as many empty tensors as it may need
    (``backend/foresee.py``), and an input that a pass takes gets the shape, dtype and device that the pass asks for.
    """

    indices: Sequence[int] = ()  # among the graph's inputs
    wanted: int = 0  # how many so far; if more than there are, the graph has to be traced again with enough of them

    def take(self, graph: fx.Graph, values: Sequence[torch.Tensor]) -> list[fx.Node] | None:
        """The inputs that stand for ``values`` (fake tensors) from now on; None if there are too few."""
        start, self.wanted = self.wanted, self.wanted + len(values)
        if self.wanted > len(self.indices):
            return None
        by_index = {index: node for node, index in graph_inputs(graph)}
        taken = [by_index[index] for index in self.indices[start : self.wanted]]
        for node, fake in zip(taken, values, strict=True):
            node.meta.update({"val": fake, TAKEN_KEY: True})
            node.meta.pop("tensor_meta", None)
        return taken
