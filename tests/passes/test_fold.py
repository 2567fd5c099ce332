"""fold: weights that arrive quantized are multiplied as they are; what cannot take their bytes dequantizes them."""

from __future__ import annotations

from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn

import fp8graph
from fp8graph import Policy, Rule
from fp8graph.numerics import sqnr_db
from helpers import dialect_counts, eager_backend, first_fast, same_bits, view_of
from stored_weights import KINDS, stored

N, K = 256, 384
DEFAULT = Policy(extends="default")


def x(rows: int = 16, columns: int = K) -> Tensor:
    return torch.randn(rows, columns, dtype=torch.bfloat16, requires_grad=True)


def lines(module: nn.Module, *args: Tensor, **settings: Any) -> list[str]:
    return view_of(module, *args, policy=DEFAULT, **settings).after.splitlines()


def named(found: list[str], kind: str) -> str:
    """The graph input of that type."""
    (name,) = (line.partition(":")[0] for line in found if line.endswith(kind) and " = " not in line)
    return name


def test_forward_and_backward_multiply_the_bytes() -> None:
    found = lines(stored("tensor", N, K), x())
    (fprop, dgrad) = [line for line in found if "fp8graph.scaled_mm" in line]
    data, scale = named(found, ": e4m3[256, 384]"), named(found, ": f32[1]")
    assert f"scaled_mm(input_rowwise, {data}, input_scale_inv, {scale}," in fprop
    (copy,) = [
        line for line in found if f": e4m3[384, 256] = fp8graph.columnwise({data}, multiples=[384, 256])" in line
    ]
    assert f"scaled_mm(grad_output_rowwise, {copy.partition(':')[0]}, grad_output_scale_inv, {scale}," in dgrad
    assert not any("stored_weight" in line or "quantize_weight" in line for line in found)


def test_scales_of_square_tiles_are_transposed() -> None:
    found = lines(stored("block", 512, 512), x(columns=512), target="sm_90")
    (fprop, dgrad) = [line for line in found if "fp8graph.scaled_mm" in line]
    scale = named(found, ": f32[4, 4]")
    assert f"{named(found, ': e4m3[512, 512]')}, input_rowwise_scale_inv, {scale}," in fprop
    (scales,) = [line for line in found if f"f32[4, 4] = fp8graph.columnwise({scale}, multiples=[4, 4])" in line]
    assert scales.partition(":")[0] in dgrad


def test_scales_of_rows_go_into_the_gradient() -> None:
    found = lines(stored("row", N, K), x())
    (gradient,) = [line for line in found if line.startswith("quantize_grad_output")]
    assert "fp8graph.quantize(mul_tensor," in gradient
    assert any("= aten.full([384, 1], 1.0" in line for line in found)


def test_padded_weight_is_copied_with_zeros() -> None:
    view = view_of(stored("row", 24, 40), x(16, 40), policy=DEFAULT, target="sm_90")
    assert "e4m3[32, 48] = fp8graph.columnwise" in view.after
    assert {gemm.recipe for gemm in view.gemms} == {"rowwise"}


@pytest.mark.parametrize("kind", ["mxfp8", "nvfp4"])
def test_scales_along_rows_do_not_transpose(kind: str) -> None:
    view = view_of(stored(kind, N, K), x(), policy=DEFAULT)
    (fprop, dgrad) = view.gemms
    assert (fprop.recipe, dgrad.recipe) == (kind, None)
    assert dgrad.reason == (
        "dgrad contracts the weight's rows, and each of its scales is for one row: it is dequantized"
    )
    forward, backward = view.after.split("# backward")
    assert "stored_weight" not in forward  # nothing in high precision is kept for backward
    assert dialect_counts(backward)["stored_weight"] == 1


