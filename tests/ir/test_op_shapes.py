"""The promises of the fakes for NVFP4's ops. ``test_ops.py`` holds those of the other ops."""

from __future__ import annotations

from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree as pytree

from fp8graph import NVFP4BlockScaling
from fp8graph.ir import ops
from fp8graph.ir.transforms import hadamard_matrix
from fp8graph.numerics import quantization
from fp8graph.recipes import OperandName
from helpers import in_one_test


def described(results: Any) -> list[Any]:
    return [(tuple(x.shape), x.stride(), x.dtype) for x in pytree.tree_leaves(results)]


@in_one_test("operand", ["input", "weight", "grad_output"])
@in_one_test("shape", [(64, 96), (50, 70), (1, 1), (2, 33, 20)])
@in_one_test("multiples", [([1, 1], [1, 1]), ([1, 32], [16, 32]), ([1, 1], []), ([], [16, 32])], ids=str)
def test_quantize_fp4(operand: OperandName, shape: tuple[int, ...], multiples: tuple[list[int], list[int]]) -> None:
    quantizer = NVFP4BlockScaling().quantizer(operand)
    args, kwargs = quantization.quantizer_args(quantizer), quantization.quantizer_kwargs(quantizer)
    with FakeTensorMode():
        promised = described(ops.quantize(torch.empty(shape), *args, *multiples, **kwargs))
    assert promised == described(ops.quantize(torch.randn(shape), *args, *multiples, **kwargs))
    assert len(promised) == 3 * sum(map(bool, multiples))  # data, scales of tiles, scale of the whole


def test_shapes_of_the_other_ops_of_fp4() -> None:
    x = torch.randn(3, 5).bfloat16()
    with FakeTensorMode():
        fakes = [hadamard_matrix(torch.empty(3, 5).bfloat16(), 7), ops.random_seed(torch.device("cpu"))]
    assert described(fakes) == described([hadamard_matrix(x, 7), ops.random_seed(x.device)])
