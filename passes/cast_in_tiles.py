"""Quantize tensors to both layouts by a kernel that computes each tile of 128 x 128 once.

    h = silu(g) * u                             ->      qh = cast_in_tiles([g, u], "swiglu", ...)
    qh = quantize(h, rowwise, columnwise)

    q = quantize(x, rowwise, columnwise)        ->      q = cast_in_tiles([x], "", ...)

Inductor fuses a reduction with loops of one direction: tiles of 1x128 and of 128x1 are two kernels, each of which reads
the tensor, or computes SwiGLU again, and the amax and the cast of tiles of 128x128 are two, too. Delayed scaling's amax
and casts are one loop along rows, which stores the other layout in pieces of 16 or 32 bytes, and an amax for each row;
the kernel makes one amax. It is ``numerics/tile_kernel.py``. Numbers are those of Inductor's kernels.

Refuses (leaves to Inductor) tensors that other functions compute, which its kernels fuse with the cast; small ones;
those with ragged tiles or padding; delayed scaling in one layout; graphs that round between operations
(``emulate_precision_casts``); other devices than those whose blocks were measured, and machines without triton.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import getitem
from typing import Final, cast

import torch
from torch import fx

from fp8graph.compat import inductor
from fp8graph.compat.attention import FLEX, FORMS
from fp8graph.compat.inductor import LARGE, erase_unused
from fp8graph.ir import ops
from fp8graph.ir.edit import insert, update_value
from fp8graph.ir.nodes import CONVERT, NAMES_KEY, aten, is_view, nodes, value
from fp8graph.ir.quantize_node import Arguments, QuantizeNode
from fp8graph.numerics.tile_casts import CAST, SIZE, TileCast
from fp8graph.numerics.tiles import TRANSPOSED
from fp8graph.passes.share_sigmoid import argument_of_exponential, argument_of_silu

_SPLITS: Final = (aten.split.Tensor, aten.split_with_sizes.default)
_GEMMS: Final = (ops.scaled_mm, aten.mm.default, aten.addmm.default, aten.bmm.default)
_ATTENTION: Final = frozenset(op for form, more in FORMS.items() for op in (form, more.backward) if form is not FLEX)
_MOST: Final = 65535  # programs along the second dim of a grid


def cast_in_tiles(graph: fx.Graph) -> None:
    for node in list(nodes(graph, (ops.quantize,))):
        if (check := _check(node)) is not None:
            _rewrite(graph, node, *check)
    erase_unused(graph)


def _check(node: fx.Node) -> tuple[str, list[fx.Node]] | None:
    """Return the function and what it is computed from; None: Inductor's kernels quantize the tensor."""
    quantized = QuantizeNode(node)
    arguments = quantized.arguments
    if quantized.kind.name not in ("block", "delayed") or not _is_plain(arguments):
        return None
    if not all(map(_fits, arguments.parts)) or not _is_only_reduced(quantized.outputs.get("amax")):
        return None
    if not inductor.writes_tiles(value(arguments.x).device):
        return None
    inputs = _inputs(arguments)
    return inputs if inputs is not None and all(map(_is_readable, inputs[1])) else None


def _is_only_reduced(amax: fx.Node | None) -> bool:
    """Return whether all that read the amaxes of a tensor are ops of ours, which take the largest of them."""
    return amax is None or all(getattr(user.target, "namespace", "") == "fp8graph" for user in amax.users)


def _is_plain(arguments: Arguments) -> bool:
    """Say whether both layouts have one given scale or 1x128 tiles, or the rowwise one square ones, without padding."""
    plain = Arguments(
        *(arguments.x, arguments.dtype, arguments.power_2_scale, arguments.amax_epsilon),
        *(arguments.rowwise, arguments.columnwise),
        scaling=arguments.scaling,
        block=arguments.block,
        scales=arguments.scales if arguments.scaling == "delayed" else None,
        row=arguments.row,
        keep_scales=arguments.keep_scales,
        more=arguments.more,
        dim=arguments.dim,
        rowwise_order=arguments.rowwise_order,
        columnwise_order=arguments.columnwise_order,
    )
    block = [*arguments.block]
    both = bool(arguments.rowwise) and bool(arguments.columnwise)
    if arguments.scaling == "delayed":
        layouts = both and arguments.scales is not None
    else:
        layouts = bool(arguments.rowwise) and block == [SIZE, SIZE] or both and block == [1, SIZE]
    orders = {arguments.rowwise_order, arguments.columnwise_order} <= {"", TRANSPOSED}
    return arguments == plain and layouts and orders and _padding(arguments) == 0


def _padding(arguments: Arguments) -> int | torch.SymInt:
    """Return the number of elements that are added to the sizes of the results."""
    sizes = [value(part).shape for part in arguments.parts]
    whole = [*sizes[0]]
    whole[arguments.dim] = sum(size[arguments.dim] for size in sizes)
    wanted = {"rowwise": whole, "columnwise": whole[::-1]}
    return sum(
        -size % multiple
        for layout, multiples in arguments.layouts.items()
        for size, multiple in zip(wanted[layout], multiples, strict=True)
    )


def _fits(part: fx.Node) -> bool:
    x = value(part)
    whole = x.ndim == 2 and all(isinstance(size, int) and size % SIZE == 0 for size in x.shape)
    return whole and x.dtype == torch.bfloat16 and x.numel() >= LARGE and x.shape[0] // SIZE <= _MOST


