"""Ops that tell Inductor more than the arithmetic: what to store, how to divide and reduce, what to read once.

On a CPU and in eager mode, none of them changes a number.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

import torch
from torch import Tensor

from fp8graph.compat import inductor
from fp8graph.recipes import FLT_MAX, FP8_MAX


def _shape_of_arrange(parts: list[Tensor], dim: int) -> Tensor:
    shape = [*parts[0].shape]
    shape[dim] = sum(part.shape[dim] for part in parts)
    return parts[0].new_empty(shape)


_library: Final = torch.library.Library("fp8graph_hints", "DEF")
_library.define("materialize(Tensor x) -> Tensor", tags=(torch.Tag.pt2_compliant_tag,))
_library.impl("materialize", torch.clone, "CompositeExplicitAutograd")
torch.library.register_fake("fp8graph_hints::materialize", torch.empty_like, lib=_library)
_library.define("join(Tensor[] parts, int dim) -> Tensor", tags=(torch.Tag.pt2_compliant_tag,))
_library.impl("join", torch.cat, "CompositeExplicitAutograd")
torch.library.register_fake("fp8graph_hints::join", torch.cat, lib=_library)
_library.define("arrange(Tensor[] parts, int dim) -> Tensor", tags=(torch.Tag.pt2_compliant_tag,))
torch.library.register_fake("fp8graph_hints::arrange", _shape_of_arrange, lib=_library)
_library.define("write_(Tensor(a!) target, Tensor x) -> ()", tags=(torch.Tag.pt2_compliant_tag,))
_library.define("divide(Tensor a, Tensor b) -> Tensor", tags=(torch.Tag.pt2_compliant_tag, torch.Tag.pointwise))
_library.impl("divide", torch.div, "CompositeExplicitAutograd")
torch.library.register_fake("fp8graph_hints::divide", torch.div, lib=_library)
_library.define("largest(Tensor x) -> Tensor", tags=(torch.Tag.pt2_compliant_tag,))
_library.impl("largest", torch.amax, "CompositeExplicitAutograd")
torch.library.register_fake("fp8graph_hints::largest", torch.amax, lib=_library)
_library.define("visible(Tensor x) -> Tensor", tags=(torch.Tag.pt2_compliant_tag, torch.Tag.pointwise))
torch.library.register_fake("fp8graph_hints::visible", torch.empty_like, lib=_library)
_library.define("logistic(Tensor x) -> Tensor", tags=(torch.Tag.pt2_compliant_tag, torch.Tag.pointwise))
torch.library.register_fake("fp8graph_hints::logistic", torch.empty_like, lib=_library)
_library.define(
    "saturating_cast(Tensor x, ScalarType dtype) -> Tensor", tags=(torch.Tag.pt2_compliant_tag, torch.Tag.pointwise)
)
_library.define(
    "placed(Tensor x, Tensor places, SymInt size, bool filled) -> Tensor", tags=(torch.Tag.pt2_compliant_tag,)
)


@torch.library.impl("fp8graph_hints::placed", "CompositeExplicitAutograd", lib=_library)
def _(x: Tensor, places: Tensor, size: int, filled: bool) -> Tensor:
    out = x.new_zeros(size)
    out[places] = x
    return out


def _fake_placed(x: Tensor, places: Tensor, size: int, filled: bool) -> Tensor:
    return x.new_empty(size)


torch.library.register_fake("fp8graph_hints::placed", _fake_placed, lib=_library)


@torch.library.impl("fp8graph_hints::arrange", "CompositeExplicitAutograd", lib=_library)
def _(parts: list[Tensor], dim: int) -> Tensor:
    return (
        torch.cat(parts, dim).contiguous() if len(parts) > 1 else parts[0].clone(memory_format=torch.contiguous_format)
    )


@torch.library.impl("fp8graph_hints::write_", "CompositeExplicitAutograd", lib=_library)
def _(target: Tensor, x: Tensor) -> None:
    target.copy_(x)


def _fake_write(target: Tensor, x: Tensor) -> None: ...


torch.library.register_fake("fp8graph_hints::write_", _fake_write, lib=_library)


@torch.library.impl("fp8graph_hints::visible", "CompositeExplicitAutograd", lib=_library)
def _(x: Tensor) -> Tensor:
    return torch.where(x.abs() <= FLT_MAX, x, math.nan)


@torch.library.impl("fp8graph_hints::logistic", "CompositeExplicitAutograd", lib=_library)
def _(x: Tensor) -> Tensor:
    return (torch.exp(-x) + 1).reciprocal()


@torch.library.impl("fp8graph_hints::saturating_cast", "CompositeExplicitAutograd", lib=_library)
def _(x: Tensor, dtype: torch.dtype) -> Tensor:
    return x.clamp_min(-FP8_MAX[dtype]).clamp_max(FP8_MAX[dtype]).to(dtype)


def _fake_cast(x: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.empty_like(x, dtype=dtype)


torch.library.register_fake("fp8graph_hints::saturating_cast", _fake_cast, lib=_library)


# Elements that one program of a GPU reduces: 64 rows of 4096. Inductor gives it 8192 up to Hopper.
FEW: Final = 2**18


def materialize(x: Tensor) -> Tensor:
    """``x``, written to memory in the shape that it has here.

    Inductor merges the dims of a view that follows before it looks for loops to fuse: a cast of [rows, tiles, 128]
    that is flattened no longer looks like the amax over the last dim. Stored in its own shape, it shares a kernel with
    the amax, and the view is free. A tensor that several GEMMs read is also stored only once: Inductor does not know
    that ``_scaled_mm`` reads from memory, and would store the tensor for each of them.
    """
    return torch.ops.fp8graph_hints.materialize(x)


def join(parts: Sequence[Tensor], dim: int) -> Tensor:
    """``torch.cat(parts, dim)``, each part computed by a loop of its own size, where it is computed at all.

    Inductor gives a ``cat`` one loop in which each element computes all parts, and selects: on an H200 the rotary
    embedding's backward took 0.60 ms for q, k and v of Llama-3-8B with 8192 tokens, and bf16's two loops take 0.23 ms.
    """
    return torch.ops.fp8graph_hints.join(list(parts), dim)


def arrange(parts: Sequence[Tensor], dim: int) -> Tensor:
    """The parts, views, joined along ``dim``: stored once and contiguous, each computed in its place.

    Inductor stores a materialized view in the order in which it is computed, and then copies it for each GEMM that
    wants it contiguous.
    """
    return torch.ops.fp8graph_hints.arrange(list(parts), dim)


def divide(a: Tensor, b: Tensor) -> Tensor:
    """``a / b`` in FP32, one IEEE division on every device.

    Triton's ``/`` is approximate (PTX ``div.full.f32``). Inductor's option ``eager_numerics.division_rounding``
    makes every division of a graph exact, also those of a model's own functions: SwiGLU's sigmoid has one per element,
    while scales need few.
    """
    return torch.ops.fp8graph_hints.divide(a, b)


def largest(x: Tensor) -> Tensor:
    """``x.amax()``, by one program of a GPU if there are at most ``FEW`` elements.

    Inductor splits a reduction to one number: partial results in one kernel, the number in a second, and what is
    computed with it in a third. For the few tokens of a decoding step all of that is one kernel.
    """
    return torch.ops.fp8graph_hints.largest(x)


def visible(x: Tensor) -> Tensor:
    """``x``, FP32, and NaN where it is infinite.

    Inductor counts a tensor that an expression reads twice (in the condition and in the result) as computed twice, and
    stores it: a norm would no longer share a kernel with the amax and the cast of tiles. This op reads it once.
    """
    return torch.ops.fp8graph_hints.visible(x)


def saturating_cast(x: Tensor, dtype: torch.dtype) -> Tensor:
    """FP32 -> FP8, round to nearest even, saturating, also from inf; NaN stays NaN.

    Torch's casts differ: E4M3 saturates only from 2.12 on, the others never. A GPU's instruction saturates
    (PTX ``cvt.rn.satfinite``), and the comparisons of a clamp in front of it, which keep NaN, are a third of the
    instructions of a kernel that casts: on an H200 it took twice as long with them.
    """
    return torch.ops.fp8graph_hints.saturating_cast(x, dtype)


def placed(x: Tensor, places: Tensor, size: int, *, filled: bool) -> Tensor:
    """[size]: each element of ``x`` at its place, of ``places`` with the same shape; zeros where nothing is placed.

    ``filled``: no element of the result that is read is left out; then a GPU writes no zeros. The loop is that of
    ``x``: the kernel that computes x writes the result.
    """
    return torch.ops.fp8graph_hints.placed(x, places, size, filled)


MATERIALIZE: Final = torch.ops.fp8graph_hints.materialize.default
ARRANGE: Final = torch.ops.fp8graph_hints.arrange.default
WRITE: Final = torch.ops.fp8graph_hints.write_.default
LOGISTIC: Final = torch.ops.fp8graph_hints.logistic.default
inductor.lower_to_maximum(torch.ops.fp8graph_hints.largest.default, FEW)
inductor.lower_to_stored(MATERIALIZE)
inductor.lower_to_join(torch.ops.fp8graph_hints.join.default)
inductor.lower_to_arranged(ARRANGE)
inductor.lower_to_written(WRITE)
inductor.lower_to_exact_quotient(torch.ops.fp8graph_hints.divide.default)
inductor.lower_to_placed(torch.ops.fp8graph_hints.placed.default)
inductor.lower_to_logistic(LOGISTIC)
inductor.lower_to_visible(torch.ops.fp8graph_hints.visible.default)
inductor.lower_to_saturating_cast(torch.ops.fp8graph_hints.saturating_cast.default, FP8_MAX)
