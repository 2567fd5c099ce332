"""Take the quantization of weights out of the graph: their FP8 copies become graph inputs.

    qw = quantize(w, rowwise, columnwise)               ->      (runs when w has changed, ``weight_cache.py``)
    y = scaled_mm(qx[0], qw[0], qx[1], qw[2])                   y = scaled_mm(qx[0], w_rowwise, qx[1], w_scale_inv)

    wt = columnwise(w)                                  ->      (a weight that arrives quantized: made once)

Any tensor that is computed from parameters alone is a weight: a parameter behind views and casts, several
concatenated, a parametrization. With too few spare inputs the graph is not changed; it is traced again with enough of
them. With delayed scaling a weight's amax is recorded when the weight is quantized.

Leaves alone a graph with a backward, unless ``cache_weights="update"``: an update follows, so that no copy would be
used twice, and whoever writes the weights, by whatever means, the next forward reads what he wrote.

Refuses (quantizes in the graph) weights whose computation also reads a buffer or an input, draws random numbers, or has
a dynamic size; and weights that are gathered from several ranks, in the graph or by FSDP2 around it: a copy of the
whole weight would take the memory that sharding saves. A shard that is quantized before it is gathered is kept.

Of weights that stay in the graph, :func:`note_weights` notes how it quantizes them, for an export of what fprop
multiplies. It leaves out weights that read anything but parameters, those that are gathered, and the bodies of
higher-order ops.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from operator import getitem
from typing import Any, ClassVar, Self, cast

import torch
from torch import fx

from fp8graph.analysis.refusals import site_of, why_not_cached
from fp8graph.analysis.siblings import fits_in_group
from fp8graph.analysis.weight_graphs import computed_from, copy_of, placeholder, signature_of, sources_of
from fp8graph.ir import ops
from fp8graph.ir.compilation import Compilation, Known
from fp8graph.ir.edit import insert
from fp8graph.ir.extra_inputs import ExtraInput, Rename, SpareInputs
from fp8graph.ir.naming import graph_inputs
from fp8graph.ir.nodes import (
    CACHED_KEY,
    OPERAND_KEY,
    ROWS_KEY,
    fake_mode_of,
    module_path,
    nodes,
    runs_without_gradients,
    value,
)
from fp8graph.ir.quantize_node import QuantizeNode
from fp8graph.ir.sites import Foreseen
from fp8graph.numerics import history, quantization
from fp8graph.passes.connect_scales import PageLayout, connect_scales
from fp8graph.recipes import LAYOUTS

_TRANSPOSED = "columnwise"


@dataclass(frozen=True, kw_only=True, eq=False)
class QuantizedWeight(ExtraInput):
    """A weight whose FP8 copy a graph takes as inputs, and how to make that copy (``weight_cache.py``)."""

    store: ClassVar = "weights"
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
        made = self.made_outputs()
        outputs = [made[name] for name in self.outputs]
        return [torch.empty(val.shape, dtype=val.dtype, device=val.device) for val in outputs]

    def titles(self, name: Callable[[int], str]) -> list[str]:
        made_of = ", ".join(map(name, self.parameters))
        return [f"{made_of} {output}" for output in self.outputs]

    def renamed(self, rename: Rename) -> Self:
        return self if self.page is None else dataclasses.replace(self, page=self.page.renamed(rename))


@dataclass(frozen=True, kw_only=True, eq=False)
class QuantizedInGraph(ExtraInput):
    """A weight that the graph itself quantizes, for an export of what it multiplies."""

    weight: QuantizedWeight


def may_keep_weights(graph: fx.Graph, compilation: Compilation) -> bool:
    """Whether copies of weights are kept beside this graph, or why they are not is to be said: FSDP2 gathers some."""
    known = compilation.known
    return bool(known.keeps_weights or known.gathered) and bool(known.settings.cache_weights) and not known.subgraph


def wanted_copies(foreseen: Sequence[Foreseen], known: Known) -> int:
    """The tensors of the copies: data and scales for each layout. Linears that are fused have one copy."""
    if not known.keeps_weights:
        return 0
    copies: dict[Any, int] = {}  # by the linears that one copy serves, and its recipe
    for each in (each for each in foreseen if each.site.parameter is not None):
        recipes = each.used("fprop", "dgrad") if known.training else each.used("fprop")
        both = known.training and len(recipes) == 1 and None not in (each.recipes["fprop"], each.recipes["dgrad"])
        for recipe in recipes:
            weight, gradient = (recipe.quantizer(operand) for operand in ("weight", "grad_output"))
            fits = fits_in_group(each.rows, (weight.block, gradient.block))
            fused = known.settings.fuse_linears and each.hardware.multiplies(weight.scaling) and fits
            names = quantization.output_names(weight.scaling, LAYOUTS if both else LAYOUTS[:1])
            copies[each.kin if fused else each, recipe] = sum(name != "amax" for name in names)
    return sum(copies.values())


def hoist_weights(graph: fx.Graph, compilation: Compilation) -> None:
    known = compilation.known
    whole = known.parameters.keys() - known.gathered.keys() if known.keeps_weights else ()
    parameters = {node: index for node, index in graph_inputs(graph) if index is not None and index in whole}
    hoist(graph, parameters, compilation, QuantizedWeight)
    for node in _quantized(graph) if known.keeps_weights or known.gathered else ():
        if CACHED_KEY not in node.meta and node.meta.get(OPERAND_KEY) == "weight":
            reason, site = why_not_cached(node, compilation), site_of(node, compilation)
            if reason and site is not None:
                compilation.refuse("kept weight", site, reason)


def hoist(
    graph: fx.Graph, parameters: Mapping[fx.Node, int], compilation: Compilation, kind: type[QuantizedWeight]
) -> None:
    """Take the weights that are computed from ``parameters`` (inputs, with their positions) as inputs."""
    found: dict[fx.Node, QuantizedWeight] = {}
    for node in _quantized(graph):
        if (body := computed_from(node, parameters)) is not None:
            made = extract if node.target is ops.quantize else _transposed
            found[node] = made(node, body, parameters, compilation, kind)
            node.meta[CACHED_KEY] = True
    taken = compilation.take(graph, [*found.values()])
    if taken is None:
        return
    for node, weight in found.items():
        placeholders = {name: taken.pop(0) for name in weight.outputs}
        outputs = QuantizeNode(node).outputs if node.target is ops.quantize else {_TRANSPOSED: node}
        for name, user in outputs.items():
            user.replace_all_uses_with(placeholders[name])
            graph.erase_node(user)
        if node.target is ops.quantize:
            graph.erase_node(node)
    if found:
        graph.eliminate_dead_code()


def _quantized(graph: fx.Graph) -> list[fx.Node]:
    """The nodes that quantize, and those that transpose what arrives quantized; without parts of another copy."""
    found = nodes(graph, (ops.quantize, ops.columnwise))
    return [node for node in found if not all(user.target is ops.columnwise for user in node.users)]


def may_be_exported(graph: fx.Graph, compilation: Compilation) -> bool:
    """Whether this is the last trace of a whole graph: with too few spare inputs it is traced again."""
    known = compilation.known
    return not known.subgraph and known.spares.wanted <= len(known.spares.indices)


def note_weights(graph: fx.Graph, compilation: Compilation) -> None:
    known = compilation.known
    whole = known.parameters.keys() - known.gathered.keys()
    parameters = {node: index for node, index in graph_inputs(graph) if index is not None and index in whole}
    found = ((node, computed_from(node, parameters)) for node in nodes(graph, (ops.quantize,)))
    compilation.extra_inputs += [
        QuantizedInGraph(weight=extract(node, body, parameters, compilation))
        for node, body in found
        if body is not None
    ]


def extract(
    node: fx.Node,
    body: Sequence[fx.Node],
    parameters: Mapping[fx.Node, int],
    compilation: Compilation,
    kind: type[QuantizedWeight] = QuantizedWeight,
) -> QuantizedWeight:
    """``node`` and the nodes that compute it, as a graph of their own."""
    sources = sources_of(body, parameters)
    quantized = QuantizeNode(node)
    asked, names = quantized.asked, quantized.names

    def copy() -> fx.Graph:
        graph, copied = copy_of(node, body, sources)
        positions = [position for position, name in enumerate(names) if name != "amax"]
        graph.output([insert(graph, getitem, (copied, i), like=node) for i in positions])
        return graph

    quantizing = recording = copy()
    signature = signature_of(quantizing)
    page = None
    if ROWS_KEY in node.meta:  # delayed scaling: a page of its own
        known = dataclasses.replace(compilation.known, spares=SpareInputs(), records_amaxes=False)
        alone = Compilation(known=known)
        connect_scales(quantizing, alone)
        (page,) = alone.extra_inputs
        assert isinstance(page, PageLayout)
        graphs: list[fx.Graph] = []
        for records in (False, True):
            graphs.append(graph := copy())
            with graph.inserting_after(graph.find_nodes(op="placeholder")[-1]), fake_mode_of(node):
                new_page = history.new_page(page.recipe.amax_history_len, 1, page.device)
                placeholder(graph, len(sources), new_page)
            spares = SpareInputs(indices=(len(sources),))
            known = dataclasses.replace(known, spares=spares, records_amaxes=records)
            connect_scales(graph, Compilation(known=known))
        quantizing, recording = graphs
    return kind(
        name=module_path(node),
        parameters=tuple(parameters[source] for source in sources),
        quantizing=quantizing,
        recording=recording,
        signature=signature,
        linears=len(asked.parts),
        outputs=tuple(quantized.outputs),
        layouts=(tuple(asked.rowwise), tuple(asked.columnwise)),
        made=tuple(name for name in names if name != "amax"),
        page=page,
        records=compilation.known.records_amaxes and page is not None and not runs_without_gradients(node),
    )


def _transposed(
    node: fx.Node,
    body: Sequence[fx.Node],
    parameters: Mapping[fx.Node, int],
    _compilation: Compilation,
    kind: type[QuantizedWeight],
) -> QuantizedWeight:
    """The same for a transposed copy of a weight that arrives quantized."""
    sources = sources_of(body, parameters)
    graph, copied = copy_of(node, body, sources)
    graph.output([copied])
    return kind(
        name=module_path(node),
        parameters=tuple(parameters[source] for source in sources),
        quantizing=graph,
        recording=graph,
        signature=signature_of(graph),
        linears=1,
        outputs=(_TRANSPOSED,),
        layouts=((), tuple(value(node).shape)),
        made=(_TRANSPOSED,),
        page=None,
        records=False,
    )
