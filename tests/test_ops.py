"""The dialect ops: what their fakes promise is what their references deliver; the GEMM against float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree as pytree

from fp8graph import ops

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2


def assert_fake_agrees(op: Any, *args: Any) -> None:
    mode = FakeTensorMode()
    fake_args = pytree.tree_map_only(Tensor, mode.from_tensor, args)
    with mode:
        promised = pytree.tree_leaves(op(*fake_args))
    delivered = pytree.tree_leaves(op(*args))
    for fake, real in zip(promised, delivered, strict=True):
        assert (fake.shape, fake.stride(), fake.dtype) == (real.shape, real.stride(), real.dtype)


LAYOUTS = st.sampled_from([[], [1, 1], [1, 16], [16, 16], [8, 4]])


@given(
    sizes=st.lists(st.integers(1, 20), min_size=2, max_size=3),
    dtype=st.sampled_from([E4M3, E5M2]),
    source=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    layouts=st.tuples(LAYOUTS, LAYOUTS).filter(any),
    power_2=st.booleans(),
    transposed=st.booleans(),
)
@settings(max_examples=100, deadline=None)
def test_quantize_fake(
    sizes: list[int], dtype: Any, source: Any, layouts: Any, power_2: bool, transposed: bool
) -> None:
    x = torch.randn(sizes).to(source)
    x = x.transpose(-1, -2) if transposed else x
    assert_fake_agrees(ops.quantize, x, dtype, power_2, 0.0, *layouts)


def fp8(*shape: int, dtype: torch.dtype = E4M3) -> Tensor:
    return torch.randn(shape).to(dtype)


ONE = torch.tensor(1.0)
PAIRS = [(E4M3, E4M3), (E5M2, E4M3), (E4M3, E5M2)]


@pytest.mark.parametrize(("a", "b"), PAIRS)
@pytest.mark.parametrize("out", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("with_bias", [False, True])
def test_scaled_mm(a: torch.dtype, b: torch.dtype, out: torch.dtype, with_bias: bool) -> None:
    """FP32 accumulation of k products and one rounding to ``out``."""
    m, n, k = 33, 48, 64
    bias = torch.randn(n).to(out) if with_bias and out != torch.float32 else None
    args = fp8(m, k, dtype=a), fp8(n, k, dtype=b), torch.tensor(0.5), torch.tensor(3.0), bias, out, False
    got = ops.scaled_mm(*args)
    exact = (args[0].double() * 0.5) @ (args[1].double() * 3.0).T
    if bias is not None:
        exact = exact + bias.double()
    error = (got.double() - exact).abs()
    assert (error <= exact.abs() * torch.finfo(out).eps + exact.abs().max() * k * 2.0**-24).all()
    assert_fake_agrees(ops.scaled_mm, *args)


def test_dequantize() -> None:
    data = fp8(5, 7)
    assert torch.equal(ops.dequantize(data, torch.tensor(0.25), torch.float32), data.float() * 0.25)
    for dtype in (torch.float32, torch.bfloat16):
        assert_fake_agrees(ops.dequantize, data, ONE, dtype)


@pytest.mark.parametrize(
    ("op", "args", "checks"),
    [
        (ops.quantize, (torch.randn(5, 6), E4M3, False, 0.0, [1, 16], [16, 16]), ("test_schema", "test_faketensor")),
        # torch's schema check multiplies its inputs by NaN, which FP8 tensors cannot do
        (ops.scaled_mm, (fp8(5, 16), fp8(16, 16), ONE, ONE, None, torch.bfloat16, True), ("test_faketensor",)),
        (ops.dequantize, (fp8(5, 6), ONE, torch.float32), ("test_faketensor",)),
    ],
)
def test_torchs_own_checks(op: Any, args: tuple[Any, ...], checks: tuple[str, ...]) -> None:
    torch.library.opcheck(op, args, test_utils=checks)
