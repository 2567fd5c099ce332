"""Reference numerics: plain eager functions, device independent, the only statement of the arithmetic.

The dialect ops run them, ``lower`` traces them into aten, ``fp8graph.numerics`` offers them to users.
All amax and scale arithmetic is FP32. Casts round to nearest even and saturate. NaN elements stay NaN,
+-inf becomes +-fp8_max.

What a reader should know:

* ``scale`` multiplies: ``x_fp8 = cast(x * scale)``. ``scale_inv = 1 / scale`` is what a GEMM needs.
* A tile is (rows, elements along the contraction dim). Ragged edges are tiles of their own: they are quantized as if
  filled with zeros, which change no amax.
* Gradients carry overflow (``carry_overflow``): where the amax is inf, ``scale_inv`` is inf instead of what the
  recipe says. Saturation would otherwise hide an overflow from ``torch.amp.GradScaler``: dy = inf would give a finite
  wgrad. MXFP8 does so by itself: 448 * 2^127 is inf.
* Compiled by Inductor, a quantize that is fused behind a pointwise producer (norm, SiLU * up, add) sees
  the producer's FP32 value, not its bf16 rounding: torch's fusion keeps registers in FP32. About 2 % of the
  bytes then differ, by one FP8 step (up to 8 % where bf16 would have rounded the largest element, and with it
  the scale). We leave that default: the unrounded value is the more accurate one, and rounding costs
  instructions. ``inductor_options={"emulate_precision_casts": True}`` restores bit-identity with eager
  (on CPU from torch 2.13 on; tests/test_compiled.py measures both).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor

from fp8graph import compat
from fp8graph.formats import (
    amax_of,
    exp2_biased,
    inverse,
    narrow_amax_of,
    nvfp4_global_scale,
    saturating_cast,
    scale_from_amax,
    unpack_e2m1,
)
from fp8graph.groups import Span, group_of_rows, padded_offsets, quantize_groups, spans
from fp8graph.hints import stored
from fp8graph.recipes import FLT_MAX, FP8_MAX, LAYOUTS, OPERANDS, Layout, OperandName, Quantizer, Recipe
from fp8graph.tiles import (
    join,
    largest_of,
    pad_to_multiple,
    quantize_rows,
    quantize_tiles,
    scales_from_amaxes,
    tiles_of,
    untile,
    with_overflow,
    with_padding,
)


def reducible_amax(x: Tensor) -> Tensor:
    """[1]: the amax of a tensor for a reduction (MAX) over ranks. NaN becomes inf, which every reduction keeps."""
    amax = amax_of(x)
    return torch.where(amax <= FLT_MAX, amax, torch.inf).reshape(1)


def scales_of_amax(
    amax: Tensor, dtype: torch.dtype, power_2_scale: bool, amax_epsilon: float, carry_overflow: bool
) -> Tensor:
    """[1, 2]: scale and scale_inv of a tensor with ``amax`` [1], as :func:`quantize_layouts` takes them."""
    scale = scale_from_amax(amax, FP8_MAX[dtype], power_2_scale=power_2_scale, amax_epsilon=amax_epsilon)
    scale_inv = inverse(scale)
    return torch.stack([scale, with_overflow(scale_inv, amax) if carry_overflow else scale_inv], -1)


def output_names(
    scaling: str, rowwise: Sequence[int], columnwise: Sequence[int], *, keep_scales: bool = False
) -> list[str]:
    """What ``quantize_layouts`` returns, in order."""
    layouts = [name for name, wanted in zip(LAYOUTS, (rowwise, columnwise), strict=True) if wanted]
    if scaling in ("tensor", "delayed"):
        return [*layouts, "scale_inv", *(["amax"] if scaling == "delayed" else ["scales"] if keep_scales else [])]
    names = [*layouts, *(f"{layout}_scale_inv" for layout in layouts)]
    return [*names, "global_scale_inv"] if scaling == "nvfp4" else names


def quantize_layouts(
    x: Tensor,
    dtype: torch.dtype,
    power_2_scale: bool,
    amax_epsilon: float,
    rowwise: Sequence[int],
    columnwise: Sequence[int],
    *,
    scaling: str = "tensor",
    block: Sequence[int] = (),
    carry_overflow: bool = False,
    scales: Tensor | None = None,
    row: int = 0,
    keep_scales: bool = False,
    more: Sequence[Tensor] | None = None,
    dim: int = -1,
    offs: Tensor | None = None,
    per_matrix: bool = False,
) -> list[Tensor]:
    """What a ``fp8graph::quantize`` node computes; :func:`output_names` names the results.

    Args:
        x: [..., rows, columns], any strides, bf16, fp16 or fp32. rowwise keeps the shape; columnwise is the
            transposed copy [..., columns, rows]. Both results are contiguous.
        rowwise, columnwise: empty for "not needed", else two multiples that the sizes of the *result* are
            padded to with zeros (GEMMs want 16).
        scaling, block: see :class:`fp8graph.recipes.Quantizer`. Each layout has scales of its own then:
            "row" FP32 [..., rows, 1]; "block" FP32, "mxfp8" uint8 (E8M0) and "nvfp4" E4M3
            [..., ceil(rows / block[0]), ceil(columns / block[1])]. nvfp4's data are bytes [..., rows, columns / 2]
            with the columns padded to a multiple of 16.
        carry_overflow: an infinite amax makes ``scale_inv`` infinite; for "delayed", whose amax is known too late
            for that, an infinite element becomes NaN.
        scales, row: for "delayed": [tensors, 2], scale and scale_inv, and the row of this tensor; None is 1. Its
            ``scale_inv`` has shape [1], its amax comes back as one for each row. For "tensor" they take the place of
            those of its amax.
        keep_scales: for "tensor": return ``scales`` as well, so that it can be quantized again without an amax.
        more, dim: the tensor is ``x`` and these, joined along rows (-2) or columns (-1); each a multiple of tiles and
            of what sizes are padded to.
        offs, per_matrix: an operand of a grouped matmul, see :func:`fp8graph.groups.quantize_groups`: the rows of ``x``
            fall into groups; or ``x`` [experts, rows, columns] and scales of tensors are one for each expert.
    """
    if offs is not None or (per_matrix and scaling == "tensor"):
        settings = (dtype, power_2_scale, amax_epsilon, rowwise, columnwise)
        extra: Any = {"carry_overflow": carry_overflow, "scales": scales, "row": row, "offs": offs}
        return quantize_groups(x, *settings, scaling=scaling, block=block, **extra)
    parts = [x, *(more or ())]
    if any(part.shape != x.shape for part in parts):
        parts = [x := torch.cat(parts, dim)]  # loops of several sizes do not fuse: one loop reads each where it is
    outputs: list[Tensor] = []
    scale_invs: list[Tensor] = []
    amax = scale = global_scale = None
    if scaling == "nvfp4" or (scaling == "tensor" and scales is None):
        amax = largest_of([amax_of(part) for part in parts])
    if scaling == "tensor" and scales is None:
        settings = (power_2_scale, amax_epsilon, False, None, x.dtype)
        scale, scale_inv = scales_from_amaxes(cast(Tensor, amax), dtype, "tensor", *settings)
    elif scaling in ("tensor", "delayed"):
        if scaling == "delayed":
            amaxes = [narrow_amax_of(part, -1) for part in parts]
            # [..., rows]: one kernel with the cast; the update reduces it
            amax = (largest_of(amaxes) if dim == -1 else join(amaxes, -1)).to(torch.float32)
        if scales is None:  # the first step's
            scales = torch.ones((1, 2), dtype=torch.float32, device=x.device)
        # [1], a slice of the table: a GEMM reads it where it is (Inductor cannot give it a 0-dim one)
        scale, scale_inv = scales[row, 0], scales[row, 1:2].clone()
    elif scaling == "nvfp4":
        global_scale = nvfp4_global_scale(cast(Tensor, amax))
        scale_inv = inverse(global_scale)
    else:
        scale_inv = None
    for multiples, transposed in ((rowwise, False), (columnwise, True)):
        if not multiples:
            continue
        axis = -3 - dim if transposed else dim
        sources = [part.transpose(-2, -1) if transposed else part for part in parts]
        if scale is not None:
            quantized: list[Tensor] = []
            for source in sources:
                exact = source.to(torch.float32)
                scaled = exact * scale
                if carry_overflow and scaling == "delayed":
                    scaled = torch.where(exact.abs() > FLT_MAX, math.nan, scaled)
                quantized.append(stored(saturating_cast(scaled, dtype).contiguous()))
            outputs.append(with_padding(join(quantized, axis), multiples))
        elif scaling == "row":
            settings = (dtype, power_2_scale, amax_epsilon, carry_overflow)
            data, layout_scale_inv = quantize_rows(sources, axis, multiples, *settings)
            outputs.append(data)
            scale_invs.append(layout_scale_inv)
        else:
            more_tiles = multiples[1] // block[1] if scaling == "block" and multiples[1] % block[1] == 0 else 1
            sources = [pad_to_multiple(source, multiples[0], multiples[1] // more_tiles) for source in sources]
            settings = (dtype, scaling, block, power_2_scale, amax_epsilon, carry_overflow, global_scale, more_tiles)
            data, layout_scale_inv = quantize_tiles(sources, axis, *settings)
            outputs.append(data)
            scale_invs.append(layout_scale_inv)
    if scale_inv is not None:
        carried = carry_overflow and scaling != "delayed" and scales is None
        scale_invs.append(with_overflow(scale_inv, cast(Tensor, amax)) if carried else scale_inv)
    if scaling == "delayed":
        scale_invs.append(cast(Tensor, amax))
    if keep_scales:
        scale_invs.append(torch.stack([cast(Tensor, scale), cast(Tensor, scale_inv).reshape(())]).reshape(1, 2))
    return [*outputs, *scale_invs]


def decode(
    data: Tensor,
    scale_inv: Tensor,
    scaling: str = "tensor",
    block: Sequence[int] = (),
    global_scale_inv: Tensor | None = None,
) -> Tensor:
    """``data * scale_inv`` in FP32: what quantized numbers stand for."""
    if scaling in ("tensor", "delayed", "row"):
        return data.to(torch.float32) * scale_inv
    values = unpack_e2m1(data) if scaling == "nvfp4" else data.to(torch.float32)
    *_, rows, columns = values.shape
    if scaling == "mxfp8":
        scale_inv = exp2_biased(scale_inv.to(torch.int32))
    tiles = tiles_of(pad_to_multiple(values, *block), block)
    tiles = tiles * scale_inv.to(torch.float32).unsqueeze(-2).unsqueeze(-1)
    values = untile(tiles)[..., :rows, :columns]
    return values if global_scale_inv is None else values * global_scale_inv


def dequantize_data(
    data: Tensor,
    scale_inv: Tensor,
    dtype: torch.dtype,
    *,
    scaling: str = "tensor",
    block: Sequence[int] = (),
    global_scale_inv: Tensor | None = None,
) -> Tensor:
    """:func:`decode`, rounded once to ``dtype``."""
    return decode(data, scale_inv, scaling, block, global_scale_inv).to(dtype)


def swizzle_scales(scale_inv: Tensor) -> Tensor:
    """Scales [rows, k tiles] -> flat, in the order in which Blackwell's tensor cores read them.

    Padded with zeros to 128 rows x 4 tiles; each such block is 512 scales: rows 0, 32, 64, 96 (4 tiles each), then
    1, 33, 65, 97, ... Source: cuBLAS "1D block scaling factors layout".
    """
    padded = pad_to_multiple(scale_inv.view(torch.uint8), 128, 4)
    rows, tiles = padded.shape
    blocks = padded.reshape(rows // 128, 4, 32, tiles // 4, 4)  # [row block, 32-row group, row in it, tile block, tile]
    return blocks.permute(0, 3, 2, 1, 4).reshape(-1).view(scale_inv.dtype)


def scaled_mm(
    a: Tensor,
    b: Tensor,
    scale_inv_a: Tensor,
    scale_inv_b: Tensor,
    bias: Tensor | None,
    out_dtype: torch.dtype,
    use_fast_accum: bool,
    *,
    scaling: str = "tensor",
    block_a: Sequence[int] = (),
    block_b: Sequence[int] = (),
    global_scale_inv_a: Tensor | None = None,
    global_scale_inv_b: Tensor | None = None,
) -> Tensor:
    """``(a * scale_inv_a) @ (b * scale_inv_b).T + bias``, FP32 accumulation, rounded once to ``out_dtype``.

    What the device's tensor cores cannot multiply (anything but per-tensor scales on a CPU, where torch 2.12 and
    later also do rows) is decoded to FP32 first; ``assign`` emits this op only where that does not happen, except
    to look at a GPU's graph on a CPU.

    Args:
        a: [m, k] FP8, row-major.  b: [n, k] FP8, row-major: both contiguous along k ("TN", all that Hopper has).
        scale_inv_a, scale_inv_b: as ``quantize_layouts`` returns them.
        bias: [n] in ``out_dtype`` (bf16 or fp16), or None.
        scaling, block_a, block_b: see :class:`fp8graph.recipes.Quantizer`.
        global_scale_inv_a, global_scale_inv_b: nvfp4's FP32 scalars.
    """
    if a.device.type == "cpu" and scaling not in compat.CPU_SCALINGS:
        values_a = decode(a, scale_inv_a, scaling, block_a, global_scale_inv_a)
        values_b = decode(b, scale_inv_b, scaling, block_b, global_scale_inv_b)
        result = values_a @ values_b.t()
        return (result if bias is None else result + bias.to(torch.float32)).to(out_dtype)
    operands = [(a, scale_inv_a, block_a), (b, scale_inv_b, block_b)]
    (data_a, scales_a), (data_b, scales_b) = (_for_tensor_cores(*operand, scaling) for operand in operands)
    scales_b = scales_b.t() if scales_b.ndim == 2 else scales_b
    if scales_a.ndim != scales_b.ndim:  # [] of an own amax and [1] of a table: Inductor's templates want one shape
        scales_a, scales_b = scales_a.reshape(1), scales_b.reshape(1)
    fp4 = global_scale_inv_a is not None and global_scale_inv_b is not None
    result = torch._scaled_mm(
        data_a,  # [m, k] row-major
        data_b.t(),  # [k, n] column-major: no copy
        scales_a,
        scales_b,
        bias=None if fp4 else bias,
        out_dtype=torch.float32 if fp4 else out_dtype,
        use_fast_accum=use_fast_accum,
    )
    if fp4:  # v1 of torch's op has no place for the global scales
        result = result * (cast(Tensor, global_scale_inv_a) * cast(Tensor, global_scale_inv_b))
        result = (result if bias is None else result + bias).to(out_dtype)
    return result


def scaled_grouped_mm(
    a: Tensor,
    b: Tensor,
    scale_inv_a: Tensor,
    scale_inv_b: Tensor,
    offs: Tensor,
    out_dtype: torch.dtype,
    use_fast_accum: bool,
    native: bool,
    *,
    scaling: str = "tensor",
    block_a: Sequence[int] = (),
    block_b: Sequence[int] = (),
    global_scale_inv_a: Tensor | None = None,
    global_scale_inv_b: Tensor | None = None,
    multiple: int = 1,
) -> Tensor:
    """:func:`scaled_mm` for each group: a [t, k] and b [experts, n, k] -> [t, n], or a [m, t] and b [n, t] ->
    [experts, m, n]. FP32 accumulation, rounded once to ``out_dtype``; rows of no group are zero where emulated.

    ``scale_inv_a``, ``scale_inv_b``: as ``quantize_layouts`` returns them for ``offs`` and ``per_matrix``.
    ``multiple``: what the groups of columns are padded to. ``native``: the device multiplies, with one scale a row.
    """
    ragged_k = b.ndim == 2
    if native and a.device.type != "cpu":
        ends = padded_offsets(offs, multiple) if ragged_k else offs
        return torch._scaled_grouped_mm(
            a,  # [t, k] or [m, t], row-major
            b.transpose(-2, -1),  # column-major: no copy
            _scales_of_rows(a, scale_inv_a, offs, scaling, ragged_k),
            _scales_of_rows(b, scale_inv_b, offs, scaling, ragged_k),
            ends,
            out_dtype=out_dtype,
            use_fast_accum=use_fast_accum,
        )
    sides = ((a, scale_inv_a, block_a, global_scale_inv_a), (b, scale_inv_b, block_b, global_scale_inv_b))
    shape = (offs.shape[0], a.shape[0], b.shape[0]) if ragged_k else (a.shape[0], b.shape[1])
    out = a.new_zeros(shape, dtype=out_dtype)
    for span in spans(offs, multiple):
        values = [
            decode(*_of_group(span, data, scale_inv, scaling, block, ragged_k), scaling, block, scalar)
            for data, scale_inv, block, scalar in sides
        ]
        out[span.group if ragged_k else span.rows] = (values[0] @ values[1].t()).to(out_dtype)
    return out


def _of_group(
    span: Span, data: Tensor, scale_inv: Tensor, scaling: str, block: Sequence[int], ragged_k: bool
) -> tuple[Tensor, Tensor]:
    """Data and scales of one group of an operand of ``scaled_grouped_mm``."""
    one = scale_inv[span.group] if scaling == "tensor" else scale_inv if scaling == "delayed" else None
    if data.ndim == 3:  # [experts, n, k]
        return data[span.group], scale_inv[span.group] if one is None else one
    if not ragged_k:  # [t, k]
        return data[span.rows], scale_inv[span.rows] if one is None else one
    columns = span.columns  # of [m, padded t]
    if scaling == "row":
        return data[:, columns], scale_inv[span.group].unsqueeze(1)
    if one is not None:
        return data[:, columns], one
    tiles = slice(columns.start // block[1], columns.stop // block[1])
    packed = 2 if scaling == "nvfp4" else 1  # two numbers a byte
    return data[:, columns.start // packed : columns.stop // packed], scale_inv[:, tiles]


def _scales_of_rows(data: Tensor, scale_inv: Tensor, offs: Tensor, scaling: str, ragged_k: bool) -> Tensor:
    """Scales as torch._scaled_grouped_mm wants them, one for each row: [t], [experts, n] or [experts * m]."""
    experts = offs.shape[0]
    if scaling == "row":  # [t, 1], [experts, n, 1] or [experts, m]
        return scale_inv.reshape(data.shape[:-1] if scale_inv.shape[-1] == 1 else -1)
    one_each = scale_inv.expand(experts)
    if data.ndim == 3:
        return one_each.unsqueeze(1).expand(experts, data.shape[1]).contiguous()
    if ragged_k:
        return one_each.repeat_interleave(data.shape[0])
    return one_each[group_of_rows(offs, data.shape[0]).clamp_max(experts - 1)]


def _for_tensor_cores(data: Tensor, scale_inv: Tensor, block: Sequence[int], scaling: str) -> tuple[Tensor, Tensor]:
    """Data and scales of one operand in the types and layouts that torch._scaled_mm takes on a GPU."""
    if scaling == "mxfp8":
        return data, swizzle_scales(scale_inv).view(torch.float8_e8m0fnu)
    if scaling == "nvfp4":
        rows = scale_inv.repeat_interleave(block[0], 0)[: data.shape[0]]  # 16x16 tiles: one scale a row
        return data.view(torch.float4_e2m1fn_x2), swizzle_scales(rows)
    if scaling == "block" and block[0] == 1:
        return data, scale_inv.t().contiguous().t()  # [rows, k / 128], outer-dim-major
    return data, scale_inv  # 128x128 tiles: [rows / 128, k / 128], rows 16 bytes apart by ``hardware.alignment``


@dataclass(frozen=True, kw_only=True)
class QuantizedTensor:
    """Quantized numbers and their scales.

    ``data``: FP8, the shape of the source (rowwise) or its transpose over the last two dims (columnwise),
    contiguous; nvfp4: two E2M1 codes a byte. ``scale_inv``: FP32 scalar, or one scale per tile (see
    :func:`quantize_layouts`). ``dtype``, ``shape``: the source's.
    """

    data: Tensor
    scale_inv: Tensor
    layout: Layout
    dtype: torch.dtype
    shape: torch.Size
    quantizer: Quantizer
    global_scale_inv: Tensor | None = None  # nvfp4: FP32 scalar
    amax: Tensor | None = None  # delayed: what goes into the history


def quantize(
    x: Tensor, recipe: Recipe, operand: OperandName, layout: Layout, *, scale: Tensor | None = None
) -> QuantizedTensor:
    """Quantize ``x`` as ``recipe`` quantizes ``operand``.

    Args:
        x: [..., rows, columns], bf16, fp16 or fp32, any strides, at least one element.
        recipe: a recipe object.
        operand: "input", "weight" or "grad_output".
        layout: "rowwise" (data has x's shape) or "columnwise" (data is the transposed copy).
        scale: for DelayedScaling, an FP32 scalar; None is the first step's 1.

    Raises:
        ValueError: for an operand or layout that does not exist, an unusable dtype, or an empty tensor.
    """
    if operand not in OPERANDS:
        raise ValueError(f"operand must be one of {', '.join(OPERANDS)}, not {operand!r}")
    if layout not in LAYOUTS:
        raise ValueError(f"layout must be one of {', '.join(LAYOUTS)}, not {layout!r}")
    if x.dtype not in (torch.bfloat16, torch.float16, torch.float32):
        raise ValueError(f"cannot quantize {x.dtype}: bf16, fp16 and fp32 only")
    if x.ndim < 2 or x.numel() == 0:
        raise ValueError(f"cannot quantize shape {tuple(x.shape)}: needs 2 dims and one element")
    quantizer = recipe.quantizer(operand)
    if scale is not None and quantizer.scaling != "delayed":
        raise ValueError(f"scale= is for DelayedScaling: {recipe.name} makes its own")
    extra = quantizer_kwargs(quantizer)
    if quantizer.scaling == "delayed":
        extra["scales"] = None if scale is None else torch.stack([scale, scale.reciprocal()]).reshape(1, 2)
    keep: tuple[list[int], list[int]] = ([1, 1], [])
    rowwise, columnwise = keep if layout == "rowwise" else keep[::-1]
    results = quantize_layouts(x, *quantizer_args(quantizer), rowwise, columnwise, **extra)
    outputs = dict(zip(output_names(quantizer.scaling, rowwise, columnwise), results, strict=True))
    if "amax" in outputs:
        outputs |= {"amax": outputs["amax"].amax(), "scale_inv": outputs["scale_inv"].reshape(())}
    return QuantizedTensor(
        data=outputs.pop(layout),
        scale_inv=outputs.pop("scale_inv" if "scale_inv" in outputs else f"{layout}_scale_inv"),
        layout=layout,
        dtype=x.dtype,
        shape=x.shape,
        quantizer=quantizer,
        **outputs,
    )


def quantizer_args(quantizer: Quantizer) -> tuple[torch.dtype, bool, float]:
    """A quantizer as the arguments of ``fp8graph::quantize`` between ``x`` and the layouts."""
    return quantizer.dtype, quantizer.power_2_scale, quantizer.amax_epsilon


def quantizer_kwargs(quantizer: Quantizer) -> dict[str, Any]:
    """The rest of a quantizer: keyword arguments of the dialect ops, only what differs from the defaults."""
    values = {"scaling": quantizer.scaling} if quantizer.scaling != "tensor" else {}
    return {**values, "block": list(quantizer.block)} if any(quantizer.block) else values


def dequantize(q: QuantizedTensor) -> Tensor:
    """The values that ``q`` stands for, in the source's shape and dtype (one rounding to that dtype)."""
    extra = quantizer_kwargs(q.quantizer)
    x = dequantize_data(q.data, q.scale_inv, q.dtype, **extra, global_scale_inv=q.global_scale_inv)
    columns = q.shape[-2 if q.layout == "columnwise" else -1]
    x = x[..., :columns]  # nvfp4 pads the columns
    return x.transpose(-2, -1) if q.layout == "columnwise" else x


def cast_to_representable(x: Tensor, recipe: Recipe, operand: OperandName) -> Tensor:
    """The nearest tensor that quantizes without loss: ``dequantize(quantize(x))``, shape and dtype of ``x``.

    A linear fed with representable input and weight gives the same result in FP8 as in high precision, up to
    the order of summation (Transformer Engine's quickstart shows this experiment).
    """
    return dequantize(quantize(x, recipe, operand, "rowwise"))


def sqnr_db(reference: Tensor, approximation: Tensor) -> float:
    """Signal to quantization noise ratio in dB: ``20 log10(|ref| / |ref - approx|)``, in FP64.

    Equal tensors give ``inf``; shapes must agree.

    Raises:
        ValueError: for shapes that differ.
    """
    if reference.shape != approximation.shape:
        raise ValueError(f"shapes differ: {tuple(reference.shape)}, {tuple(approximation.shape)}")
    if torch.equal(reference, approximation):
        return math.inf  # also where both are zero, empty or infinite: no noise
    signal = reference.detach().to(torch.float64)
    noise = signal - approximation.detach().to(torch.float64)
    return cast(float, (20.0 * torch.log10(signal.norm() / noise.norm())).item())
