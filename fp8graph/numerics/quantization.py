"""Reference numerics: plain eager functions, device independent, the only statement of the arithmetic.

The dialect ops run them, ``lower`` traces them into aten, ``fp8graph.numerics`` offers them to users.
All amax and scale arithmetic is FP32. Casts round to nearest even; finite numbers saturate.

Read this first:

* ``scale`` multiplies: ``x_fp8 = cast(x * scale)``. ``scale_inv = 1 / scale`` is what a GEMM needs.
* A tile is (rows, elements along the contraction dim). Ragged edges are separate tiles: they are quantized as if
  filled with zeros, which change no amax.
* NaN stays NaN, and an infinite number becomes NaN (nvfp4: the scale of its tile does, E2M1 has none), in each operand
  under each recipe. Saturated, an overflow of the model would be a finite number: a loss that looks right, and from
  dy = inf a wgrad in which ``torch.amp.GradScaler`` sees nothing. It is the number and not the scale that becomes NaN:
  delayed scaling knows its amax only after the cast, and other rows keep their results, as in high precision.
* Compiled by Inductor, a quantize that is fused behind a pointwise producer (norm, SiLU * up, add) sees
  the producer's FP32 value, not its bf16 rounding: torch's fusion keeps registers in FP32. About 2 % of the
  bytes then differ, by one FP8 step (up to 8 % where bf16 would have rounded the largest element, and with it
  the scale). We leave that default: the unrounded value is the more accurate one, and rounding costs
  instructions. ``inductor_options={"emulate_precision_casts": True}`` restores bit-identity with eager
  (on CPU from torch 2.13 on; tests/codegen/test_compiled.py measures both).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, Final

import torch
from torch import Tensor

from fp8graph.numerics import group_blocks, hints
from fp8graph.numerics.experts import group_of_rows, pad_groups, padded_rows
from fp8graph.numerics.formats import amax_of, inverse, overflow_as_nan, scale_from_amax, table_of
from fp8graph.numerics.hints import divide, materialize, saturating_cast
from fp8graph.numerics.history import without_nan
from fp8graph.numerics.scalings import SCALINGS, Groups, LayoutRequest, QuantizeArguments, Shared
from fp8graph.numerics.transforms import transformed
from fp8graph.recipes import FP8_MAX, Layout, Quantizer

_DECODING: Final = ("scaling", "block")  # what decoding needs of a quantizer besides the scales
_QUANTIZING: Final = (
    *(*_DECODING, "columnwise_from_rowwise"),
    *("rotation", "stochastic", "four_over_six", "largest_scale", "row_scaled"),
)


def reducible_amax(x: Tensor) -> Tensor:
    """[1]: the amax of a tensor for a reduction (MAX) over ranks. NaN becomes inf, which survives any reduction."""
    return without_nan(amax_of(x)).reshape(1)


def reducible_amaxes(x: Tensor) -> Tensor:
    """[columns]: the same for each column of ``x`` [rows, columns]."""
    return without_nan(amax_of(x, 0))


def scales_of_amax(amax: Tensor, dtype: torch.dtype, power_2_scale: bool, amax_epsilon: float) -> Tensor:
    """[1, 2]: scale_inv and scale of a tensor with ``amax`` [1], as :func:`quantize_layouts` takes them."""
    scale = scale_from_amax(amax, FP8_MAX[dtype], power_2_scale=power_2_scale, amax_epsilon=amax_epsilon)
    return table_of(scale, inverse(scale))


def output_names(scaling: str, layouts: Sequence[Layout], *, keep_scales: bool = False) -> list[str]:
    """Return the names of the results of ``quantize_layouts``, in order."""
    return SCALINGS[scaling].outputs(layouts, keep_scales)


def output_shapes(arguments: QuantizeArguments[Any]) -> list[tuple[list[int], torch.dtype]]:
    """Return the shapes and dtypes of the results of ``quantize_layouts``, from shapes alone."""
    kind, block = SCALINGS[arguments.scaling], arguments.block
    *batch, rows, columns = arguments.x.shape
    joined = sum(part.shape[arguments.dim] for part in arguments.parts)
    rows, columns = (joined, columns) if arguments.dim == -2 else (rows, joined)
    groups: int = 0 if arguments.offs is None else arguments.offs.shape[0]
    units = arguments.x.shape[0] if arguments.per_matrix else groups or None
    data: list[tuple[list[int], torch.dtype]] = []
    scales: list[tuple[list[int], torch.dtype]] = []
    whole: list[list[int]] = []
    for layout, multiples in arguments.layouts.items():
        sizes, groups_of_columns = (rows, columns), 0
        if layout == "columnwise":
            sizes, groups_of_columns = (columns, rows), groups
            if groups:
                sizes = columns, padded_rows(rows, groups, multiples[1])
        r, c = (size + -size % multiple for size, multiple in zip(sizes, multiples, strict=True))
        data.append(([*batch, *kind.data_shape(r, c, block)], arguments.dtype))
        shape = kind.scale_shape(r, c, block, groups_of_columns)
        if shape is not None:
            shape, order = [*batch, *shape], arguments.order_of(layout)
            if order and (groups or arguments.per_matrix):
                shape = group_blocks.ordered_shape(shape, groups, rows=block[0], columns=layout == "columnwise")
            elif order:
                shape = kind.ordered_shape(shape, order, block)
            scales.append((shape, kind.scale_dtype))
        if kind.scale_of_layout:
            whole.append([*batch, r, 1] if arguments.row_scaled else [] if units is None else [units])
    shared = kind.shared_shapes([*batch, rows], units, arguments.scales is not None, arguments.keep_scales)
    kept = kind.scale_shape(rows, columns, block) if kind.tiled and arguments.keep_scales else None
    tiles = [] if kept is None else [([*batch, *kept], kind.scale_dtype)]
    return [*data, *scales, *((shape, torch.float32) for shape in (*whole, *shared)), *tiles]


def quantize_layouts(*args: Any, **kwargs: Any) -> list[Tensor]:
    """Return the computation of a ``fp8graph::quantize`` node, given its :class:`QuantizeArguments`.

    :func:`output_names` names the results.
    """
    return quantize_as(QuantizeArguments(*args, **kwargs))


def quantize_as(arguments: QuantizeArguments[Tensor]) -> list[Tensor]:
    """Return the same for arguments that are there."""
    kind, dim, offs = SCALINGS[arguments.scaling], arguments.dim, arguments.offs
    grouped = offs is not None or arguments.per_matrix
    parts, group = (
        arguments.parts,
        None if arguments.offs is None else group_of_rows(arguments.offs, arguments.x.shape[0]),
    )
    if any(part.shape != arguments.x.shape for part in parts) or (arguments.row_scaled and len(parts) > 1):
        parts = [hints.join(parts, dim)]  # loops of several sizes do not fuse: one loop reads each in its place
    if offs is None or group is None:
        shared = kind.shared(parts, arguments)
    else:
        shared = kind.shared_of_groups(group, offs.shape[0], arguments)
    data: list[Tensor] = []
    scales: list[Tensor] = []
    whole: list[Shared] = []
    in_rows: tuple[Tensor, Tensor] | None = None  # the rowwise copy, its scales in no order
    for layout, multiples in arguments.layouts.items():
        of_layout, sources, groups, transposed = shared, parts, None, layout == "columnwise"
        if transposed and arguments.columnwise_from_rowwise:
            sources = [_rowwise_numbers(arguments, in_rows)]
        if offs is not None and group is not None:
            (x,) = sources
            rows, of_rows = pad_groups(x, offs, multiples[1]) if transposed else (x, group.clamp_max(offs.shape[0] - 1))
            sources, groups = [rows], Groups(of_rows=of_rows, count=offs.shape[0], transposed=transposed)
        if transposed and arguments.rotation is not None:  # groups are whole tiles: none mixes with another
            sources = [transformed(source, arguments.rotation, arguments.matrix) for source in sources]
            if groups is None:
                of_layout = kind.shared(sources, arguments)
            else:
                turned = dataclasses.replace(arguments, x=sources[0])
                of_layout = kind.shared_of_groups(groups.of_rows, groups.count, turned)
        if transposed and groups is None:
            sources = [source.transpose(-2, -1) for source in sources]
        if transposed and arguments.row_scaled:
            of_layout = kind.shared(sources if groups is None else [sources[0].t()], arguments)
        if transposed and of_layout.of_tiles is not None:
            turned = [x.transpose(-2, -1).contiguous() for x in of_layout.of_tiles]
            of_layout = dataclasses.replace(of_layout, of_tiles=turned)
        request = LayoutRequest(
            parts=sources,
            axis=-3 - dim if transposed and groups is None else dim,
            multiples=multiples,
            arguments=dataclasses.replace(arguments, draw=2 * arguments.draw + transposed)
            if arguments.stochastic
            else arguments,
            shared=of_layout,
            order="" if grouped else arguments.order_of(layout),
        )
        numbers, scale_inv = kind.layout(request) if groups is None else kind.layout_of_groups(request, groups)
        data.append(numbers)
        if not transposed and arguments.columnwise_from_rowwise and scale_inv is not None:
            in_rows = numbers, kind.in_rows(numbers, scale_inv, request.order, arguments.block)
        if scale_inv is not None and grouped and arguments.order_of(layout):
            ends, in_blocks = offs, None
            if offs is not None and transposed:
                ends, in_blocks = group_blocks.ends_of_columns(offs, multiples[1], arguments.block[1])
            scale_inv = group_blocks.ordered(scale_inv, ends, in_blocks=in_blocks, rows=arguments.block[0])
        scales += [] if scale_inv is None else [scale_inv]
        whole.append(of_layout)
    return [*data, *scales, *kind.layout_scales(whole, arguments), *kind.shared_outputs(shared, arguments)]


def _rowwise_numbers(arguments: QuantizeArguments[Tensor], made: tuple[Tensor, Tensor] | None) -> Tensor:
    """Return the numbers of the rowwise copy, decoded, in FP32: of the one that was ``made``, if it was."""
    if made is None:
        plain = dataclasses.replace(arguments, rowwise=[1, 1], columnwise=[], rowwise_order="", columnwise_order="")
        data, scale_inv = quantize_as(plain)
    else:
        data, scale_inv = made
    joined = sum(part.shape[arguments.dim] for part in arguments.parts)
    rows, columns = (joined, arguments.x.shape[-1]) if arguments.dim == -2 else (arguments.x.shape[-2], joined)
    return SCALINGS[arguments.scaling].decode(data, scale_inv, arguments.block, None)[..., :rows, :columns]


def quantized_copy(
    x: Tensor, dtype: torch.dtype, power_2_scale: bool, amax_epsilon: float, layout: Layout, **settings: Any
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Data, scales and global scale of one layout of ``x``, not padded; ``settings``: scaling, block."""
    multiples = ([], [1, 1]) if layout == "columnwise" else ([1, 1], [])
    results = quantize_layouts(x, dtype, power_2_scale, amax_epsilon, *multiples, **settings)
    outputs = dict(zip(output_names(settings.get("scaling", "tensor"), [layout]), results, strict=True))
    scale_inv = outputs["scale_inv"] if "scale_inv" in outputs else outputs[f"{layout}_scale_inv"]
    return outputs[layout], scale_inv, outputs.get(f"{layout}_global_scale_inv")


