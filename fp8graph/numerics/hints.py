"""Ops that tell Inductor more than the arithmetic: what to store, how to divide and reduce, what to read once.

On a CPU and in eager mode, none of them changes a number.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Final

import torch
from torch import Tensor

from fp8graph.compat import inductor
from fp8graph.compat.ops import define_op
from fp8graph.recipes import FLT_MAX, FP8_MAX


def _shape_of_arrange(parts: list[Tensor], dim: int) -> Tensor:
    shape = [*parts[0].shape]
    shape[dim] = sum(part.shape[dim] for part in parts)
    return parts[0].new_empty(shape)


def _arranged(parts: list[Tensor], dim: int) -> Tensor:
    return (
        torch.cat(parts, dim).contiguous() if len(parts) > 1 else parts[0].clone(memory_format=torch.contiguous_format)
    )


def _written(target: Tensor, x: Tensor) -> None:
    target.copy_(x)


def _nothing(target: Tensor, x: Tensor) -> None: ...


def _visible(x: Tensor) -> Tensor:
    return torch.where(x.abs() <= FLT_MAX, x, math.nan)


def _logistic(x: Tensor) -> Tensor:
    return (torch.exp(-x) + 1).reciprocal()


def _saturating_cast(x: Tensor, dtype: torch.dtype) -> Tensor:
    return x.clamp_min(-FP8_MAX[dtype]).clamp_max(FP8_MAX[dtype]).to(dtype)


def _shape_of_cast(x: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.empty_like(x, dtype=dtype)


def _placed(x: Tensor, places: Tensor, size: int, filled: bool) -> Tensor:
    out = x.new_zeros(size)
    out[places] = x
    return out


def _shape_of_placed(x: Tensor, places: Tensor, size: int, filled: bool) -> Tensor:
    return x.new_empty(size)


_library: Final = torch.library.Library("fp8graph_hints", "DEF")
_define = functools.partial(define_op, _library)
_POINTWISE: Final = (torch.Tag.pointwise,)
MATERIALIZE: Final = _define("materialize(Tensor x) -> Tensor", torch.clone, torch.empty_like)
ARRANGE: Final = _define("arrange(Tensor[] parts, int dim) -> Tensor", _arranged, _shape_of_arrange)
WRITE: Final = _define("write_(Tensor(a!) target, Tensor x) -> ()", _written, _nothing)
LOGISTIC: Final = _define("logistic(Tensor x) -> Tensor", _logistic, torch.empty_like, tags=_POINTWISE)
_JOIN: Final = _define("join(Tensor[] parts, int dim) -> Tensor", torch.cat, torch.cat)
_DIVIDE: Final = _define("divide(Tensor a, Tensor b) -> Tensor", torch.div, torch.div, tags=_POINTWISE)
_LARGEST: Final = _define("largest(Tensor x) -> Tensor", torch.amax, torch.amax)
_VISIBLE: Final = _define("visible(Tensor x) -> Tensor", _visible, torch.empty_like, tags=_POINTWISE)
_CAST: Final = _define(
    "saturating_cast(Tensor x, ScalarType dtype) -> Tensor", _saturating_cast, _shape_of_cast, tags=_POINTWISE
)
_PLACED: Final = _define(
    "placed(Tensor x, Tensor places, SymInt size, bool filled) -> Tensor", _placed, _shape_of_placed
)


# Elements that one program of a GPU reduces: 64 rows of 4096. Inductor gives it 8192 up to Hopper.
FEW: Final = 2**18


def materialize(x: Tensor) -> Tensor:
    """``x``, written to memory in the shape that it has here.

    Inductor merges the dims of a view that follows before it looks for loops to fuse: a cast of [rows, tiles, 128]
    that is flattened no longer looks like the amax over the last dim. Stored in its own shape, it shares a kernel with
    the amax, and the view is free. A tensor that several GEMMs read is also stored only once: Inductor does not know
    that ``_scaled_mm`` reads from memory, and would store the tensor for each of them.
    """
    return MATERIALIZE(x)


def join(parts: Sequence[Tensor], dim: int) -> Tensor:
    """``torch.cat(parts, dim)``, each part computed by a loop of its own size, where it is computed at all.

    Inductor gives a ``cat`` one loop in which each element computes all parts, and selects: on an H200 the rotary
    embedding's backward took 0.60 ms for q, k and v of Llama-3-8B with 8192 tokens, and bf16's two loops take 0.23 ms.
    """
    return _JOIN(list(parts), dim)


def arrange(parts: Sequence[Tensor], dim: int) -> Tensor:
    """Return the parts, views, joined along ``dim``: stored once and contiguous, each computed in its place.

    Inductor stores a materialized view in the order in which it is computed, and then copies it for each GEMM that
    wants it contiguous.
    """
    return ARRANGE(list(parts), dim)


def divide(a: Tensor, b: Tensor) -> Tensor:
    """``a / b`` in FP32, one IEEE division on every device.

    Triton's ``/`` is approximate (PTX ``div.full.f32``). Inductor's option ``eager_numerics.division_rounding``
    makes every division of a graph exact, also those of a model's own functions: SwiGLU's sigmoid has one per element,
    while scales need few.
    """
    return _DIVIDE(a, b)


def largest(x: Tensor) -> Tensor:
    """``x.amax()``, by one program of a GPU if there are at most ``FEW`` elements.

    Inductor splits a reduction to one number: partial results in one kernel, the number in a second, and what is
    computed with it in a third. For the few tokens of a decoding step all of that is one kernel.
    """
    return _LARGEST(x)


def visible(x: Tensor) -> Tensor:
    """``x``, FP32, and NaN where it is infinite.

    Inductor counts a tensor that an expression reads twice (in the condition and in the result) as computed twice, and
    stores it: a norm would no longer share a kernel with the amax and the cast of tiles. This op reads it once.
    """
    return _VISIBLE(x)


def saturating_cast(x: Tensor, dtype: torch.dtype) -> Tensor:
    """FP32 -> FP8, round to nearest even, saturating, also from inf; NaN stays NaN.

    Torch's casts differ: E4M3 saturates only from 2.12 on, the others never. A GPU's instruction saturates
    (PTX ``cvt.rn.satfinite``), and the comparisons of a clamp in front of it, which keep NaN, are a third of the
    instructions of a kernel that casts: on an H200 it took twice as long with them.
    """
    return _CAST(x, dtype)


def placed(x: Tensor, places: Tensor, size: int, *, filled: bool) -> Tensor:
    """[size]: each element of ``x`` at its place, of ``places`` with the same shape; zeros where nothing is placed.

    ``filled``: no element of the result that is read is left out; then a GPU writes no zeros. The loop is that of
    ``x``: the kernel that computes x writes the result.
    """
    return _PLACED(x, places, size, filled)


inductor.lower_to_maximum(_LARGEST, FEW)
inductor.lower_to_stored(MATERIALIZE)
inductor.lower_to_join(_JOIN)
inductor.lower_to_arranged(ARRANGE)
inductor.lower_to_written(WRITE)
inductor.lower_to_exact_quotient(_DIVIDE)
inductor.lower_to_placed(_PLACED)
inductor.lower_to_logistic(LOGISTIC)
inductor.lower_to_visible(_VISIBLE)
inductor.lower_to_saturating_cast(_CAST, FP8_MAX)
