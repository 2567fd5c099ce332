"""Reference numerics: plain eager functions, device independent, the only statement of the arithmetic.

The dialect ops run them, ``lower`` traces them into aten, ``fp8graph.numerics`` offers them to users.
All amax and scale arithmetic is FP32. Casts round to nearest even and saturate. NaN elements stay NaN,
+-inf becomes +-fp8_max.

Two things that a reader should know:

* ``scale`` multiplies: ``x_fp8 = cast(x * scale)``. ``scale_inv = 1 / scale`` is what a GEMM needs.
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
from typing import cast

import torch
from torch import Tensor

from fp8graph.recipes import FLT_MAX, FP8_MAX, LAYOUTS, OPERANDS, Layout, OperandName, Quantizer, Recipe


def tensor_amax(x: Tensor) -> Tensor:
    """``max |x|`` as an FP32 scalar; NaN if any element is NaN. Exact: every dtype taken widens to FP32."""
    return x.abs().amax().to(torch.float32)


def scale_from_amax(amax: Tensor, fp8_max: float, *, power_2_scale: bool = False, amax_epsilon: float = 0.0) -> Tensor:
    """``fp8_max / max(amax, epsilon)`` with Transformer Engine's edge cases. FP32 in, FP32 out, any shape.

    amax 0, inf or nan -> 1; a quotient that overflows -> FLT_MAX; ``power_2_scale`` clears the mantissa.
    Source: ``compute_scale_from_amax``, Transformer Engine ``common/recipe/recipe_common.cuh``.
    """
    if amax_epsilon > 0.0:
        amax = amax.clamp_min(amax_epsilon)  # NaN passes through
    # Tensor / tensor: one IEEE division. (python float) / tensor would be reciprocal * float: two roundings.
    scale = torch.div(torch.full_like(amax, fp8_max), amax)
    scale = scale.clamp_max(FLT_MAX)
    usable = (amax > 0.0) & (amax <= FLT_MAX)  # False for 0, inf and nan
    scale = torch.where(usable, scale, torch.ones_like(scale))
    if power_2_scale:
        # sign and exponent bits only; 0xFF800000 as a signed 32-bit integer
        bits = torch.bitwise_and(scale.view(torch.int32), -(1 << 23))
        scale = bits.view(torch.float32)
    return scale


def saturating_cast(x: Tensor, dtype: torch.dtype) -> Tensor:
    """FP32 -> FP8, round to nearest even, saturating; NaN stays NaN.

    The clamp is explicit because torch's casts differ: E4M3 saturates only from 2.12 on, E5M2 never.
    """
    fp8_max = FP8_MAX[dtype]
    return x.clamp_min(-fp8_max).clamp_max(fp8_max).to(dtype)


def pad_to_multiple(x: Tensor, rows: int, columns: int) -> Tensor:
    """Zero rows and columns at the end so that both sizes are multiples. Zeros change no amax."""
    pad_rows, pad_columns = -x.shape[-2] % rows, -x.shape[-1] % columns
    if isinstance(pad_rows, int) and isinstance(pad_columns, int) and pad_rows == pad_columns == 0:
        return x
    return torch.constant_pad_nd(x, [0, pad_columns, 0, pad_rows], 0.0)


def quantize_layouts(
    x: Tensor,
    dtype: torch.dtype,
    power_2_scale: bool,
    amax_epsilon: float,
    rowwise: Sequence[int],
    columnwise: Sequence[int],
) -> list[Tensor]:
    """What a ``fp8graph::quantize`` node computes: each layout asked for, then ``scale_inv``.

    Args:
        x: [..., rows, columns], any strides, bf16, fp16 or fp32. rowwise keeps the shape; columnwise is the
            transposed copy [..., columns, rows]. Both results are contiguous.
        rowwise, columnwise: empty for "not needed", else two multiples that the sizes of the *result* are
            padded to with zeros (GEMMs want 16).
    """
    scale = scale_from_amax(tensor_amax(x), FP8_MAX[dtype], power_2_scale=power_2_scale, amax_epsilon=amax_epsilon)
    outputs: list[Tensor] = []
    for multiples, transposed in ((rowwise, False), (columnwise, True)):
        if not multiples:
            continue
        source = x.transpose(-2, -1) if transposed else x
        source = pad_to_multiple(source, multiples[0], multiples[1])
        data = saturating_cast(source.to(torch.float32) * scale, dtype)
        outputs.append(data.contiguous())
    outputs.append(scale.reciprocal())
    return outputs


def dequantize_data(data: Tensor, scale_inv: Tensor, dtype: torch.dtype) -> Tensor:
    """``data * scale_inv`` in FP32, rounded once to ``dtype``."""
    return (data.to(torch.float32) * scale_inv).to(dtype)


def scaled_mm(
    a: Tensor,
    b: Tensor,
    scale_inv_a: Tensor,
    scale_inv_b: Tensor,
    bias: Tensor | None,
    out_dtype: torch.dtype,
    use_fast_accum: bool,
) -> Tensor:
    """``(a * scale_inv_a) @ (b * scale_inv_b).T + bias``, FP32 accumulation, rounded once to ``out_dtype``.

    Args:
        a: [m, k] FP8, row-major.  b: [n, k] FP8, row-major: both contiguous along k ("TN", all that Hopper has).
        scale_inv_a, scale_inv_b: FP32 scalars.
        bias: [n] in ``out_dtype`` (bf16 or fp16), or None.
    """
    return torch._scaled_mm(
        a,  # [m, k] row-major
        b.t(),  # [k, n] column-major: no copy
        scale_inv_a,
        scale_inv_b,
        bias=bias,
        out_dtype=out_dtype,
        use_fast_accum=use_fast_accum,
    )


@dataclass(frozen=True, kw_only=True)
class QuantizedTensor:
    """An FP8 tensor and its scale.

    ``data``: FP8, the shape of the source (rowwise) or its transpose over the last two dims (columnwise),
    contiguous. ``scale_inv``: FP32 scalar, ``dequantized = data * scale_inv``. ``dtype``: the source's.
    """

    data: Tensor
    scale_inv: Tensor
    layout: Layout
    dtype: torch.dtype


def quantize(x: Tensor, recipe: Recipe, operand: OperandName, layout: Layout) -> QuantizedTensor:
    """Quantize ``x`` as ``recipe`` quantizes ``operand``.

    Args:
        x: [..., rows, columns], bf16, fp16 or fp32, any strides, at least one element.
        recipe: a recipe object.
        operand: "input", "weight" or "grad_output".
        layout: "rowwise" (data has x's shape) or "columnwise" (data is the transposed copy).

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
    keep: tuple[list[int], list[int]] = ([1, 1], [])
    rowwise, columnwise = keep if layout == "rowwise" else keep[::-1]
    data, scale_inv = quantize_layouts(x, *quantizer_args(quantizer), rowwise, columnwise)
    return QuantizedTensor(data=data, scale_inv=scale_inv, layout=layout, dtype=x.dtype)


def quantizer_args(quantizer: Quantizer) -> tuple[torch.dtype, bool, float]:
    """A quantizer as the arguments of ``fp8graph::quantize`` between ``x`` and the layouts."""
    return quantizer.dtype, quantizer.power_2_scale, quantizer.amax_epsilon


def dequantize(q: QuantizedTensor) -> Tensor:
    """The values that ``q`` stands for, in the source's shape and dtype (one rounding to that dtype)."""
    x = dequantize_data(q.data, q.scale_inv, q.dtype)
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
