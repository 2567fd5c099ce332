"""What `match` finds and `assign` decides: sites, their GEMMs, the plan. Plain data between passes."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, Literal, cast

import torch
from torch import fx

from fp8graph import delayed
from fp8graph.graph import aten, graph_inputs, value
from fp8graph.hardware import Hardware, of_device
from fp8graph.naming import Parameter, Place
from fp8graph.policy import Op, Policy, Resolution
from fp8graph.recipes import DelayedScaling, GemmName, Layout, OperandName, Recipe

Execution = Literal["native", "emulated", "high precision"]


@dataclass(frozen=True, kw_only=True)
class OperandView:
    """One argument of a matmul: a tensor under transposes, and the layout that the FP8 GEMM needs of it.

    The rowwise layout is contiguous along the contraction dim of fprop: x [M, K], w [N, K], dy [M, N].
    """

    operand: OperandName
    tensor: fx.Node  # as the program stores it, transposes removed
    flipped: bool  # rowwise orientation = tensor with its last two dims swapped (GPT-2's [K, N] weight)
    layout: Layout


@dataclass(frozen=True, kw_only=True, eq=False)
class Gemm:
    """One matmul node ``a @ b``: ``[m, k] @ [k, n]``, with a bias for addmm."""

    node: fx.Node
    gemm: GemmName
    a: OperandView
    b: OperandView

    @property
    def bias(self) -> fx.Node | None:
        """What addmm and baddbmm add. Read from the node: it may itself be a rewritten matmul."""
        first, *_ = cast(tuple[fx.Node, ...], self.node.args)
        return first if self.node.target in (aten.addmm.default, aten.baddbmm.default) else None


@dataclass(kw_only=True, eq=False)
class Site:
    """One matmul of the user's program and its GEMMs in forward and backward."""

    place: Place
    fqn: str = ""
    index: int = 0  # among the sites of the same module
    op: Op
    use: int = 0  # among the sites with that parameter that run with gradients, or among those without
    region: str | None  # the innermost autocast region in the compiled code, see autocast.py
    gemms: list[Gemm] = field(default_factory=list[Gemm])

    @property
    def parameter(self) -> int | None:
        """The graph input that the weight comes from."""
        return self.place.parameter


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
    """One tensor of scaling state that a graph takes as an input: see ``fp8graph/delayed.py``.

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
        return torch.empty(delayed.page_shape(self.recipe.amax_history_len, len(self.rows)), device=self.device)


TAKEN_KEY: Final = "fp8graph_taken"  # node.meta of a spare input that a pass took
CACHED_KEY: Final = "fp8graph_cached"  # node.meta of a quantize node that runs outside the graph


@dataclass(frozen=True, kw_only=True, eq=False)
class QuantizedWeight:
    """A weight whose FP8 copy a graph takes as inputs: how it is made of parameters. See ``fp8graph/weights.py``."""

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


@dataclass(frozen=True, kw_only=True)
class Decision:
    """What happens to one GEMM, and why."""

    recipe: Recipe | None
    reason: str
    execution: Execution
    resolution: Resolution
    by_profitability: bool = False  # left in high precision because FP8 would not pay
    speedup: float | None = None  # predicted, over high precision
    required: bool = False  # a user's rule or region asks for FP8: strict mode insists


@dataclass(kw_only=True)
class SpareInputs:
    """Graph inputs without a meaning: a pass that wants tensors from outside takes some, and says what they are.

    AOTAutograd has to know of all inputs before the passes run; what they want (scaling state, FP8 copies of weights)
    is known after. So a graph is traced with as many empty tensors as it may need (``fp8graph/foresee.py``), and what
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


@dataclass(kw_only=True)
class Compilation:
    """What the passes of one graph share. Filled from the left: names -> sites -> plan."""

    policy: Policy
    hardware: Hardware | None = None  # None: that of the tensors' device
    cuda_graphs: bool = False  # launches cost the host nothing: Inductor records CUDA graphs
    region: str | Recipe | None = None  # the autocast region around the whole call
    sources: tuple[str, ...] = ()  # Dynamo's names of the graph's inputs
    parameters: Mapping[int, Parameter] = field(default_factory=dict[int, Parameter])  # by input index
    subgraph: bool = False  # the body of a higher-order op
    amax_group: str | None = None  # ranks whose amaxes are reduced, by the group's name; None: this one alone
    records_amaxes: bool = True  # False: gradients are off, scales are read and never changed
    spares: SpareInputs = field(default_factory=SpareInputs)
    pages: tuple[PageLayout, ...] = ()  # found by pass `state`
    cache_weights: bool = False  # quantize weights once per update, outside the graph
    gathered: frozenset[int] = frozenset()  # parameters that are whole only while the graph runs (FSDP2)
    save: str = "speed"  # what backward keeps: see pass `save`
    save_activations_in_fp8: bool = False
    weights: tuple[QuantizedWeight, ...] = ()  # found by pass `cache`
    group: bool = True  # multiply once where linears share their input
    grouped: dict[tuple[str, int, str], tuple[str, ...]] = field(  # (fqn, index, gemm) -> names of its siblings
        default_factory=dict[tuple[str, int, str], "tuple[str, ...]"]
    )
    sites: list[Site] = field(default_factory=list[Site])
    plan: dict[fx.Node, Decision] = field(default_factory=dict[fx.Node, Decision])

    def hardware_of(self, node: fx.Node) -> Hardware:
        """What ``node`` is decided for: the target, or the device of its result."""
        return self.hardware or of_device(value(node).device)

    def forget_nodes(self) -> None:
        """Drop what points into the graph."""
        self.sites, self.plan, self.grouped = [], {}, {}


@dataclass(frozen=True, kw_only=True)
class Findings:
    """What the passes found in one graph: who calls it must know, whether the passes ran here or its code was kept."""

    sites: tuple[Site, ...] = ()  # without their GEMMs
    weights: tuple[QuantizedWeight, ...] = ()  # whose copies the graph takes
    pages: tuple[PageLayout, ...] = ()  # of scaling state, which it takes after them
    has_subgraphs: bool = False  # a higher-order op has matmuls in graphs of its own

    @property
    def inputs(self) -> int:
        """How many inputs the graph takes after Dynamo's."""
        return sum(len(weight.outputs) for weight in self.weights) + len(self.pages)

    def stand_ins(self) -> list[torch.Tensor]:
        """Empty tensors for what the graph takes, in order, in the fake mode that is on."""
        return [*(x for weight in self.weights for x in weight.stand_ins()), *(page.stand_in() for page in self.pages)]

    def and_those_of(self, compilation: Compilation) -> Findings:
        """With what was found in one more graph: a higher-order op has some of its own, without inputs."""
        sites = (dataclasses.replace(site, gemms=[]) for site in compilation.sites)
        return Findings(
            sites=(*self.sites, *sites),
            weights=compilation.weights or self.weights,
            pages=compilation.pages or self.pages,
            has_subgraphs=self.has_subgraphs or (compilation.subgraph and bool(compilation.sites)),
        )
