"""Which ops of torch multiply by weights inside, where no pass can see a matmul, and how to do without them."""

from __future__ import annotations

from typing import Any, Final

from torch import fx

from fp8graph.ir.compilation import Compilation
from fp8graph.ir.nodes import module_path
from fp8graph.ir.sources import split_source

_ENCODER: Final = "torch.backends.mha.set_fastpath_enabled(False) lets torch multiply by its weights one by one"
_RECURRENT: Final = "nn.LSTMCell multiplies step by step, in linears"
_INSTEAD: Final[dict[str, str]] = {
    "_transformer_encoder_layer_fwd": _ENCODER,
    "_native_multi_head_attention": _ENCODER,
    "_trilinear": "nn.Bilinear is no matmul; einsum writes it as two",
    **dict.fromkeys(("mkldnn_rnn_layer", "_cudnn_rnn", "miopen_rnn"), _RECURRENT),
}


def refuse_fused_ops(graph: fx.Graph, compilation: Compilation) -> None:
    """Say in the report which ops are left as they are, where a linear in their place would be in FP8."""
    for node in graph.nodes:
        target: Any = node.target
        if (
            getattr(target, "namespace", "") != "aten"
            or (name := target._schema.name.partition("::")[2]) not in _INSTEAD
        ):
            continue
        _, path = split_source(module_path(node))
        if any(compilation.known.policy.resolve(path, "linear").recipes.values()):
            reason = f"aten.{name} multiplies by weights inside one op of torch: {_INSTEAD[name]}"
            compilation.refuse_at("FP8", path, 0, reason)