def quantizer_args(quantizer: Quantizer) -> tuple[torch.dtype, bool, float]:
    """Return a quantizer as the arguments of ``fp8graph::quantize`` between ``x`` and the layouts."""
    return quantizer.dtype, quantizer.power_2_scale, quantizer.amax_epsilon


def quantizer_kwargs(quantizer: Quantizer) -> dict[str, Any]:
    """Give the rest of a quantizer as keyword arguments of ``fp8graph::quantize``, without those that are defaults."""
    return _settings(quantizer, _QUANTIZING)


def measuring_kwargs(arguments: Quantizer | QuantizeArguments[Any]) -> dict[str, Any]:
    """Return the settings that measuring a copy needs (``stats.quantized_parts``), as keyword arguments."""
    turned = {} if arguments.rotation is None else {"rotation": arguments.rotation}
    return {"scaling": arguments.scaling, "block": list(arguments.block), **turned}


def decoding_kwargs(quantizer: Quantizer) -> dict[str, Any]:
    """Return the settings of a quantizer that decoding needs, as keyword arguments, without those that are defaults."""
    return _settings(quantizer, _DECODING)


def _settings(quantizer: Quantizer, names: Sequence[str]) -> dict[str, Any]:
    values = {name: getattr(quantizer, name) for name in names if getattr(quantizer, name) != getattr(Quantizer, name)}
    return {name: list(value) if isinstance(value, tuple) else value for name, value in values.items()}


