"""The dialect ops: what their fakes promise is what their references deliver; the GEMM against float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree as pytree

import oracle
from fp8graph.ir import ops, transforms
from fp8graph.passes.attention import ops as of_attention
from fp8graph.passes.batch_invariance.fix_order import (
    ordered_attention,
    ordered_attention_backward,
    ordered_grouped_mm,
    ordered_mm,
    ordered_scaled_grouped_mm,
    ordered_scaled_mm,
)
from fp8graph.passes.batch_invariance.fix_sums import ordered_sum, ordered_var_mean
from fp8graph.passes.connect_scales import initial_scales, read_scales, stage_amaxes, update_page
from fp8graph.passes.observe import measuring
from fp8graph.passes.order_scales import scales_in_rows
from helpers import in_one_test, same_bits

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2


def assert_fake_agrees(op: Any, *args: Any, **kwargs: Any) -> None:
    mode = FakeTensorMode()
    fake_args, fake_kwargs = pytree.tree_map_only(Tensor, mode.from_tensor, (args, kwargs))
    with mode:
        promised = pytree.tree_leaves(op(*fake_args, **fake_kwargs))
    delivered = pytree.tree_leaves(op(*args, **kwargs))
    for fake, real in zip(promised, delivered, strict=True):
        assert (fake.shape, fake.stride(), fake.dtype) == (real.shape, real.stride(), real.dtype)


LAYOUTS = st.sampled_from([[], [1, 1], [1, 16], [16, 16], [8, 4]])
SOURCES = st.sampled_from([torch.float32, torch.bfloat16, torch.float16])
VIEWS: dict[str, Any] = {
    "as it is": lambda x: x,
    "transposed": lambda x: x.transpose(-1, -2),
    "permuted": lambda x: x.permute(*range(1, x.ndim), 0),
    "strided": lambda x: x[..., ::2, 1:],
    "expanded rows": lambda x: x[..., :1, :].expand_as(x),
    "expanded columns": lambda x: x[..., :1].expand_as(x),
}


@given(
    sizes=st.lists(st.integers(1, 20), min_size=2, max_size=4),
    dtype=st.sampled_from([E4M3, E5M2]),
    source=SOURCES,
    layouts=st.tuples(LAYOUTS, LAYOUTS).filter(any),
    power_2=st.booleans(),
    view=st.sampled_from(sorted(VIEWS)),
)
@settings(max_examples=150, deadline=None)
def test_quantize_fake(sizes: list[int], dtype: Any, source: Any, layouts: Any, power_2: bool, view: str) -> None:
    x = VIEWS[view](torch.randn(sizes).to(source))
    assume(x.numel() > 0)
    assert_fake_agrees(ops.quantize, x, dtype, power_2, 0.0, *layouts)


@given(sizes=st.lists(st.integers(1, 20), min_size=1, max_size=4), dtype=st.sampled_from([E4M3, E5M2]), source=SOURCES)
@settings(max_examples=50, deadline=None)
def test_dequantize_fake(sizes: list[int], dtype: Any, source: Any) -> None:
    assert_fake_agrees(ops.dequantize, torch.randn(sizes).to(dtype), ONE, source)


@in_one_test("view", sorted(VIEWS))
def test_dequantize_fake_of_a_view(view: str) -> None:
    data = VIEWS[view](fp8(4, 6))
    assert_fake_agrees(ops.dequantize, data, ONE, torch.float32)


def fp8(*shape: int, dtype: torch.dtype = E4M3) -> Tensor:
    return torch.randn(shape).to(dtype)


ONE = torch.tensor(1.0)
PAIRS = [(E4M3, E4M3), (E5M2, E4M3), (E4M3, E5M2)]
OUT = [
    pytest.param(torch.bfloat16, False, id="bf16"),
    pytest.param(torch.bfloat16, True, id="bf16 with bias"),
    pytest.param(torch.float16, False, id="fp16"),
    pytest.param(torch.float16, True, id="fp16 with bias"),
    pytest.param(torch.float32, False, id="fp32"),
]


@given(
    sizes=st.tuples(st.integers(1, 40), st.integers(1, 4), st.integers(1, 4)),
    pair=st.sampled_from(PAIRS),
    out=SOURCES,
    fast=st.booleans(),
    rows_of_more=st.booleans(),
)
@settings(max_examples=60, deadline=None)
def test_scaled_mm_fake(sizes: tuple[int, int, int], pair: Any, out: Any, fast: bool, rows_of_more: bool) -> None:
    """Also for operands that are rows of a larger matrix: contiguous along k, with gaps between the rows."""
    (m, n, k), gap = (sizes[0], sizes[1] * 16, sizes[2] * 16), 16 if rows_of_more else 0
    a, b = fp8(m, k + gap, dtype=pair[0])[:, :k], fp8(n, k + gap, dtype=pair[1])[:, :k]
    assert_fake_agrees(ops.scaled_mm, a, b, ONE, ONE, None, out, fast)
    packed = ops.scaled_mm(a.contiguous(), b.contiguous(), ONE, ONE, None, out, fast)
    assert torch.equal(ops.scaled_mm(a, b, ONE, ONE, None, out, fast), packed)


@in_one_test(("a", "b"), PAIRS)
@in_one_test(("out", "with_bias"), OUT)
@in_one_test("scales", [(0.5, 3.0), (1.0, 1.0), (0.0123, 77.7), (2.0**-20, 2.0**18)])
@in_one_test(("m", "n", "k"), [(33, 48, 64), (1, 16, 16), (16, 16, 512)])
def test_scaled_mm(
    a: torch.dtype, b: torch.dtype, out: torch.dtype, with_bias: bool, scales: Any, m: int, n: int, k: int
) -> None:
    """FP32 accumulation of k products and one rounding to ``out``."""
    bias = torch.randn(n).to(out) if with_bias else None
    scale_a, scale_b = map(torch.tensor, scales)
    args = fp8(m, k, dtype=a), fp8(n, k, dtype=b), scale_a, scale_b, bias, out, False
    got = ops.scaled_mm(*args)
    exact = (args[0].double() * scale_a.double()) @ (args[1].double() * scale_b.double()).T
    if bias is not None:
        exact = exact + bias.double()
    error = (got.double() - exact).abs()
    assert (error <= exact.abs() * torch.finfo(out).eps + exact.abs().max() * k * 2.0**-24).all()
    assert_fake_agrees(ops.scaled_mm, *args)


def test_scaled_mm_takes_both_operands_along_k() -> None:
    """a [m, k] @ b [n, k].T, each with its own scale: exact small integers, none of them alike."""
    a, b = torch.arange(32).remainder(7).reshape(2, 16).float(), torch.arange(256).remainder(5).reshape(16, 16).float()
    got = ops.scaled_mm(a.to(E4M3), b.to(E4M3), ONE * 2, ONE * 0.25, None, torch.float32, False)
    assert torch.equal(got, 0.5 * a @ b.T)


def test_dequantize() -> None:
    data = fp8(5, 7)
    assert torch.equal(ops.dequantize(data, torch.tensor(0.25), torch.float32), data.float() * 0.25)
    assert torch.equal(ops.dequantize(data, torch.tensor(0.1), torch.bfloat16), (data.float() * 0.1).bfloat16())


@pytest.mark.parametrize("dtype", [E4M3, E5M2])
def test_quantize_writes_what_the_oracle_says(dtype: torch.dtype) -> None:
    """The op itself, not only its reference: dtype, power of two, epsilon and both layouts arrive."""
    x = torch.randn(5, 6).bfloat16()
    for settings_ in ((False, 0.0), (True, 0.0), (False, 8.0)):
        row, column, scale_inv = ops.quantize(x, dtype, *settings_, [1, 1], [1, 1])
        for got, columnwise in ((row, False), (column, True)):
            power_2, epsilon = settings_
            codes, expected = oracle.quantize(x, dtype, power_2_scale=power_2, epsilon=epsilon, columnwise=columnwise)
            oracle.assert_codes(got, codes)
            assert scale_inv.item() == expected


SCHEMA_FREE = ("test_faketensor", "test_autograd_registration", "test_aot_dispatch_static", "test_aot_dispatch_dynamic")
ALL_CHECKS = ("test_schema", *SCHEMA_FREE)


@pytest.mark.parametrize(
    ("op", "args", "checks"),
    [
        (ops.quantize, (torch.randn(5, 6), E4M3, False, 0.0, [1, 16], [16, 16]), ALL_CHECKS),
        (ops.quantize, (torch.randn(2, 5, 6).transpose(0, 1), E5M2, True, 1e-3, [], [16, 16]), ALL_CHECKS),
        (ops.quantize, (torch.randn(6).expand(4, 6).bfloat16(), E4M3, False, 0.0, [1, 1], []), ALL_CHECKS),
        # torch's schema check multiplies its inputs by NaN, which FP8 tensors cannot do: see the test below
        (ops.scaled_mm, (fp8(5, 16), fp8(16, 16), ONE, ONE, None, torch.bfloat16, True), SCHEMA_FREE),
        (ops.scaled_mm, (fp8(5, 16), fp8(16, 16), ONE, ONE, torch.ones(16).half(), torch.float16, False), SCHEMA_FREE),
        (ops.dequantize, (fp8(5, 6), ONE, torch.float32), SCHEMA_FREE),
    ],
)
def test_torchs_own_checks(op: Any, args: tuple[Any, ...], checks: tuple[str, ...]) -> None:
    torch.library.opcheck(op, args, test_utils=checks)


@pytest.mark.parametrize(
    ("op", "args"),
    [
        (ops.scaled_mm, (fp8(5, 16), fp8(16, 16), ONE, ONE, torch.ones(16).bfloat16(), torch.bfloat16, True)),
        (ops.dequantize, (fp8(5, 6), torch.tensor(0.5), torch.float32)),
    ],
)
def test_fp8_arguments_are_neither_written_nor_returned(op: Any, args: tuple[Any, ...]) -> None:
    """The findings of torch's schema check, were it able to run: no mutation, no aliasing."""
    tensors = [a for a in args if isinstance(a, Tensor)]
    copies = [t.clone() for t in tensors]
    out = op(*args)
    assert same_bits(tensors, copies)
    assert out.untyped_storage().data_ptr() not in [t.untyped_storage().data_ptr() for t in tensors]


