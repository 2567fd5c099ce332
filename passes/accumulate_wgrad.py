"""Add wgrad's results to FP32 gradients, without rounding them to the weights' dtype (``accumulate_wgrad=True``).

    dw = scaled_mm(qdy, qx, out_dtype=bf16)             ->      dw = scaled_mm(qdy, qx, out_dtype=f32, addend=buffer)
    return y, ..., dw.to(f32), ...                              copy_(buffer, dw);  return y, ..., None, ...

The buffer is ``weight.main_grad``, or the ``.grad`` of an FP32 weight (``runtime/main_grads.py``). Autograd then has no
gradient of the weight to add. A bf16 result that autograd casts and adds moves 20 bytes for each number: written (2),
cast (2 + 4), added (4 + 4 + 4). An FP32 result that is added in a kernel of its own moves 16; a GEMM that adds it, 8.
With too few spare inputs the graph is not changed; it is traced again with enough of them.

Refuses (leaves the gradient to autograd) weights without such a buffer, or whose gradient something waits for (hooks,
DDP, FSDP2); gradients that are a sum or a part, or transposed; wgrads that no scaled GEMM computes, or none in FP32.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, cast

import torch
from torch import fx

from fp8graph.compat.ops import named_arguments
from fp8graph.ir import ops
from fp8graph.ir.compilation import Compilation
from fp8graph.ir.edit import insert, set_argument, set_direction, update_value
from fp8graph.ir.extra_inputs import Gradient
from fp8graph.ir.keys import GEMM_KEY
from fp8graph.ir.nodes import aten, nodes, value
from fp8graph.ir.sources import graph_inputs
from fp8graph.ir.verify import quantizers_of
from fp8graph.numerics.scalings import SCALINGS

_NAME = "accumulate_wgrad"
_EMULATED = "its wgrad is emulated"
_GROUPED = "it is one of experts"
_OTHERS: Final[dict[Any, str]] = {
    aten.mm.default: _EMULATED,
    aten.bmm.default: _EMULATED,
    ops.scaled_grouped_mm: _GROUPED,
    ops.grouped_mm: _GROUPED,
}
_CONVERT = torch.ops.prims.convert_element_type.default


def accumulate_wgrad(graph: fx.Graph, compilation: Compilation) -> None:
    if not compilation.known.settings.accumulate_wgrad or compilation.known.subgraph:
        return
    (output,) = graph.find_nodes(op="output")
    results = list(cast("Sequence[fx.Node | None]", output.args[0]))
    primals = [(node, index) for node, index in graph_inputs(graph) if not str(node.target).startswith("tangents")]
    first = len(results) - len(primals)  # the gradients come last, one for each input
    found: dict[fx.Node, tuple[int, Gradient]] = {}
    moved: dict[tuple[str, int, str], str] = {}  # by site and GEMM: what adding to the gradient moves
    for wgrad in nodes(graph, (ops.scaled_mm, *_OTHERS)):
        if wgrad.meta.get(GEMM_KEY, (0, ""))[1] != "wgrad":
            continue
        site = compilation.sites[wgrad.meta[GEMM_KEY][0]]
        place = _result_of(wgrad, output, results) if wgrad.target is ops.scaled_mm else _OTHERS[wgrad.target]
        reason = place if isinstance(place, str) else None
        if isinstance(place, int):
            parameter, index = primals[place - first] if place >= first else (wgrad, None)
            reason = _why_not(wgrad, parameter, index, compilation)
            if reason is None:
                shape, device = tuple(value(parameter).shape), value(parameter).device
                found[wgrad] = place, Gradient(parameter=cast(int, index), shape=shape, device=device)
                moved[site.fqn, site.index, "wgrad"] = _moves(wgrad, parameter, compilation)
        if reason is not None:
            compilation.refuse("FP32 gradient", site, reason)
    taken = compilation.take(graph, [gradient for _, gradient in found.values()])
    if not found or taken is None:
        return
    compilation.amend(moved, dtype="fp32")
    for buffer, (wgrad, (place, _)) in zip(taken, found.items(), strict=True):
        set_argument(wgrad, "out_dtype", torch.float32)
        set_argument(wgrad, "addend", buffer)
        update_value(wgrad)
        with graph.inserting_before(output):
            copy = insert(graph, aten.copy_.default, (buffer, wgrad), like=wgrad, made_by=_NAME)
        set_direction(copy, "must_be_in_backward")
        results[place] = None
    output.args = (type(output.args[0])(results),)
    graph.eliminate_dead_code()


def _moves(wgrad: fx.Node, parameter: fx.Node, compilation: Compilation) -> str:
    own, other = value(wgrad).dtype, value(parameter).dtype
    cast_bytes = own.itemsize + other.itemsize if own != other else 0
    before = own.itemsize + cast_bytes + 3 * other.itemsize
    gemm = SCALINGS[named_arguments(wgrad)["scaling"]].gemm
    after = 8 if compilation.hardware_of(wgrad).adds(gemm) else 16
    return f"added to an FP32 gradient: {after} bytes moved for each number, {before} through autograd"


def _result_of(wgrad: fx.Node, output: fx.Node, results: Sequence[fx.Node | None]) -> int | str:
    """The place of ``wgrad`` among the graph's results, behind casts and transpositions; else why there is none."""
    node, transposed = wgrad, False
    while True:
        users = [user for user in node.users if user.users or user is output]
        if len(users) != 1:
            return "its wgrad is read by several"
        (user,) = users
        if user is output:
            break
        if user.target is aten.permute.default:
            transposed = not transposed
        elif user.target is not _CONVERT:
            return f"its wgrad is not its gradient yet: {user.name} follows"
        node = user
    if transposed:
        return "it is stored transposed"
    places = [place for place, result in enumerate(results) if result is node]
    return places[0] if len(places) == 1 else "its wgrad is the gradient of several weights"


def _why_not(wgrad: fx.Node, parameter: fx.Node, index: int | None, compilation: Compilation) -> str | None:
    if index is None or index not in compilation.known.gradients:
        return "it is no parameter"
    if (reason := compilation.known.gradients[index]) is not None:
        return reason
    given: dict[str, Any] = named_arguments(wgrad)
    if value(parameter).shape != value(wgrad).shape:
        return "it is padded"
    return compilation.hardware_of(wgrad).obstacle(*quantizers_of(given), torch.float32)
