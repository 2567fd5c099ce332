"""Fuse linears whose weights arrive quantized, and that share their input, into one GEMM: q, k and v; gate and up.

    q = scaled_mm(qx, wq, sx, swq)                      w = join([wq, wk]);  sw = join([swq, swk])
    k = scaled_mm(qx, wk, sx, swk)              ->      qk = scaled_mm(qx, w, sx, sw);  q, k = slices of its columns

Each row of the joined weight has the code and the scale that it had: no number changes. ``hoist_weights`` takes the
joins out of the graph: the weights are moved into one memory once, of which each is a part.

Where a weight is padded or transposed, its copy is joined in place of it.

Refuses (multiplies one by one) linears in a graph that keeps no weights or has a backward, whose dgrad reads a
transposed copy of each; weights with one scale for all of their numbers, or with a global one; those that are computed
from anything but parameters and buffers, gathered by FSDP2, or parts of a tensor subclass; sizes that are not multiples
of their tiles; linears whose inputs are quantized in different ways, as by static scales of their own; and results
whose slices would be copied.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from operator import getitem
from typing import Any, Final

from torch import fx

from fp8graph.analysis.siblings import FORWARD_APART, can_be_slices, fits_in_group, sibling_key
from fp8graph.compat import aot
from fp8graph.compat.inductor import erase_unused, stable_topological_sort
from fp8graph.compat.ops import named_arguments
from fp8graph.hardware import Hardware
from fp8graph.ir import ops
from fp8graph.ir.compilation import Compilation, GraphFacts
from fp8graph.ir.edit import insert, set_argument, slice_result, update_value
from fp8graph.ir.naming import graph_inputs
from fp8graph.ir.nodes import GEMM_KEY, aten, nodes, static_size, value, value_key
from fp8graph.ir.quantize_node import QuantizeNode
from fp8graph.ir.sites import Foreseen, Site
from fp8graph.ir.weight_graphs import computed_from, inputs_to_keep
from fp8graph.numerics.scalings import SCALINGS

_OWN: Final = ("b", "scale_inv_b", "bias")
_SAME: Final = (aten.detach.default, aten.alias.default)  # a library reads parameters so


def may_be_joined(graph: fx.Graph, compilation: Compilation) -> bool:
    """Return whether linears are to be fused, and some weight is multiplied as it arrives."""
    decisions = compilation.decisions.values()
    return compilation.facts.settings.fuses_linears and any(decision.stored is not None for decision in decisions)


def wanted_joins(foreseen: Callable[[], Sequence[Foreseen]], facts: GraphFacts) -> int:
    """Two for each group of linears: the data, and the scales."""
    if not facts.settings.fuses_linears or facts.training or not facts.keeps_weights:
        return 0
    siblings = [each.sibling_key for each in foreseen() if each.stored and _joins(each.stored, each.hardware)]
    return 2 * sum(count > 1 for count in Counter(siblings).values())


def _joins(scaling: str, hardware: Hardware) -> bool:
    kind = SCALINGS[scaling]
    return not kind.one_scale and kind.packed == 1 and hardware.multiplies(scaling)


def fuse_stored_linears(graph: fx.Graph, compilation: Compilation) -> None:
    siblings: dict[Any, list[fx.Node]] = {}
    for fprop in _fprops_of_stored(graph, compilation):
        site = _site(fprop, compilation)
        key = sibling_key(site), value_key(_input(fprop, "a" if _is_on_the_right(site) else "b"))
        siblings.setdefault(key, []).append(fprop)
    fused: dict[tuple[str, int, str], tuple[str, ...]] = {}
    for several in siblings.values():
        if len(several) > 1:
            fused |= _fuse(graph, several, compilation)
    if fused:
        compilation.fused.update(fused)
        compilation.amend({key: f"one GEMM with {', '.join(others)}" for key, others in fused.items()})
        stable_topological_sort(graph)  # the joined result is needed where the first linear runs
        erase_unused(graph)


def _fuse(
    graph: fx.Graph, fprops: Sequence[fx.Node], compilation: Compilation
) -> dict[tuple[str, int, str], tuple[str, ...]]:
    """Join those of ``fprops`` that can be, and say why the others cannot. Returns the siblings of each, by its row."""
    fused: dict[tuple[str, int, str], tuple[str, ...]] = {}
    sites = {fprop: _site(fprop, compilation) for fprop in fprops}
    reasons = {fprop: _why_not_by_itself(fprop, compilation) for fprop in fprops}
    groups: dict[Any, list[fx.Node]] = {}
    alike = [fprop for fprop in fprops if not reasons[fprop]]
    for fprop in alike:
        groups.setdefault(tuple(_differences(fprop).values()), []).append(fprop)
    for group in groups.values():
        if len(group) > 1 and not can_be_slices(group):
            reasons.update(dict.fromkeys(group, FORWARD_APART))
        elif len(group) > 1:
            names = {fprop: sites[fprop].fqn.rpartition(".")[2] for fprop in group}
            for fprop in group:
                others = tuple(name for other, name in names.items() if other is not fprop)
                fused[sites[fprop].fqn, sites[fprop].index, "fprop"] = others
            _join(graph, group)
        else:
            reasons[group[0]] = _why_alone(group[0], [fprop for fprop in alike if fprop is not group[0]], sites)
    for fprop, reason in reasons.items():
        if reason:
            compilation.refuse("one GEMM", sites[fprop], reason)
    return fused


def _join(graph: fx.Graph, fprops: Sequence[fx.Node]) -> None:
    """Turn the first GEMM into that of all."""
    first = fprops[0]
    sizes = [value(fprop).shape[1] for fprop in fprops]
    for name, op in zip(_OWN, (ops.join, ops.join, aten.cat.default), strict=True):
        parts = [named_arguments(fprop)[name] for fprop in fprops]
        if all(part is not None for part in parts):
            parts = [*map(_itself, parts)]
            with graph.inserting_before(first):
                set_argument(first, name, insert(graph, op, (parts,), like=first, name=f"joined_{name}"))
    update_value(first)
    slice_result(graph, fprops, sizes, dim=1)


def _fprops_of_stored(graph: fx.Graph, compilation: Compilation) -> list[fx.Node]:
    """Return the native fprops that multiply a weight as it arrives."""
    fprops: list[fx.Node] = []
    for node in nodes(graph, (ops.scaled_mm,)):
        site, gemm = _site(node, compilation), node.meta[GEMM_KEY][1]
        if gemm == "fprop" and site.op == "linear" and compilation.decisions[site.gemms[0].node].stored is not None:
            fprops.append(node)
    return fprops


def _itself(tensor: fx.Node) -> fx.Node:
    """Return the tensor of which ``tensor`` is another name."""
    while tensor.target in _SAME:
        (tensor,) = tensor.all_input_nodes
    return tensor


def _site(fprop: fx.Node, compilation: Compilation) -> Site:
    return compilation.sites[fprop.meta[GEMM_KEY][0]]


def _is_on_the_right(site: Site) -> bool:
    """Return whether the program multiplies by the weight, not the weight by its input."""
    return site.gemms[0].a.operand == "input"


def _input(fprop: fx.Node, side: str) -> fx.Node:
    """Return the tensor that is quantized for a GEMM as its operand ``side``."""
    operand = named_arguments(fprop)[side]
    quantized = operand.all_input_nodes[0] if operand.target is getitem else operand
    return QuantizeNode(quantized).arguments.x if quantized.target is ops.quantize else quantized


def _why_not_by_itself(fprop: fx.Node, compilation: Compilation) -> str:
    """Return the reason why a linear is multiplied by itself, whatever its siblings; "" if it may be joined."""
    facts, given = compilation.facts, named_arguments(fprop)
    inputs = dict(graph_inputs(fprop.graph))
    if facts.training:
        return "the graph has a backward, whose dgrad reads a transposed copy of each weight"
    if not facts.keeps_weights or facts.subgraph:
        return "weights would be joined in each call: nothing is kept between calls (cache_weights=False, a subgraph)"
    if not _is_on_the_right(_site(fprop, compilation)):
        return "its weight is on the left: write x @ w.T in place of w @ x"
    data, scales, kind = _itself(given["b"]), _itself(given["scale_inv_b"]), SCALINGS[given["scaling"]]
    if inputs.get(data) in facts.gathered:
        return "its weight is whole while the graph runs, and no longer"
    if data in inputs and aot.is_part_of_subclass(data):
        return "a tensor subclass holds its weight, whose parts cannot be moved into one memory"
    if kind.one_scale:
        return "its weight has one scale, and a joined weight would need one per row: sums would be rounded differently"
    if given["global_scale_inv_b"] is not None:
        return "its weight has a global scale of its own"
    size, block = static_size(value(data).shape[0]), given["block_b"]
    if size is None or not fits_in_group(size, [block]):
        return f"its output size {size} is not a multiple of {max([16, *block])}"
    kept = inputs_to_keep(fprop.graph, facts)
    if any(node not in kept and computed_from(node, kept) is None for node in (data, scales)):
        return "its weight or scales are neither parameters nor buffers, and may change with each call"
    return ""


def _differences(fprop: fx.Node) -> Mapping[str, Any]:
    """By name, the things that linears must have in common to be joined."""
    given = named_arguments(fprop)
    settings = {name: x for name, x in given.items() if not isinstance(x, fx.Node)}
    return {
        "how its input is quantized": (given["a"], given["scale_inv_a"], given["global_scale_inv_a"]),
        "having a bias": given["bias"] is None,
        "the dtype or scaling of its weight": (
            *(value(given["b"]).dtype, value(given["b"]).shape[1], value(given["scale_inv_b"]).shape[1:]),
            str({name: x for name, x in settings.items() if name != "bias"}),
        ),
    }


def _why_alone(fprop: fx.Node, others: Sequence[fx.Node], sites: Mapping[fx.Node, Site]) -> str:
    if not others:
        return "the others that read its input cannot be joined with it"
    own, other = _differences(fprop), others[0]
    different = next(what for what, of_other in _differences(other).items() if of_other != own[what])
    return f"it differs from {sites[other].fqn.rpartition('.')[2]} in {different}"