def dequantize_data(
    data: Tensor,
    scale_inv: Tensor,
    dtype: torch.dtype,
    *,
    scaling: str = "tensor",
    block: Sequence[int] = (),
    global_scale_inv: Tensor | None = None,
) -> Tensor:
    """``data * scale_inv``, rounded once to ``dtype``."""
    return SCALINGS[scaling].decode(data, scale_inv, block, global_scale_inv).to(dtype)


def stored_weight(
    data: Tensor,
    scale_inv: Tensor,
    dtype: torch.dtype,
    *,
    scaling: str = "tensor",
    block: Sequence[int] = (),
    global_scale_inv: Tensor | None = None,
    activations: str = "dynamic",
    input_scale_inv: Tensor | None = None,
) -> Tensor:
    """Return a weight that arrives quantized, in high precision: what a GEMM multiplies that cannot take its bytes.

    Args:
        data, scale_inv, scaling, block, global_scale_inv: a rowwise copy [N, K], see :class:`QuantizeArguments`.
        dtype: of the activations.
        activations: how its checkpoint quantizes what is multiplied by it: "dynamic", "static" or "none".
        input_scale_inv: for "static": [] or [1], FP32; it multiplies.
    """
    del activations, input_scale_inv  # ``assign`` and ``quantize`` read them
    return dequantize_data(data, scale_inv, dtype, scaling=scaling, block=block, global_scale_inv=global_scale_inv)


