"""Weights that a graph quantizes, as graphs of their own: the part that computes them from parameters alone.

    qw = quantize(w, rowwise, columnwise)               ->      (whoever keeps or gathers the weight runs this part)
    y = scaled_mm(qx[0], qw[0], qx[1], qw[2])                   y = scaled_mm(qx[0], w_rowwise, qx[1], w_scale_inv)

Any tensor that is computed from parameters alone is a weight: a parameter behind views and casts, several
concatenated, a parametrization.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from operator import getitem
from typing import Final, Self, TypeVar, cast

import torch
from torch import fx

from fp8graph.compat import aot
from fp8graph.compat.inductor import erase_unused
from fp8graph.ir import collectives, ops
from fp8graph.ir.compilation import Compilation, GraphFacts
from fp8graph.ir.edit import insert
from fp8graph.ir.extra_inputs import ExtraInput, Rename, SpareInputs
from fp8graph.ir.naming import graph_inputs
from fp8graph.ir.nodes import (
    CACHED_KEY,
    fake_mode_of,
    in_order,
    module_path,
    nodes,
    runs_without_gradients,
    static_size,
    value,
)
from fp8graph.ir.quantize_node import QuantizeNode, call
from fp8graph.recipes import FP8_MAX

SHARDED: Final = "a copy of all of it would take the memory that sharding saves"  # why a gathered one is not kept
# Made of a weight that arrives quantized; scales are repeated of any.
_MADE_OF_STORED: Final = {ops.columnwise: "columnwise", ops.join: "joined", ops.repeat_scales: "repeated_scale_inv"}


@dataclass(frozen=True, kw_only=True, eq=False)
class WeightGraph(ExtraInput):
    """A weight that is quantized from parameters alone. By itself it notes, for an export, that the graph does so."""

    name: str  # name of the module that uses it, for the report
    parameters: tuple[int, ...]  # graph inputs that it is computed from
    quantizing: fx.Graph  # dialect graph: parameters, and the tensors of ``extra_inputs`` -> the outputs
    recording: fx.Graph  # the same for a graph with gradients: it may write to the tensors of ``extra_inputs``
    extra_inputs: tuple[ExtraInput, ...] = ()  # tensors that these graphs take behind the parameters: a delayed scale
    trains: bool  # the graph computes gradients with it
    linears: int  # how many weights it joins
    signature: str  # equal for weights that are computed in the same way, whatever their layouts
    layouts: tuple[tuple[int, ...], tuple[int, ...]]  # rowwise and columnwise multiples, () if not needed
    outputs: tuple[str, ...]  # the outputs that the graph reads, see ``numerics.output_names``
    made: tuple[str, ...]  # all outputs of ``quantizing``

    @property
    def records(self) -> bool:
        """Whether quantizing the weight must also record its amax (``recording``)."""
        return self.trains and bool(self.extra_inputs)

    def made_outputs(self) -> dict[str, torch.Tensor]:
        """Return the fake values of the outputs, by name."""
        (output,) = self.quantizing.find_nodes(op="output")
        results = cast("list[fx.Node]", output.args[0])
        return dict(zip(self.made, map(value, results), strict=True))

    def renamed(self, rename: Rename) -> Self:
        return dataclasses.replace(self, extra_inputs=tuple(each.renamed(rename) for each in self.extra_inputs))

    def passed(self, run: Callable[[fx.Graph, Compilation], None], facts: GraphFacts) -> Self:
        """Return the same after a pass, if that takes inputs for it: whoever runs its graphs gives them, too."""
        alone = Compilation(facts=dataclasses.replace(facts, spares=SpareInputs(), records_amaxes=False))
        run(self.quantizing, alone)  # it has no spare inputs, and is not changed
        if not (more := alone.extra_inputs):
            return self
        quantizing, recording = (self._passed(run, facts, more, records=records) for records in (False, True))
        return dataclasses.replace(
            self, quantizing=quantizing, recording=recording, extra_inputs=(*self.extra_inputs, *more)
        )

    def _passed(
        self,
        run: Callable[[fx.Graph, Compilation], None],
        facts: GraphFacts,
        extra_inputs: Sequence[ExtraInput],
        *,
        records: bool,
    ) -> fx.Graph:
        graph = fx.Graph()
        graph.output(graph.graph_copy(self.quantizing, {}))
        count, first = len(graph.find_nodes(op="placeholder")), next(n for n in graph.nodes if n.op != "placeholder")
        with graph.inserting_before(first), fake_mode_of(first):
            fakes = [fake for each in extra_inputs for fake in each.stand_ins()]
            for place, fake in enumerate(fakes, count):
                _placeholder(graph, place, fake)
        spares = SpareInputs(indices=range(count, count + len(fakes)))
        run(graph, Compilation(facts=dataclasses.replace(facts, spares=spares, records_amaxes=records)))
        return graph


@dataclass(frozen=True, kw_only=True, eq=False)
class WeightInput(WeightGraph):
    """A weight that a graph takes as inputs: data and scales, which a store makes by its graph."""

    def stand_ins(self) -> list[torch.Tensor]:
        made = self.made_outputs()
        outputs = [made[name] for name in self.outputs]
        return [torch.empty(val.shape, dtype=val.dtype, device=val.device) for val in outputs]

    def titles(self, name: Callable[[int], str]) -> list[str]:
        made_of = ", ".join(map(name, self.parameters))
        return [f"{made_of} {output}" for output in self.outputs]


_READ_BUFFERS: Final = (ops.join, ops.repeat_scales)
_Kind = TypeVar("_Kind", bound=WeightGraph)


def weight_graph(
    node: fx.Node, parameters: Mapping[fx.Node, int], compilation: Compilation, kind: type[_Kind]
) -> _Kind | None:
    """``node`` (quantize; columnwise or join of weights that arrive quantized) and the nodes that compute it.

    Args:
        parameters: the inputs that it may be computed from, with their positions.

    Returns:
        None if it reads anything else.
    """
    if (body := computed_from(node, parameters)) is None:
        return None
    sources = _sources_of(body, parameters)
    graph, copied = _copy_of(node, body, sources)
    if node.target is ops.quantize:
        quantized = QuantizeNode(node)
        made = tuple(name for name in quantized.names if name != "amax")
        outputs, linears = tuple(quantized.outputs), len(quantized.arguments.parts)
        layouts = tuple(quantized.arguments.rowwise), tuple(quantized.arguments.columnwise)
        graph.output([insert(graph, getitem, (copied, quantized.names.index(name)), like=node) for name in made])
    else:
        made = outputs = (_MADE_OF_STORED[node.target],)
        counts = node.target is ops.columnwise or value(node).dtype in FP8_MAX  # joined scales are no weights
        layouts, linears = ((), tuple(value(node).shape)), len(node.all_input_nodes) * counts
        graph.output([copied])
    return kind(
        name=module_path(node),
        parameters=tuple(parameters[source] for source in sources),
        quantizing=graph,
        recording=graph,
        trains=compilation.facts.records_amaxes and not runs_without_gradients(node),
        signature=_signature_of(graph),
        linears=linears,
        layouts=layouts,
        outputs=outputs,
        made=made,
    )


def quantized_weights(graph: fx.Graph) -> list[fx.Node]:
    """Return the nodes that quantize, transpose what arrives quantized, or join it; without parts of another weight."""
    candidates = nodes(graph, (ops.quantize, *_MADE_OF_STORED))
    return [node for node in candidates if not all(user.target in _MADE_OF_STORED for user in node.users)]


def hoist(
    graph: fx.Graph,
    parameters: Mapping[fx.Node, int],
    compilation: Compilation,
    kind: type[WeightInput],
    buffers: Mapping[fx.Node, int] | None = None,
) -> None:
    """Take the weights that are computed from ``parameters`` (inputs, with their positions) as inputs.

    What joins weights that arrive quantized, or repeats scales, may read ``buffers``, too: such scales are.

    With too few spare inputs the graph is not changed; it is traced again with enough of them.
    """
    weights: dict[fx.Node, WeightInput] = {}
    for node in quantized_weights(graph):
        sources = {**parameters, **(buffers or {})} if node.target in _READ_BUFFERS else parameters
        if (weight := weight_graph(node, sources, compilation, kind)) is not None:
            weights[node] = weight
            node.meta[CACHED_KEY] = True
    inputs = compilation.take(graph, [*weights.values()])
    if inputs is None:
        return
    for node, weight in weights.items():
        placeholders = {name: inputs.pop(0) for name in weight.outputs}
        if node.target is ops.quantize:
            QuantizeNode(node).replace(placeholders)
        else:
            node.replace_all_uses_with(placeholders[weight.outputs[0]])
            graph.erase_node(node)
    if weights:
        erase_unused(graph)


def inputs_to_keep(graph: fx.Graph, facts: GraphFacts) -> dict[fx.Node, int]:
    """Return the inputs, with their positions, of which something may be kept between calls: parameters and buffers."""
    positions = (facts.parameters.keys() | facts.buffers) - facts.gathered
    return {node: index for node, index in graph_inputs(graph) if index in positions}


def computed_from(node: fx.Node, parameters: Mapping[fx.Node, int]) -> list[fx.Node] | None:
    """Return the nodes between parameters and ``node``, in order; None if they read or do anything else."""
    between: set[fx.Node] = set()
    pending = [node]
    reads_parameter = False
    while pending:
        current = pending.pop()
        if current in parameters:
            reads_parameter = True
        elif current.op != "call_function" or torch.Tag.nondeterministic_seeded in getattr(current.target, "tags", ()):
            return None
        elif current.target is collectives.ALL_GATHER:
            return None
        elif current not in between:
            between.add(current)
            pending.extend(current.all_input_nodes)
    source = QuantizeNode(node).arguments.x if node.target is ops.quantize else node
    if not reads_parameter or any(static_size(size) is None for size in value(source).shape):
        return None
    return in_order(between)


def _sources_of(body: Sequence[fx.Node], parameters: Mapping[fx.Node, int]) -> list[fx.Node]:
    return list(dict.fromkeys(n for inner in body for n in inner.all_input_nodes if n in parameters))


def _copy_of(node: fx.Node, body: Sequence[fx.Node], sources: Sequence[fx.Node]) -> tuple[fx.Graph, fx.Node]:
    """Return a graph of ``sources`` and ``body``, and ``node`` in it."""
    graph, copies = fx.Graph(), dict[fx.Node, fx.Node]()
    for position, source in enumerate(sources):
        copies[source] = _placeholder(graph, position, value(source))
    for inner in body:
        copies[inner] = graph.node_copy(inner, lambda n: copies[n])
    return graph, copies[node]


def _placeholder(graph: fx.Graph, position: int, val: torch.Tensor) -> fx.Node:
    node = graph.placeholder(f"input{position}")
    node.meta["val"] = val
    aot.set_input_position(node, position)
    return node


def _signature_of(graph: fx.Graph) -> str:
    """Return the arithmetic of a weight as text, the same for all names of nodes and all layouts that are asked for."""
    order = {node: f"%{position}" for position, node in enumerate(graph.nodes)}
    lines: list[str] = []
    for node in graph.nodes:
        if node.op == "placeholder":
            x = value(node)
            lines.append(f"{x.dtype} {tuple(x.shape)} {x.stride()} {x.device}")
        elif node.op == "call_function" and not _takes_layout(node):
            args, kwargs = node.args, node.kwargs
            if node.target is ops.quantize:
                args, kwargs = call(dataclasses.replace(QuantizeNode(node).arguments, rowwise=[], columnwise=[]))
            lines.append(f"{node.target} {fx.map_arg((args, kwargs), lambda n: order[n])}")
    return "\n".join(lines)


def _takes_layout(node: fx.Node) -> bool:
    """Give whether ``node`` is an output of quantize; other getitems take parts (of a packed weight that is split)."""
    return node.target is getitem and node.all_input_nodes[0].target is ops.quantize
