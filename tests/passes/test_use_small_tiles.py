"""use_small_tiles: GEMMs of few rows take operands in forms that cuBLASLt multiplies in tiles of 64x8."""

from __future__ import annotations

from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn

import fp8graph
from fp8graph import Policy
from fp8graph.numerics import tiles
from fp8graph.numerics.tiles import in_rows
from helpers import brief, counted_passes, dialect_counts, eager_backend, first_fast, same_bits
from stored_weights import stored

N, K = 384, 1024
DEFAULT = Policy(extends="default")


def x(rows: int) -> Tensor:
    return torch.randn(rows, K, generator=torch.Generator().manual_seed(rows)).bfloat16()


def linear(kind: str, *, bias: bool = False) -> nn.Module:
    """Weights that arrive in FP8, or a linear in bf16."""
    torch.manual_seed(0)
    return nn.Linear(K, N, bias=bias).bfloat16() if kind == "bf16" else stored(kind, N, K)


def run(module: nn.Module, *inputs: Tensor, policy: Any = DEFAULT, **settings: Any) -> tuple[Tensor, fp8graph.Backend]:
    """The result for the last of ``inputs``, without gradients."""
    torch._dynamo.reset()
    given: dict[str, Any] = {"cache_weights": True, "target": "sm_90", **settings}
    dynamic = given.pop("dynamic", False)
    backend = eager_backend(policy, **given)
    compiled = torch.compile(module, backend=backend, dynamic=dynamic)
    with torch.no_grad():
        results = [compiled(each) for each in inputs]
    return results[-1], backend


def gemms(backend: fp8graph.Backend) -> list[str]:
    return [line for view in backend.report.graphs for line in brief(view.after).splitlines() if "scaled_mm(" in line]


def reasons(backend: fp8graph.Backend) -> list[str]:
    return [each.reason for each in backend.report.refusals if each.what == "small tiles"]


RECIPES = {"block": DEFAULT, "bf16": Policy(default="blockwise", min_speedup=0)}


@first_fast("kind", RECIPES)
@first_fast("rows", [16, 128, 132])
def test_scales_of_square_tiles_are_repeated_for_few_rows(kind: str, rows: int) -> None:
    module = linear(kind)
    y, backend = run(module, x(rows), policy=RECIPES[kind])
    (gemm,) = gemms(backend)
    few = rows <= 128
    assert ("block_b=[1, 128], order_b=transposed" in gemm) == few
    assert ("block_b=[128, 128]" in gemm) != few
    assert dialect_counts(backend.report.graphs[0].after)["repeat_scales"] == 0  # the graph takes them
    repeated, own = N * K // 128 * 4, N * K // 128**2 * 4
    assert backend.weights.bytes == (N * K + own) * (kind == "bf16") + repeated * few
    assert repeated * 32 == N * K  # 3 % of the weight
    row = next(each for each in backend.report.gemms)
    assert row.reason.endswith("the weight's scales are repeated to 1x128, for smaller tiles") == few
    if few:  # no number changes
        decoded, other = run(module, x(rows), policy=RECIPES[kind], target="cpu")
        assert gemms(other) == []
        assert same_bits([y], [decoded])


