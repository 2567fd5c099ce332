"""The quantizer that a recipe has for one tensor: dtype, tile, power of two."""

from __future__ import annotations

from typing import Any

import torch

from fp8graph import (
    Float8CurrentScaling,
    Format,
    recipes,
)
from fp8graph.recipes import resolve_recipe
from helpers import in_one_test


@in_one_test(
    ("fields", "expected"),
    [
        ({}, [torch.float8_e4m3fn, torch.float8_e4m3fn, torch.float8_e5m2]),
        ({"fp8_format": Format.E4M3}, [torch.float8_e4m3fn] * 3),
        ({"fp8_format": "E4M3"}, [torch.float8_e4m3fn] * 3),
        ({"fp8_format": "HYBRID"}, [torch.float8_e4m3fn, torch.float8_e4m3fn, torch.float8_e5m2]),
    ],
)
def test_quantizer_has_the_fields_of_its_recipe(fields: dict[str, Any], expected: list[torch.dtype]) -> None:
    recipe = Float8CurrentScaling(**fields, power_2_scale=True, amax_epsilon=0.25)
    quantizers = [recipe.quantizer(operand) for operand in recipes.OPERANDS]
    assert [q.dtype for q in quantizers] == expected
    assert [q.fp8_max for q in quantizers] == [torch.finfo(dtype).max for dtype in expected]
    assert {(q.power_2_scale, q.amax_epsilon) for q in quantizers} == {(True, 0.25)}


@in_one_test(
    ("name", "operand", "dtype", "block"),
    [
        ("rowwise", "grad_output", torch.float8_e4m3fn, (0, 0)),
        ("delayed", "grad_output", torch.float8_e5m2, (0, 0)),
        ("blockwise", "input", torch.float8_e4m3fn, (1, 128)),
        ("blockwise", "weight", torch.float8_e4m3fn, (128, 128)),
        ("mxfp8", "weight", torch.float8_e4m3fn, (1, 32)),
        ("nvfp4", "input", torch.uint8, (1, 16)),
        ("nvfp4", "weight", torch.uint8, (16, 16)),
    ],
)
def test_quantizers(name: str, operand: Any, dtype: torch.dtype, block: tuple[int, int]) -> None:
    recipe = resolve_recipe(name)
    assert recipe is not None
    assert (recipe.quantizer(operand).dtype, recipe.quantizer(operand).block) == (dtype, block)
