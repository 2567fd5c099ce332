"""torch's ops that multiply matrices, and their FLOPs: those that torch's registry counts, and those that it lacks."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, NamedTuple

from torch import fx
from torch.utils.flop_counter import flop_registry

from fp8graph.compat.attention import FORMS
from fp8graph.compat.ops import OpOverload

__all__ = ["Counter", "Operation", "by_first", "is_of_torch", "operation_of", "was_product"]

Counter = Callable[[Sequence[Any], Any], int]  # of the arguments and the result, with a list of sizes for each tensor

# The namespaces of torch's ops that multiply nothing, and of those whose products are listed by name.
_OF_TORCH: Final = frozenset(
    (
        "aten", "prim", "prims", "fp8graph", "fp8graph_kernels", "_c10d_functional", "_c10d_functional_autograd",
        "_dtensor", "debugprims", "device_mesh", "fsdp", "higher_order", "inductor", "inductor_prims", "profiler",
        "quantized_decomposed", "rngprims", "streams",
    )
)  # fmt: skip
_OTHER_HIGHER_ORDER: Final = "triton_kernel_wrapper"  # the only higher-order ops that are kernels of somebody else


class Operation(NamedTuple):
    """One op that multiplies matrices."""

    kind: str  #: in words: "scaled matmul", "convolution"
    operands: tuple[int, ...]  #: the places of the tensors that it multiplies
    formula: Counter | None  #: its FLOPs; None: they depend on more than sizes


def by_first(args: Sequence[Any], out: Any) -> int:
    """Return the FLOPs of [..., k] @ [k, n], in which the first argument says k."""
    return 2 * math.prod(out) * args[0][-1]


def _by_second(args: Sequence[Any], out: Any) -> int:
    """bias + [m, k] @ [k, n]."""
    return 2 * math.prod(out) * args[1][-1]


def _of_vector(args: Sequence[Any], _out: Any) -> int:
    """[m, k] @ [k], or [k] @ [k]."""
    return 2 * math.prod(args[0])


def _plus_vector(args: Sequence[Any], out: Any) -> int:
    """bias + [m, k] @ [k]."""
    return _of_vector(args[1:], out)


def _as_if_dense(args: Sequence[Any], out: Any) -> int:
    """[m, k] @ [k, n], of which the first is compressed; the second is the last tensor."""
    return 2 * math.prod(out) * [arg for arg in args if isinstance(arg, list)][-1][0]


def _by_rows_of_second(args: Sequence[Any], out: Any) -> int:
    """Return the same, of a second tensor behind which others may come."""
    return _as_if_dense(args[:2], out)


def _grouped(args: Sequence[Any], out: Any) -> int:
    """[t, k] @ [experts, k, n], or for each expert its part of t in [m, t] @ [t, n]."""
    experts = out[0] if len(args[0]) == len(args[1]) == 2 else 1
    return 2 * math.prod(out) * args[0][-1] // experts


def _added_up(args: Sequence[Any], _out: Any) -> int:
    """bias + the sum of [b, m, k] @ [b, k, n]."""
    return 2 * math.prod(args[1]) * args[2][-1]


def _trilinear(args: Sequence[Any], _out: Any) -> int:
    """Return the product of three tensors that are broadcast to one shape, and then summed."""
    shapes = [list(shape) for shape in args[:3]]
    for shape, dims in zip(shapes, args[3:6], strict=True):
        for dim in dims:
            shape.insert(dim, 1)
    return 2 * math.prod(map(max, *shapes))


def _attention(args: Sequence[Any], _out: Any) -> int:
    """softmax(q @ k.T) @ v, all [batch, heads, tokens, size]."""
    q, k, v = args[:3]
    return 2 * math.prod(q[:-1]) * k[-2] * (q[-1] + v[-1])


def _convolution_backward(args: Sequence[Any], _out: Any) -> int:
    """Of dy [n, c', ...], x [n, c, ...] and w [c', c / groups, ...]: as forward for each of the gradients of x and w.

    Transposed, w is [c, c' / groups, ...]. Torch's own count knows no groups.
    """
    dy, x, w, transposed, wanted = args[0], args[1], args[2], args[7], args[10]
    return 2 * math.prod(x if transposed else dy) * math.prod(w[1:]) * sum(map(bool, wanted[:2]))


def _logits(args: Sequence[Any], _out: Any) -> int:
    """[tokens, k] @ [classes, k].T."""
    return 2 * math.prod(args[0]) * args[1][0]


def _logits_and_gradients(args: Sequence[Any], out: Any) -> int:
    """Return the same, and the gradients of its operands that are computed at once: two of the last three arguments."""
    return _logits(args, out) * (1 + sum(map(bool, args[-3:-1])))


def _backward_of(forward: Counter, first: int) -> Counter:
    """Attention's: the scores once more, and the gradients of scores, probabilities, queries, keys and values."""
    return lambda args, out: 5 * forward(args[first:], out) // 2


_PACKED: Final = Operation("matmul of packed weights", (0, 1), by_first)
_SPARSE: Final = "sparse matmul"
_RECURRENT: Final = Operation("recurrent layer", (0,), None)

# By name. Those that torch's registry has and that have no formula here keep its count, which profilers print.
_BY_NAME: Final[Mapping[str, Operation]] = {
    "aten.mm": Operation("matmul", (0, 1), by_first),
    "aten.bmm": Operation("matmul", (0, 1), by_first),
    "aten.addmm": Operation("matmul", (1, 2), _by_second),
    "aten.baddbmm": Operation("matmul", (1, 2), _by_second),
    "aten.mv": Operation("matmul", (0, 1), _of_vector),
    "aten.addmv": Operation("matmul", (1, 2), _plus_vector),
    "aten.dot": Operation("matmul", (0, 1), _of_vector),
    "aten.vdot": Operation("matmul", (0, 1), _of_vector),
    "aten.addbmm": Operation("matmul", (1, 2), _added_up),
    "aten.linear": Operation("matmul", (0, 1), by_first),
    "aten._addmm_activation": Operation("matmul", (1, 2), _by_second),
    "aten._grouped_mm": Operation("grouped matmul", (0, 1), _grouped),
    "fp8graph.grouped_mm": Operation("grouped matmul", (0, 1), _grouped),
    "fp8graph.scaled_mm": Operation("scaled matmul", (0, 1), by_first),
    "fp8graph.scaled_grouped_mm": Operation("scaled grouped matmul", (0, 1), _grouped),
    "aten._scaled_mm": Operation("scaled matmul", (0, 1), by_first),
    "aten._scaled_mm_v2": Operation("scaled matmul", (0, 1), by_first),
    "aten._scaled_grouped_mm": Operation("scaled grouped matmul", (0, 1), _grouped),
    "aten._scaled_grouped_mm_v2": Operation("scaled grouped matmul", (0, 1), _grouped),
    "aten._int_mm": Operation("integer matmul", (0, 1), by_first),
    "aten._weight_int8pack_mm": _PACKED,
    "aten._weight_int4pack_mm": _PACKED,
    "aten._weight_int4pack_mm_for_cpu": _PACKED,
    "aten._weight_int4pack_mm_with_scales_and_zeros": _PACKED,
    "aten._dyn_quant_matmul_4bit": _PACKED,
    "aten._mixed_dtypes_linear": _PACKED,
    "aten._cslt_sparse_mm": Operation(_SPARSE, (0, 1), _by_rows_of_second),
    "aten._sparse_semi_structured_mm": Operation(_SPARSE, (0, 2), _as_if_dense),
    "aten._sparse_semi_structured_addmm": Operation(_SPARSE, (1, 3), _as_if_dense),
    "aten._sparse_semi_structured_linear": Operation(_SPARSE, (0, 1), by_first),
    "aten.convolution": Operation("convolution", (0, 1), None),
    "aten.convolution_backward": Operation("convolution", (0, 1, 2), _convolution_backward),
    "aten._trilinear": Operation("bilinear", (0, 1, 2), _trilinear),
    "aten.mkldnn_rnn_layer": _RECURRENT,
    "aten.mkldnn_rnn_layer_backward": _RECURRENT,
    "aten._cudnn_rnn": _RECURRENT,
    "aten._cudnn_rnn_backward": _RECURRENT,
    "aten.miopen_rnn": _RECURRENT,
    "aten.miopen_rnn_backward": _RECURRENT,
    "aten._transformer_encoder_layer_fwd": Operation("encoder layer", (0,), None),
    "aten._native_multi_head_attention": Operation("attention with its projections", (0, 1, 2), None),
    "aten.linalg_matrix_exp": Operation("matrix exponential", (0,), None),
    "torch_nn._linear_cross_entropy_batch_chunked": Operation(
        "linear and cross-entropy", (0, 1), _logits_and_gradients
    ),
    "torch_nn._linear_cross_entropy_batch_chunked_no_reduction": Operation("linear and cross-entropy", (0, 1), _logits),
    **{
        str(getattr(op, "overloadpacket", op)): Operation("attention", (first, first + 1, first + 2), count)
        for forward, form in FORMS.items()
        for op, first, count in (
            (forward, 0, _attention if form.name != "packed" else None),
            (form.backward, form.first, _backward_of(_attention, form.first) if form.name != "packed" else None),
        )
    },
}
# What a decomposition may have written as products of elements and their sum.
_TAKEN_APART: Final = frozenset(
    f"aten.{name}"
    for name in ("addbmm", "addmm", "addmv", "baddbmm", "bmm", "dot", "linear", "matmul", "mm", "mv", "vdot")
)


def _packet(op: Any) -> Any:
    return op.overloadpacket if isinstance(op, OpOverload) else op


def operation_of(op: Any) -> Operation | None:
    """Return the product that ``op`` computes; None if it multiplies no matrices, as far as torch knows.

    A custom op is one if its FLOPs are registered (``torch.utils.flop_counter.register_flop_formula``).
    """
    packet = _packet(op)
    operation, registered = _BY_NAME.get(str(packet)), flop_registry.get(packet)
    if registered is None or (operation is not None and operation.formula is not None):
        return operation  # torch's own count of those is the same, but for backward of convolutions in groups
    if operation is None and is_of_torch(op):
        return _of_registry(str(packet), registered)
    return (operation or Operation("custom op", (), None))._replace(formula=_with_sizes(registered))


def _of_registry(name: str, registered: Any) -> Operation:
    """Another op of torch: convolutions of one library, attention inside of ``scaled_dot_product_attention``."""
    kind = "attention" if "attention" in name else "convolution" if "conv" in name else "matmul"
    return Operation(kind, (), _with_sizes(registered))


def _with_sizes(registered: Any) -> Counter | None:
    """Return a formula of the registry that reads sizes; None: it reads tensors, which may have none."""
    if not hasattr(registered, "__wrapped__"):
        return None

    def count(args: Sequence[Any], out: Any) -> int:
        return int(registered(*args, out_val=out))

    return count


def is_of_torch(op: Any) -> bool:
    """Return whether ``op`` is torch's or ours, so that its products are listed here."""
    if isinstance(op, OpOverload):
        return op.namespace in _OF_TORCH
    return not str(getattr(op, "__name__", "")).startswith(_OTHER_HIGHER_ORDER)


def was_product(node: fx.Node) -> bool:
    """Return whether ``node`` sums the products of the elements that a decomposition made of a matrix product."""
    original = _packet(node.meta.get("original_aten"))
    return str(_packet(node.target)) == "aten.sum" and str(original) in _TAKEN_APART