def test_transposed_copies_are_made_once() -> None:
    model = stored("block", N, K)
    backend = fp8graph.Backend(compiler="eager", strict=True, cache_weights="update")
    compiled = torch.compile(model, backend=backend)
    for _ in range(3):
        compiled(x()).sum().backward()
    assert backend.weights.quantized == 2  # data and scales
    assert backend.weights.bytes == N * K + 4 * (N // 128) * (K // 128)


def test_inference_takes_the_very_tensors() -> None:
    model = stored("block", N, K)
    backend = fp8graph.Backend(compiler="eager")
    with torch.no_grad():
        torch.compile(model, backend=backend)(x())
    assert backend.weights.bytes == 0
    after = backend.report.graphs[0].after
    assert f"fp8graph.dequantize({named(after.splitlines(), ': e4m3[256, 384]')}, " in after


@pytest.mark.parametrize("kind", KINDS)
def test_numbers(kind: str) -> None:
    model, given = stored(kind, N, K), x(64)
    weight = model.dequantized()
    y = torch.compile(model, backend=eager_backend(DEFAULT))(given)
    dy = torch.randn_like(y)
    y.backward(dy)
    assert sqnr_db(given.detach().double() @ weight.t(), y) > (18 if kind == "nvfp4" else 30)
    assert sqnr_db(dy.double() @ weight, cast(Tensor, given.grad)) > (50 if kind in ("mxfp8", "nvfp4") else 25)


@pytest.mark.parametrize("kind", ["tensor", "row", "block"])  # of rows and tiles: the same for all
def test_a_static_scale_replaces_the_amax(kind: str) -> None:
    model, given = stored(kind, N, K, input_scale_inv=0.02), x()
    view = view_of(model, given, policy=DEFAULT)
    assert "scales=cat_default" in view.after
    with torch.no_grad():
        y = torch.compile(model, backend=eager_backend(DEFAULT))(given)
    quantized = (given.detach().float() / 0.02).clamp(-448, 448).to(torch.float8_e4m3fn).double() * 0.02
    assert sqnr_db(quantized @ model.dequantized().t(), y) > 50


def test_projections_with_static_scales_of_their_own_share_nothing() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.q = stored("tensor", N, K, input_scale_inv=0.02)
            self.k = stored("tensor", N, K, input_scale_inv=0.5)

        def forward(self, x: Tensor) -> Tensor:
            return self.q(x) + self.k(x)

    view = view_of(Two(), x(), policy=DEFAULT)
    assert dialect_counts(view.stages["share"])["quantize"] == 3  # dy once


@pytest.mark.parametrize(
    ("policy", "recipe", "reason"),
    [
        (Policy(default=None), None, "default -> high precision"),
        (Policy([Rule("*", None)]), None, "-> high precision"),
        (Policy([Rule("*", "mxfp8")]), "mxfp8", "-> mxfp8"),
        (DEFAULT, "blockwise", "weight stored in E4M3FN with 128x128 scales"),
    ],
)
def test_who_decides(policy: Policy, recipe: str | None, reason: str) -> None:
    view = view_of(stored("block", N, K), x(), policy=policy)
    assert {gemm.recipe for gemm in view.gemms} == {recipe}
    assert all(reason in gemm.reason for gemm in view.gemms)
    assert ("quantize_weight" in view.after) == (recipe == "mxfp8")


def test_a_checkpoint_of_weights_only_is_dequantized() -> None:
    view = view_of(stored("row", N, K, activations="none"), x(), policy=DEFAULT)
    assert {gemm.reason for gemm in view.gemms} == {"the checkpoint quantizes weights only: they are dequantized"}
    assert dialect_counts(view.after)["stored_weight"] == 2  # once forward, once backward


@first_fast("kind", ["block_e8m0", "mxfp8"])
def test_a_static_scale_does_not_go_with_exponents(kind: str) -> None:
    view = view_of(stored(kind, N, K, input_scale_inv=0.02), x(), policy=DEFAULT)
    assert {gemm.recipe for gemm in view.gemms} == {None}
    assert all("an FP32 scale for activations, and E8M0 scales" in gemm.reason for gemm in view.gemms)


@pytest.mark.parametrize("size", [1, 1e9])  # far beyond the scale: clamped
def test_a_static_scale_of_the_tensor_is_that_of_e2m1s_tiles(size: float) -> None:
    model, given = stored("nvfp4", N, K, input_scale_inv=4 / (448 * 6)), x() * size
    with torch.no_grad():
        y = torch.compile(model, backend=eager_backend(DEFAULT))(given)
    tiles = given.detach().float().reshape(-1, K // 16, 16)
    one = torch.tensor(4 / (448 * 6))
    scales = (tiles.abs().amax(-1, keepdim=True) / 6 / one).clamp(max=448).to(torch.float8_e4m3fn).float() * one
    grid = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    steps = ((tiles / scales).abs().clamp(max=6).unsqueeze(-1) - grid).abs().argmin(-1)  # ties are rare
    quantized = (grid[steps] * tiles.sign() * scales).reshape(given.shape).double()
    assert sqnr_db(quantized @ model.dequantized().t(), y) > 40


def test_scales_may_be_buffers() -> None:
    given, results = x(), list[Tensor]()
    for buffers in (False, True):
        backend = eager_backend(DEFAULT)
        results.append(torch.compile(stored("block", N, K, buffers=buffers), backend=backend)(given))
        assert {(gemm.op, gemm.recipe) for gemm in backend.report.gemms} == {("linear", "blockwise")}
    assert same_bits(results[:1], results[1:])