def test_each_dialect_op_has_a_reference() -> None:
    own_kernels = {torch.ops.fp8graph.ordered_index_put.default, torch.ops.fp8graph.ordered_masked_index_put.default}
    modules = ops, transforms, of_attention, measuring
    defined = {op for module in modules for op in vars(module).values() if isinstance(op, torch._ops.OpOverload)}
    loops = {ordered_mm, ordered_scaled_mm, ordered_grouped_mm, ordered_scaled_grouped_mm}
    loops |= {ordered_attention, ordered_attention_backward, ordered_sum, ordered_var_mean, *own_kernels}
    defined |= {read_scales, initial_scales, stage_amaxes, update_page, scales_in_rows}
    defined |= loops
    assert {op.namespace for op in defined} == {"fp8graph"}
    run_as_they_are = {ops.grouped_mm, measuring.error_of_gemm, ops.random_seed, *loops}
    assert ops.REFERENCE.keys() == defined - run_as_they_are
    strided = {ops.dequantize, ops.stored_weight, of_attention.scaled_attention, ordered_attention}
    strided |= {ordered_attention_backward, ordered_var_mean, *own_kernels}
    assert ops.SHAPES.keys() == defined - strided - {ops.random_seed}  # which has no tensor to describe


@example(rows=16, columns=1, source=torch.float32, dtype=E4M3)  # whose transpose is contiguous
@given(rows=st.integers(1, 20), columns=st.integers(1, 20), source=SOURCES, dtype=st.sampled_from([E4M3, E5M2]))
@settings(max_examples=20, deadline=None)
def test_fakes_around_a_gather(rows: int, columns: int, source: Any, dtype: Any) -> None:
    x = torch.randn(rows, columns).to(source)
    assert_fake_agrees(ops.amax, x)
    assert_fake_agrees(ops.scales, ops.amax(x), dtype, False, 0.0)
    assert_fake_agrees(ops.columnwise, x.to(dtype), [1, 16])
    assert_fake_agrees(ops.join, [x.to(dtype), x[:1].to(dtype)])
    ends = torch.tensor([0, rows // 2, rows], dtype=torch.int32)
    assert_fake_agrees(ops.columnwise, x.to(dtype), [16, 16], offs=ends)
    assert_fake_agrees(stage_amaxes, torch.ones(2, 6), [torch.ones(rows), torch.ones(())])


@given(sizes=st.lists(st.integers(1, 4), min_size=1, max_size=4), dim=st.integers(0, 3), view=st.booleans())
@settings(max_examples=20, deadline=None)
def test_rotate_fake(sizes: list[int], dim: int, view: bool) -> None:
    dim %= len(sizes)
    sizes[dim] *= 16
    x = torch.randn(sizes[::-1]).permute(*reversed(range(len(sizes)))) if view else torch.randn(sizes)
    assert_fake_agrees(transforms.rotate, x, torch.randn(16, 16), dim)


@pytest.mark.parametrize("transposed", [False, True])
def test_fakes_of_ordered_ops(transposed: bool) -> None:
    """As torch's attention returns them: heads behind tokens in memory."""
    sizes = (2, 5, 4, 8) if transposed else (2, 4, 5, 8)
    q, k, v, grad = (torch.randn(sizes).to(torch.bfloat16) for _ in range(4))
    q, k, v, grad = (x.transpose(1, 2) if transposed else x for x in (q, k, v, grad))
    assert_fake_agrees(ordered_attention, q, k[:, :2], v[:, :2], None, True, None)
    out, logsumexp = ordered_attention(q, k[:, :2], v[:, :2], None, True, None)
    args = grad, q, k[:, :2], v[:, :2], out, logsumexp, None, True, None
    assert_fake_agrees(ordered_attention_backward, *args)
    a, b = torch.randn(5, 16), torch.randn(16, 3)
    assert_fake_agrees(ordered_mm, a.t().contiguous().t() if transposed else a, b, torch.randn(3))
    ends = torch.tensor([2, 4], dtype=torch.int32)
    assert_fake_agrees(ordered_grouped_mm, a, b.expand(2, 16, 3), ends)
    for dims, keepdim in (([-1], True), ([1, 2], False)):
        assert_fake_agrees(ordered_sum, q, dims, keepdim, torch.float32, True)
        assert_fake_agrees(ordered_var_mean, q, dims, 1.0, keepdim)
