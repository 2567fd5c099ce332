"""nodes.value_key: which nodes surely hold one tensor, and which only look alike."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, fx

from fp8graph.ir.nodes import look_through_transposes, swaps_last_dims, value_key
from helpers import in_one_test, traced


def results(body: Any, *shapes: tuple[int, ...]) -> list[fx.Node]:
    (output,) = traced(body, *shapes).find_nodes(op="output")
    return list(output.args[0])


SAME = [
    pytest.param(lambda x: [x.view(4, 6), x.view(24).view(4, 6)], id="by two views"),
    pytest.param(lambda x: [x.double(), x.double()], id="cast twice"),
    pytest.param(lambda x: [x.view(4, 6).double(), x.double().view(4, 6)], id="cast before a view, and after"),
    pytest.param(lambda x: [x.unsqueeze(0).squeeze(0), x.detach()], id="squeezed, detached"),
    pytest.param(lambda x: [x.permute(1, 0, 2), x.permute(1, 0, 2)], id="permuted alike"),
]
DIFFERENT = [
    pytest.param(lambda x: [x.view(4, 6), x.view(6, 4)], id="in two shapes"),
    pytest.param(lambda x: [x.double(), x.half()], id="in two dtypes"),
    pytest.param(lambda x: [x, x.double().float()], id="rounded on the way"),
    pytest.param(lambda x: [x.permute(1, 0, 2), x.view(3, 2, 4)], id="moved, and viewed"),
    pytest.param(lambda x: [x.permute(2, 1, 0).reshape(24), x.permute(2, 0, 1).reshape(24)], id="permuted otherwise"),
    pytest.param(lambda x: [x.sin(), x.sin()], id="computed twice"),
]


@in_one_test("body", SAME)
def test_one_tensor_has_one_key(body: Any) -> None:
    a, b = results(body, (2, 3, 4))
    assert a is not b
    assert value_key(a) == value_key(b)


@in_one_test("body", DIFFERENT)
def test_tensors_that_may_differ_have_two(body: Any) -> None:
    a, b = results(body, (2, 3, 4))
    assert value_key(a) != value_key(b)


@in_one_test(
    ("body", "swaps"),
    [
        (lambda x: x.transpose(-1, -2), True),
        (lambda x: x.permute(0, 2, 1), True),
        (lambda x: x.permute(0, -1, -2), True),
        (lambda x: x.transpose(0, 1), False),
        (lambda x: x.permute(0, 1, 2), False),
        (lambda x: x.permute(2, 1, 0), False),
        (lambda x: x.view(2, 4, 3), False),
    ],
)
def test_swaps_last_dims(body: Any, swaps: bool) -> None:
    (node,) = results(lambda x: [body(x)], (2, 3, 4))
    assert swaps_last_dims(node) == swaps


@in_one_test(("times", "flipped"), [(0, False), (1, True), (2, False), (3, True)])
def test_transposes_are_counted(times: int, flipped: bool) -> None:
    def body(x: Tensor) -> list[Tensor]:
        y = x.sin()
        for _ in range(times):
            y = y.t().detach()
        return [y]

    (node,) = results(body, (3, 4))
    source, found = look_through_transposes(node)
    assert (source.target, found) == (torch.ops.aten.sin.default, flipped)
