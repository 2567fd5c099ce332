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
  (on CPU from torch 2.13 on; tests/codegen/test_compiled.py measures both).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor

from fp8graph.numerics.experts import quantize_groups
from fp8graph.numerics.formats import (
    amax_of,
    inverse,
    narrow_amax_of,
    nvfp4_global_scale,
    saturating_cast,
    scale_from_amax,
)
from fp8graph.numerics.hints import stored
from fp8graph.numerics.tiles import (
    join,
    largest_of,
    pad_to_multiple,
    quantize_rows,
    quantize_tiles,
    scales_from_amaxes,
    with_overflow,
    with_padding,
)
from fp8graph.recipes import FLT_MAX, FP8_MAX, LAYOUTS, Quantizer


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
        offs, per_matrix: an operand of a grouped matmul, see :func:`experts.quantize_groups`: the rows of ``x``
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


def quantizer_args(quantizer: Quantizer) -> tuple[torch.dtype, bool, float]:
    """A quantizer as the arguments of ``fp8graph::quantize`` between ``x`` and the layouts."""
    return quantizer.dtype, quantizer.power_2_scale, quantizer.amax_epsilon


def quantizer_kwargs(quantizer: Quantizer) -> dict[str, Any]:
    """The rest of a quantizer: keyword arguments of the dialect ops, only what differs from the defaults."""
    values = {"scaling": quantizer.scaling} if quantizer.scaling != "tensor" else {}
    return {**values, "block": list(quantizer.block)} if any(quantizer.block) else values
