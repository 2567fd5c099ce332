"""recognize: the ways in which programs dequantize a weight, and those that are not understood."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fp8graph import Policy
from fp8graph.numerics import sqnr_db
from helpers import around, eager_backend, first_fast, view_of
from stored_weights import stored

N, K = 256, 384
DEFAULT = Policy(extends="default")
Decode = Callable[[Tensor, Tensor, torch.dtype], Tensor]


class Written(nn.Module):
    """A linear whose weight the program decodes itself."""

    def __init__(self, data: Tensor, scale: Tensor, decode: Decode, *, transposed: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(data, requires_grad=False)
        self.register_buffer("scale", scale)
        self.decode, self.transposed = decode, transposed

    def forward(self, x: Tensor) -> Any:
        weight = self.decode(self.weight, self.get_buffer("scale"), x.dtype)
        return x @ weight if self.transposed else nn.functional.linear(x, weight)


def x() -> Tensor:
    return torch.randn(16, K, dtype=torch.bfloat16, requires_grad=True)


def repeated(scale: Tensor) -> Tensor:
    return scale.repeat_interleave(128, 0).repeat_interleave(128, 1)


def hugging_face(w: Tensor, s: Tensor, dtype: torch.dtype) -> Tensor:
    """As ``_dequantize_fp8_weight``: the scale is rounded first, and repeated along the rows alone."""
    rows = s.to(dtype).repeat_interleave(128, -2)
    return (w.to(dtype).view(N, K // 128, 128) * rows.unsqueeze(-1)).view(N, K)


def compressed_tensors(w: Tensor, s: Tensor, dtype: torch.dtype) -> Tensor:
    tiles = w.view(N // 128, 128, K // 128, 128).transpose(1, 2).to(dtype)
    return (tiles * s.unsqueeze(-1).unsqueeze(-1).to(dtype)).transpose(1, 2).reshape(N, K)


WAYS: dict[str, tuple[str, Decode]] = {
    "one scale": ("tensor", lambda w, s, dtype: w.to(dtype) * s.to(dtype)),
    "one scale in FP32": ("tensor", lambda w, s, dtype: (w.float() * s).to(dtype)),
    "rows": ("row", lambda w, s, dtype: (w.float() * s).to(dtype)),
    "rows, scale first": ("row", lambda w, s, dtype: (s * w.float()).to(dtype)),
    "rows, [N]": ("row", lambda w, s, dtype: (w.float() * s.flatten().unsqueeze(1)).to(dtype)),
    "rows, transposed": ("row", lambda w, s, dtype: (w.t().float() * s.t()).to(dtype).t()),
    "tiles, repeated": ("block", lambda w, s, dtype: (w.float() * repeated(s)).to(dtype)),
    "tiles, Hugging Face": ("block", hugging_face),
    "tiles, compressed-tensors": ("block", compressed_tensors),
    "tiles, E8M0": ("block_e8m0", lambda w, s, dtype: (w.float() * repeated(s.float())).to(dtype)),
    "tiles 1x32, E8M0": (
        "mxfp8",
        lambda w, s, dtype: (w.float().view(N, -1, 32) * s.float().unsqueeze(-1)).view(N, K).to(dtype),
    ),
}


def written(way: str) -> tuple[Written, Any]:
    """The module of ``WAYS`` and the same weight as a ``stored_weight``."""
    kind, decode = WAYS[way]
    known = stored(kind, N, K)
    scale = known.get_parameter("scale_inv").detach()
    if scale.dtype == torch.uint8:
        scale = scale.view(torch.float8_e8m0fnu)
    return Written(known.weight.detach(), scale, decode), known


@pytest.mark.parametrize("way", WAYS)
def test_a_chain_becomes_a_stored_weight(way: str) -> None:
    module, known = written(way)
    given = x()
    view = view_of(module, given, policy=DEFAULT)
    before, after = around(view, "recognize")
    assert "stored_weight" not in before
    assert after.count("fp8graph.stored_weight(") == 1  # for forward and backward
    assert [gemm.reason.partition(";")[0] for gemm in view.gemms][0].startswith("weight stored in E4M3FN with")
    expected = view_of(known, given, policy=DEFAULT)
    assert [(g.gemm, g.recipe, g.execution) for g in view.gemms] == [
        (g.gemm, g.recipe, g.execution) for g in expected.gemms
    ]
    assert "quantize_weight" not in view.after


@first_fast("way", WAYS)
def test_numbers(way: str) -> None:
    module, known = written(way)
    given = x()
    compiled: Any = torch.compile(module, backend=eager_backend(DEFAULT))
    y = compiled(given)
    y.float().sum().backward()
    weight = known.dequantized()
    assert sqnr_db(given.detach().double() @ weight.t(), y) > 30
    assert given.grad is not None
    assert sqnr_db(torch.ones(16, N).double() @ weight, given.grad) > 26


def test_a_weight_on_the_right_of_a_matmul() -> None:
    known = stored("row", N, K)
    module = Written(
        known.weight.detach(),
        known.get_parameter("scale_inv").detach(),
        lambda w, s, d: (w.float() * s).to(d).t(),
        transposed=True,
    )
    view = view_of(module, x(), policy=DEFAULT)
    assert {gemm.recipe for gemm in view.gemms} == {"rowwise"}


@pytest.mark.parametrize("transposed", [False, True])
def test_one_row_is_stored_like_one_column(transposed: bool) -> None:
    """A weight [1, K] has the same bytes as [K, 1]: shapes tell which of them is multiplied."""
    data = torch.randn(1, K).to(torch.float8_e4m3fn)
    given = torch.randn(16, 1 if transposed else K, dtype=torch.bfloat16, requires_grad=True)
    module = Written(data, torch.tensor([0.5]), lambda w, s, d: (w.float() * s).to(d), transposed=transposed)
    compiled: Any = torch.compile(module, backend=(backend := eager_backend(DEFAULT)))
    y = compiled(given)
    y.float().sum().backward()
    weight = data.double() / 2
    assert sqnr_db(given.detach().double() @ (weight if transposed else weight.t()), y) > 30
    assert given.grad is not None
    assert sqnr_db(torch.ones(y.shape).double() @ (weight.t() if transposed else weight), given.grad) > 26
    assert {gemm.reason.partition(";")[0] for gemm in backend.report.gemms} == {
        "weight stored in E4M3FN with one scale"
    }


SCALES: dict[str, tuple[tuple[int, ...], Decode, str]] = {
    "of columns": ((1, K), lambda w, s, d: (w.float() * s).to(d), "its scales are not those of rows or tiles"),
    "of each number": ((N, K), lambda w, s, d: (w.float() * s).to(d), "each of its numbers has a scale of its own"),
    "of several rows": (
        (2, 1),
        lambda w, s, d: (w.float().view(2, 128, K) * s.unsqueeze(-1)).view(N, K).to(d),
        "128 of its rows share a scale",
    ),
    "transposed tiles": (
        (3, 2),
        lambda w, s, d: (w.float() * repeated(s.t())).to(d),
        "its scales are not those of rows or tiles",
    ),
    "of another shape": (
        (1,),
        lambda w, s, d: (w.float() * s).to(d).view(K, N).t(),
        "its numbers are stored as (256, 384), and multiplied as (384, 256)",
    ),
    "added": ((1,), lambda w, s, d: (w.float() + s).to(d), "add.Tensor of (256, 384) is not understood"),
    "divided": ((1,), lambda w, s, d: (w.float() / s).to(d), "div.Tensor of (256, 384) is not understood"),
    "none": ((1,), lambda w, s, d: w.to(d), "it is not the product of FP8 numbers and scales"),
    "computed": ((1,), lambda w, s, d: (w.float() * s.exp()).to(d), "exp.default of (1,) is not understood"),
}


@pytest.mark.parametrize("name", SCALES)
def test_unknown_dequantization_is_reported(name: str) -> None:
    shape, decode, reason = SCALES[name]
    module = Written(stored("tensor", N, K).weight.detach(), torch.rand(shape) + 0.5, decode)
    backend = eager_backend(DEFAULT)
    torch.compile(module, backend=backend)(x()).sum().backward()
    refused = [refusal.reason for refusal in backend.report.refusals if refusal.what == "stored weight"]
    assert refused == [reason]
    assert reason in str(backend.report)
    (view,) = backend.report.graphs
    assert "stored_weight" not in view.stages["recognize"]


@torch.library.custom_op("fp8graph_tests::kernel_of_a_library", mutates_args=())
def kernel(x: Tensor, weight: Tensor, scale: Tensor) -> Tensor:
    return x @ (weight.float() * scale).to(x.dtype).t()


@kernel.register_fake
def _(x: Tensor, weight: Tensor, _scale: Tensor) -> Tensor:
    return x.new_empty(x.shape[0], weight.shape[0])


def test_a_kernel_of_a_library_that_reads_fp8_is_reported() -> None:
    class Module(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = stored("tensor", N, K)

        def forward(self, x: Tensor) -> Tensor:
            return kernel(x, self.linear.weight, self.linear.get_parameter("scale_inv")) + 1

    backend = eager_backend(DEFAULT)
    with torch.no_grad():
        torch.compile(Module(), backend=backend)(x())
    (refusal,) = backend.report.refusals
    assert (refusal.what, refusal.reason) == (
        "stored weight",
        "fp8graph_tests.kernel_of_a_library.default reads it: an op that is not looked into",
    )
