"""Hugging Face's grouped matmuls for FP32 become matmuls that the passes see."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fp8graph
from helpers import ALL, around, eager_backend, stage, step

transformers_moe = pytest.importorskip("transformers.integrations.moe")


class Experts(nn.Module):
    def __init__(self, transposed: bool = True) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(3, 16, 32) if transposed else torch.randn(3, 32, 16))
        self.transposed = transposed

    def forward(self, x: Tensor, offs: Tensor) -> Tensor:
        w = self.w.transpose(-2, -1) if self.transposed else self.w
        return torch.ops.transformers.grouped_mm_fallback(x, w, offs)


OFFS = torch.tensor([5, 5, 12], dtype=torch.int32)


def x(**kwargs: Any) -> Tensor:
    return torch.randn(12, 32, requires_grad=True, **kwargs)


def test_before_and_after() -> None:
    text = stage(Experts(), x(), OFFS, after="unpack")
    assert "transformers" not in text
    assert text.count("fp8graph.grouped_mm") == 3
    lines = [line.split("fp8graph.grouped_mm")[1] for line in text.splitlines() if "fp8graph.grouped_mm" in line]
    fprop, dgrad, wgrad = (re.sub(r"permute\w*", "permuted", line) for line in lines)
    assert fprop == "(primals_2, permuted, primals_3)"
    assert dgrad == "(tangents_1, permuted, primals_3)"
    assert wgrad == "(permuted, tangents_1, primals_3)"


def test_a_gradient_that_nobody_wants_is_not_computed() -> None:
    frozen = Experts().requires_grad_(False)
    text = stage(frozen, x(), OFFS, after="unpack")
    assert text.count("fp8graph.grouped_mm") == 2
    text = stage(Experts(), x().detach(), OFFS, after="unpack")
    assert text.count("fp8graph.grouped_mm") == 2


@pytest.mark.parametrize("transposed", [True, False])
@pytest.mark.parametrize("compiler", ["eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_in_high_precision_no_number_changes(transposed: bool, compiler: Any) -> None:
    module, a = Experts(transposed), x()
    expected = step(module, a, OFFS, parameters=module.parameters())
    compiled = torch.compile(module, backend=fp8graph.Backend(fp8graph.Policy(default=None), compiler=compiler))
    got = step(compiled, a, OFFS, parameters=module.parameters())
    assert all(map(torch.equal, expected, got))


def test_other_ops_are_left_as_they_are() -> None:
    class Matmul(nn.Module):
        def forward(self, a: Tensor) -> Tensor:
            return a @ a.t()

    backend = eager_backend(ALL)
    torch.compile(Matmul(), backend=backend, fullgraph=True)(x())
    (view,) = backend.report.graphs
    assert around(view, "unpack") == (view.before, view.before)
