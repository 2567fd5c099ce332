"""Statistics of a tensor and of its quantized copy: Transformer Engine's statistics and a few more.

Each is made of parts that are counted or summed in one pass: FP32 vectors, so that a graph can make them next to a
quantization. The parts of several micro-batches or ranks are merged, and the statistics computed from them.

Names and definitions are those of Transformer Engine (transformer_engine/debug/features/utils/stats_computation.py),
except that numbers that were zero before they were quantized do not count as underflows, that all variances are merged
exactly (its ``compute_variance`` subtracts the spread of the means), and that blocks of zeros alone have no dynamic
range.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Final

import torch
from torch import Tensor

from fp8graph.numerics.quantization import quantized_copy
from fp8graph.numerics.scalings import SCALINGS
from fp8graph.numerics.tiles import join, pad_to_multiple, tiles_of
from fp8graph.numerics.transforms import transformed
from fp8graph.recipes import FP8_MAX, Layout

TENSOR_PARTS: Final = (
    "numel",
    "min",
    "max",
    "mean",
    "square_deviation",  # from the mean, summed
    "l1_norm",
    "l2_norm_square",
    "cur_amax",
    "smallest",  # |x| that is not zero
    "nonzero",
    "max_blockwise_dynamic_range",
)
_QUANTILES: Final = (0.05, 0.25, 0.5, 0.75, 0.95)
QUANTIZED_PARTS: Final = (
    "underflows",
    "overflows",
    "saturated",
    "square_error",
    "scale_inv_min",
    "scale_inv_max",
    "scales",
    "log2_mean",  # of the scales that are not zero
    "log2_square_deviation",
    *(f"scale_inv_q{100 * q:g}" for q in _QUANTILES),
)
TENSOR_STATISTICS: Final = (
    "min",
    "max",
    "mean",
    "std",
    "l1_norm",
    "l2_norm",
    "cur_amax",
    "dynamic_range",
    "max_blockwise_dynamic_range",
    "zeros%",
)
QUANTIZED_STATISTICS: Final = (
    "underflows%",
    "overflows%",
    "saturated%",
    "mse",
    "sqnr",
    "scale_inv_min",
    "scale_inv_max",
    "scale_inv_std",
    *(f"scale_inv_q{100 * q:g}" for q in _QUANTILES),
)
_FP4_MAX: Final = 0x77  # two E2M1 codes of 6

Parts = Mapping[str, float]


def tensor_parts(x: Tensor, block_size: int = 32) -> Tensor:
    """Return the ``TENSOR_PARTS`` of ``x`` [..., rows, columns], FP32.

    ``block_size``: of max_blockwise_dynamic_range, over blocks along rows and along columns, which reads ``x``
    twice more; 0: it is not computed (and is 0).
    """
    numbers = x.to(torch.float32)
    sizes = numbers.abs()
    # rows first, then all rows together: few kernels, since a reduction of a GPU takes two steps anyway
    variances, means = torch.var_mean(numbers, -1, correction=0)
    spread, mean = torch.var_mean(means, correction=0)
    ones = torch.ones_like(numbers)  # not x.shape: sizes may be dynamic
    numel, l1_norm, l2_norm_square, nonzero = _summed(
        ones, sizes, numbers.square(), torch.where(numbers != 0, ones, 0.0)
    )
    smallest = torch.where(sizes > 0, sizes, torch.inf)
    of_rows = [each.amax(-1) for each in (-numbers, numbers, sizes, -smallest)]
    if block_size:
        of_rows.append(_dynamic_ranges(sizes, block_size))
    largest = torch.stack(of_rows).flatten(1).amax(-1)
    blockwise = torch.zeros_like(mean)
    if block_size:
        blockwise = torch.maximum(largest[-1], _dynamic_ranges(sizes.transpose(-2, -1), block_size).amax())
    parts = {
        "numel": numel,
        "min": -largest[0],
        "max": largest[1],
        "mean": mean,
        "square_deviation": (variances.mean() + spread) * numel,
        "l1_norm": l1_norm,
        "l2_norm_square": l2_norm_square,
        "cur_amax": largest[2],
        "smallest": -largest[3],
        "nonzero": nonzero,
        "max_blockwise_dynamic_range": blockwise,
    }
    return _vector([parts[name] for name in TENSOR_PARTS])


def quantized_parts(
    x: Tensor,
    data: Tensor,
    scale_inv: Tensor,
    *,
    layout: Layout,
    scaling: str = "tensor",
    block: Sequence[int] = (),
    rotation: int | None = None,
    global_scale_inv: Tensor | None = None,
) -> Tensor:
    """Return the ``QUANTIZED_PARTS`` of ``x`` [..., rows, columns] and its quantized copy, FP32.

    ``data``, ``scale_inv``, ``scaling``, ``block``, ``rotation``, ``global_scale_inv``: see ``quantize_layouts``. A
    transformed copy is compared with the transformed tensor. Padding of the data does not count.
    """
    kind = SCALINGS[scaling]
    if rotation is not None and layout == "columnwise":
        x = transformed(x, rotation)
    source = (x.transpose(-2, -1) if layout == "columnwise" else x).to(torch.float32)
    largest = torch.full_like(data, _FP4_MAX) if kind.packed > 1 else _full(data, FP8_MAX[data.dtype])
    decoded, limit = (
        kind.decode(codes, scale_inv, block, global_scale_inv)[..., : source.shape[-2], : source.shape[-1]]
        for codes in (data, largest)
    )
    rows, columns = source.shape[-2:]
    if (own := kind.scale_shape(rows, columns, block)) is not None:
        scale_inv = scale_inv[..., : own[0], : own[1]]
    scales = scale_inv.to(torch.float32).reshape(-1)
    used = scales > 0
    count = _count(used)
    log2 = torch.where(used, scales, 1.0).log2()  # 0 for those that are not used
    log2_mean = log2.sum() / count.clamp_min(1.0)
    in_order = scales if len(scales) == 1 else scales.sort().values
    last = _count(torch.ones_like(used)) - 1
    underflows, overflows, saturated, square_error = _summed(
        _counted((source != 0) & (decoded == 0)),
        _counted(source.abs() > limit),
        _counted(decoded.abs() == limit),
        (decoded - source).square(),
    )
    parts = {
        "underflows": underflows,
        "overflows": overflows,
        "saturated": saturated,
        "square_error": square_error,
        "scale_inv_min": torch.where(used, scales, torch.inf).amin(),
        "scale_inv_max": scales.amax(),
        "scales": count,
        "log2_mean": log2_mean,
        "log2_square_deviation": torch.where(used, (log2 - log2_mean).square(), 0.0).sum(),
    }
    ranks = torch.stack([q * last for q in _QUANTILES]).round().long()
    quantiles = in_order.index_select(0, ranks)
    return torch.cat([_vector([parts[name] for name in QUANTIZED_PARTS[: len(parts)]]), quantiles])


def of_tensor(x: Tensor, block_size: int, *, more: Sequence[Tensor] | None = None, dim: int = -1) -> Tensor:
    """:func:`tensor_parts` of ``x`` and ``more``, joined along ``dim``."""
    return tensor_parts(join([x, *(more or ())], dim), block_size)


def of_copy(
    x: Tensor,
    data: Tensor,
    scale_inv: Tensor,
    columnwise: bool,
    *,
    more: Sequence[Tensor] | None = None,
    dim: int = -1,
    **settings: Any,
) -> Tensor:
    """:func:`quantized_parts` of ``x`` and ``more``, joined along ``dim``."""
    layout: Layout = "columnwise" if columnwise else "rowwise"
    return quantized_parts(join([x, *(more or ())], dim), data, scale_inv, layout=layout, **settings)


def of_other_copy(
    x: Tensor,
    dtype: torch.dtype,
    power_2_scale: bool,
    amax_epsilon: float,
    columnwise: bool,
    *,
    more: Sequence[Tensor] | None = None,
    dim: int = -1,
    **settings: Any,
) -> Tensor:
    """:func:`quantized_parts` of ``x`` and ``more``, joined along ``dim``, and their copy by a quantizer."""
    whole = join([x, *(more or ())], dim)
    layout: Layout = "columnwise" if columnwise else "rowwise"
    data, scale_inv, global_scale_inv = quantized_copy(whole, dtype, power_2_scale, amax_epsilon, layout, **settings)
    described = {name: settings[name] for name in ("scaling", "block", "rotation") if name in settings}
    return quantized_parts(whole, data, scale_inv, layout=layout, global_scale_inv=global_scale_inv, **described)


def _dynamic_ranges(sizes: Tensor, block_size: int) -> Tensor:
    """[..., rows]: the largest log2(amax / smallest that is not zero) of the blocks of each row of |x|."""
    blocks = tiles_of(pad_to_multiple(sizes, 1, block_size), (1, block_size))
    top = blocks.amax(-1)  # [..., rows, 1, blocks]
    bottom = torch.where(blocks > 0, blocks, torch.inf).amin(-1)
    return torch.where(top > 0, top.log2() - bottom.log2(), 0.0).amax((-2, -1))


def _summed(*numbers: Tensor) -> Sequence[Tensor]:
    """Return the sum of each, rows first."""
    return torch.stack([each.sum(-1) for each in numbers]).flatten(1).sum(-1).unbind()


def _counted(which: Tensor) -> Tensor:
    return which.to(torch.float32)


def _vector(numbers: Sequence[Tensor]) -> Tensor:
    """``torch.stack``, which Inductor would give a kernel per number."""
    position = torch.arange(len(numbers), device=numbers[0].device)
    result = numbers[0].expand(len(numbers))
    for index, number in enumerate(numbers[1:], start=1):
        result = torch.where(position == index, number, result)
    return result.clone()


def _count(which: Tensor) -> Tensor:
    return _counted(which).sum()


def _full(data: Tensor, value: float) -> Tensor:
    return torch.full(data.shape, value, dtype=torch.float32, device=data.device).to(data.dtype)


def merged(vectors: Sequence[Parts]) -> dict[str, float]:
    """Return the parts of several tensors as those of one, in FP64. Quantiles of scales are averaged."""
    first, *others = vectors
    result = dict(first)
    for other in others:
        both = dict(result)
        for count, mean, deviation in (
            ("numel", "mean", "square_deviation"),
            ("scales", "log2_mean", "log2_square_deviation"),
        ):
            if count in both:  # Chan, Golub and LeVeque, "Updating formulae" (1979): Welford's, for two sets
                here, there = result[count], other[count]
                apart, total = other[mean] - result[mean], max(here + there, 1.0)
                both[mean] = result[mean] + apart * there / total
                both[deviation] = result[deviation] + other[deviation] + apart**2 * here * there / total
        for name in result.keys() - {"mean", "square_deviation", "log2_mean", "log2_square_deviation"}:
            both[name] = _merge(name, result[name], other[name])
        result = both
    weight = len(vectors)
    return {name: value / weight if "_q" in name else value for name, value in result.items()}


def finished(tensor: Parts, quantized: Parts | None = None) -> dict[str, float]:
    """Return the statistics computed from the parts, by Transformer Engine's names if it has one.

    "overflows%" counts numbers beyond the largest that the scale leaves room for; "saturated%" those that were
    quantized to it. "sqnr" is in dB, "scale_inv_std" in octaves (log2). A tensor of zeros has a dynamic range of 0.
    """
    numel, smallest = tensor["numel"], tensor["smallest"]
    values = {name: tensor[name] for name in ("min", "max", "mean", "l1_norm", "cur_amax")}
    values["std"] = math.sqrt(tensor["square_deviation"] / (numel - 1)) if numel > 1 else math.nan
    values["l2_norm"] = math.sqrt(tensor["l2_norm_square"])
    values["dynamic_range"] = math.log2(tensor["cur_amax"] / smallest) if 0 < tensor["cur_amax"] < math.inf else 0.0
    values["max_blockwise_dynamic_range"] = tensor["max_blockwise_dynamic_range"]
    values["zeros%"] = 100 * (1 - tensor["nonzero"] / numel)
    if quantized is not None:
        for name in ("underflows", "overflows", "saturated"):
            values[f"{name}%"] = 100 * quantized[name] / numel
        error, signal = quantized["square_error"], tensor["l2_norm_square"]
        values["mse"] = error / numel
        values["sqnr"] = math.inf if error == 0 else 10 * math.log10(signal / error) if signal else -math.inf
        values |= {name: value for name, value in quantized.items() if name.startswith("scale_inv")}
        scales = quantized["scales"]
        values["scale_inv_std"] = math.sqrt(quantized["log2_square_deviation"] / scales) if scales else 0.0
    return values


def named(names: Sequence[str], vector: Tensor) -> dict[str, float]:
    """Return a vector of parts by name."""
    return dict(zip(names, vector.tolist(), strict=True))


def _merge(name: str, here: float, there: float) -> float:
    if math.isnan(here) or math.isnan(there):  # min and max would drop one of them
        return math.nan
    if name in ("min", "smallest", "scale_inv_min"):
        return min(here, there)
    if name in ("max", "cur_amax", "scale_inv_max", "max_blockwise_dynamic_range"):
        return max(here, there)
    return here + there
