"""The ops that scales are followed through, by what they do to the numbers of their operands."""

from __future__ import annotations

from typing import Any, Final

import torch

from fp8graph.numerics import hints as _hints

aten, prims = torch.ops.aten, torch.ops.prims
hints: Any = torch.ops.fp8graph_hints  # with the ops of numerics
assert hints.materialize.default is _hints.MATERIALIZE

# One operand in, the same elements out, as they are or negated.
SAME: Final = {
    aten.neg.default,
    aten.abs.default,
    aten.clone.default,
    aten.alias.default,
    aten.detach.default,
    aten.lift_fresh_copy.default,
    aten.relu.default,
    aten.contiguous.default,
    aten._to_copy.default,
    aten.to.dtype,
    prims.convert_element_type.default,
    hints.materialize.default,
    hints.visible.default,
    hints.saturating_cast.default,
}
CLAMPS: Final = {
    aten.clamp.default,
    aten.clamp.Tensor,
    aten.clamp_min.default,
    aten.clamp_max.default,
    aten.minimum.default,
    aten.maximum.default,
    aten.hardtanh.default,
}
MOVES: Final = {
    aten.view.default,
    aten._unsafe_view.default,
    aten.reshape.default,
    aten.permute.default,
    aten.transpose.int,
    aten.t.default,
    aten.unsqueeze.default,
    aten.squeeze.default,
    aten.squeeze.dim,
    aten.squeeze.dims,
    aten.expand.default,
    aten.slice.Tensor,
    aten.select.int,
    aten.split.Tensor,
    aten.split_with_sizes.default,
    aten.unbind.int,
    aten.flip.default,
    aten.repeat_interleave.self_int,
    aten.repeat.default,
    aten.unfold.default,
}
JOINS: Final = {aten.cat.default, aten.stack.default}
MULTIPLIES: Final = {aten.mul.Tensor, aten.mul.Scalar}
DIVIDES: Final = {aten.div.Tensor, aten.div.Scalar, hints.divide.default}
ADDS: Final = {aten.add.Tensor, aten.sub.Tensor, aten.where.self}
SUMS: Final = {aten.sum.dim_IntList, aten.sum.default, aten.mean.dim, aten.mean.default}
LARGEST_OF: Final = {
    aten.amax.default,
    aten.amin.default,
    aten.max.default,
    aten.max.dim,
    aten.min.default,
    aten.min.dim,
    aten.aminmax.default,
    aten.linalg_vector_norm.default,
    aten.norm.ScalarOpt_dim,
    hints.largest.default,
}
REDUCTIONS: Final = {  # other than the largest magnitude, from which scales are computed as well
    *SUMS,
    aten.std.correction,
    aten.var.correction,
    aten.median.default,
    aten.linalg_vector_norm.default,
}
MEASURES: Final = {  # from whose results a tensor's largest magnitude is taken
    *SAME,
    *CLAMPS,
    *MOVES,
    *JOINS,
    *LARGEST_OF,
    *SUMS,
    aten.pow.Tensor_Scalar,
    aten.square.default,
    aten.sqrt.default,
    aten.sort.default,
    aten.topk.default,
    aten.roll.default,
}
WRITES: Final[dict[Any, str]] = {  # into a tensor, at some of its places: the name of what is written
    aten.index_put.default: "values",
    aten.index_copy.default: "source",
    aten.slice_scatter.default: "src",
    aten.select_scatter.default: "src",
    aten.scatter.src: "src",
    aten.copy.default: "src",
}
CONSTANTS: Final = {
    aten.full.default,
    aten.ones.default,
    aten.zeros.default,
    aten.zeros_like.default,
    aten.new_zeros.default,
    aten.scalar_tensor.default,
    aten.ones_like.default,
    aten.full_like.default,
    aten.new_ones.default,
    aten.new_full.default,
}
SCALED: Final = {aten._scaled_mm.default}
WITH_ADDEND: Final = {aten.addmm.default, aten.baddbmm.default}
WITH_BIAS: Final = {*WITH_ADDEND, *SCALED, aten.linear.default}
PRODUCTS: Final = {  # through which scales are followed: [..., m, k] @ [..., k, n], of linear [n, k]
    aten.mm.default,
    aten.bmm.default,
    *WITH_BIAS,
}
BOUNDED: Final = ("softmax", "sigmoid", "exp", "tanh")  # ops whose results need no scale
