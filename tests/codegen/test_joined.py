"""A quantize of several joined tensors: bit for bit that of the tensor that they make, whichever way it is computed."""

from __future__ import annotations

from typing import Any

import torch

from fp8graph.ir import ops
from fp8graph.numerics import quantization
from helpers import RECIPES, in_one_test, rounding_to_nearest, same_bits

SHAPES = {  # rows and columns of the parts
    "equal": [(128, 256), (128, 256), (128, 256)],
    "unequal columns": [(128, 256), (128, 128)],
    "unequal rows": [(256, 128), (128, 128)],
    "ragged rows": [(72, 128), (72, 128)],
    "ragged columns": [(128, 40), (128, 40)],
}


@in_one_test("shapes", SHAPES)
@in_one_test("operand", ["weight", "grad_output"])
@in_one_test("recipe", RECIPES)
def test_joined_tensors_are_quantized_as_one(recipe: str, operand: Any, shapes: str) -> None:
    generator = torch.Generator().manual_seed(0)
    parts = [
        torch.randn(shape, generator=generator).to(torch.bfloat16) * 3**i for i, shape in enumerate(SHAPES[shapes])
    ]
    parts[0][0, 0] = torch.inf
    parts[1][1, 2] = torch.nan
    dim = -2 if shapes in ("unequal rows", "ragged columns") else -1
    quantizer = rounding_to_nearest(recipe).quantizer(operand)  # each part draws its own random numbers
    settings = quantization.quantizer_kwargs(quantizer)
    if quantizer.scaling == "delayed":
        settings["scales"] = torch.tensor([[4.0, 0.25]])
    multiples = ([16, 16], [16, 16])
    one = torch.cat(parts, dim)
    expected = ops.quantize(one, *quantization.quantizer_args(quantizer), *multiples, **settings)
    got = ops.quantize(
        parts[0], *quantization.quantizer_args(quantizer), *multiples, more=parts[1:], dim=dim, **settings
    )
    amax = [expected.pop(), got.pop()] if quantizer.scaling == "delayed" else [one, one]
    assert same_bits(expected, got)
    torch.testing.assert_close(*amax, rtol=0, atol=0, equal_nan=True)  # one NaN is as good as another
