"""Casts of whole tensors with FP32 scales of tiles by one kernel, which computes each tile of 128 x 128 once.

Also behind the functions that compute the tensor from others, SwiGLU and its backward: tiles that lie along rows and
tiles that lie along columns would be two loops, each of which computes the function again. ``passes/cast_in_tiles.py``
says where. In eager mode, the reference numerics compute the function in FP32 and quantize it: the oracle.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import torch
from torch import Tensor

from fp8graph.compat import inductor
from fp8graph.numerics import quantization
from fp8graph.numerics.scalings import QuantizeArguments
from fp8graph.numerics.tiles import TRANSPOSED
from fp8graph.recipes import FP8_MAX

SIZE: Final = 128


def logistic(x: Tensor) -> Tensor:
    return torch.ops.fp8graph_hints.logistic(x)


def _swiglu(gate: Tensor, up: Tensor) -> list[Tensor]:
    return [gate * logistic(gate) * up]


def _swiglu_backward(gate: Tensor, dy: Tensor, up: Tensor) -> list[Tensor]:
    sigmoid = logistic(gate)
    return [dy * up * sigmoid * (gate * (1 - sigmoid) + 1), dy * (gate * sigmoid)]


# Of tensors in FP32 that are not rounded in between, as generated code computes them: the parts that are quantized.
FUNCTIONS: Final[Mapping[str, Callable[..., list[Tensor]]]] = {
    "swiglu": _swiglu,
    "swiglu_backward": _swiglu_backward,
}


def cast_in_tiles(
    inputs: Sequence[Tensor],
    function: str,
    dtype: torch.dtype,
    power_2_scale: bool,
    amax_epsilon: float,
    block: Sequence[int],
    dim: int,
    both: bool,
    keep_scales: bool,
    orders: Sequence[str],
) -> list[Tensor]:
    """The results of ``quantize_layouts`` for tiles of ``block``: rowwise and, if ``both``, columnwise.

    Args:
        inputs: bf16 [rows, columns], multiples of ``SIZE``, contiguous along columns: what ``function`` takes, or
            without one ("") the parts that are quantized.
        dim: along which the parts are joined.
        orders: of the scales of each layout, see ``tiles.ordered``.
    """
    parts = FUNCTIONS[function](*(x.to(torch.float32) for x in inputs)) if function else list(inputs)
    return quantization.quantize_layouts(
        *(parts[0], dtype, power_2_scale, amax_epsilon, [1, 1], [1, 1] if both else []),
        scaling="block", block=block, dim=dim, more=parts[1:] or None, keep_scales=keep_scales,
        rowwise_order=orders[0], columnwise_order=orders[1],
    )  # fmt: skip


def _shapes(
    inputs: Sequence[Any],
    function: str,
    dtype: torch.dtype,
    power_2_scale: bool,
    amax_epsilon: float,
    block: Sequence[int],
    dim: int,
    both: bool,
    keep_scales: bool,
    orders: Sequence[str],
) -> list[tuple[list[int], torch.dtype]]:
    parts = 2 if function == "swiglu_backward" else 1 if function else len(inputs)
    arguments: QuantizeArguments[Any] = QuantizeArguments(
        *(inputs[0], dtype, power_2_scale, amax_epsilon, [1, 1], [1, 1] if both else []),
        scaling="block", block=block, dim=dim, more=(list(inputs) if not function else [inputs[0]] * parts)[1:],
        keep_scales=keep_scales, rowwise_order=orders[0], columnwise_order=orders[1],
    )  # fmt: skip
    return quantization.output_shapes(arguments)


def _fake(inputs: Sequence[Tensor], *settings: Any) -> list[Tensor]:
    return [inputs[0].new_empty(shape, dtype=dtype) for shape, dtype in _shapes(inputs, *settings)]


def launches_of(
    inputs: Sequence[inductor.Described],
    function: str,
    dtype: torch.dtype,
    power_2_scale: bool,
    amax_epsilon: float,
    block: Sequence[int],
    dim: int,
    both: bool,
    keep_scales: bool,
    orders: Sequence[str],
) -> inductor.Launches:
    """The results, and the launches of the kernel that write them: one for each part."""
    from fp8graph.numerics.tile_kernel import cast_tiles  # needs triton

    settings = (function, dtype, power_2_scale, amax_epsilon, block, dim, both, keep_scales, orders)
    results = _shapes(inputs, *settings)
    (rows, columns), _ = results[0]
    row_strides, column_strides = (
        (1, lines) if order == TRANSPOSED else (tiles, 1)
        for order, lines, tiles in zip(orders, (rows, columns), (columns // SIZE, rows // SIZE), strict=True)
    )
    square = block[0] == SIZE
    names = ["rowwise", *(["columnwise"] if both else []), "rowwise_scale_inv"]
    names += [*(["columnwise_scale_inv"] if both else []), *(["scales"] if keep_scales else [])]
    unused = {"columnwise": 0, "columnwise_scale_inv": names.index("rowwise_scale_inv"), "scales": 0}
    written = unused | {name: index for index, name in enumerate(names)}
    launches: list[inductor.Launch] = []
    first_row = first_column = 0
    for read in [range(len(inputs))] if function else [[index] for index in range(len(inputs))]:
        a, b, c = (inputs[read[min(index, len(read) - 1)]] for index in range(3))
        height, width = a.shape
        tiles = width // SIZE * (2 if function == "swiglu_backward" else 1)
        launches.append(
            inductor.Launch(
                kernel=cast_tiles,
                grid=(tiles, height // SIZE, 1),
                reads={name: read[min(index, len(read) - 1)] for index, name in enumerate("abc")},
                writes=written,
                constants={
                    "stride_a": a.stride[0], "stride_b": b.stride[0], "stride_c": c.stride[0],
                    "first_row": first_row, "first_column": first_column,
                    "whole_rows": rows, "whole_columns": columns,
                    "row_stride": row_strides[0], "row_tile_stride": row_strides[1],
                    "column_stride": column_strides[0], "column_tile_stride": column_strides[1],
                    "function": function, "fp8_max": FP8_MAX[dtype], "power_2": power_2_scale,
                    "epsilon": amax_epsilon, "square": square, "both": both, "keeps": keep_scales,
                },
            )
        )  # fmt: skip
        first_row, first_column = (first_row + height // SIZE, 0) if dim == -2 else (0, first_column + tiles)
    return results, launches


_library: Final = torch.library.Library("fp8graph_tiles", "DEF")
_library.define(
    "cast(Tensor[] inputs, str function, ScalarType dtype, bool power_2_scale, float amax_epsilon, int[] block,"
    " int dim, bool both, bool keep_scales, str[] orders) -> Tensor[]",
    tags=(torch.Tag.pt2_compliant_tag,),
)
_library.impl("cast", cast_in_tiles, "CompositeExplicitAutograd")
torch.library.register_fake("fp8graph_tiles::cast", _fake, lib=_library)
CAST: Final = torch.ops.fp8graph_tiles.cast.default
inductor.lower_to_launches(CAST, launches_of)
