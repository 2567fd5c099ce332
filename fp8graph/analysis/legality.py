"""GEMMs that FP8 cannot do on any device: the refusals of the pass `assign`, in words for the report."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from fp8graph.ir.nodes import GROUPED, known_at_run_time_only, static_size, value
from fp8graph.ir.sites import Gemm
from fp8graph.recipes.rules import Resolution

_HIGH_PRECISION_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def why_not_in_fp8(gemm: Gemm, resolution: Resolution) -> str | None:
    """Why FP8 cannot do this GEMM, or None if it can."""
    recipe = resolution.recipes[gemm.gemm]
    if recipe is not None and recipe.only_for_attention:  # of an autocast region: rules and policies refuse it
        return f"{recipe.only_for_attention}=True is for attention alone"
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


def why_not_of_size(shape: Sequence[int | torch.SymInt], *, grouped: bool = False) -> str | None:
    """Return the reason why no operand of this shape is quantized, or None if one is.

    A maximum of nothing has no value, and kernels and tiles depend on a size; groups of rows may all be empty.
    """
    if any(static_size(size) == 0 for size in shape):
        return f"an operand is empty: {list(shape)}"
    if not grouped and any(map(known_at_run_time_only, shape)):
        return f"a size is known at run time only, and may be 0: {list(shape)}"
    return None


def _why_not_grouped(gemm: Gemm, resolution: Resolution) -> str | None:
    """Why FP8 cannot do this grouped matmul."""
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
    """Whether this is a bmm over more than one matrix (a batch of one is a plain GEMM)."""
    out = value(gemm.node)
    return gemm.node.target not in GROUPED and out.ndim == 3 and static_size(out.shape[0]) != 1
