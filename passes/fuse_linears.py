"""Fuse linears of one module that share their input into one GEMM: q, k and v; gate and up.

    q = scaled_mm(qx, qwq)                              qw = quantize(wq, more=[wk], dim=-2)
    k = scaled_mm(qx, qwk)                      ->      qk = scaled_mm(qx, qw);  q, k = slices of its columns
    dx = scaled_mm(qdq, qwq.columnwise)                 qdy = quantize(dq, more=[dk], dim=-1)
       + scaled_mm(qdk, qwk.columnwise)         ->      dx = scaled_mm(qdy, qw.columnwise)
    dwq = scaled_mm(qdq.columnwise, qx.columnwise)      dw = scaled_mm(qdy.columnwise, qx.columnwise)
    dwk = scaled_mm(qdk.columnwise, qx.columnwise) ->   dwq, dwk = slices of its rows

The joined weight is quantized as one tensor, and so is the joined gradient: its parts share a scale where one scale
spans them (one per tensor; one per row that is contracted), as in Transformer Engine's fused projections. The GEMM's
accumulator adds up the gradients of the input. If slices of fprop's result would have to be copied, or would keep
more memory alive for backward than they need, fprop multiplies slices of the weight one by one
(``can_be_slices``).

Refuses (multiplies one by one) linears whose recipes, layouts or biases differ from their neighbours'; output sizes
that are not multiples of the tile; weights and gradients with further uses; gradients of the input that are used for
more than their sum.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from operator import getitem
from typing import Any, Final, cast

from torch import fx

from fp8graph.analysis.siblings import (
    FORWARD_APART,
    are_summed,
    can_be_slices,
    sibling_key,
    size_in_group,
    take_out_of_sum,
)
from fp8graph.compat import aot
from fp8graph.compat.inductor import erase_unused, stable_topological_sort
from fp8graph.compat.ops import named_arguments
from fp8graph.ir import ops
from fp8graph.ir.compilation import Compilation
from fp8graph.ir.edit import insert, parts_of, set_argument, slice_result, update_value
from fp8graph.ir.nodes import GEMM_KEY, OPERAND_KEY, USES_KEY, aten, nodes, value, value_key
from fp8graph.ir.quantize_node import QuantizeNode
from fp8graph.ir.sites import Site
from fp8graph.recipes import GemmName

_JOINED_DIM = {"weight": -2, "grad_output": -1}  # of [N, K] and of [M, N]
# the sides of each GEMM whose operand belongs to the linear alone; the operand of the others is x
_OWN: Final[dict[GemmName, str]] = {"fprop": "b", "dgrad": "ab", "wgrad": "a"}
_PART: Final = "a tensor subclass holds its weight, and may compare the strides and offsets of its parts' gradients"
_GATHERED: Final = "its weight or gradient is gathered in FP8"


def are_fused(graph: fx.Graph, compilation: Compilation) -> bool:
    """Return whether the settings ask for it."""
    return compilation.facts.settings.fuses_linears


def fuse_linears(graph: fx.Graph, compilation: Compilation) -> None:
    groups: dict[Any, list[FusableSite]] = {}
    siblings: dict[Any, list[FusableSite]] = {}
    for linear in linears_of(graph, compilation):
        siblings.setdefault((sibling_key(linear.site)[0], linear.x), []).append(linear)
        if not linear.refusal:
            groups.setdefault(tuple(fusion_key(linear).values()), []).append(linear)
    joined = [linears for linears in groups.values() if len(linears) > 1 and are_summed(_dgrads(linears))]
    for linears in siblings.values():
        for linear in linears:
            if len(linears) > 1 and not any(linear in several for several in joined):
                compilation.refuse("one GEMM", linear.site, linear.refusal or why_not_fused(linear, linears))
    for linears in joined:
        multiplied = list(_group(graph, linears, compilation))
        for linear in linears:
            others = tuple(x.site.fqn.rpartition(".")[2] for x in linears if x is not linear)
            for gemm in multiplied:
                compilation.fused[linear.site.fqn, linear.site.index, gemm] = others
            if "fprop" not in multiplied:
                compilation.refuse("one GEMM", linear.site, FORWARD_APART)
    if joined:
        compilation.amend({key: f"one GEMM with {', '.join(others)}" for key, others in compilation.fused.items()})
        stable_topological_sort(graph)  # the joined tensors are needed where the first linear runs
        erase_unused(graph)


def _dgrads(linears: Sequence[FusableSite]) -> list[fx.Node]:
    return [linear.gemms["dgrad"] for linear in linears if "dgrad" in linear.gemms]


def _group(graph: fx.Graph, linears: Sequence[FusableSite], compilation: Compilation) -> Iterator[GemmName]:
    """Turn the first linear's nodes into those of the group. Yields the GEMMs that are now fused."""
    sizes = [linear.size for linear in linears]
    for place, quantized in linears[0].quantized().items():
        if QuantizeNode(quantized).arguments.more is None:  # else already joined for another GEMM
            _join(quantized, [linear.quantized()[place] for linear in linears[1:]])
    for decoders in zip(*(linear.decoders for linear in linears), strict=True):
        _read_parts(decoders, sizes, ("data", "scale_inv", "global_scale_inv"))
    for gemm, first in linears[0].gemms.items():
        others = [linear.gemms[gemm] for linear in linears[1:]]
        if gemm == "fprop" and not can_be_slices([first, *others]):
            _read_parts([first, *others], sizes, _operand("b"))
            continue
        if gemm == "wgrad" and compilation.facts.settings.accumulate_wgrad:  # each is added to a gradient of its own
            _read_parts([first, *others], sizes, _operand("a"))
            continue
        biases = [named_arguments(node)["bias"] for node in (first, *others)]
        if None not in biases:
            with graph.inserting_before(first):
                bias = insert(graph, aten.cat.default, (biases,), like=first, name="bias")
            set_argument(first, "bias", bias)
        update_value(first)
        if gemm == "dgrad":
            for other in others:
                take_out_of_sum(other)
        else:
            slice_result(graph, [first, *others], sizes, dim=1 if gemm == "fprop" else 0)
        yield gemm


