"""Which ops of torch multiply by weights inside, where no pass can see a matmul, and how to do without them."""

from __future__ import annotations

from typing import Any, Final

from torch import fx

from fp8graph.compat.ops import OpOverload, schema
from fp8graph.ir.compilation import Compilation
from fp8graph.ir.nodes import backward_nodes, module_path, value
from fp8graph.ir.sources import graph_inputs, split_source

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
    """Say in the report which ops are left as they are, where a linear in their place would be in FP8."""
    inputs = dict(graph_inputs(graph))
    matrices = {  # of weights in FP8 the pass `recognize` reports
        node
        for node, index in inputs.items()
        if index in compilation.known.parameters and value(node).ndim > 1 and value(node).dtype.itemsize > 1
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
        _, path = split_source(module_path(node))
        if reason and any(compilation.known.policy.resolve(path, "linear").recipes.values()):
            compilation.refuse_at("FP8", path, 0, reason)


def _origin(node: fx.Node) -> fx.Node:
    """The tensor that ``node`` is a cast, a view or a transpose of."""
    while node.op == "call_function" and len(node.all_input_nodes) == 1:
        node = node.all_input_nodes[0]
    return node
