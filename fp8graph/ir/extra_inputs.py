"""What a graph takes beside Dynamo's inputs: pages of scaling state, FP8 copies of weights."""

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
    """Whose scale it is: one tensor of one site under one recipe (delayed scaling)."""

    fqn: str
    index: int = field(compare=False)  # among the sites of the same module; for the name only
    use: int  # of the weight in the graph: a layer that runs twice has two rows; not counting uses without gradients
    parameter: int | None  # graph input that the site's weight comes from
    operand: OperandName
    recipe: Recipe


@dataclass(frozen=True, kw_only=True)
class PageLayout:
    """One tensor of scaling state that a graph takes as an input: see ``numerics/history.py``.

    ``rows``: one entry a row of the page. Tensors that are quantized once for several sites share a row, and
    all of their rows are names of it.
    """

    recipe: DelayedScaling
    fp8_max: float
    backward: bool  # read and updated in backward
    device: torch.device
    rows: tuple[tuple[StateRow, ...], ...]
    group: str | None = None  # of ranks that reduce its amaxes after a step; None: recorded in the graph

    def stand_in(self) -> torch.Tensor:
        """An empty page, in the fake mode that is on."""
        return torch.empty(history.page_shape(self.recipe.amax_history_len, len(self.rows)), device=self.device)


@dataclass(frozen=True, kw_only=True, eq=False)
class QuantizedWeight:
    """A weight whose FP8 copy a graph takes as inputs: how it is made of parameters (``runtime/weight_cache.py``)."""

    name: str  # of the module that uses it, for the report
    parameters: tuple[int, ...]  # graph inputs that it is computed from
    quantizing: fx.Graph  # dialect: parameters, and its page under delayed scaling -> the outputs
    recording: fx.Graph  # the same, and the page is updated
    linears: int  # whose weights it joins
    signature: str  # equal for weights that are made alike, except for the layouts
    layouts: tuple[tuple[int, ...], tuple[int, ...]]  # rowwise and columnwise multiples, () if not needed
    outputs: tuple[str, ...]  # what the graph takes, see ``numerics.output_names``
    page: PageLayout | None  # its scaling state
    records: bool  # the graph trains it under delayed scaling

    made: tuple[str, ...]  # all that ``quantizing`` returns

    def made_outputs(self) -> dict[str, torch.Tensor]:
        """The fake values of what is made, by name."""
        (output,) = self.quantizing.find_nodes(op="output")
        nodes = cast("list[fx.Node]", output.args[0])
        return dict(zip(self.made, map(value, nodes), strict=True))

    def stand_ins(self) -> list[torch.Tensor]:
        """Empty tensors for what the graph takes, in the fake mode that is on."""
        made = self.made_outputs()
        outputs = [made[name] for name in self.outputs]
        return [torch.empty(val.shape, dtype=val.dtype, device=val.device) for val in outputs]


@dataclass(kw_only=True)
class SpareInputs:
    """Graph inputs without a meaning: a pass that wants tensors from outside takes some, and says what they are.

    AOTAutograd has to know of all inputs before the passes run; what they want (scaling state, FP8 copies of weights)
    is known after. So a graph is traced with as many empty tensors as it may need (``backend/foresee.py``), and what
    a pass takes gets the shape, dtype and device that it asks for.
    """

    indices: Sequence[int] = ()  # among the graph's inputs
    wanted: int = 0  # so far; more than there are: the graph has to be traced again, with enough of them

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
