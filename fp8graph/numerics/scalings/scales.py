"""FP32 scales from amaxes."""

from __future__ import annotations

from torch import Tensor

from fp8graph.numerics.formats import inverse, scale_from_amax
from fp8graph.numerics.hints import stored
from fp8graph.numerics.scalings.base import Asked
from fp8graph.recipes import FLT_MAX, FP8_MAX


def fp8_scales(amax: Tensor, asked: Asked, *, largest: float = FLT_MAX) -> tuple[Tensor, Tensor]:
    """``(scale, scale_inv)`` in FP32 for these amaxes; see :func:`formats.scale_from_amax`.

    The scales that were asked for (``QuantizeArguments.scales``) replace them: the same for every amax.
    """
    if asked.scales is not None:
        scale, scale_inv = (asked.scales[asked.row, i].expand(amax.shape) for i in (0, 1))
        return scale, scale_inv.clone()
    scale = scale_from_amax(
        amax,
        FP8_MAX[asked.dtype],
        power_2_scale=asked.power_2_scale,
        amax_epsilon=asked.amax_epsilon,
        largest=largest,
    )
    scale = stored(scale)  # else every thread that casts with it would divide
    return scale, inverse(scale)
