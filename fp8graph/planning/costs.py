"""The predicted time of one GEMM under each recipe: for ``tune``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import torch

from fp8graph.hardware import Hardware
from fp8graph.hardware.roofline import Operand, gemm_seconds
from fp8graph.planning.scoring import Measured
from fp8graph.recipes import Layout, OperandName, Recipe

# a [m, k] and b [k, n] of each GEMM: the operand, and the layout that it is read in
_OPERANDS: Final[Mapping[str, tuple[tuple[OperandName, Layout], ...]]] = {
    "fprop": (("input", "rowwise"), ("weight", "rowwise")),
    "dgrad": (("grad_output", "rowwise"), ("weight", "columnwise")),
    "wgrad": (("grad_output", "columnwise"), ("input", "columnwise")),
}


def seconds(found: Measured, recipe: Recipe | None, device: Hardware, sharing: int) -> float | None:
    """The time of a GEMM on ``device``, with its part of the quantization; None if the device cannot multiply so.

    Weights are quantized once per update and cost nothing. ``sharing``: how many linears read the input.
    """
    assert device.speed is not None
    sizes, dtype = (found.m, found.n, found.k), torch.bfloat16
    if recipe is None:
        return gemm_seconds(device.speed, *sizes, dtype)
    if not recipe.covers(found.gemm):  # pyright: ignore[reportArgumentType]
        return None
    operands = _OPERANDS[found.gemm]
    a, b = (device.quantizer(recipe, operand) for operand, _ in operands)
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
        for (operand, layout), size in zip(operands, elements, strict=True)
    )
    return gemm_seconds(device.speed, *sizes, dtype, a.scaling, read)
