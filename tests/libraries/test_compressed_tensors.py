"""Layers of compressed-tensors, multiplied as they are stored: its hook would decompress them in the first call."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import fp8graph
from fp8_checkpoints import FORMATS, IDS, load
from fp8graph.numerics import sqnr_db
from helpers import first_slow

pytest.importorskip("compressed_tensors", reason="compressed-tensors is not installed: pip install compressed-tensors")


@first_slow(
    ("preset", "recipe", "quality"),
    [
        ("fp8", "tensorwise", 25),
        ("fp8-dynamic", "rowwise", 27),
        ("fp8-block", "blockwise", 27),
        ("mxfp8", "mxfp8", 27),
        ("nvfp4", "nvfp4", 16),
    ],
)
def test_a_model_of_a_checkpoint(preset: str, recipe: str, quality: float, tmp_path: Path) -> None:
    FORMATS[f"compressed-tensors-{preset}"].write(tmp_path)
    reference = load(tmp_path)
    with torch.no_grad():
        reference(input_ids=IDS)  # decompresses itself
    weight = reference.model.layers[0].mlp.down_proj.weight.double()

    model: Any = fp8graph.compile(load(tmp_path), compiler="eager", fullgraph=True)
    assert not hasattr(model, "ct_decompress_hook")
    x = torch.randn(64, 512, dtype=torch.bfloat16, requires_grad=True)
    linear = model.model.layers[0].mlp.down_proj
    assert sqnr_db(x.detach().double() @ weight.t(), linear(x)) > 40  # in eager: dequantized
    with torch.no_grad():
        model(input_ids=IDS)
    report = fp8graph.backend_of(model).report
    assert [gemm.recipe for gemm in report.gemms if "lm_head" not in gemm.fqn] == [recipe] * 14
    fp8graph.compile(linear, compiler="eager", fullgraph=True)
    if preset in ("fp8", "nvfp4"):  # their static scales are for smaller inputs: others would be clamped
        amax = linear.input_scale * 448 if preset == "fp8" else 448 * 6 / linear.input_global_scale
        x = (x * amax / x.abs().amax()).to(torch.bfloat16).detach().requires_grad_()
    y = linear(x)
    y.backward(dy := torch.randn_like(y))
    assert sqnr_db(x.detach().double() @ weight.t(), y) > quality
    assert x.grad is not None
    assert sqnr_db(dy.double() @ weight, x.grad) > 25


@pytest.mark.slow
def test_torch_compile_says_that_it_is_too_late(tmp_path: Path) -> None:
    """In the first call the library's hook runs, before the model."""
    FORMATS["compressed-tensors-fp8-dynamic"].write(tmp_path)
    model: Any = load(tmp_path)
    compiled: Any = torch.compile(model, backend=fp8graph.Backend(compiler="eager", strict=True))
    message = r"strict mode: compressed-tensors decompresses the layers .* call fp8graph.adopt\(model\) before"
    with pytest.raises(fp8graph.Fp8CoverageError, match=message), torch.no_grad():
        compiled(input_ids=IDS)
