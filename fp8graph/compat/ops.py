"""torch's operators: those without a public name, the schemas of all, and their arguments by name."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, Final, cast

import torch
from torch import Tensor, fx
from torch._ops import OpOverload as OpOverload
from torch.utils import _pytree

from fp8graph.compat import inductor


def scaled_mm(
    a: Tensor,
    b: Tensor,
    scale_a: Tensor,
    scale_b: Tensor,
    *,
    bias: Tensor | None,
    out_dtype: torch.dtype,
    use_fast_accum: bool,
) -> Tensor:
    """``(a * scale_a) @ (b * scale_b) + bias``: a [m, k] row-major, b [k, n] column-major, both FP8 or FP4."""
    return torch._scaled_mm(a, b, scale_a, scale_b, bias=bias, out_dtype=out_dtype, use_fast_accum=use_fast_accum)


def define_op(
    library: torch.library.Library,
    schema: str,
    run: Callable[..., Any],
    fake: Callable[..., Any],
    *,
    tags: tuple[torch.Tag, ...] = (),
) -> Any:
    """Define an op that computes ``run`` on every device, and return it.

    Args:
        schema: its name, arguments and results, as torch writes them.
        fake: ``run`` in shapes alone.
        tags: of torch's, more than ``pt2_compliant_tag``.
    """
    name = schema.partition("(")[0]
    library.define(schema, tags=(torch.Tag.pt2_compliant_tag, *tags))
    library.impl(name, run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"{library.ns}::{name}", fake, lib=library)
    return getattr(getattr(torch.ops, library.ns), name).default


pytree: Final = _pytree
HAS_SCALED_ADDMM: Final = hasattr(torch.nn.functional, "scaled_addmm")  # from torch 2.15 on


def scaled_addmm(
    addend: Tensor, a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, *, use_fast_accum: bool
) -> Tensor:
    """``addend + (a * scale_a) @ (b * scale_b)`` in one kernel: addend [m, n] FP32, one scale for each operand."""
    functional: Any = torch.nn.functional
    kind = functional.ScalingType.TensorWise
    return functional.scaled_addmm(addend, a, b, scale_a, kind, scale_b, kind, use_fast_accum=use_fast_accum)


def scaled_grouped_mm(
    a: Tensor,
    b: Tensor,
    scale_a: Tensor,
    scale_b: Tensor,
    ends: Tensor,
    *,
    out_dtype: torch.dtype,
    use_fast_accum: bool,
) -> Tensor:
    """:func:`scaled_mm` for each group of rows, or of columns, that ends where ``ends`` says."""
    return torch._scaled_grouped_mm(a, b, scale_a, scale_b, ends, out_dtype=out_dtype, use_fast_accum=use_fast_accum)


_library: Final = torch.library.Library("fp8graph_kernels", "DEF")


def _grouped_mm_of_blocks(a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, ends: Tensor) -> Tensor:
    return torch._scaled_grouped_mm(a, b, scale_a, scale_b, ends, out_dtype=torch.bfloat16)


_OF_BLOCKS: Final = define_op(
    _library,
    "grouped_mm_of_blocks(Tensor a, Tensor b, Tensor scale_a, Tensor scale_b, Tensor ends) -> Tensor",
    _grouped_mm_of_blocks,
    _grouped_mm_of_blocks,
)
inductor.lower_to_kernel(
    _OF_BLOCKS,
    torch.ops.aten._scaled_grouped_mm.default,
    None,  # bias
    None,  # scale of the result
    torch.bfloat16,
)


def grouped_mm_of_blocks(a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, ends: Tensor) -> Tensor:
    """:func:`scaled_grouped_mm` with E8M0 scales of 32 elements each, in blocks (``numerics.group_blocks``), in bf16.

    An op of its own: where Inductor tunes ``_scaled_grouped_mm``, its template takes E8M0 scales for those of rows
    (``_tuned_grouped_mm_common``, torch 2.11 to 2.15).
    """
    return _OF_BLOCKS(a, b, scale_a, scale_b, ends)


def _grouped_mm_of_fp4(
    a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, global_a: Tensor, global_b: Tensor, ends: Tensor
) -> Tensor:
    functional: Any = torch.nn.functional
    scaling, swizzle, experts = functional.ScalingType, functional.SwizzleType, ends.shape[0]
    kinds = [scaling.BlockWise1x16, scaling.TensorWise]
    orders = [swizzle.SWIZZLE_32_4_4, swizzle.NO_SWIZZLE]
    return functional.scaled_grouped_mm(
        a.view(torch.float4_e2m1fn_x2),
        b.view(torch.float4_e2m1fn_x2).transpose(-2, -1),
        # torch multiplies both scales of a group, and the kernel reads the product of each
        scale_a=[scale_a, global_a.expand(experts)],
        scale_recipe_a=kinds,
        scale_b=[scale_b, global_b.expand(experts)],
        scale_recipe_b=kinds,
        swizzle_a=orders,
        swizzle_b=orders,
        offs=ends,
        output_dtype=torch.bfloat16,
    )


def _shape_of_grouped_mm_of_fp4(a: Tensor, b: Tensor, *scales_and_ends: Tensor) -> Tensor:
    shape = (a.shape[0], b.shape[1]) if b.ndim == 3 else (scales_and_ends[-1].shape[0], a.shape[0], b.shape[0])
    return a.new_empty(shape, dtype=torch.bfloat16)


_OF_FP4: Final = define_op(
    _library,
    "grouped_mm_of_fp4(Tensor a, Tensor b, Tensor scale_a, Tensor scale_b, Tensor global_a, Tensor global_b,"
    " Tensor ends) -> Tensor",
    _grouped_mm_of_fp4,
    _shape_of_grouped_mm_of_fp4,
)


def grouped_mm_of_fp4(
    a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, global_a: Tensor, global_b: Tensor, ends: Tensor
) -> Tensor:
    """:func:`scaled_grouped_mm` of FP4 with E4M3 scales of 16 elements each, in blocks, in bf16.

    Args:
        a, b: two E2M1 numbers per byte, both contiguous along k: a [t, k / 2] and b [experts, n, k / 2], or
            a [m, t / 2] and b [n, t / 2].
        global_a, global_b: FP32 [experts] or []: they multiply the scales.
        ends: in numbers, not in bytes.

    An op of its own: torch's, behind scaled_grouped_mm of torch.nn.functional alone (pytorch#187095), has a shape
    function from torch 2.14 on, and would make buffers of FP4 in generated code, which Triton's interpreter does not
    know.
    """
    return _OF_FP4(a, b, scale_a, scale_b, global_a, global_b, ends)


def copy_each(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    """``target.copy_(source)`` for each pair, in few kernels."""
    torch._foreach_copy_(list(targets), list(sources))


def largest_of_each(tensors: Sequence[Tensor]) -> list[Tensor]:
    """[]: the largest magnitude in each tensor, in its dtype, in few kernels and without a copy of magnitudes."""
    return list(torch._foreach_norm(list(tensors), torch.inf))


def largest_of_columns(x: Tensor) -> Tensor:
    """[columns]: the largest magnitude in each column of ``x`` [rows, columns], without a copy of magnitudes."""
    return torch.linalg.vector_norm(x, torch.inf, dim=0)


def raise_each(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    """``target = max(target, source)`` for each pair, in few kernels; NaN wins."""
    torch._foreach_maximum_(list(targets), list(sources))


def schema(op: Any) -> Any:
    """Return the schema of an op: its arguments and returns, with types and aliases."""
    return cast(OpOverload, op)._schema


@functools.cache
def _arguments_of(op: Any) -> list[tuple[str, Any]]:
    """Return the names and defaults of an op's arguments. A schema makes them anew each time it is read."""
    return [(argument.name, argument.default_value) for argument in schema(op).arguments]


def named_arguments(node: fx.Node) -> dict[str, Any]:
    """Return the arguments of an op's node by name, in the order of its schema, its defaults included."""
    named: dict[str, Any] = {}
    args, kwargs = node.args, node.kwargs
    for position, (name, default) in enumerate(_arguments_of(node.target)):
        if position < len(args):
            named[name] = args[position]
        elif name in kwargs:
            named[name] = kwargs[name]
        else:
            named[name] = list(cast("list[Any]", default)) if isinstance(default, list) else default
    return named
