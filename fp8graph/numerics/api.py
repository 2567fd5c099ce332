"""The arithmetic for users: quantize a tensor as a recipe does, decode it, measure the difference."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor

from fp8graph.errors import ConfigError, expect
from fp8graph.numerics.formats import table_of
from fp8graph.numerics.quantization import (
    decoding_kwargs,
    dequantize_data,
    measuring_kwargs,
    quantize_layouts,
    quantizer_args,
    quantizer_kwargs,
)
from fp8graph.numerics.scalings import SCALINGS
from fp8graph.numerics.stats import QUANTIZED_PARTS, TENSOR_PARTS, finished, named, quantized_parts, tensor_parts
from fp8graph.numerics.transforms import hadamard, transform_rows
from fp8graph.recipes import LAYOUTS, OPERANDS, Layout, OperandName, Quantizer, Recipe


@dataclass(frozen=True, kw_only=True)
class QuantizedTensor:
    """Quantized numbers and their scales: ``data * scale_inv`` is the source, rounded.

    :func:`fp8graph.numerics.quantize` makes it.
    """

    #: FP8, contiguous: [..., rows, columns] as the source, columnwise [..., columns, rows]. nvfp4: two E2M1 codes per
    #: byte, the first in the low half
    data: Tensor
    #: FP32 scalar; or one scale per tile of ``data``: per row [..., rows, 1], else [..., rows / tile, columns / tile],
    #: rounded up (FP32; E8M0 bytes for mxfp8; E4M3 for nvfp4)
    scale_inv: Tensor
    layout: Layout  #: "rowwise" or "columnwise"
    dtype: torch.dtype  #: the source's
    shape: torch.Size  #: the source's
    quantizer: Quantizer  #: how it was quantized
    global_scale_inv: Tensor | None = None  #: nvfp4: FP32 scalar
    amax: Tensor | None = None  #: delayed: the amax that goes into the history


def quantize(
    x: Tensor,
    recipe: Recipe,
    operand: OperandName,
    layout: Layout,
    *,
    scale: Tensor | None = None,
    seed: int = 0,
) -> QuantizedTensor:
    """Quantize ``x`` as ``recipe`` quantizes ``operand``.

    Args:
        x: [..., rows, columns], bf16, fp16 or fp32, any strides, at least one element.
        recipe: a recipe object.
        operand: "input", "weight" or "grad_output".
        layout: "rowwise" (data has x's shape) or "columnwise" (data is the transposed copy).
        scale: for DelayedScaling, an FP32 scalar; None is the first step's 1.
        seed: of the random numbers, for recipes that round stochastically.

    Raises:
        ConfigError: (a ``ValueError``) for a recipe, operand or layout that does not exist, an unusable dtype, or an
            empty tensor.
    """
    expect("quantize", "x", x, Tensor, "a tensor")
    expect("quantize", "recipe", recipe, Recipe, "a recipe object like fp8graph.Float8RowwiseScaling()")
    expect("quantize", "scale", scale, (Tensor, type(None)), "a tensor, or None")
    expect("quantize", "seed", seed, int, "a whole number")
    for name, value, options in (("operand", operand, OPERANDS), ("layout", layout, LAYOUTS)):
        if value not in options:
            raise ConfigError(f"quantize({name}={value!r}): {name} must be one of {', '.join(options)}.")
    if x.dtype not in (torch.bfloat16, torch.float16, torch.float32):
        raise ConfigError(f"quantize(x=...): x is {x.dtype}, and must be bf16, fp16 or fp32.")
    if x.ndim < 2 or x.numel() == 0:
        raise ConfigError(f"quantize(x=...): x has shape {list(x.shape)}, and needs at least 2 dims and one element.")
    if x.layout != torch.strided:
        raise ConfigError(f"quantize(x=...): x has the layout {x.layout}, and must be dense (strided).")
    quantizer = recipe.quantizer(operand)
    kind = SCALINGS[quantizer.scaling]
    if scale is not None and not kind.has_state:
        raise ConfigError(f"quantize(scale=...): scale is for DelayedScaling, and {recipe.name} makes its own.")
    if scale is not None and (scale.numel() != 1 or scale.dtype != torch.float32 or scale.device != x.device):
        raise ConfigError(
            f"quantize(scale=...): scale is {scale.dtype} with shape {list(scale.shape)} on {scale.device}, and must "
            f"be one FP32 number on the device of x, {x.device}."
        )
    extra = quantizer_kwargs(quantizer)
    if scale is not None:
        extra["scales"] = table_of(scale, scale.reciprocal()).reshape(1, 2)
    if quantizer.stochastic:
        extra["seed"] = torch.tensor([seed], device=x.device)
    keep: tuple[list[int], list[int]] = ([1, 1], [])
    rowwise, columnwise = keep if layout == "rowwise" else keep[::-1]
    results = quantize_layouts(x, *quantizer_args(quantizer), rowwise, columnwise, **extra)
    outputs = dict(zip(kind.outputs([layout], keep_scales=False), results, strict=True))
    if "amax" in outputs:
        outputs |= {"amax": outputs["amax"].amax(), "scale_inv": outputs["scale_inv"].reshape(())}
    return QuantizedTensor(
        data=outputs.pop(layout),
        scale_inv=outputs.pop("scale_inv" if "scale_inv" in outputs else f"{layout}_scale_inv"),
        layout=layout,
        dtype=x.dtype,
        shape=x.shape,
        quantizer=quantizer,
        global_scale_inv=outputs.pop(f"{layout}_global_scale_inv", None),
        **outputs,
    )


def dequantize(q: QuantizedTensor) -> Tensor:
    """Decode ``q`` to the source's shape and dtype (with one rounding to that dtype).

    A Hadamard transform of the columnwise copy is inverted, in FP32.
    """
    expect("dequantize", "q", q, QuantizedTensor, "a result of quantize()")
    extra = decoding_kwargs(q.quantizer)
    signs = q.quantizer.rotation if q.layout == "columnwise" else None
    decoded_dtype = q.dtype if signs is None else torch.float32
    x = dequantize_data(q.data, q.scale_inv, decoded_dtype, **extra, global_scale_inv=q.global_scale_inv)
    if q.layout == "columnwise":
        x = x.transpose(-2, -1)
    if signs is not None:
        x = transform_rows(x, hadamard(x, signs).t()).to(q.dtype)
    return x[..., : q.shape[-2], : q.shape[-1]]  # nvfp4 pads


def cast_to_representable(x: Tensor, recipe: Recipe, operand: OperandName) -> Tensor:
    """Return the nearest tensor that quantizes without loss: ``dequantize(quantize(x))``, shape and dtype of ``x``.

    A linear fed with representable input and weight gives the same result in FP8 as in high precision, up to
    the order of summation (Transformer Engine's quickstart shows this experiment).
    """
    return dequantize(quantize(x, recipe, operand, "rowwise"))


def statistics(
    x: Tensor,
    recipe: Recipe | None = None,
    operand: OperandName = "input",
    layout: Layout = "rowwise",
    *,
    scale: Tensor | None = None,
    block_size: int = 32,
) -> dict[str, float]:
    """Statistics of ``x``, and of ``x`` as ``recipe`` quantizes it.

    Args:
        x, recipe, operand, layout, scale: see :func:`quantize`. Without a recipe, only ``x`` itself is described.
        block_size: of the blocks of "max_blockwise_dynamic_range", along rows and along columns.

    Returns:
        Numbers, by Transformer Engine's names. Of the tensor min, max, mean, std, l1_norm, l2_norm, cur_amax,
        dynamic_range (log2 of the largest over the smallest size that is not zero), max_blockwise_dynamic_range; with a
        recipe underflows%, overflows%, mse, scale_inv_min and scale_inv_max. In addition zeros%, saturated%, sqnr
        (dB), quantiles of the scales (scale_inv_q5 to scale_inv_q95), and scale_inv_std (octaves).

    Raises:
        ConfigError: (a ``ValueError``) see :func:`quantize`.
    """
    expect("statistics", "x", x, Tensor, "a tensor")
    if type(block_size) is not int or block_size < 1:
        raise ConfigError(f"statistics(block_size={block_size!r:.100}): block_size must be a whole number >= 1.")
    if recipe is None:
        recipe_parts = None
        if x.ndim < 2 or x.numel() == 0:
            raise ConfigError(
                f"statistics(x=...): x has shape {list(x.shape)}, and needs at least 2 dims and one element."
            )
    else:
        q = quantize(x, recipe, operand, layout, scale=scale)
        parts = quantized_parts(
            x,
            q.data,
            q.scale_inv,
            layout=layout,
            **measuring_kwargs(q.quantizer),
            global_scale_inv=q.global_scale_inv,
        )
        recipe_parts = named(QUANTIZED_PARTS, parts)
    return finished(named(TENSOR_PARTS, tensor_parts(x, block_size)), recipe_parts)


def sqnr_db(reference: Tensor, approximation: Tensor) -> float:
    """Signal to quantization noise ratio in dB: ``20 log10(|ref| / |ref - approx|)``, in FP64.

    Equal tensors give ``inf``; shapes must agree.

    Raises:
        ConfigError: (a ``ValueError``) for shapes that differ.
    """
    expect("sqnr_db", "reference", reference, Tensor, "a tensor")
    expect("sqnr_db", "approximation", approximation, Tensor, "a tensor")
    if reference.shape != approximation.shape:
        shapes = f"reference has shape {list(reference.shape)}, approximation {list(approximation.shape)}"
        raise ConfigError(f"sqnr_db(): {shapes}: they must be equal.")
    if torch.equal(reference, approximation):
        return math.inf  # also where both are zero, empty or infinite: no noise
    signal = reference.detach().to(torch.float64)
    noise = signal - approximation.detach().to(torch.float64)
    return cast(float, (20.0 * torch.log10(signal.norm() / noise.norm())).item())
