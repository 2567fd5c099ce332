"""Inductor lowerings for our own ops: how they store, divide, reduce and read."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch._inductor import config as inductor_config
from torch._inductor import ir
from torch._inductor.lowering import lowerings, make_pointwise, register_lowering
from torch._inductor.ops_handler import OpsHandler
from torch._inductor.virtualized import V, ops
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols


def lower_to_stored(op: Any) -> None:
    """``op(x)`` is x, written to memory in the shape that x has at this point.

    Contiguous where the data decide a size: GraphLowering.run_node keeps the strides of a graph's results, but not
    those that hold such a size, and backward, which was traced with the strides, would read others.
    """

    def stored(x: Any) -> Any:
        x.realize()
        return ir.ExternKernel.require_contiguous(x) if free_unbacked_symbols(x.get_size()) else x

    register_lowering(op, type_promotion_kind=None)(stored)


def lower_to_exact_quotient(op: Any) -> None:
    """``op(a, b)`` is a / b, elementwise, one IEEE division on every device."""

    def quotient(a: Any, b: Any) -> Any:
        return make_pointwise(_rounded_to_nearest if a.get_device().type == "cuda" else ops.truediv)(a, b)

    register_lowering(op, type_promotion_kind=None, broadcast=True)(quotient)


def lower_to_maximum(op: Any, few: int) -> None:
    """``op(x)`` is ``x.amax()``; a reduction of at most ``few`` elements is not split into several kernels."""

    def maximum(x: Any) -> Any:
        is_small = V.graph.sizevars.statically_known_leq(x.get_numel(), few)
        with inductor_config.patch(split_reductions=inductor_config.split_reductions and not is_small):
            return lowerings[torch.ops.aten.amax.default](x)

    register_lowering(op, type_promotion_kind=None)(maximum)


def lower_to_visible(op: Any) -> None:
    """``op(x)`` is x, FP32, and NaN where it is infinite. x is read once."""
    register_lowering(op, type_promotion_kind=None)(make_pointwise(_nan_where_infinite))


def _nan_where_infinite(x: Any) -> Any:
    largest, nan = (ops.constant(value, torch.float32) for value in (torch.finfo(torch.float32).max, math.nan))
    return ops.where(ops.le(ops.abs(x), largest), x, nan)


def _rounded_to_nearest(a: Any, b: Any) -> Any:
    """``a / b`` in Inductor's GPU code, FP32, rounded to nearest. Torch 2.11 has no operation for it."""
    if hasattr(OpsHandler, "div_rn"):
        return ops.div_rn(a, b)
    return ops.inline_asm_elementwise(a, b, asm="div.rn.f32 $0, $1, $2;", constraints="=f,f,f", dtype=torch.float32)
