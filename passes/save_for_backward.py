"""Decide whether FP8 copies are kept for backward (``save="speed"``) or quantized again in it (``save="memory"``).

    qh = quantize(h, rowwise, columnwise)       ->      qh = quantize(h, rowwise)                       (forward)
    dw = scaled_mm(qdy, qh.columnwise)                  qh_again = quantize(h, columnwise)              (backward)
                                                        dw = scaled_mm(qdy, qh_again.columnwise)

With "speed" this is done only where it costs little. A large weight lies in memory anyway: backward reads it once more
for its columnwise copy, in a kernel more; a small one keeps the copy, which takes less than a launch does. Row-wise
recipes read a tensor twice, once for the scales of its rows and once for those of its columns, so the columnwise copy
of an activation function's result is made next to the function's own backward, which reads the same inputs. Otherwise
the partitioner, to which the dialect is opaque, saves the FP8 copy. With "memory" backward quantizes everything once
more, from tensors that are kept anyway (the inputs of a norm, of an activation function, of attention), as the
partitioner finds out. With one scale per tensor, or per square tile, forward's scales are saved: backward takes no
amax, and computes the same bits.

With ``save_activations_in_fp8``, the inputs of an activation function between two FP8 GEMMs (SwiGLU's gate and up)
are kept in E4M3 with one scale per tensor, and backward recomputes the function from them:

    h = silu(g) * u;  qh = quantize(h)          ->      h, qh as before; qg = quantize(g), qu = quantize(u)  (forward)
    dg = silu_backward(dh * u, g)                       dg = silu_backward(dh * dequantize(qu), dequantize(qg))

Weights that FSDP2 gathers anew for backward are always quantized anew in backward, also for a backward that decodes
them (``dequantize_backward``): FP8 copies kept until then would take the memory that sharding saves.

Weights that are decoded from integers (bases in 4 and 8 bits) are always decoded and quantized anew, too.

In a region of torch.utils.checkpoint, the operands of GEMMs are quantized again when the region runs again, also where
a selective policy saves the GEMMs' results. A tensor's own scale is saved, so that it is cast again without an amax:

    qh = quantize(h, rowwise, columnwise)       ->      s = quantize(h, keep_scales)                  (saved)
                                                        qh = quantize(h, rowwise, columnwise, scales=s)  (runs again)

Refuses (leaves unchanged) what "memory" and FP8 activations would change in such a region, the operands of grouped
GEMMs, and functions whose inputs are not GEMM results or whose values are read by anything but an FP8 GEMM.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Collection, Container, Mapping, Sequence
from operator import getitem
from typing import Final

import torch
from torch import fx
from torch.utils.checkpoint import CheckpointPolicy

from fp8graph.compat.inductor import LARGE, erase_unused
from fp8graph.ir import ops
from fp8graph.ir.compilation import Compilation
from fp8graph.ir.edit import insert
from fp8graph.ir.naming import parameters_of
from fp8graph.ir.nodes import (
    CACHED_KEY,
    CASTS,
    CONVERT,
    GEMM_KEY,
    OPERAND_KEY,
    USES_KEY,
    aten,
    in_order,
    is_backward,
    is_view,
    nodes,
    readers,
    size_hint,
    value,
)
from fp8graph.ir.quantize_node import Arguments, QuantizeNode, call

_RECOMPUTE: Final = "recompute"  # node.meta: torch.utils.checkpoint's policy for a node of its region
_BACKWARD = "must_be_in_backward"  # else the partitioner moves what needs no gradient to forward, to save less
_GEMMS = (ops.scaled_mm, aten.mm.default, aten.addmm.default)
_NOT_AGAIN: Final = (*_GEMMS, aten.bmm.default, ops.quantize, ops.scaled_grouped_mm)  # costly, or decided elsewhere
_CONVERSIONS: Final = (*CASTS, ops.dequantize)
_VIEWS: Final = (aten.view.default, aten._unsafe_view.default, aten.reshape.default, aten.slice.Tensor)


def has_backward(graph: fx.Graph, compilation: Compilation) -> bool:
    """Return whether backward is in this graph."""
    return any(map(is_backward, graph.nodes))


def save_for_backward(graph: fx.Graph, compilation: Compilation) -> None:
    gemms = dict.fromkeys(node for node in nodes(graph, _GEMMS) if not is_backward(node))
    candidates = activation_functions(gemms)
    functions = [function for function, refusal in candidates if not refusal]
    free = {node for function in functions if _is_read_by_backward(function, gemms) for node in function}
    parameters = parameters_of(graph, compilation.facts.parameters)
    for node in list(nodes(graph, (ops.quantize,))):
        if not is_backward(node):
            node = _run_again(graph, node)
            quantized = QuantizeNode(node)
            by_row = quantized.kind.columns_again and quantized.arguments.x in free
            sharded = bool(compilation.facts.gathered) and node.meta[OPERAND_KEY] == "weight"
            wanted = compilation.facts.settings.save == "memory" or by_row or sharded
            chains = _chains(quantized, parameters)
            decoding = _decoding(quantized)
            if wanted or decoding or (chains and _is_large(quantized)):
                refusal = _check(quantized, decoded_anew=sharded)
                if refusal is None:
                    for each in decoding:
                        each.meta[_RECOMPUTE] = CheckpointPolicy.MUST_RECOMPUTE
                    chains = [[part] for part in quantized.arguments.parts] if decoding else chains
                    _quantize_again(graph, node, chains, decoded_anew=sharded)
                elif wanted and refusal and (site := compilation.site_of(node)) is not None:
                    compilation.refuse("quantized again", site, refusal)
    if compilation.facts.settings.save_activations_in_fp8:
        _keep_in_fp8(graph, functions, gemms, compilation)
        for function, refusal in candidates:
            for node in function if refusal else ():
                if GEMM_KEY in node.meta and node in gemms and any(map(is_backward, readers(node))):
                    compilation.refuse("FP8 activation", compilation.sites[node.meta[GEMM_KEY][0]], refusal)
    erase_unused(graph)


def _is_large(quantized: QuantizeNode) -> bool:
    """Return whether casting it takes longer than a launch."""
    return sum(size_hint(value(part).numel()) for part in quantized.arguments.parts) >= LARGE


def _chains(quantized: QuantizeNode, parameters: Container[fx.Node]) -> list[list[fx.Node]]:
    """Return the parameters that a weight is quantized from, each with its views, casts and decoding.

    Empty if it is computed in another way, or arrives computed: the result would be kept in the place of its copy.
    """
    chains: list[list[fx.Node]] = []
    for node in quantized.arguments.parts if quantized.node.meta[OPERAND_KEY] == "weight" else ():
        chain = [node]
        while is_view(chain[0]) or chain[0].target in _CONVERSIONS:
            chain.insert(0, chain[0].all_input_nodes[0])
        if chain[0] not in parameters:
            return []
        chains.append(chain)
    return chains


def _decoding(quantized: QuantizeNode) -> list[fx.Node]:
    """Return the nodes that decode a weight from inputs of the graph, one of which is a matrix of integers: its codes.

    They are there in backward anyway, and a copy of the weight is not. Empty for other weights.
    """
    pending = list(quantized.arguments.parts) if quantized.node.meta[OPERAND_KEY] == "weight" else []
    decoding, has_codes = dict[fx.Node, None](), False
    while pending:
        node = pending.pop()
        if node.op == "placeholder":
            val = node.meta["val"]  # sizes are inputs, too
            has_codes |= isinstance(val, torch.Tensor) and val.ndim > 1 and not val.dtype.is_floating_point
        elif node not in decoding:
            if node.op != "call_function" or node.target in _NOT_AGAIN or _is_random(node) or is_backward(node):
                return []
            decoding[node] = None
            pending += node.all_input_nodes
    return [*decoding] if has_codes else []


def _is_random(node: fx.Node) -> bool:
    return torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())


def _computed_again(graph: fx.Graph, chain: Sequence[fx.Node]) -> fx.Node:
    """Compute the last node of a chain from the first once more, in backward."""
    again = {chain[0]: chain[0]}
    for node in chain[1:]:
        again[node] = graph.node_copy(node, functools.partial(_replaced, again))
        again[node].meta["partitioner_tag"] = _BACKWARD
    return again[chain[-1]]


def _check(quantized: QuantizeNode, *, decoded_anew: bool) -> str | None:
    """Return the reason why copies are kept for backward ("": there are none); None if backward makes them again.

    ``decoded_anew``: backward also makes a rowwise copy that it decodes.
    """
    node, copy = quantized.node, quantized.outputs.get("columnwise")
    read = [user for user in copy.users if user.target not in ops.MEASURES] if copy is not None else []
    for_backward = bool(read) and all(map(is_backward, read)) or (decoded_anew and bool(_decoded(quantized)))
    if CACHED_KEY in node.meta or not quantized.arguments.rowwise or not for_backward:
        return ""
    if _RECOMPUTE in node.meta:
        return "torch.utils.checkpoint runs its forward again anyway"
    if quantized.arguments.offs is not None or quantized.arguments.per_matrix:
        return "the operands of grouped GEMMs are kept as they are"
    return None


def _run_again(graph: fx.Graph, node: fx.Node) -> fx.Node:
    """Let a checkpointed region quantize again as it makes its tensors again, with the scale of its forward.

    A quantize node has the policy of the matmul that reads it. Were FP8 operands saved wherever a result is, selective
    checkpointing would keep more than in bf16: as much as without it.
    """
    quantized = QuantizeNode(node)
    arguments = quantized.arguments
    if _RECOMPUTE not in node.meta:
        return node
    if quantized.kind.own_scale and arguments.scales is None and arguments.offs is None and not arguments.per_matrix:
        with graph.inserting_before(node):
            of_scale = dataclasses.replace(arguments, rowwise=[], columnwise=[], keep_scales=True)
            first = _insert(graph, of_scale, node, like=node)
            scales = _output(graph, first, "scales")
            quantized = _insert(graph, dataclasses.replace(arguments, scales=scales, row=0), node, like=node)
            made = {name: _output(graph, quantized, name) for name in QuantizeNode(node).outputs}
        for saved in (first.node, scales):
            saved.meta[_RECOMPUTE] = CheckpointPolicy.MUST_SAVE
        QuantizeNode(node).replace(made)
    for each in (quantized.node, *quantized.node.users):
        if each.meta.get(_RECOMPUTE) == CheckpointPolicy.MUST_SAVE:
            each.meta[_RECOMPUTE] = CheckpointPolicy.PREFER_RECOMPUTE
    return quantized.node


def _decoded(quantized: QuantizeNode) -> list[fx.Node]:
    """Return the nodes of backward that read the rowwise copy: they decode it."""
    return [user for user in quantized.outputs["rowwise"].users if is_backward(user)]


def _quantize_again(graph: fx.Graph, node: fx.Node, chains: Sequence[Sequence[fx.Node]], *, decoded_anew: bool) -> None:
    """Let backward make the copies that it reads. On observed steps forward makes them, too, to measure them."""
    quantized = QuantizeNode(node)
    arguments, outputs = quantized.arguments, quantized.outputs
    copy = outputs.get("columnwise")
    decoded = _decoded(quantized) if decoded_anew else []
    read = {*decoded, *(filter(is_backward, copy.users) if copy is not None else ())}
    with graph.inserting_before(node):
        columnwise = arguments.columnwise if copy is not None and not all(map(is_backward, copy.users)) else []
        of_tiles = quantized.kind.keeps_tiles and arguments.has_square_tiles
        keep = quantized.kind.own_scale or of_tiles
        of_forward = dataclasses.replace(arguments, columnwise=columnwise, keep_scales=keep)
        forward = _insert(graph, of_forward, node, like=node)
        made = {name: _output(graph, forward, name) for name in outputs if name in forward.names}
        if quantized.kind.own_scale:
            arguments = dataclasses.replace(arguments, scales=_output(graph, forward, "scales"), row=0)
        elif of_tiles:
            arguments = dataclasses.replace(arguments, tile_scales=_output(graph, forward, "scales"))
    first = in_order(read)[0]
    with graph.inserting_before(first):
        if chains:
            source, *more = (_computed_again(graph, chain) for chain in chains)
            arguments = dataclasses.replace(arguments, x=source, more=more or None)
        else:
            # The partitioner saves the inputs of an op that it cannot fuse. It can fuse a clamp (here one that changes
            # nothing), and so finds out which tensor is cheapest to keep. A clone would be removed before it looks.
            source = insert(graph, aten.clamp_min.default, (arguments.x, -math.inf), like=first)
            source.meta["partitioner_tag"] = _BACKWARD
            arguments = dataclasses.replace(arguments, x=source)
        rowwise = arguments.rowwise if decoded else []
        again = _insert(graph, dataclasses.replace(arguments, rowwise=rowwise), node, like=first)
        again.node.meta.pop(USES_KEY, None)  # recorded in forward
        again.node.meta["partitioner_tag"] = _BACKWARD
        remade = {name: _output(graph, again, name) for name in outputs if name in again.names and name != "amax"}
    for name, output in outputs.items():
        for user in list(output.users):
            source = remade if name in remade and is_backward(user) else made
            user.replace_input_with(output, source[name])
        graph.erase_node(output)
    graph.erase_node(node)


def _is_read_by_backward(function: Sequence[fx.Node], gemms: Collection[fx.Node]) -> bool:
    """Return whether backward reads all inputs of an activation function, and can compute it again without more
    traffic.
    """
    inputs = [node for node in function if node in gemms]
    return all(any(map(is_backward, readers(x))) for x in inputs)


def _keep_in_fp8(
    graph: fx.Graph, functions: Sequence[Sequence[fx.Node]], gemms: Collection[fx.Node], compilation: Compilation
) -> None:
    """Let backward compute activation functions from FP8 copies of their inputs."""
    for function in functions:
        inputs = [node for node in function if node in gemms]
        users = {user for node in function for user in node.users if is_backward(user)}
        if not users:
            continue
        first = in_order(users)[0]
        again: dict[fx.Node, fx.Node] = {}
        for node in inputs:
            with graph.inserting_after(node):
                dtype = compilation.hardware_of(node).device_dtype(torch.float8_e4m3fn)
                args = node, dtype, False, 0.0, [1, 1], []
                quantized = insert(graph, ops.quantize, args, like=node, name="kept")
            quantized.meta[OPERAND_KEY] = "kept"
            with graph.inserting_after(quantized):
                data, scale_inv = (insert(graph, getitem, (quantized, i), like=node) for i in (0, 1))
            with graph.inserting_before(first):
                args = (data, scale_inv, value(node).dtype)
                again[node] = insert(graph, ops.dequantize, args, like=first)
                again[node].meta["partitioner_tag"] = _BACKWARD
        with graph.inserting_before(first):
            for node in function:
                if node not in again:
                    again[node] = graph.node_copy(node, functools.partial(_replaced, again))
                    again[node].meta["partitioner_tag"] = first.meta.get("partitioner_tag")
        for user in users:
            for node in function:
                user.replace_input_with(node, again[node])


def _replaced(replacements: Mapping[fx.Node, fx.Node], node: fx.Node) -> fx.Node:
    return replacements.get(node, node)


def _insert(graph: fx.Graph, arguments: Arguments, old: fx.Node, *, like: fx.Node) -> QuantizeNode:
    name = f"quantize_{old.meta[OPERAND_KEY]}"
    args, kwargs = call(arguments)
    node = insert(graph, ops.quantize, args, like=like, name=name, kwargs=kwargs)
    node.meta.update({key: old.meta[key] for key in (OPERAND_KEY, USES_KEY) if key in old.meta})
    return QuantizeNode(node)


def _output(graph: fx.Graph, quantized: QuantizeNode, name: str) -> fx.Node:
    node = quantized.node
    label = f"{node.meta[OPERAND_KEY]}_{name}"
    return insert(graph, getitem, (node, quantized.names.index(name)), like=node, name=label)


def activation_functions(gemms: Collection[fx.Node]) -> list[tuple[list[fx.Node], str]]:
    """Return the elementwise functions of GEMM results, as ``(nodes, refusal)``: their nodes, inputs first.

    The refusal is "" if all values of a function go into quantize nodes and all its inputs are GEMM results.
    """
    functions: list[tuple[list[fx.Node], str]] = []
    earlier: set[fx.Node] = set()
    for gemm in gemms:
        if gemm in earlier:
            continue
        function, pending, refusal = {gemm}, [gemm], ""
        while pending:
            node = pending.pop()
            read = [] if node in gemms else node.all_input_nodes  # a GEMM's operands are not part of the function
            for other in (*(user for user in node.users if not is_backward(user)), *read):
                if other.target in (ops.quantize, *ops.MEASURES) or other in function:
                    continue
                if other.op != "call_function" or not (_elementwise(other) or other in gemms):
                    refusal = refusal or _refusal(other, is_read=other in read)
                    continue
                function.add(other)
                pending.append(other)
        earlier |= function
        if any(_RECOMPUTE in node.meta for node in function):
            refusal = refusal or "torch.utils.checkpoint runs its forward again anyway"
        if len(function) > 1:
            functions.append((in_order(function), refusal))
    return functions


def _refusal(other: fx.Node, *, is_read: bool) -> str:
    name = str(getattr(other.target, "overloadpacket", other.target))
    if is_read:
        given = "an input of the graph" if other.op == "placeholder" else f"the result of {name}"
        return f"the activation function also reads {given}: backward can only compute it again from results of GEMMs"
    if other.op == "output":
        return "its result, or a function of it, leaves the graph, where FP8 copies do not go"
    return f"{name} reads it or a function of it: only inputs of elementwise functions before an FP8 GEMM can be kept"


def _elementwise(node: fx.Node) -> bool:
    tags = getattr(node.target, "tags", ())
    convert = node.target is CONVERT
    return torch.Tag.pointwise in tags or convert or node.target in _VIEWS
