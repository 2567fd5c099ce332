"""The predicted time of one GEMM under each recipe: for ``tune``."""

from __future__ import annotations

from typing import cast

from fp8graph.hardware import Hardware
from fp8graph.hardware.roofline import Operand, gemm_seconds
from fp8graph.planning.scoring import Measured
from fp8graph.recipes import GEMM_LAYOUTS, GEMM_OPERANDS, GemmName, Recipe


def seconds(found: Measured, recipe: Recipe | None, device: Hardware, sharing: int) -> float | None:
    """The time of a GEMM on ``device``, with its part of the quantization; None if the device cannot multiply so.

    Weights are quantized once per update and cost nothing. ``sharing``: how many linears read the input.
    """
    assert device.speed is not None
    sizes, dtype, gemm = (found.m, found.n, found.k), found.dtype, cast(GemmName, found.gemm)
    if recipe is None:
        return gemm_seconds(device.speed, *sizes, dtype)
    if not recipe.covers(gemm):
        return None
    operands = GEMM_OPERANDS[gemm]
    a, b = (device.quantizer(recipe, operand) for operand in operands)
    if device.obstacle(a, b, dtype) is not None:
        return None
    elements = (found.m * found.k, found.k * found.n)
    read = tuple(
        Operand(
            elements=size,
            layouts=frozenset({layout}),
            users=sharing if operand == "input" else 1,
            kept=operand == "weight",
        )
        for operand, layout, size in zip(operands, GEMM_LAYOUTS[gemm], elements, strict=True)
    )
    return gemm_seconds(device.speed, *sizes, dtype, a.scaling, read)
