"""Statistics from their parts: merge those of several micro-batches or ranks, and name what they come to."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Final

from torch import Tensor

from fp8graph.numerics.statistic_parts import QUANTILES

Parts = Mapping[str, float]

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
    *(f"scale_inv_q{100 * q:g}" for q in QUANTILES),
)


def merged(vectors: Sequence[Parts]) -> dict[str, float]:
    """The parts of several tensors as those of one, in FP64. Quantiles of scales are averaged."""
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
    """The statistics that the parts come to, by Transformer Engine's names where it has one.

    "overflows%" counts numbers beyond the largest that the scale leaves room for; "saturated%" those that were
    quantized to it. "sqnr" is in dB, "scale_inv_std" in octaves (log2). A tensor of zeros has a dynamic range of 0.
    """
    numel, smallest = tensor["numel"], tensor["smallest"]
    found = {name: tensor[name] for name in ("min", "max", "mean", "l1_norm", "cur_amax")}
    found["std"] = math.sqrt(tensor["square_deviation"] / (numel - 1)) if numel > 1 else math.nan
    found["l2_norm"] = math.sqrt(tensor["l2_norm_square"])
    found["dynamic_range"] = math.log2(tensor["cur_amax"] / smallest) if 0 < tensor["cur_amax"] < math.inf else 0.0
    found["max_blockwise_dynamic_range"] = tensor["max_blockwise_dynamic_range"]
    found["zeros%"] = 100 * (1 - tensor["nonzero"] / numel)
    if quantized is not None:
        for name in ("underflows", "overflows", "saturated"):
            found[f"{name}%"] = 100 * quantized[name] / numel
        error, signal = quantized["square_error"], tensor["l2_norm_square"]
        found["mse"] = error / numel
        found["sqnr"] = math.inf if error == 0 else 10 * math.log10(signal / error) if signal else -math.inf
        found |= {name: value for name, value in quantized.items() if name.startswith("scale_inv")}
        scales = quantized["scales"]
        found["scale_inv_std"] = math.sqrt(quantized["log2_square_deviation"] / scales) if scales else 0.0
    return found


def named(names: Sequence[str], vector: Tensor) -> dict[str, float]:
    """A vector of parts by name."""
    return dict(zip(names, vector.tolist(), strict=True))


def _merge(name: str, here: float, there: float) -> float:
    if math.isnan(here) or math.isnan(there):  # min and max would drop one of them
        return math.nan
    if name in ("min", "smallest", "scale_inv_min"):
        return min(here, there)
    if name in ("max", "cur_amax", "scale_inv_max", "max_blockwise_dynamic_range"):
        return max(here, there)
    return here + there
