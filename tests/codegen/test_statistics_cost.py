"""The cost of an observed step on a GPU: kernels and bytes in sm_90 code, counted without a GPU."""

from __future__ import annotations

import torch

from fp8graph.passes.observe.measuring import quantization_statistics, tensor_statistics
from fp8graph.recipes import resolve_recipe
from generated import generate
from helpers import first_fast

ROWS, COLUMNS = 2048, 1024
X = torch.empty(ROWS, COLUMNS, dtype=torch.bfloat16)


@first_fast(("block_size", "kernels", "reads"), [(0, 7, 1.1), (32, 12, 3.6)])
def test_a_tensor(block_size: int, kernels: int, reads: float) -> None:
    """The tensor is read once, and twice more for the dynamic range of blocks along rows and along columns."""
    made = generate(lambda x: tensor_statistics(x, block_size), [X]).kernels
    assert len(made) <= kernels
    assert sum(kernel.bytes for kernel in made) <= reads * X.nbytes


@first_fast(("recipe", "kernels", "reads"), [("tensorwise", 6, 1.1), ("mxfp8", 20, 2.4)])
def test_a_copy(recipe: str, kernels: int, reads: float) -> None:
    """The tensor and the copy are read once; twice with 65,536 scales, which take most of the kernels."""
    resolved = resolve_recipe(recipe)
    assert resolved is not None
    quantizer = resolved.quantizer("input")
    scaling, block = quantizer.scaling, list(quantizer.block) if any(quantizer.block) else []
    scale_shape = (ROWS, COLUMNS // 32) if recipe == "mxfp8" else (1,)
    data = torch.empty(ROWS, COLUMNS, dtype=torch.float8_e4m3fn)
    scale_inv = torch.empty(scale_shape, dtype=torch.float8_e8m0fnu if recipe == "mxfp8" else torch.float32)

    def measure(x: torch.Tensor, data: torch.Tensor, scale_inv: torch.Tensor) -> torch.Tensor:
        return quantization_statistics(x, data, scale_inv, False, scaling=scaling, block=block)

    made = generate(measure, [X, data, scale_inv]).kernels
    assert len(made) <= kernels
    assert sum(kernel.bytes for kernel in made) <= reads * (X.nbytes + data.nbytes)