def _is_readable(node: fx.Node) -> bool:
    """Return whether a tensor lies in memory, and a program can load 16 bytes of a row at a time."""
    x = value(node)
    step, one = x.stride()
    numbers = step, one, x.storage_offset()
    placed = all(isinstance(each, int) for each in numbers) and one == 1 and step % 8 == 0 and numbers[2] % 8 == 0
    while is_view(node) or (node.target is getitem and cast(fx.Node, node.args[0]).target in _SPLITS):
        node = cast(fx.Node, node.args[0])
    if node.op == "placeholder" or node.target in _GEMMS:
        return placed
    if node.target is getitem:
        node = cast(fx.Node, node.args[0])
    if node.target in _ATTENTION:
        return placed
    namespace = str(getattr(node.target, "namespace", ""))
    return placed and bool(namespace) and namespace not in ("aten", "prims", "fp8graph", "fp8graph_hints")


def _inputs(arguments: Arguments) -> tuple[str, list[fx.Node]] | None:
    """Return the function that computes the parts and its inputs; "" and the parts if they are not computed."""
    parts = arguments.parts
    fused = arguments.scaling == "delayed" or ([*arguments.block] == [1, SIZE] and arguments.power_2_scale)
    if fused and not inductor.rounds_between():
        if len(parts) == 1 and (operands := _swiglu(parts[0])) is not None:
            return "swiglu", operands
        if len(parts) == 2 and arguments.dim == -1 and (operands := _swiglu_backward(*parts)) is not None:
            return "swiglu_backward", operands
    return "", parts


def _swiglu(node: fx.Node) -> list[fx.Node] | None:
    """``[gate, up]`` if a node is ``silu(gate) * up``."""
    for silu, up in _factors(node):
        if (gate := _argument_of_silu(silu)) is not None:
            return [gate, up]
    return None


def _swiglu_backward(dgate: fx.Node, dup: fx.Node) -> list[fx.Node] | None:
    """``[gate, dy, up]`` if the nodes are ``silu_backward(dy * up, gate)`` and ``dy * silu(gate)``."""
    for dy, silu in _factors(dup):
        gate = _argument_of_silu(silu)
        for slope, more in _factors(_converted(dgate, torch.bfloat16)) if gate is not None else ():
            for product, sigmoid in _factors(slope):
                wide = _argument_of_sigmoid(sigmoid)
                if wide is None or _converted(wide, torch.float32) is not gate or not _is_slope(more, wide, sigmoid):
                    continue
                for first, up in _factors(_converted(product, torch.float32)):
                    if first is dy:
                        return [cast(fx.Node, gate), dy, up]
    return None


def _argument_of_sigmoid(node: fx.Node) -> fx.Node | None:
    """``x`` if a node is ``sigmoid(x)``; torch 2.11 writes that of SiLU's backward as ``1 / (exp(-x) + 1) * 1``."""
    if node.target is aten.mul.Tensor and node.args[1] == 1:
        node = cast(fx.Node, node.args[0])
        if node.target is not aten.reciprocal.default:
            return None
        return argument_of_exponential(cast(fx.Node, node.args[0]))
    return cast(fx.Node, node.args[0]) if node.target is aten.sigmoid.default else None


def _is_slope(node: fx.Node, x: fx.Node, sigmoid: fx.Node) -> bool:
    """Return whether a node is ``x * (1 - sigmoid) + 1``."""
    if node.target is not aten.add.Tensor or node.args[1] != 1 or node.kwargs:
        return False
    for first, rest in _factors(node.args[0]):
        if first is x and rest.target is aten.sub.Tensor and rest.args == (1, sigmoid) and not rest.kwargs:
            return True
    return False


def _factors(node: object) -> Sequence[tuple[fx.Node, fx.Node]]:
    """Return the factors of a product of two tensors of its shape, in both orders; nothing if it is none."""
    if not isinstance(node, fx.Node) or node.target is not aten.mul.Tensor:
        return ()
    a, b = node.args
    if not isinstance(a, fx.Node) or not isinstance(b, fx.Node):
        return ()
    if value(a).shape != value(node).shape or value(b).shape != value(node).shape:
        return ()
    return (a, b), (b, a)


def _converted(node: fx.Node, dtype: torch.dtype) -> fx.Node | None:
    """Return the operand of a conversion to ``dtype``."""
    return cast(fx.Node, node.args[0]) if node.target is CONVERT and node.args[1] == dtype else None


def _argument_of_silu(node: fx.Node) -> fx.Node | None:
    """``x``, bf16, if a node is ``silu(x)``, computed in FP32 and rounded."""
    quotient = _converted(node, torch.bfloat16)
    if quotient is None or quotient.target is not aten.div.Tensor:
        return None
    wide = argument_of_silu(quotient)
    return None if wide is None else _converted(wide, torch.float32)


def _rewrite(graph: fx.Graph, node: fx.Node, function: str, inputs: list[fx.Node]) -> None:
    arguments = QuantizeNode(node).arguments
    with graph.inserting_before(node):
        made = insert(
            graph,
            CAST,
            (
                [*inputs, *([] if arguments.scales is None else [arguments.scales])],
                *TileCast(
                    function=function,
                    dtype=arguments.dtype,
                    power_2_scale=arguments.power_2_scale,
                    amax_epsilon=arguments.amax_epsilon,
                    block=[*arguments.block],
                    dim=arguments.dim,
                    both=bool(arguments.columnwise),
                    keep_scales=arguments.keep_scales,
                    orders=[arguments.rowwise_order, arguments.columnwise_order],
                    row=arguments.row,
                ),
            ),
            like=node,
        )
    made.meta[NAMES_KEY] = (node.name, *(user.name for user in node.users))
    node.replace_all_uses_with(made)
    for output in made.users:
        update_value(output)
    graph.erase_node(node)
