"""Casts of whole tensors by one kernel, which computes each tile of 128 x 128 once.

FP32 scales of tiles, and those that delayed scaling has from earlier steps. Also behind the functions that compute the
tensor from others, SwiGLU and its backward: tiles that lie along rows and tiles that lie along columns would be two
loops, each of which computes the function again. ``passes/cast_in_tiles.py`` says where. In eager mode, the reference
numerics compute the function in FP32 and quantize it: the oracle.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, NamedTuple, TypeVar

import torch
from torch import Tensor

from fp8graph.compat import inductor
from fp8graph.compat.ops import define_op
from fp8graph.numerics import quantization
from fp8graph.numerics.formats import SCALE, SCALE_INV
from fp8graph.numerics.hints import LOGISTIC
from fp8graph.numerics.scalings import QuantizeArguments
from fp8graph.numerics.tiles import TRANSPOSED
from fp8graph.recipes import FP8_MAX, Layout

T = TypeVar("T")
SIZE: Final = 128


def _swiglu(gate: Tensor, up: Tensor) -> list[Tensor]:
    return [gate * LOGISTIC(gate) * up]


def _swiglu_backward(gate: Tensor, dy: Tensor, up: Tensor) -> list[Tensor]:
    sigmoid = LOGISTIC(gate)
    return [dy * up * sigmoid * (gate * (1 - sigmoid) + 1), dy * (gate * sigmoid)]


# Of tensors in FP32 that are not rounded in between, as generated code computes them: the parts that are quantized.
FUNCTIONS: Final[Mapping[str, Callable[..., list[Tensor]]]] = {
    "swiglu": _swiglu,
    "swiglu_backward": _swiglu_backward,
}


class TileCast(NamedTuple):
    """The way to cast tensors: the arguments of the op after its inputs, in order."""

    function: str  # of the inputs; "": they are quantized themselves
    dtype: torch.dtype
    power_2_scale: bool
    amax_epsilon: float
    block: Sequence[int]  # the tiles that have a scale each; none: one scale, of the table that is the last input
    dim: int  # along which parts are joined
    both: bool  # layouts; the rowwise one alone without
    keep_scales: bool
    orders: Sequence[str]  # of the scales of each layout, see ``tiles.ordered``
    row: int  # of the table

    def arguments(self, parts: Sequence[Any], scales: Any) -> QuantizeArguments[Any]:
        """Return the request for a quantization of ``parts``."""
        return QuantizeArguments(
            *(parts[0], self.dtype, self.power_2_scale, self.amax_epsilon, [1, 1], [1, 1] if self.both else []),
            scaling="block" if self.block else "delayed", block=self.block, scales=scales, row=self.row,
            dim=self.dim, more=parts[1:] or None, keep_scales=self.keep_scales,
            rowwise_order=self.orders[0], columnwise_order=self.orders[1],
        )  # fmt: skip

    def split(self, inputs: Sequence[T]) -> tuple[Sequence[T], T | None]:
        """Return the inputs of the function, and the table of scales."""
        return (inputs, None) if self.block else (inputs[:-1], inputs[-1])


def cast_in_tiles(inputs: Sequence[Tensor], *settings: Any) -> list[Tensor]:
    """Return the results of ``quantize_layouts``: rowwise and, if ``both``, columnwise.

    Of delayed scaling, the amax [1] is that of the whole tensor, and not of each row.

    Args:
        inputs: bf16 [rows, columns], multiples of ``SIZE``, contiguous along columns: what the function takes, or
            without one the parts that are quantized. Behind them, if the scale is given, the table that holds it.
        settings: see :class:`TileCast`.
    """
    given = TileCast(*settings)
    inputs, scales = given.split(inputs)
    function = FUNCTIONS.get(given.function)
    parts = function(*(x.to(torch.float32) for x in inputs)) if function else list(inputs)
    results = quantization.quantize_as(given.arguments(parts, scales))
    if not given.block:
        results[-1] = results[-1].amax().reshape(1)
    return results


def _shapes(inputs: Sequence[Any], given: TileCast) -> list[tuple[list[int], torch.dtype]]:
    inputs, scales = given.split(inputs)
    parts = list(inputs) if not given.function else [inputs[0]] * (2 if given.function == "swiglu_backward" else 1)
    shapes = quantization.output_shapes(given.arguments(parts, scales))
    if not given.block:
        shapes[-1] = [1], torch.float32
    return shapes


def _fake(inputs: Sequence[Tensor], *settings: Any) -> list[Tensor]:
    return [inputs[0].new_empty(shape, dtype=dtype) for shape, dtype in _shapes(inputs, TileCast(*settings))]


def launches_of(inputs: Sequence[inductor.Described], *settings: Any) -> inductor.Launches:
    """Return the results, and the launches of the kernel that write them: one for each part."""
    from fp8graph.numerics.tile_kernel import cast_tiles  # needs triton

    given = TileCast(*settings)
    results = _shapes(inputs, given)
    tensors, table = given.split(inputs)
    (rows, columns), _ = results[0]
    row_strides, column_strides = (
        (1, lines) if order == TRANSPOSED else (tiles, 1)
        for order, lines, tiles in zip(given.orders, (rows, columns), (columns // SIZE, rows // SIZE), strict=True)
    )
    layouts: list[Layout] = ["rowwise", "columnwise"] if given.both else ["rowwise"]
    names = quantization.output_names("block" if given.block else "delayed", layouts, keep_scales=given.keep_scales)
    written = {_PARAMETERS.get(name, name): index for index, name in enumerate(names)}
    unused = {"columnwise": 0, "columnwise_scale_inv": written["rowwise_scale_inv"], "of_tiles": 0}
    launches: list[inductor.Launch] = []
    first_row = first_column = 0
    for read in [range(len(tensors))] if given.function else [[index] for index in range(len(tensors))]:
        a, b, c = (tensors[read[min(index, len(read) - 1)]] for index in range(3))
        height, width = a.shape
        tiles = width // SIZE * (2 if given.function == "swiglu_backward" else 1)
        reads = {name: read[min(index, len(read) - 1)] for index, name in enumerate("abc")}
        launches.append(
            inductor.Launch(
                kernel=cast_tiles,
                grid=(tiles, height // SIZE, 1),
                reads=reads | {"table": reads["a"] if table is None else len(inputs) - 1},
                writes=unused | written,
                constants={
                    "stride_a": a.stride[0], "stride_b": b.stride[0], "stride_c": c.stride[0],
                    "first_row": first_row, "first_column": first_column,
                    "whole_rows": rows, "whole_columns": columns,
                    "row_stride": row_strides[0], "row_tile_stride": row_strides[1],
                    "column_stride": column_strides[0], "column_tile_stride": column_strides[1],
                    "at_scale": _place(table, given.row, SCALE), "at_scale_inv": _place(table, given.row, SCALE_INV),
                    "function": given.function, "fp8_max": FP8_MAX[given.dtype], "power_2": given.power_2_scale,
                    "epsilon": given.amax_epsilon,
                    "scales": "given" if table is not None else "squares" if given.block[0] == SIZE else "rows",
                    "both": given.both, "keeps": given.keep_scales,
                },
            )
        )  # fmt: skip
        first_row, first_column = (first_row + height // SIZE, 0) if given.dim == -2 else (0, first_column + tiles)
    return results, [] if given.block else [names.index("amax")], launches


# The kernel's names of results.
_PARAMETERS: Final = {"scale_inv": "rowwise_scale_inv", "scales": "of_tiles", "amax": "of_tiles"}


def _place(table: inductor.Described | None, row: int, column: int) -> int:
    return 0 if table is None else row * table.stride[0] + column * table.stride[1]


_library: Final = torch.library.Library("fp8graph_tiles", "DEF")
CAST: Final = define_op(
    _library,
    "cast(Tensor[] inputs, str function, ScalarType dtype, bool power_2_scale, float amax_epsilon, int[] block,"
    " int dim, bool both, bool keep_scales, str[] orders, int row) -> Tensor[]",
    cast_in_tiles,
    _fake,
)
inductor.lower_to_launches(CAST, launches_of)