# For code that Dynamo traces: rowwise scaling, and scales that are given, without the requests of quantize_layouts.


def quantize_rows(x: Tensor, dtype: torch.dtype, *, power_2_scale: bool) -> tuple[Tensor, Tensor]:
    """Return the bits of ``Float8RowwiseScaling``, epsilon 0: ``(data, scale_inv)``, both contiguous.

    Args:
        x: [..., rows, columns], bf16, fp16 or FP32, any strides.
        dtype: of the data [..., rows, columns], E4M3 or E5M2; ``scale_inv`` is FP32 [..., rows, 1].
        power_2_scale: see :class:`fp8graph.Float8RowwiseScaling`.
    """
    amax = amax_of(x, -1, keepdim=True)
    scale = materialize(scale_from_amax(amax, FP8_MAX[dtype], power_2_scale=power_2_scale))
    data = saturating_cast(overflow_as_nan(x) * scale, dtype)
    return data.contiguous(), inverse(scale)


def quantize_by(x: Tensor, scale_inv: Tensor, dtype: torch.dtype) -> Tensor:
    """``x / scale_inv`` in FP8, contiguous; larger numbers saturate, and inf becomes NaN.

    ``scale_inv``: FP32, broadcast with ``x``.
    """
    scaled = divide(overflow_as_nan(x), scale_inv.expand(x.shape))
    return saturating_cast(scaled, dtype).contiguous()


def clipped_by(x: Tensor, scale_inv: Tensor) -> Tensor:
    """[]: how many elements are too large for E4M3: beyond 464, up to which numbers are rounded to 448, its largest."""
    return (x.to(torch.float32).abs() > 464.0 * scale_inv).sum()


def dequantize_rows(data: Tensor, scale_inv: Tensor, dtype: torch.dtype) -> Tensor:
    """``data * scale_inv``, rounded once to ``dtype``."""
    return (data.to(torch.float32) * scale_inv).to(dtype)