def test_repeated_scales_are_those_of_each_row() -> None:
    scales = torch.arange(12.0).reshape(3, 4)
    repeated = tiles.repeated_scales(scales, 320)
    assert (repeated.shape, repeated.is_contiguous()) == ((4, 320), True)
    rows = in_rows(repeated, tiles.TRANSPOSED, (320, 4))
    assert all(torch.equal(rows[row], scales[row // 128]) for row in (0, 127, 128, 255, 256, 319))


def test_prefill_and_decode_share_the_weight() -> None:
    """Decode has repeated scales beside the copy; both follow the weight."""
    module = linear("bf16")
    _, backend = run(module, x(256), x(16), policy=RECIPES["bf16"])
    assert ["block_b=[1, 128]" in gemm for gemm in gemms(backend)] == [False, True]
    assert reasons(backend) == []
    assert backend.weights.bytes == N * K * 33 // 32 + N * K // 128**2 * 4
    with torch.no_grad():
        cast(Tensor, module.weight).data.mul_(3)
        compiled = torch.compile(module, backend=backend, dynamic=False)
        results = [compiled(x(256)), compiled(x(16))]
    fresh = [run(module, x(rows), policy=RECIPES["bf16"], target="cpu")[0] for rows in (256, 16)]
    assert same_bits(results, fresh)


def test_repeated_scales_are_foreseen(monkeypatch: pytest.MonkeyPatch) -> None:
    runs = counted_passes(monkeypatch)
    for kind, rows in (("bf16", 16), ("block", 16), ("bf16", 256)):
        run(linear(kind), x(rows), policy=RECIPES[kind])
    assert len(runs) == 3


@pytest.mark.parametrize("kind", ["row", "bf16"])
def test_scales_of_rows_multiply_the_result_where_the_user_says_so(kind: str) -> None:
    bias, policy = kind == "bf16", DEFAULT if kind == "row" else Policy(default="rowwise", min_speedup=0)
    y, backend = run(linear(kind, bias=bias), x(16), policy=policy, small_tiles=True)
    (gemm,) = gemms(backend)
    assert "one, one, bias=None, out_dtype=f32" in gemm
    assert "scaling=row" not in gemm
    assert backend.report.gemms[0].reason.endswith("its scales multiply an FP32 result, for smaller tiles")
    expected, usual = run(linear(kind, bias=bias), x(16), policy=policy)
    assert "scaling=row" in gemms(usual)[0]
    assert y.dtype == expected.dtype
    # one rounding of FP32 more: few bf16 results have another last bit
    assert (y != expected).float().mean() < 0.005
    assert torch.allclose(y.float(), expected.float(), rtol=2**-7, atol=0)
    more, backend = run(linear(kind, bias=bias), x(132), policy=policy, small_tiles=True)
    assert "scaling=row" in gemms(backend)[0]
    assert same_bits([more], [run(linear(kind, bias=bias), x(132), policy=policy)[0]])


def test_linears_of_one_graph_read_one_unit_scale() -> None:
    module = nn.Sequential(nn.Linear(K, K), nn.ReLU(), nn.Linear(K, K)).bfloat16()
    _, backend = run(module, x(8), policy=Policy(default="rowwise", min_speedup=0), small_tiles=True)
    assert len(gemms(backend)) == 2
    assert backend.report.graphs[0].after.count("aten.full(") == 1


OTHERS: dict[str, tuple[dict[str, Any], int, str]] = {
    "sm_100 has no such GEMM": ({"target": "sm_100"}, 0, ""),
    "weights in each call": ({"cache_weights": False}, 1, "the weight's scales would be repeated in each call"),
    "rows that may grow": ({"dynamic": True}, 1, "its rows, 16 now, may be more than 128 in another call"),
}


@pytest.mark.parametrize("case", OTHERS)
def test_gemms_that_keep_their_form(case: str) -> None:
    settings, count, reason = OTHERS[case]
    _, backend = run(linear("bf16"), x(16), policy=RECIPES["bf16"], **settings)
    assert not any("block_b=[1, 128]" in gemm for gemm in gemms(backend))
    assert [each.startswith(reason) for each in reasons(backend)] == [True] * count


def test_rows_with_a_maximum_are_few_in_every_call() -> None:
    inputs = x(16)
    torch._dynamo.mark_dynamic(inputs, 0, min=4, max=128)
    _, backend = run(linear("block"), inputs, dynamic=None)
    assert ["block_b=[1, 128]" in gemm for gemm in gemms(backend)] == [True]


def test_graphs_with_a_backward_keep_their_form() -> None:
    policy = Policy(default="rowwise", min_speedup=0)
    backend = eager_backend(policy, target="sm_90", small_tiles=True)
    torch.compile(nn.Linear(K, N).bfloat16(), backend=backend)(x(16).requires_grad_()).sum().backward()
    assert not any("out_dtype=f32" in gemm for gemm in gemms(backend))
    assert reasons(backend) == ["small_tiles=True changes graphs without a backward alone"]