def _join(first: fx.Node, others: Sequence[fx.Node]) -> None:
    """Let ``first`` quantize the tensors of ``others`` together with its own, as one."""
    dim = _JOINED_DIM[first.meta[OPERAND_KEY]]
    QuantizeNode(first).ask(more=[QuantizeNode(node).arguments.x for node in others], dim=dim)
    for node in (first, *first.users):
        update_value(node)
    if USES_KEY in first.meta:  # one amax: the rows of the others become further names of its row
        rows = [row for node in (first, *others) for row in node.meta[USES_KEY]]
        first.meta[USES_KEY] = list(dict.fromkeys(rows))


def _operand(side: str) -> tuple[str, ...]:
    """Return the arguments of a scaled matmul that are one operand."""
    return side, f"scale_inv_{side}", f"global_scale_inv_{side}"


def _read_parts(readers: Sequence[fx.Node], sizes: Sequence[int], names: Sequence[str]) -> None:
    """Let the node of each linear read its rows of the joined weight, or of the joined gradient's columnwise copy."""
    graph = readers[0].graph
    for name in names:  # data [N, K], scales [N / tile, K / tile] or one
        joined = cast("fx.Node | None", named_arguments(readers[0])[name])
        if joined is None:
            continue
        rows = value(joined).shape[0] if value(joined).ndim == 2 else 0
        parts = parts_of(graph, joined, readers, [size * rows // sum(sizes) for size in sizes], 0) if rows else ()
        for node, part in zip(readers, parts or [joined] * len(readers), strict=True):
            set_argument(node, name, part)


@dataclass(frozen=True, kw_only=True, eq=False)
class FusableSite:
    """A site whose GEMMs may be fused, with its scaled_mm nodes."""

    site: Site
    gemms: dict[GemmName, fx.Node]
    size: int  # N
    decoders: tuple[fx.Node, ...] = ()  # what decodes its weight for backward
    refusal: str = ""  # why it is multiplied by itself, whatever its siblings

    @property
    def x(self) -> Any:
        """The tensor that is quantized for fprop; linears of other recipes quantize it in another way."""
        source = _source(self.gemms["fprop"], "a" if self.site.gemms[0].a.operand == "input" else "b")
        return value_key(QuantizeNode(source).arguments.x) if source.target is ops.quantize else source

    def quantized(self) -> dict[tuple[GemmName, str], fx.Node]:
        """Return the quantize nodes of the weight and of the gradient, by where they are used."""
        return {(gemm, side): _source(node, side) for gemm, node in self.gemms.items() for side in _OWN[gemm]}


def _source(gemm: fx.Node, side: str) -> fx.Node:
    """Return the node whose output is operand "a" or "b" of a scaled matmul; what is no output, itself."""
    operand = named_arguments(gemm)[side]
    return operand.all_input_nodes[0] if operand.target is getitem else operand


def linears_of(graph: fx.Graph, compilation: Compilation) -> Iterator[FusableSite]:
    multiplied: dict[int, dict[GemmName, fx.Node]] = {}
    for node in nodes(graph, (ops.scaled_mm,)):
        site, gemm = node.meta[GEMM_KEY]
        multiplied.setdefault(site, {})[gemm] = node
    for position, gemms in multiplied.items():
        site = compilation.sites[position]
        own = FusableSite(site=site, gemms=gemms, size=0).quantized().values()
        here = {q.target for q in own} == {ops.quantize}  # on this rank, not gathered from others
        if "fprop" not in gemms or site.op != "linear":
            continue
        if compilation.decisions[site.gemms[0].node].stored is not None:  # see fuse_stored_linears
            continue
        if not here:
            yield FusableSite(site=site, gemms=gemms, size=0, refusal=_GATHERED)
            continue
        size = size_in_group(site, [QuantizeNode(q).arguments.block for q in own])
        users = dict.fromkeys(user for q in own for output in q.users for user in output.users)
        decoders = tuple(user for user in users if user.target is ops.dequantize)
        if _is_part_of_subclass(site.gemms[0].b.tensor):
            yield FusableSite(site=site, gemms=gemms, size=0, refusal=_PART)
        elif isinstance(size, str):
            yield FusableSite(site=site, gemms=gemms, size=0, refusal=size)
        elif {user for user in users if user not in decoders} <= set(gemms.values()):
            yield FusableSite(site=site, gemms=gemms, size=size, decoders=decoders)
        else:
            refusal = "another matmul reads its quantized weight or gradient, too (tied weights?)"
            yield FusableSite(site=site, gemms=gemms, size=size, refusal=refusal)


def _is_part_of_subclass(weight: fx.Node) -> bool:
    while weight.op != "placeholder" and len(weight.all_input_nodes) == 1:  # through casts and views
        weight = weight.all_input_nodes[0]
    return aot.is_part_of_subclass(weight)


def fusion_key(linear: FusableSite) -> dict[str, Any]:
    """Return a key equal for linears that can be fused: module, input, and how each operand is quantized and
    multiplied.
    """
    quantized: list[Any] = []
    for (gemm, side), q in linear.quantized().items():
        recipes = {row.recipe for row in q.meta.get(USES_KEY, [])}
        request = QuantizeNode(q).arguments
        quantized.append((gemm, side, value(request.x).dtype, repr(dataclasses.replace(request, x=None)), *recipes))
    given: dict[GemmName, dict[str, Any]] = {gemm: named_arguments(node) for gemm, node in linear.gemms.items()}
    shared = [
        arguments[name]
        for gemm, arguments in given.items()
        for side in "ab"
        if side not in _OWN[gemm]
        for name in (side, f"scale_inv_{side}")
    ]
    settings = [
        str({name: x for name, x in arguments.items() if name != "bias" and not isinstance(x, fx.Node)})
        for arguments in given.values()
    ]
    module, region, *when = sibling_key(linear.site)
    return {
        "its module": module,
        "autocast region": region,
        "where it runs (torch.no_grad, checkpoint)": tuple(when),
        "which GEMMs run in FP8, or at all (a frozen weight has no wgrad)": (
            frozenset(linear.gemms),
            len(linear.decoders),
        ),
        "having a bias": given["fprop"]["bias"] is None,
        "the order in which backward runs its GEMMs": tuple(linear.gemms),
        "recipe, dtype or layouts": (*quantized, *settings),
        "how its input is quantized": tuple(shared),
    }


def why_not_fused(linear: FusableSite, siblings: Sequence[FusableSite]) -> str:
    """Return the reason why a linear is not fused with the others that read its input."""
    own = fusion_key(linear)
    for other in siblings:
        if other is not linear and not other.refusal:
            different = [what for what, values in fusion_key(other).items() if values != own[what]]
            name = other.site.fqn.rpartition(".")[2]
            if not different:
                return f"backward does more with the gradients that it and {name} give their input than add them up"
            return f"it differs from {name} in {different[0]}"
    return "the others that read its input cannot be joined with it"
