"""Quantized linears: which of them can be fused into one GEMM, and why others cannot."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from operator import getitem
from typing import Any, Final

from torch import fx

from fp8graph.analysis.same_value import value_key
from fp8graph.analysis.siblings import kin, size_in_group
from fp8graph.compat import aot
from fp8graph.compat.ops import named_arguments
from fp8graph.ir import ops
from fp8graph.ir.compilation import Compilation
from fp8graph.ir.keys import GEMM_KEY, ROWS_KEY
from fp8graph.ir.nodes import nodes, value
from fp8graph.ir.quantize_node import QuantizeNode
from fp8graph.ir.sites import Site
from fp8graph.recipes import GemmName

# the sides of each GEMM whose operand belongs to the linear alone; the operand of the others is x
_OWN: Final[dict[GemmName, str]] = {"fprop": "b", "dgrad": "ab", "wgrad": "a"}
_PART: Final = "a tensor subclass holds its weight, and may compare the strides and offsets of its parts' gradients"
_GATHERED: Final = "its weight or gradient is gathered in FP8"


@dataclass(frozen=True, kw_only=True, eq=False)
class Linear:
    """A site whose GEMMs may be fused, with its scaled_mm nodes."""

    site: Site
    gemms: dict[GemmName, fx.Node]
    size: int  # N
    refusal: str = ""  # why it is multiplied by itself, whatever its siblings

    @property
    def x(self) -> Any:
        """The tensor that is quantized for fprop; linears of other recipes quantize it in another way."""
        source = _source(self.gemms["fprop"], "a" if self.site.gemms[0].a.operand == "input" else "b")
        return value_key(QuantizeNode(source).asked.x) if source.target is ops.quantize else source

    def quantized(self) -> dict[tuple[GemmName, str], fx.Node]:
        """The quantize nodes of the weight and of the gradient, by where they are used."""
        return {(gemm, side): _source(node, side) for gemm, node in self.gemms.items() for side in _OWN[gemm]}


def _source(gemm: fx.Node, side: str) -> fx.Node:
    """The node whose output is operand "a" or "b" of a scaled matmul; what is no output, itself."""
    operand = named_arguments(gemm)[side]
    return operand.all_input_nodes[0] if operand.target is getitem else operand


def linears_of(graph: fx.Graph, compilation: Compilation) -> Iterator[Linear]:
    multiplied: dict[int, dict[GemmName, fx.Node]] = {}
    for node in nodes(graph, (ops.scaled_mm,)):
        site, gemm = node.meta[GEMM_KEY]
        multiplied.setdefault(site, {})[gemm] = node
    for position, gemms in multiplied.items():
        site = compilation.sites[position]
        own = Linear(site=site, gemms=gemms, size=0).quantized().values()
        here = {q.target for q in own} == {ops.quantize}  # on this rank, not gathered from others
        if "fprop" not in gemms or site.op != "linear":
            continue
        if not here:
            stored = compilation.decisions[site.gemms[0].node].stored is not None
            refusal = "its weight is stored with scales of its own" if stored else _GATHERED
            yield Linear(site=site, gemms=gemms, size=0, refusal=refusal)
            continue
        size = size_in_group(site, [QuantizeNode(q).asked.block for q in own])
        users = {user for q in own for output in q.users for user in output.users}
        if _is_part_of_subclass(site.gemms[0].b.tensor):
            yield Linear(site=site, gemms=gemms, size=0, refusal=_PART)
        elif isinstance(size, str):
            yield Linear(site=site, gemms=gemms, size=0, refusal=size)
        elif users <= set(gemms.values()):
            yield Linear(site=site, gemms=gemms, size=size)
        else:
            refusal = "another matmul reads its quantized weight or gradient, too (tied weights?)"
            yield Linear(site=site, gemms=gemms, size=size, refusal=refusal)


def _is_part_of_subclass(weight: fx.Node) -> bool:
    while weight.op != "placeholder" and len(weight.all_input_nodes) == 1:  # through casts and views
        weight = weight.all_input_nodes[0]
    return aot.is_part_of_subclass(weight)


def key_of(linear: Linear) -> dict[str, Any]:
    """A key equal for linears that can be fused: module, input, and how each operand is quantized and multiplied."""
    quantized: list[Any] = []
    for (gemm, side), q in linear.quantized().items():
        recipes = {row.recipe for row in q.meta.get(ROWS_KEY, [])}
        asked = QuantizeNode(q).asked
        quantized.append((gemm, side, value(asked.x).dtype, repr(dataclasses.replace(asked, x=None)), *recipes))
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
    module, region, *when = kin(linear.site)
    return {
        "its module": module,
        "autocast region": region,
        "where it runs (torch.no_grad, checkpoint)": tuple(when),
        "which GEMMs run in FP8, or at all (a frozen weight has no wgrad)": frozenset(linear.gemms),
        "having a bias": given["fprop"]["bias"] is None,
        "the order in which backward runs its GEMMs": tuple(linear.gemms),
        "recipe, dtype or layouts": (*quantized, *settings),
        "how its input is quantized": tuple(shared),
    }


def why_apart(linear: Linear, siblings: Sequence[Linear]) -> str:
    """Why a linear is not fused with the others that read its input."""
    own = key_of(linear)
    for other in siblings:
        if other is not linear and not other.refusal:
            different = [what for what, values in key_of(other).items() if values != own[what]]
            name = other.site.fqn.rpartition(".")[2]
            if not different:
                return f"backward does more with the gradients that it and {name} give their input than add them up"
            return f"it differs from {name} in {different[0]}"
    return "the others that read its input cannot be joined with it"
