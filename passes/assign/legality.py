"""GEMMs that FP8 cannot do on any device, and ops of torch that multiply inside: in words for the report."""

from __future__ import annotations

from typing import Any, Final

import torch
from torch import fx

from fp8graph.compat.ops import OpOverload, schema
from fp8graph.ir.compilation import Compilation
from fp8graph.ir.naming import graph_inputs, split_source
from fp8graph.ir.nodes import GROUPED, backward_nodes, module_path, static_size, value
from fp8graph.ir.sites import Gemm, why_not_of_size
from fp8graph.recipes.rules import Resolution

_HIGH_PRECISION_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def why_not_in_fp8(gemm: Gemm, resolution: Resolution) -> str | None:
    """Return the reason why FP8 cannot do this GEMM, or None if it can."""
    recipe = resolution.recipes[gemm.gemm]
    if recipe is not None and (other := recipe.why_not_for_gemms):  # a region's
        return other
    a, b = value(gemm.a.tensor), value(gemm.b.tensor)
    for tensor in (a, b):
        if tensor.dtype not in _HIGH_PRECISION_DTYPES:
            return f"FP8 cannot multiply {str(tensor.dtype).removeprefix('torch.')}"
        if (size := why_not_of_size(tensor.shape, grouped=gemm.node.target in GROUPED)) is not None:
            return size
    if a.dtype != b.dtype:
        return f"operands of two dtypes: {a.dtype}, {b.dtype}"
    if value(gemm.node).dtype not in _HIGH_PRECISION_DTYPES:
        return f"the result is {value(gemm.node).dtype}"
    if gemm.node.target in GROUPED and (form := _why_not_grouped(gemm, resolution)) is not None:
        return form
    if is_batched(gemm) and not resolution.by_user:
        return "batched matmul: torch has no scaled bmm; a rule that names it gets it emulated"
    return None


def _why_not_grouped(gemm: Gemm, resolution: Resolution) -> str | None:
    """Return the reason why FP8 cannot do this grouped matmul."""
    dims = value(gemm.a.tensor).ndim, value(gemm.b.tensor).ndim
    if dims not in ((2, 3), (2, 2)):
        return f"grouped matmul of {dims[0]} x {dims[1]} dims: only rows in groups x one matrix per group"
    if len(gemm.node.args) < 3 or any(x is not None for x in (*gemm.node.args[3:], *gemm.node.kwargs.values())):
        return "grouped matmul with a bias, another result dtype or no offsets"
    recipe = resolution.recipes[gemm.gemm]
    for view in (gemm.a, gemm.b):
        rows = recipe.quantizer(view.operand).block[0] if recipe is not None else 0
        if value(view.tensor).ndim == 2 and rows > 1:
            return f"tiles of {rows} rows do not fit groups of rows"
    return None


def is_batched(gemm: Gemm) -> bool:
    """Return whether this is a bmm over more than one matrix (a batch of one is a plain GEMM)."""
    out = value(gemm.node)
    return gemm.node.target not in GROUPED and out.ndim == 3 and static_size(out.shape[0]) != 1


_ENCODER: Final = "torch.backends.mha.set_fastpath_enabled(False) lets torch multiply by its weights one by one"
_RECURRENT: Final = "nn.LSTMCell multiplies step by step, in linears"
_INSTEAD: Final[dict[str, str]] = {
    "_transformer_encoder_layer_fwd": _ENCODER,
    "_native_multi_head_attention": _ENCODER,
    "_trilinear": "nn.Bilinear is no matmul; einsum writes it as two",
    **dict.fromkeys(("mkldnn_rnn_layer", "_cudnn_rnn", "miopen_rnn"), _RECURRENT),
}


_MATMULS: Final = ("mm", "bmm", "addmm", "baddbmm")
_KNOWN: Final = ("aten", "prims", "fp8graph", "_c10d_functional", "c10d", "c10d_functional", "inductor")


def refuse_fused_ops(graph: fx.Graph, compilation: Compilation) -> None:
    """Say which ops are left as they are. The report has those where a linear in their place would be in FP8."""
    inputs = dict(graph_inputs(graph))
    matrices = {  # of weights in FP8 the pass `recognize` reports
        node
        for node, index in inputs.items()
        if index in compilation.facts.parameters and value(node).ndim > 1 and value(node).dtype.itemsize > 1
    }
    backward = backward_nodes(graph)
    for node in graph.nodes:
        # auto_functionalized, around an op that writes to its arguments, has it as its first argument
        target: Any = node.args[0] if node.args and isinstance(node.args[0], OpOverload) else node.target
        if not isinstance(target, OpOverload) or node in backward:
            continue
        name = schema(target).name.partition("::")[2]
        reason = ""
        if target.namespace == "aten" and name in _INSTEAD:
            reason = f"aten.{name} multiplies by weights inside one op of torch: {_INSTEAD[name]}"
        elif target.namespace == "aten" and name in _MATMULS and schema(target).overload_name.startswith("dtype"):
            reason = f"aten.{name} with out_dtype= stays in high precision: leave the argument out, and cast the result"
        elif target.namespace not in _KNOWN and any(_origin(x) in matrices for x in node.all_input_nodes):
            reason = (
                f"{target.namespace}.{name} reads a parameter with two or more dims, and is no op of torch: fp8graph "
                "does not look into it. If it multiplies by the parameter, F.linear in its place would be in FP8"
            )
        if reason:
            compilation.refuse_at("FP8", split_source(module_path(node))[1], 0, reason)


def _origin(node: fx.Node) -> fx.Node:
    """Return the tensor that ``node`` is a cast, a view or a transpose of."""
    while node.op == "call_function" and len(node.all_input_nodes) == 1:
        node = node.all_input_nodes[0]
    return node
