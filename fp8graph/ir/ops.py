"""The dialect: the ops that fp8graph's graphs are written in, between match and lower.

    quantize(x, dtype, power_2_scale, amax_epsilon, rowwise, columnwise, *, scaling, block, ...) -> [data..., scales...]
    scaled_mm(a [m, k], b [n, k], scale_inv_a, scale_inv_b, bias, out_dtype, use_fast_accum, *, scaling, ...) -> [m, n]
    scaled_grouped_mm(a, b, scale_inv_a, scale_inv_b, offs, out_dtype, use_fast_accum, native, *, ...) -> a GEMM a group
    grouped_mm(a, b, offs) -> the same in high precision, for what aten._grouped_mm does not take
    dequantize(data, scale_inv, dtype, *, scaling, block, ...) -> the numbers
    amax(x) -> [1];  scales(amax, dtype, power_2_scale, amax_epsilon, carry_overflow) -> [1, 2]
    columnwise(data [rows, columns], multiples) -> [columns, rows], padded
    read_scales(page, copy) -> [tensors, 2];  stage_amaxes(page, amaxes) -> page
    update_page(page, amaxes, fp8_max, margin, amax_compute_algo) -> page

Each op runs its reference function from ``numerics``, which is also what ``lower`` traces (``REFERENCE``).
The fakes state the shapes only (running a reference on fakes costs a millisecond a node);
tests/ir/test_ops.py holds them against the references.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, Final, cast

import torch
from torch import Tensor, fx

from fp8graph.compat import fakes
from fp8graph.compat.ops import pytree
from fp8graph.numerics import decoding, experts, history, matmul, quantization, tiles
from fp8graph.numerics.arguments import QuantizeArguments
from fp8graph.numerics.scalings import SCALINGS

_SCHEMAS: Final[dict[str, str]] = {
    "quantize": "(Tensor x, ScalarType dtype, bool power_2_scale, float amax_epsilon,"
    ' int[] rowwise, int[] columnwise, *, str scaling="tensor", int[] block=[], bool carry_overflow=False,'
    " Tensor? scales=None, int row=0, bool keep_scales=False, Tensor[]? more=None, int dim=-1,"
    " Tensor? offs=None, bool per_matrix=False) -> Tensor[]",
    "scaled_mm": "(Tensor a, Tensor b, Tensor scale_inv_a, Tensor scale_inv_b, Tensor? bias,"
    ' ScalarType out_dtype, bool use_fast_accum, *, str scaling="tensor", int[] block_a=[], int[] block_b=[],'
    " Tensor? global_scale_inv_a=None, Tensor? global_scale_inv_b=None) -> Tensor",
    "scaled_grouped_mm": "(Tensor a, Tensor b, Tensor scale_inv_a, Tensor scale_inv_b, Tensor offs,"
    ' ScalarType out_dtype, bool use_fast_accum, bool native, *, str scaling="tensor", int[] block_a=[],'
    " int[] block_b=[], Tensor? global_scale_inv_a=None, Tensor? global_scale_inv_b=None, int multiple=1) -> Tensor",
    "grouped_mm": "(Tensor a, Tensor b, Tensor offs) -> Tensor",
    "dequantize": '(Tensor data, Tensor scale_inv, ScalarType dtype, *, str scaling="tensor", int[] block=[],'
    " Tensor? global_scale_inv=None) -> Tensor",
    "amax": "(Tensor x) -> Tensor",
    "scales": "(Tensor amax, ScalarType dtype, bool power_2_scale, float amax_epsilon, bool carry_overflow) -> Tensor",
    "columnwise": "(Tensor data, int[] multiples) -> Tensor",
    "read_scales": "(Tensor page, bool copy) -> Tensor",
    "stage_amaxes": "(Tensor page, Tensor[] amaxes) -> Tensor",
    "update_page": "(Tensor page, Tensor[] amaxes, float fp8_max, float margin, str amax_compute_algo) -> Tensor",
}
_library = torch.library.Library("fp8graph", "DEF")


def _fake_quantize(*args: Any, **kwargs: Any) -> list[Tensor]:
    asked = QuantizeArguments[Any](*args, **kwargs)
    return [asked.x.new_empty(shape, dtype=dtype) for shape, dtype in quantization.output_shapes(asked)]


def _fake_scaled_mm(
    a: Tensor,
    b: Tensor,
    _scale_inv_a: Tensor,
    _scale_inv_b: Tensor,
    _bias: Tensor | None,
    out_dtype: torch.dtype,
    _use_fast_accum: bool,
    **_kwargs: Any,
) -> Tensor:
    return a.new_empty((a.shape[0], b.shape[0]), dtype=out_dtype)


def _fake_scaled_grouped_mm(
    a: Tensor,
    b: Tensor,
    _scale_inv_a: Tensor,
    _scale_inv_b: Tensor,
    offs: Tensor,
    out_dtype: torch.dtype,
    _use_fast_accum: bool,
    _native: bool,
    **_kwargs: Any,
) -> Tensor:
    shape = (a.shape[0], b.shape[1]) if b.ndim == 3 else (offs.shape[0], a.shape[0], b.shape[0])
    return a.new_empty(shape, dtype=out_dtype)


def _fake_grouped_mm(a: Tensor, b: Tensor, offs: Tensor) -> Tensor:
    return a.new_empty((a.shape[0], b.shape[2]) if b.ndim == 3 else (offs.shape[0], a.shape[0], b.shape[1]))


def _fake_dequantize(
    data: Tensor, _scale_inv: Tensor, dtype: torch.dtype, *, scaling: str = "tensor", **_kwargs: Any
) -> Tensor:
    if (packed := SCALINGS[scaling].packed) > 1:
        return data.new_empty([*data.shape[:-1], data.shape[-1] * packed], dtype=dtype)
    return torch.empty_like(data, dtype=dtype)


def _fake_amax(x: Tensor) -> Tensor:
    return x.new_empty((1,), dtype=torch.float32)


def _fake_scales(amax: Tensor, *_settings: Any) -> Tensor:
    return amax.new_empty((1, 2))


def _fake_columnwise(data: Tensor, multiples: Sequence[int]) -> Tensor:
    rows, columns = data.shape
    return data.new_empty([size + -size % m for size, m in zip((columns, rows), multiples, strict=True)])


def _fake_read_scales(page: Tensor, _copy: bool) -> Tensor:
    return page.new_empty((page.shape[0], history.HEADER))


def _read_scales(page: Tensor, _copy: bool) -> Tensor:
    return history.read_scales(page, copy=True)  # an op must not return a view of its argument


def _fake_update_page(page: Tensor, _amaxes: Sequence[Tensor], *_settings: Any) -> Tensor:
    return page.new_empty(page.shape)


_OPS: Final = (
    ("quantize", quantization.quantize_layouts, _fake_quantize),
    ("scaled_mm", matmul.scaled_mm, _fake_scaled_mm),
    ("scaled_grouped_mm", matmul.scaled_grouped_mm, _fake_scaled_grouped_mm),
    ("grouped_mm", experts.grouped_mm, _fake_grouped_mm),
    ("dequantize", decoding.dequantize_data, _fake_dequantize),
    ("amax", quantization.reducible_amax, _fake_amax),
    ("scales", quantization.scales_of_amax, _fake_scales),
    ("columnwise", tiles.columnwise_copy, _fake_columnwise),
    ("read_scales", _read_scales, _fake_read_scales),
    ("stage_amaxes", history.staged_page, _fake_update_page),
    ("update_page", history.updated_page, _fake_update_page),
)
for _name, _reference, _fake in _OPS:
    _library.define(_name + _SCHEMAS[_name], tags=(torch.Tag.pt2_compliant_tag,))
    _library.impl(_name, _reference, "CompositeExplicitAutograd")
    torch.library.register_fake(f"fp8graph::{_name}", _fake, lib=_library)


class _Described:
    """A tensor as far as a fake looks at it; ``new_empty`` describes another one."""

    def __init__(self, shape: Sequence[int], dtype: torch.dtype) -> None:
        self.shape, self.dtype, self.ndim = tuple(shape), dtype, len(shape)

    def new_empty(self, shape: Sequence[int], dtype: torch.dtype | None = None) -> _Described:
        return _Described(shape, dtype or self.dtype)


def fake_results(target: Any, args: Any, kwargs: Any) -> Any:
    """What the fake of a dialect op gives for fake tensors of fixed sizes; None if some size is dynamic.

    The same as calling the op on them, which takes torch a millisecond: a graph of a hundred layers has thousands.
    """
    first = args[0]
    described = pytree.tree_map_only(torch.Tensor, lambda x: _Described(x.shape, x.dtype), (args, kwargs))
    if any(not isinstance(size, int) for x in pytree.tree_leaves(described) for size in getattr(x, "shape", ())):
        return None
    results = SHAPES[target](*described[0], **described[1])
    make = functools.partial(fakes.contiguous_fake, first.fake_mode, first.device)
    return (
        [make(x.shape, x.dtype) for x in results] if isinstance(results, list) else make(results.shape, results.dtype)
    )


quantize = torch.ops.fp8graph.quantize.default
scaled_mm = torch.ops.fp8graph.scaled_mm.default
scaled_grouped_mm = torch.ops.fp8graph.scaled_grouped_mm.default
grouped_mm = torch.ops.fp8graph.grouped_mm.default
dequantize = torch.ops.fp8graph.dequantize.default
amax = torch.ops.fp8graph.amax.default
scales = torch.ops.fp8graph.scales.default
columnwise = torch.ops.fp8graph.columnwise.default
read_scales = torch.ops.fp8graph.read_scales.default
stage_amaxes = torch.ops.fp8graph.stage_amaxes.default
update_page = torch.ops.fp8graph.update_page.default

SHAPES: Final[dict[Any, Callable[..., Any]]] = {
    getattr(torch.ops.fp8graph, name).default: fake
    for name, _, fake in _OPS
    if name != "dequantize"  # keeps the strides of what it reads: the others are contiguous
}
REFERENCE: Final[dict[Any, Callable[..., Any]]] = {
    quantize: quantization.quantize_layouts,
    scaled_mm: matmul.scaled_mm,
    scaled_grouped_mm: matmul.scaled_grouped_mm,
    dequantize: decoding.dequantize_data,
    amax: quantization.reducible_amax,
    scales: quantization.scales_of_amax,
    columnwise: tiles.columnwise_copy,
    read_scales: history.read_scales,
    stage_amaxes: history.staged_page,
    update_page: history.updated_page,
}


DIALECT: Final = frozenset(REFERENCE)


def stays(node: fx.Node) -> bool:
    """Whether a node of the dialect runs as the op that it is: a loop over groups, whose sizes no graph knows."""
    if node.target is not scaled_grouped_mm:
        return False
    device = cast(fx.Node, node.args[0]).meta["val"].device
    return not node.args[7] or device.type == "cpu"
