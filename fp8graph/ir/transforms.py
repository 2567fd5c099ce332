"""The dialect's transforms of a tensor before it is quantized (``numerics/transforms.py``).

    hadamard(like, signs) -> [16, 16];  rotate(x, matrix [16, 16], dim) -> x

NVFP4 and attention transform with Hadamard's matrix.
"""

from __future__ import annotations

from torch import Tensor

from fp8graph.ir.ops import define
from fp8graph.numerics import transforms


def _shape_of_hadamard(like: Tensor, _signs: int) -> Tensor:
    return like.new_empty((transforms.SIZE, transforms.SIZE))


def _shape_of_rotate(x: Tensor, _matrix: Tensor, _dim: int) -> Tensor:
    return x.new_empty(x.shape)


hadamard_matrix = define("hadamard", reference=transforms.hadamard, fake=_shape_of_hadamard)
rotate = define("rotate", reference=transforms.rotate, fake=_shape_of_rotate)
