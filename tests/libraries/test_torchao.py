"""torchao's weights of nn.Linear, multiplied as they are stored, forward and backward."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import fp8graph
from fp8_checkpoints import FORMATS, load
from fp8graph.numerics import sqnr_db

pytest.importorskip("torchao", reason="torchao is not installed: pip install torchao")


@pytest.mark.parametrize(
    ("name", "recipe"),
    [
        ("torchao-rowwise", "rowwise"),
        ("torchao-tensorwise", "tensorwise"),
        ("torchao-weight-only", None),
        ("torchao-mxfp8", "mxfp8"),
        ("torchao-nvfp4-weight-only", None),
    ],
)
def test_a_linear_of_a_checkpoint(name: str, recipe: str | None, tmp_path: Path) -> None:
    FORMATS[name].write(tmp_path)
    linear = load(tmp_path).model.layers[0].mlp.down_proj
    weight = linear.weight.dequantize().double()  # of torchao
    fp8graph.compile(linear, compiler="eager", fullgraph=True)
    x = torch.randn(64, 512, dtype=torch.bfloat16, requires_grad=True)
    y = linear(x)
    y.backward(dy := torch.randn_like(y))
    (fprop, dgrad) = fp8graph.backend_of(linear).report.gemms
    assert (fprop.recipe, dgrad.recipe) == (recipe, None if recipe == "mxfp8" else recipe)
    assert sqnr_db(x.detach().double() @ weight.t(), y) > 27
    assert x.grad is not None
    assert sqnr_db(dy.double() @ weight, x.grad) > 25
